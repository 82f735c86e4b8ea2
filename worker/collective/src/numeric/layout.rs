//! How an all-reduce is cut into messages. Every rank computes the same from the length and the
//! job's properties.
//!
//! A message has [`CHECK_LANES`] check lanes, for floats perhaps exponents, then data. Chunk g of
//! the data goes to ring g mod R, as that ring's data message g div R. The exponents of the
//! [blocks](super::block) of a ring's data message i + W travel in its message i; those of its first
//! W messages travel in *prologue* messages, which hold nothing else.
//!
//! A *small* operation of floats needs no prologue: one *speculative* message has their histogram,
//! and their values in [`Limbs`] for the exponents that the last such message needed. If the
//! histogram shows that these were wrong, a second message follows with the right ones.

use std::ops::Range;

use netsum_common::lanes::CHECK_LANES;

use super::block::{BLOCK, Blocks, EXPONENT_BYTES, EXPONENT_LANES, Width};
use super::element::Dtype;
use super::limbs::Limbs;
use super::quant::{Exponents, HISTOGRAM_BYTES, HISTOGRAM_LANES};

pub const CHECK_BYTES: usize = CHECK_LANES * 4;

/// Limbs of a float in a message of one packet, at the usual path MTU, which is always sent.
const SHORT_LIMBS: u8 = 3;
const PACKET_BYTES: usize = 1024;
/// Limbs of a float in a longer one, which has values only if the last prediction was right: its
/// bytes are wasted if this one is wrong.
const LONG_LIMBS: u8 = 2;
/// Most elements of a small operation.
const MAX_SMALL_ELEMENTS: usize = 4096;

/// The properties of a job that decide how data is cut into messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Bytes of a message with all its lanes, a multiple of 4.
    pub message_size: u32,
    /// Messages in a ring that a rank may send without having their sums.
    pub window: u32,
    /// Rings of the job.
    pub rings: u32,
}

impl Layout {
    /// Data elements in a full message of a long operation; `width` is that of floats.
    ///
    /// # Errors
    /// Where the message size leaves no room; names the least one that does.
    pub fn elements(&self, dtype: Dtype, width: Width) -> Result<usize, String> {
        let overhead = CHECK_LANES + if dtype.is_scaled() { HISTOGRAM_LANES } else { 0 };
        let lanes = self.message_size as usize / 4;
        if !self.message_size.is_multiple_of(4) || lanes <= overhead {
            return Err(format!(
                "message size {} bytes: {dtype} needs a multiple of 4 and at least {}",
                self.message_size,
                (overhead + 1) * 4
            ));
        }
        let lanes = lanes - CHECK_LANES;
        if !dtype.is_scaled() {
            return Ok(lanes);
        }
        // Each message of a ring carries the exponents of another one of the same length.
        let block = EXPONENT_BYTES + BLOCK * width.bytes();
        let (blocks, rest) = (lanes * 4 / block, lanes * 4 % block);
        Ok(blocks * BLOCK + rest.saturating_sub(EXPONENT_BYTES) / width.bytes())
    }
}

/// The contents of a message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// Data messages (of the same ring) whose exponents it carries.
    pub exponents: Range<usize>,
    /// Bytes of these: of a histogram in a small operation, else of all their blocks' exponents.
    pub exponent_bytes: usize,
    /// Its number among the data messages, and its elements; `None` for a prologue.
    pub data: Option<(usize, Range<usize>)>,
    /// In a small operation of floats, the limbs of each.
    pub limbs: Option<u8>,
}

impl Message {
    /// Whether its exponents are predicted.
    pub fn is_speculative(&self) -> bool {
        self.limbs.is_some() && !self.exponents.is_empty()
    }

    /// Bytes with all lanes, for elements of `element_bytes`.
    pub fn len(&self, element_bytes: usize) -> usize {
        let values = self.data.as_ref().map_or(0, |d| d.1.len()) * element_bytes;
        CHECK_BYTES + self.exponent_bytes + values.next_multiple_of(4)
    }
}

/// The exponent that the last speculative message needed.
#[derive(Clone, Copy, Debug)]
struct Last {
    /// The largest over all ranks.
    bucket: u8,
    /// The message before needed the same format.
    steady: bool,
}

impl Default for Last {
    /// Numbers from 1 to 2.
    fn default() -> Self {
        Self { bucket: 127, steady: false }
    }
}

/// The last exponents, in 16 entries by length modulo 16: a training repeats the same operations.
/// Lengths that share an entry may spoil each other's prediction.
#[derive(Debug, Default)]
pub struct ExponentPredictor([Last; 16]);

impl ExponentPredictor {
    /// The format of a speculative message's values; `None` if it has none.
    pub fn predict(&self, message: &Message, ranks: u32) -> Option<Limbs> {
        let (limbs, last) = (message.limbs?, self.0[Self::place(message)]);
        let exponents = Exponents { largest: last.bucket, finite: last.bucket };
        (limbs == SHORT_LIMBS || last.steady).then(|| Limbs::new(limbs, exponents, ranks))
    }

    /// Notes the exponents that a speculative message needed, which its sum shows.
    pub fn learn(&mut self, message: &Message, exponents: Exponents) {
        let last = &mut self.0[Self::place(message)];
        let window = |bucket| message.limbs.map(|limbs| Limbs::window(limbs, bucket));
        let steady = window(last.bucket) == window(exponents.finite);
        *last = Last { bucket: exponents.finite, steady };
    }

    fn place(message: &Message) -> usize {
        message.data.as_ref().map_or(0, |d| d.1.len()) % 16
    }
}

/// An operation's messages.
#[derive(Clone, Debug)]
pub struct Plan {
    elements: usize,
    length: usize,
    chunks: usize,
    window: usize,
    rings: usize,
    /// Data messages whose exponents fit in a prologue message; 0 where none are needed.
    prologue: usize,
    /// How floats travel in a long operation.
    width: Option<Width>,
    /// In a small operation of floats, the limbs of each: it is one speculative message, and
    /// another one if the prediction was wrong.
    limbs: Option<u8>,
}

impl Plan {
    pub fn new(layout: &Layout, dtype: Dtype, width: Width, length: usize) -> Result<Self, String> {
        let long = Self::of_part(layout, dtype, width, length)?;
        let lanes = layout.message_size as usize / 4 - CHECK_LANES;
        // Also with classes, which a second message may need.
        let most = lanes.saturating_sub(HISTOGRAM_LANES) / usize::from(LONG_LIMBS + 1);
        let most = MAX_SMALL_ELEMENTS.min(most);
        let packet = (CHECK_LANES + HISTOGRAM_LANES + length * usize::from(SHORT_LIMBS)) * 4;
        let limbs = if !dtype.is_scaled() || length == 0 {
            None
        } else if packet <= PACKET_BYTES.min(layout.message_size as usize) {
            Some(SHORT_LIMBS)
        } else {
            (length <= most).then_some(LONG_LIMBS)
        };
        Ok(match limbs {
            Some(_) => Self { prologue: 0, width: None, limbs, ..long },
            None => long,
        })
    }

    /// The messages of a part of a longer operation: its floats have scales for blocks.
    pub fn of_part(
        layout: &Layout,
        dtype: Dtype,
        width: Width,
        length: usize,
    ) -> Result<Self, String> {
        let elements = layout.elements(dtype, width)?;
        // An empty slice still takes one message: the ranks must wait for each other.
        let chunks = length.div_ceil(elements).max(1);
        let width = (dtype.is_scaled() && length > 0).then_some(width);
        let lanes = layout.message_size as usize / 4 - CHECK_LANES;
        let exponents = elements.div_ceil(BLOCK) * EXPONENT_LANES;
        let prologue = if width.is_some() { lanes / exponents } else { 0 };
        let (window, rings) = (layout.window as usize, layout.rings as usize);
        Ok(Self { elements, length, chunks, window, rings, prologue, width, limbs: None })
    }

    pub fn data_messages(&self, ring: usize) -> usize {
        (self.chunks + self.rings - 1 - ring) / self.rings
    }

    fn prologue_messages(&self, ring: usize) -> usize {
        if self.prologue == 0 {
            0
        } else {
            self.data_messages(ring).min(self.window).div_ceil(self.prologue)
        }
    }

    /// All messages of a ring, if a prediction is right.
    pub fn messages(&self, ring: usize) -> usize {
        self.prologue_messages(ring) + self.data_messages(ring)
    }

    /// The elements of a ring's data message.
    pub fn range(&self, ring: usize, data_message: usize) -> Range<usize> {
        let start = (data_message * self.rings + ring) * self.elements;
        start.min(self.length)..(start + self.elements).min(self.length)
    }

    /// Message `m` of a ring, from 0.
    pub fn message(&self, ring: usize, m: usize) -> Message {
        let limbs = self.limbs;
        if limbs.is_some() {
            let (exponents, exponent_bytes) =
                if m == 0 { (0..1, HISTOGRAM_BYTES) } else { (0..0, 0) };
            let data = Some((0, self.range(ring, 0)));
            return Message { exponents, exponent_bytes, data, limbs };
        }
        let (n, p) = (self.data_messages(ring), self.prologue_messages(ring));
        let (exponents, data) = match m.checked_sub(p) {
            None => {
                let last = n.min(self.window);
                (m * self.prologue..((m + 1) * self.prologue).min(last), None)
            }
            Some(i) => {
                let ahead = i + self.window;
                let ahead = if self.prologue > 0 && ahead < n { ahead..ahead + 1 } else { 0..0 };
                (ahead, Some((i, self.range(ring, i))))
            }
        };
        let blocks: usize = exponents.clone().map(|i| self.blocks(ring, i).len()).sum();
        Message { exponents, exponent_bytes: blocks * EXPONENT_BYTES, data, limbs }
    }

    /// Whether data messages have a format, by their exponents.
    pub fn has_exponents(&self) -> bool {
        self.width.is_some() || self.limbs.is_some()
    }

    /// Numbers of a data message's blocks among those of its ring.
    pub fn blocks(&self, ring: usize, data_message: usize) -> Range<usize> {
        let first = data_message * self.elements.div_ceil(BLOCK);
        first..first + self.range(ring, data_message).len().div_ceil(BLOCK)
    }

    /// The elements of each of a data message's blocks.
    pub fn block_ranges(
        &self,
        ring: usize,
        data_message: usize,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let range = self.range(ring, data_message);
        range.clone().step_by(BLOCK).map(move |start| start..(start + BLOCK).min(range.end))
    }

    /// The format of a message's floats in a long operation, with their blocks' exponents.
    pub fn block_format<'a>(&self, buckets: &'a [u8], ranks: u32) -> Option<Blocks<'a>> {
        Some(Blocks::new(buckets, self.width?, ranks))
    }

    /// The format of a small operation's floats.
    pub fn limb_format(&self, exponents: Exponents, ranks: u32) -> Option<Limbs> {
        Some(Limbs::new(self.limbs?, exponents, ranks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_and_every_scale_travels_once_and_in_time() {
        let (full, half) = (Width::Full, Width::Half);
        for (dtype, width) in [(Dtype::I32, full), (Dtype::F32, full), (Dtype::F32, half)] {
            for (message_size, window, rings) in
                [(336, 1, 1), (512, 2, 1), (600, 4, 3), (4096, 3, 2), (336, 4, 2), (9000, 2, 1)]
            {
                let layout = Layout { message_size, window, rings };
                for length in [0, 1, 3, 100, 1000, 5003, 20_001] {
                    let plan = Plan::new(&layout, dtype, width, length).unwrap();
                    let mut seen = vec![0; length];
                    for ring in 0..rings as usize {
                        let mut known = vec![!plan.has_exponents(); plan.data_messages(ring)];
                        for m in 0..plan.messages(ring) {
                            // The contents of message m - W are known when m is sent.
                            if let Some(before) = m.checked_sub(window as usize) {
                                plan.message(ring, before).exponents.for_each(|i| known[i] = true);
                            }
                            let message = plan.message(ring, m);
                            // A second message may have a lane of classes.
                            let limbs = message.limbs.map_or(0, usize::from) * 4;
                            let most = if message.is_speculative() {
                                plan.message(ring, 1).len(limbs + 4).max(message.len(limbs))
                            } else {
                                message.len(width.bytes())
                            };
                            assert!(most <= message_size as usize, "{layout:?} {length}");
                            match message.data {
                                Some((i, ref range)) => {
                                    if message.is_speculative() {
                                        // The second message is counted only where it is needed.
                                        let second = plan.message(ring, 1);
                                        assert_eq!(second.data, Some((0, 0..length)));
                                        assert!(!second.is_speculative());
                                        known[i] = true;
                                    }
                                    if i >= window as usize {
                                        assert!(known[i], "{layout:?} {length}: scale of {i}");
                                    }
                                    range.clone().for_each(|e| seen[e] += 1);
                                }
                                None => message.exponents.for_each(|i| known[i] = true),
                            }
                        }
                    }
                    assert!(seen.iter().all(|n| *n == 1), "{layout:?} {dtype} {length}");
                }
            }
        }
    }

    #[test]
    fn large_sums_are_predicted_only_after_a_right_prediction() {
        let layout = Layout { message_size: 65536, window: 2, rings: 1 };
        let predicted = |length, predictor: &ExponentPredictor| {
            let message =
                Plan::new(&layout, Dtype::F32, Width::Full, length).unwrap().message(0, 0);
            (message.is_speculative(), predictor.predict(&message, 4))
        };
        let format = |limbs, bucket| {
            Some(Limbs::new(limbs, Exponents { largest: bucket, finite: bucket }, 4))
        };
        let mut predictor = ExponentPredictor::default();
        for (bucket, few, more) in [
            (170, format(3, 127), None),
            (170, format(3, 170), None),
            // Of the same window.
            (175, format(3, 170), format(2, 175)),
            (60, format(3, 175), format(2, 175)),
            (60, format(3, 60), None),
        ] {
            assert_eq!(predicted(57, &predictor), (true, few));
            assert_eq!(predicted(57 + 16, &predictor), (true, more));
            let message =
                Plan::new(&layout, Dtype::F32, Width::Full, 57 + 16).unwrap().message(0, 0);
            predictor.learn(&message, Exponents { largest: bucket, finite: bucket });
        }
        // Other lengths have others.
        assert_eq!(predicted(4096, &predictor), (true, None));
        assert_eq!(predicted(4097, &predictor), (false, None));
    }

    #[test]
    fn too_small_messages_are_refused() {
        let layout = |message_size| Layout { message_size, window: 1, rings: 1 };
        let full = |size, dtype| layout(size).elements(dtype, Width::Full);
        assert_eq!(full(80, Dtype::I32), Ok(1));
        assert_eq!(full(336, Dtype::F32), Ok(40));
        assert_eq!(layout(336).elements(Dtype::F32, Width::Half), Ok(80));
        assert!(full(76, Dtype::I32).unwrap_err().contains("at least 80"));
        assert!(full(332, Dtype::F32).unwrap_err().contains("at least 336"));
        assert!(full(30, Dtype::I32).is_err());
    }
}
