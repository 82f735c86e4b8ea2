//! How an all-reduce is cut into messages. Every rank computes the same from the length and the
//! job's properties.
//!
//! A message has [`CHECK_LANES`] check lanes, for floats perhaps a histogram, then data. Chunk g of
//! the data goes to ring g mod R, as that ring's data message g div R. The scale of a ring's data
//! message i + W travels as a histogram in its message i; those of its first W messages travel in
//! *prologue* messages, which hold nothing else.
//!
//! Few floats need no prologue: one message has their histogram, and their values with each of a
//! few *speculative scales*. If the histogram shows that none of them was right, a second message
//! follows with the right one.

use std::ops::Range;

use netsum_common::lanes::CHECK_LANES;

use super::element::Dtype;
use super::quant::{self, HISTOGRAM_LANES};

pub const CHECK_BYTES: usize = CHECK_LANES * 4;

/// Scales of a small speculative message.
const SPECULATIVE_SCALES: u8 = 3;
/// Most bytes of a message with so many: a packet, at the usual path MTU.
const SEVERAL_SCALES_BYTES: usize = 1024;
/// Most bytes of values in a speculative message with one scale, which is sent only if the last
/// scale was right: as many bytes are wasted if it is wrong.
const SPECULATIVE_BYTES: usize = 16 << 10;

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
    /// Data elements in a full message.
    ///
    /// # Errors
    /// Where the message size leaves no room; names the least one that does.
    pub fn elements(&self, dtype: Dtype) -> Result<usize, String> {
        let overhead = CHECK_LANES + if dtype == Dtype::F32 { HISTOGRAM_LANES } else { 0 };
        let lanes = self.message_size as usize / 4;
        if !self.message_size.is_multiple_of(4) || lanes <= overhead {
            return Err(format!(
                "message size {} bytes: {dtype} needs a multiple of 4 and at least {}",
                self.message_size,
                (overhead + 1) * 4
            ));
        }
        Ok(lanes - overhead)
    }
}

/// The contents of a message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// Data messages (of the same ring) whose histograms it carries.
    pub histograms: Range<usize>,
    /// Its number among the data messages, and its elements; `None` for a prologue.
    pub data: Option<(usize, Range<usize>)>,
    /// For a speculative message, the most scales that it may have values with.
    pub speculative: Option<u8>,
}

impl Message {
    /// The scales of a speculative message, where `last` is the last one of such a length.
    pub fn scales(&self, last: Last) -> Range<u8> {
        let count =
            self.speculative.map_or(0, |most| if most > 1 { most } else { last.steady.into() });
        quant::around(last.bucket, count)
    }

    /// Bytes with all lanes.
    pub fn len(&self, last: Last) -> usize {
        let times = self.speculative.map_or(1, |_| self.scales(last).len());
        let values = self.data.as_ref().map_or(0, |d| d.1.len()) * times;
        (CHECK_LANES + self.histograms.len() * HISTOGRAM_LANES + values) * 4
    }
}

/// The scale that the last speculative message needed.
#[derive(Clone, Copy, Debug)]
pub struct Last {
    /// The largest exponent over all ranks.
    pub bucket: u8,
    /// The message before needed the same.
    pub steady: bool,
}

impl Default for Last {
    /// Numbers from 1 to 2.
    fn default() -> Self {
        Self { bucket: 127, steady: false }
    }
}

/// The last scales by length, as far as lengths differ in their lowest bits: a training repeats the
/// same operations.
#[derive(Debug, Default)]
pub struct Lasts([Last; 16]);

impl Lasts {
    pub fn of(&self, message: &Message) -> Last {
        self.0[Self::place(message)]
    }

    /// Notes the scale that a speculative message needed, which its sum shows.
    pub fn learn(&mut self, message: &Message, bucket: u8) {
        let last = &mut self.0[Self::place(message)];
        *last = Last { bucket, steady: last.bucket == bucket };
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
    /// Histograms in a prologue message; 0 where none are needed.
    prologue: usize,
    /// If set, the operation is one speculative message with at most so many scales, and another
    /// message if none was right.
    speculative: Option<u8>,
}

impl Plan {
    pub fn new(layout: &Layout, dtype: Dtype, length: usize) -> Result<Self, String> {
        let elements = layout.elements(dtype)?;
        // An empty slice still takes one message: the ranks must wait for each other.
        let chunks = length.div_ceil(elements).max(1);
        let most = elements.min(SPECULATIVE_BYTES / 4);
        let bytes = (CHECK_LANES + HISTOGRAM_LANES + length * usize::from(SPECULATIVE_SCALES)) * 4;
        let few = bytes <= SEVERAL_SCALES_BYTES.min(layout.message_size as usize);
        let speculative = (dtype == Dtype::F32 && (1..=most).contains(&length)).then_some(if few {
            SPECULATIVE_SCALES
        } else {
            1
        });
        let prologue = match dtype {
            Dtype::F32 if length > 0 && speculative.is_none() => {
                (layout.message_size as usize / 4 - CHECK_LANES) / HISTOGRAM_LANES
            }
            _ => 0,
        };
        let (window, rings) = (layout.window as usize, layout.rings as usize);
        Ok(Self { elements, length, chunks, window, rings, prologue, speculative })
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

    /// All messages of a ring, if a speculative scale is right.
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
        if self.speculative.is_some() {
            let histograms = if m == 0 { 0..1 } else { 0..0 };
            return Message {
                histograms,
                data: Some((0, self.range(ring, 0))),
                speculative: self.speculative.filter(|_| m == 0),
            };
        }
        let (n, p) = (self.data_messages(ring), self.prologue_messages(ring));
        match m.checked_sub(p) {
            None => {
                let last = n.min(self.window);
                let histograms = m * self.prologue..((m + 1) * self.prologue).min(last);
                Message { histograms, data: None, speculative: None }
            }
            Some(i) => {
                let ahead = i + self.window;
                let histograms =
                    if self.prologue > 0 && ahead < n { ahead..ahead + 1 } else { 0..0 };
                Message { histograms, data: Some((i, self.range(ring, i))), speculative: None }
            }
        }
    }

    /// Whether data messages have scales.
    pub fn scaled(&self) -> bool {
        self.prologue > 0 || self.speculative.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_and_every_scale_travels_once_and_in_time() {
        for dtype in [Dtype::I32, Dtype::F32] {
            for (message_size, window, rings) in
                [(336, 1, 1), (512, 2, 1), (600, 4, 3), (4096, 3, 2), (336, 4, 2)]
            {
                let layout = Layout { message_size, window, rings };
                for length in [0, 1, 3, 100, 1000, 5003] {
                    let plan = Plan::new(&layout, dtype, length).unwrap();
                    let mut seen = vec![0; length];
                    for ring in 0..rings as usize {
                        let mut known = vec![!plan.scaled(); plan.data_messages(ring)];
                        for m in 0..plan.messages(ring) {
                            // The contents of message m - W are known when m is sent.
                            if let Some(before) = m.checked_sub(window as usize) {
                                plan.message(ring, before).histograms.for_each(|i| known[i] = true);
                            }
                            let message = plan.message(ring, m);
                            for last in [Last::default(), Last { bucket: 0, steady: true }] {
                                let len = message.len(last);
                                assert!(len <= message_size as usize && len.is_multiple_of(4));
                            }
                            match message.data {
                                Some((i, range)) => {
                                    if message.speculative.is_some() {
                                        // The second message is counted only where it is needed.
                                        let second = plan.message(ring, 1);
                                        assert_eq!(second.data, Some((0, 0..length)));
                                        assert!(second.speculative.is_none());
                                        known[i] = true;
                                    }
                                    if i >= window as usize {
                                        assert!(known[i], "{layout:?} {length}: scale of {i}");
                                    }
                                    range.for_each(|e| seen[e] += 1);
                                }
                                None => message.histograms.for_each(|i| known[i] = true),
                            }
                        }
                    }
                    assert!(seen.iter().all(|n| *n == 1), "{layout:?} {dtype} {length}");
                }
            }
        }
    }

    #[test]
    fn many_floats_are_speculative_only_if_the_last_two_scales_were_the_same() {
        let layout = Layout { message_size: 65536, window: 2, rings: 1 };
        let scales = |length, lasts: &Lasts| {
            let message = Plan::new(&layout, Dtype::F32, length).unwrap().message(0, 0);
            message.speculative.map(|_| message.scales(lasts.of(&message)))
        };
        let mut lasts = Lasts::default();
        for (bucket, few, more) in
            [(130, 126..129, 127..127), (130, 129..132, 130..130), (130, 129..132, 130..131)]
        {
            assert_eq!(scales(57, &lasts), Some(few));
            assert_eq!(scales(57 + 16, &lasts), Some(more));
            let message = Plan::new(&layout, Dtype::F32, 57).unwrap().message(0, 0);
            lasts.learn(&message, bucket);
        }
        // Other lengths have others.
        assert_eq!(scales(4096, &lasts), Some(127..127));
        assert_eq!(scales(4097, &lasts), None);
    }

    #[test]
    fn too_small_messages_are_refused() {
        let layout = |message_size| Layout { message_size, window: 1, rings: 1 };
        assert_eq!(layout(80).elements(Dtype::I32), Ok(1));
        assert_eq!(layout(336).elements(Dtype::F32), Ok(1));
        assert!(layout(76).elements(Dtype::I32).unwrap_err().contains("at least 80"));
        assert!(layout(332).elements(Dtype::F32).unwrap_err().contains("at least 336"));
        assert!(layout(30).elements(Dtype::I32).is_err());
    }
}
