//! How an all-reduce is cut into messages. Every rank computes the same from the length and the
//! job's properties.
//!
//! A message has [`CHECK_LANES`] check lanes, for floats perhaps a histogram, then data. Chunk g of
//! the data goes to ring g mod R, as that ring's data message g div R. The scale of a ring's data
//! message i + W travels as a histogram in its message i; those of its first W messages travel in
//! *prologue* messages, which hold nothing else.
//!
//! Floats that are few need no prologue: one *guess* message has their histogram, and their values
//! with each scale that is likely. Where the histogram says that none of them was right, a second
//! message follows with the right one.

use std::ops::Range;

use netsum_common::lanes::CHECK_LANES;

use super::element::Dtype;
use super::quant::{self, HISTOGRAM_LANES};

pub const CHECK_BYTES: usize = CHECK_LANES * 4;

/// Scales that a guess message has values with where it is small.
const GUESSES: u8 = 3;
/// Most bytes of a message with so many: a packet, at the usual path MTU.
const GUESSES_BYTES: usize = 1024;
/// Most bytes of values that are sent with a single scale, if that has been right: as much is lost
/// where it is wrong.
const GUESS_BYTES: usize = 16 << 10;

/// The properties of a job that decide how data is cut into messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Bytes of a message with all its lanes, a multiple of 4.
    pub message_size: u32,
    /// Messages that a rank may have sent in a ring without having their sums.
    pub window: u32,
    /// Rings of the job.
    pub rings: u32,
}

impl Layout {
    /// Data elements in a full message.
    ///
    /// # Errors
    /// The message size leaves no room, with the least that does.
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

/// What a message of an operation carries.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// Data messages (of the same ring) whose histograms it carries.
    pub histograms: Range<usize>,
    /// The data message that it is, and its elements; `None` for a prologue.
    pub data: Option<(usize, Range<usize>)>,
    /// Where no scale is known: with how many the values may be there.
    pub guess: Option<u8>,
}

impl Message {
    /// The scales of a guess message, where the last one of such a length was `last`.
    pub fn guesses(&self, last: Last) -> Range<u8> {
        let count = self.guess.map_or(0, |most| if most > 1 { most } else { last.steady.into() });
        quant::around(last.bucket, count)
    }

    /// Bytes with all lanes.
    pub fn len(&self, last: Last) -> usize {
        let times = self.guess.map_or(1, |_| self.guesses(last).len());
        let values = self.data.as_ref().map_or(0, |d| d.1.len()) * times;
        (CHECK_LANES + self.histograms.len() * HISTOGRAM_LANES + values) * 4
    }
}

/// What the last guess message was found to need.
#[derive(Clone, Copy, Debug)]
pub struct Last {
    /// The largest exponent over all ranks.
    pub bucket: u8,
    /// It was that of the one before.
    pub steady: bool,
}

impl Default for Last {
    /// Numbers from 1 to 2.
    fn default() -> Self {
        Self { bucket: 127, steady: false }
    }
}

/// By lengths, as far as they differ in their lowest bits: a training's operations are the same
/// ones over and over.
#[derive(Debug, Default)]
pub struct Lasts([Last; 16]);

impl Lasts {
    pub fn of(&self, message: &Message) -> Last {
        self.0[Self::place(message)]
    }

    /// A guess message's sum says what is right.
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
    /// All of it is one guess message with so many scales at the most, and if that was wrong
    /// another one.
    guess: Option<u8>,
}

impl Plan {
    pub fn new(layout: &Layout, dtype: Dtype, length: usize) -> Result<Self, String> {
        let elements = layout.elements(dtype)?;
        // An empty slice still takes one message, so that the ranks meet.
        let chunks = length.div_ceil(elements).max(1);
        let most = elements.min(GUESS_BYTES / 4);
        let bytes = (CHECK_LANES + HISTOGRAM_LANES + length * usize::from(GUESSES)) * 4;
        let few = bytes <= GUESSES_BYTES.min(layout.message_size as usize);
        let guess = (dtype == Dtype::F32 && (1..=most).contains(&length)).then_some(if few {
            GUESSES
        } else {
            1
        });
        let prologue = match dtype {
            Dtype::F32 if length > 0 && guess.is_none() => {
                (layout.message_size as usize / 4 - CHECK_LANES) / HISTOGRAM_LANES
            }
            _ => 0,
        };
        let (window, rings) = (layout.window as usize, layout.rings as usize);
        Ok(Self { elements, length, chunks, window, rings, prologue, guess })
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

    /// All messages of a ring, if guesses are right.
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
        if self.guess.is_some() {
            let histograms = if m == 0 { 0..1 } else { 0..0 };
            return Message {
                histograms,
                data: Some((0, self.range(ring, 0))),
                guess: self.guess.filter(|_| m == 0),
            };
        }
        let (n, p) = (self.data_messages(ring), self.prologue_messages(ring));
        match m.checked_sub(p) {
            None => {
                let last = n.min(self.window);
                let histograms = m * self.prologue..((m + 1) * self.prologue).min(last);
                Message { histograms, data: None, guess: None }
            }
            Some(i) => {
                let ahead = i + self.window;
                let histograms =
                    if self.prologue > 0 && ahead < n { ahead..ahead + 1 } else { 0..0 };
                Message { histograms, data: Some((i, self.range(ring, i))), guess: None }
            }
        }
    }

    /// Whether data messages have scales.
    pub fn scaled(&self) -> bool {
        self.prologue > 0 || self.guess.is_some()
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
                            // What message m - W carried is known when m is sent.
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
                                    if message.guess.is_some() {
                                        // The second message is counted only where it is needed.
                                        let second = plan.message(ring, 1);
                                        assert_eq!(second.data, Some((0, 0..length)));
                                        assert!(second.guess.is_none());
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
    fn more_than_few_floats_are_guessed_where_the_last_two_were_alike() {
        let layout = Layout { message_size: 65536, window: 2, rings: 1 };
        let guesses = |length, lasts: &Lasts| {
            let message = Plan::new(&layout, Dtype::F32, length).unwrap().message(0, 0);
            message.guess.map(|_| message.guesses(lasts.of(&message)))
        };
        let mut lasts = Lasts::default();
        for (bucket, few, more) in
            [(130, 126..129, 127..127), (130, 129..132, 130..130), (130, 129..132, 130..131)]
        {
            assert_eq!(guesses(57, &lasts), Some(few));
            assert_eq!(guesses(57 + 16, &lasts), Some(more));
            let message = Plan::new(&layout, Dtype::F32, 57).unwrap().message(0, 0);
            lasts.learn(&message, bucket);
        }
        // Other lengths have others.
        assert_eq!(guesses(4096, &lasts), Some(127..127));
        assert_eq!(guesses(4097, &lasts), None);
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
