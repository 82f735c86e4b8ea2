//! Messages between ranks on bypass connections, from each rank to the next. Little endian.

use std::time::Duration;

use crate::buffer::Buffer;
use crate::call::{Call, Collective};
use crate::error::Error;
use crate::numeric::block::Width;
use crate::numeric::element::Dtype;
use crate::seal::{BYPASS_BYTES, Proof, PublicKey, SealedKey};
use crate::shape::JobShape;

/// Version of these messages, and of the contents of messages to be summed.
pub const VERSION: u32 = 16;
/// Longest text in bytes.
const TEXT: usize = 400;
/// Bytes of a [`Frame::Data`] before its lanes.
pub const DATA_HEADER: usize = 20;

/// A rank's operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// Counts up from 1.
    pub number: u64,
    /// Elements, or lanes where bytes are moved.
    pub length: u64,
    pub dtype: Dtype,
    pub call: Call,
}

impl Descriptor {
    /// A hash of all fields except the number. The stamps of the operation's messages contain it, so
    /// messages of different operations never pass for a sum, whatever their data is.
    pub fn tag(&self) -> u32 {
        let ([kind, op, root, tag], block) = self.call.words();
        let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let words =
            [self.length, pair(self.dtype.code(), kind), pair(op, root), pair(tag, 0), block];
        // The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), chained.
        let hash = words.into_iter().fold(0u64, |h, word| {
            let mut h = (h ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
            h = (h ^ h >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            h = (h ^ h >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            h ^ h >> 31
        });
        (hash >> 32) as u32
    }
}

impl std::fmt::Display for Descriptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { length, dtype, call, .. } = self;
        match call.collective {
            Collective::AllReduce(op) => {
                write!(f, "all_reduce ({op}) of {length} elements of {dtype}")
            }
            Collective::Reduce { op, root } => {
                write!(f, "reduce ({op}) to rank {root} of {length} elements of {dtype}")
            }
            Collective::ReduceScatter(op) => {
                write!(f, "reduce_scatter ({op}) of {length} elements of {dtype}")
            }
            Collective::Broadcast { root, block } => {
                write!(f, "broadcast of {block} bytes from rank {root}")
            }
            Collective::AllGather { block } => {
                write!(f, "all_gather of {block} bytes from each rank")
            }
            Collective::AllToAll { block } => {
                write!(f, "all_to_all of {block} bytes for each rank")
            }
            Collective::Barrier => f.write_str("barrier"),
            Collective::Refused => f.write_str("nothing (its own call returned an error)"),
        }?;
        if call.width == Width::Half {
            f.write_str(" in 16 bits")?;
        }
        match call.tag {
            0 => Ok(()),
            tag => write!(f, " (tag {tag:#x})"),
        }
    }
}

/// Why ranks stop trusting the box.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    Unsummed,
    Wrong,
    Stalled,
    Broken,
    Stray,
}

impl Reason {
    const ALL: [Self; 5] = [Self::Unsummed, Self::Wrong, Self::Stalled, Self::Broken, Self::Stray];

    pub fn text(self) -> &'static str {
        match self {
            Self::Unsummed => "its neighbour's data arrived unsummed, so no box is on the path",
            Self::Wrong => "a sum was wrong",
            Self::Stalled => "no sum arrived although all ranks take part",
            Self::Broken => "the connection through the box broke",
            Self::Stray => {
                "a sum belonged to another message: the box has slots of an earlier session, which \
                 `netsum job restart` empties, or a flow is registered with a wrong ring or rank"
            }
        }
    }
}

/// A message on a bypass connection.
#[derive(Clone, PartialEq, Debug)]
pub enum Frame {
    /// The first frame: the sender's properties of the job, its timeout, and a random number that
    /// makes it differ from an earlier session's. One small packet.
    Hello { shape: JobShape, timeout: Duration, rank: u32, nonce: u64 },
    /// The second frame: one packet of the path MTU, in bytes. It reveals a path that carries only
    /// smaller ones before anything is summed.
    FullSize(usize),
    /// The first frame of a rank with another version of these messages.
    OtherVersion(u32),
    /// The session's number, drawn by rank 0 and forwarded by all.
    Session(u64),
    /// In a sealed session, in place of its number: the keys of the ranks up to the sender.
    Keys { keys: Vec<PublicKey>, proof: Proof },
    /// Then those of all ranks, and the group key.
    GroupKey { keys: Vec<PublicKey>, sealed: SealedKey },
    /// A keep-alive, with the operations that each rank has started and completed, as far as the
    /// sender knows.
    Status { ranks: Vec<Progress> },
    /// The sender starts an operation.
    Operation(Descriptor),
    /// `origin` no longer trusts the box; for each ring the first message whose sum it has not
    /// verified.
    FallBack { origin: u32, reason: Reason, unverified: Vec<u64> },
    /// An error that ends the session for all.
    Failure { origin: u32, error: Error },
    /// A rank leaves in good order, after `completed` operations.
    Goodbye { origin: u32, completed: u64 },
    /// A step of the hosts' ring; the lanes follow.
    Data(DataHeader),
    /// Rank 0 proposes to reconnect after an operation that it has not started. Until it is
    /// decided, `after` is the latest operation that any rank up to the sender has started.
    Reconnect { after: u64, decided: bool },
    /// The rank after this one has received nothing from it for its timeout. Repeated with each
    /// keep-alive. A rank that waits without progress calls it dead.
    Silent { rank: u32 },
}

/// A rank's operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Progress {
    pub started: u64,
    pub completed: u64,
}

/// Ring, message and step of a part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataHeader {
    pub ring: u32,
    pub step: u32,
    pub number: u64,
}

/// Room that the largest control frame needs.
fn control_room(ranks: u32, rings: u32) -> usize {
    64 + TEXT + (ranks as usize * 32).max(rings as usize * 8)
}

/// Room that the largest frame of a job needs: control, or a step of the hosts' ring.
pub fn bypass_room(shape: &JobShape) -> usize {
    let lanes = shape.message_room() / 4;
    // A message is cut in at most one range of lanes for each rank, and one for all.
    let step = DATA_HEADER + (lanes.div_ceil(shape.ranks as usize) + shape.ranks as usize) * 4;
    let room = step.max(control_room(shape.ranks, shape.layout.rings)).max(shape.mtu as usize);
    room + if shape.is_sealed { BYPASS_BYTES } else { 0 }
}

/// Receive buffers of a bypass connection: 64, or fewer where that would be more than 32 MiB. A
/// sender of more frames at once gets RNR NAKs and waits.
pub fn bypass_buffers(shape: &JobShape) -> usize {
    ((32 << 20) / bypass_room(shape)).clamp(8, 64)
}

/// Pieces of a fixed length, if nothing is left over.
fn whole<const N: usize>(bytes: &[u8]) -> Option<Vec<[u8; N]>> {
    let (pieces, rest) = bytes.as_chunks();
    rest.is_empty().then(|| pieces.to_vec())
}

impl Frame {
    /// Writes the frame to an empty buffer. Lanes may follow.
    pub fn encode_to(&self, w: &mut Buffer) {
        let u32s = |w: &mut Buffer, x: &[u32]| {
            x.iter().for_each(|x| w.extend_from_slice(&x.to_le_bytes()))
        };
        let u64 = |w: &mut Buffer, x: u64| w.extend_from_slice(&x.to_le_bytes());
        match self {
            Self::Hello { shape, timeout, rank, nonce } => {
                let l = shape.layout;
                let flags = [shape.relaxed, shape.on_host_ring, shape.is_sealed];
                let flags = flags.iter().rev().fold(0, |all, flag| all << 1 | u32::from(*flag));
                u32s(
                    w,
                    &[
                        1,
                        VERSION,
                        *rank,
                        shape.ranks,
                        shape.mtu,
                        l.message_size,
                        l.window,
                        l.rings,
                        flags,
                    ],
                );
                u64(w, *nonce);
                u64(w, timeout.as_nanos() as u64);
            }
            Self::FullSize(bytes) => {
                u32s(w, &[10]);
                w.resize(*bytes);
            }
            Self::OtherVersion(version) => u32s(w, &[1, *version]),
            Self::Session(session) => {
                u32s(w, &[9]);
                u64(w, *session);
            }
            Self::Keys { keys, proof } => {
                u32s(w, &[11]);
                w.extend_from_slice(keys.as_flattened());
                w.extend_from_slice(proof);
            }
            Self::GroupKey { keys, sealed } => {
                u32s(w, &[13]);
                w.extend_from_slice(keys.as_flattened());
                w.extend_from_slice(sealed);
            }
            Self::Status { ranks } => {
                u32s(w, &[2]);
                for p in ranks {
                    u64(w, p.started);
                    u64(w, p.completed);
                }
            }
            Self::Operation(d) => {
                let (call, block) = d.call.words();
                u32s(w, &[3, d.dtype.code()]);
                u32s(w, &call);
                u64(w, d.number);
                u64(w, d.length);
                u64(w, block);
            }
            Self::FallBack { origin, reason, unverified } => {
                u32s(w, &[4, *origin, *reason as u32]);
                unverified.iter().for_each(|n| u64(w, *n));
            }
            Self::Failure { origin, error } => {
                let other;
                let (kind, rank, text) = match error {
                    Error::RankDied { rank, reason } => (0, *rank, reason.as_str()),
                    Error::RankLeft { rank } => (1, *rank, ""),
                    Error::Mismatch(text) => (2, 0, text.as_str()),
                    Error::JobFailed { reason } => (3, 0, reason.as_str()),
                    Error::Protocol(text) => (4, 0, text.as_str()),
                    // `Error::for_others` has converted these already.
                    error => {
                        other = error.to_string();
                        (4, 0, other.as_str())
                    }
                };
                let mut end = text.len().min(TEXT);
                while !text.is_char_boundary(end) {
                    end -= 1;
                }
                u32s(w, &[5, *origin, kind, rank, end as u32]);
                w.extend_from_slice(&text.as_bytes()[..end]);
                w.resize(w.len().next_multiple_of(4));
            }
            Self::Goodbye { origin, completed } => {
                u32s(w, &[6, *origin]);
                u64(w, *completed);
            }
            Self::Data(h) => {
                u32s(w, &[7, h.ring, h.step]);
                u64(w, h.number);
            }
            Self::Reconnect { after, decided } => {
                u32s(w, &[8, u32::from(*decided)]);
                u64(w, *after);
            }
            Self::Silent { rank } => u32s(w, &[12, *rank]),
        }
    }

    /// Reads a frame; of [`Frame::Data`] only the header, before the lanes at [`DATA_HEADER`].
    pub fn decode(b: &[u8]) -> Option<Self> {
        let word = |i: usize| b.as_chunks::<4>().0.get(i).map(|w| u32::from_le_bytes(*w));
        let long = |at: usize| {
            b.get(at..at + 8).map(|b| u64::from_le_bytes(b.try_into().expect("8 bytes")))
        };
        let longs = |at: usize| -> Option<Vec<u64>> {
            let longs: Vec<[u8; 8]> = whole(b.get(at..)?)?;
            Some(longs.into_iter().map(u64::from_le_bytes).collect())
        };
        Some(match word(0)? {
            1 if word(1)? != VERSION => Self::OtherVersion(word(1)?),
            1 => {
                let layout = crate::numeric::layout::Layout {
                    message_size: word(5)?,
                    window: word(6)?,
                    rings: word(7)?,
                };
                let (ranks, mtu, flags) = (word(3)?, word(4)?, word(8)?);
                let [relaxed, on_host_ring, is_sealed] = [1, 2, 4].map(|flag| flags & flag != 0);
                let shape = JobShape { ranks, mtu, layout, relaxed, on_host_ring, is_sealed };
                let timeout = Duration::from_nanos(long(44)?);
                Self::Hello { rank: word(2)?, shape, timeout, nonce: long(36)? }
            }
            2 => {
                let longs = longs(4)?;
                let (pairs, rest) = longs.as_chunks::<2>();
                if !rest.is_empty() {
                    return None;
                }
                let pairs =
                    pairs.iter().map(|p| Progress { started: p[0], completed: p[1] }).collect();
                Self::Status { ranks: pairs }
            }
            3 => Self::Operation(Descriptor {
                dtype: Dtype::of_code(word(1)?)?,
                call: Call::of_words([word(2)?, word(3)?, word(4)?, word(5)?], long(40)?)?,
                number: long(24)?,
                length: long(32)?,
            }),
            4 => Self::FallBack {
                origin: word(1)?,
                reason: *Reason::ALL.get(word(2)? as usize)?,
                unverified: longs(12)?,
            },
            5 => {
                let text = String::from_utf8_lossy(b.get(20..20 + word(4)? as usize)?);
                // Other ranks print it on their terminals.
                let text =
                    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(TEXT).collect();
                let error = match word(2)? {
                    0 => Error::RankDied { rank: word(3)?, reason: text },
                    1 => Error::RankLeft { rank: word(3)? },
                    2 => Error::Mismatch(text),
                    3 => Error::JobFailed { reason: text },
                    _ => Error::Protocol(text),
                };
                Self::Failure { origin: word(1)?, error }
            }
            6 => Self::Goodbye { origin: word(1)?, completed: long(8)? },
            7 => Self::Data(DataHeader { ring: word(1)?, step: word(2)?, number: long(12)? }),
            8 => Self::Reconnect { decided: word(1)? != 0, after: long(8)? },
            9 => Self::Session(long(4)?),
            10 => Self::FullSize(b.len()),
            11 => {
                let (keys, proof) = b[4..].split_last_chunk()?;
                Self::Keys { keys: whole(keys)?, proof: *proof }
            }
            12 => Self::Silent { rank: word(1)? },
            13 => {
                let (keys, sealed) = b[4..].split_last_chunk()?;
                Self::GroupKey { keys: whole(keys)?, sealed: *sealed }
            }
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::layout::Layout;

    #[test]
    fn frames_survive_a_round_trip_and_truncation_is_refused() {
        let shape = JobShape {
            ranks: 3,
            mtu: 1024,
            layout: Layout { message_size: 65536, window: 2, rings: 4 },
            relaxed: true,
            on_host_ring: false,
            is_sealed: false,
        };
        for frame in [
            Frame::Hello { shape, timeout: Duration::from_millis(100), rank: 2, nonce: 1 << 63 },
            Frame::Hello {
                shape: JobShape { relaxed: false, on_host_ring: true, is_sealed: true, ..shape },
                timeout: Duration::from_secs(86_400),
                rank: 0,
                nonce: 0,
            },
            Frame::Status { ranks: vec![Progress { started: 1 << 40, completed: 7 }; 3] },
            Frame::Operation(Descriptor {
                number: 9,
                length: 1 << 33,
                dtype: Dtype::F32,
                call: Call {
                    collective: Collective::Broadcast { root: 63, block: 1 << 40 },
                    tag: 7,
                    width: Width::Half,
                },
            }),
            Frame::FallBack { origin: 1, reason: Reason::Stray, unverified: vec![5, 6, 1 << 50] },
            Frame::Failure {
                origin: 0,
                error: Error::RankDied { rank: 63, reason: "silent für 10 s".into() },
            },
            Frame::Failure { origin: 2, error: Error::Mismatch("ä".repeat(150)) },
            Frame::Goodbye { origin: 1, completed: 12 },
            Frame::Data(DataHeader { ring: 3, step: 1, number: 1 << 35 }),
            Frame::Reconnect { after: 1 << 40, decided: false },
            Frame::Reconnect { after: 3, decided: true },
            Frame::FullSize(256),
            Frame::OtherVersion(VERSION - 1),
            Frame::Session(u64::MAX - 5),
            Frame::Keys { keys: vec![[7; 32], [9; 32]], proof: [1; 32] },
            Frame::GroupKey { keys: vec![[7; 32], [8; 32], [9; 32]], sealed: [2; 48] },
            Frame::Silent { rank: 63 },
        ] {
            let mut bytes = Buffer::default();
            frame.encode_to(&mut bytes);
            assert_eq!(bytes.len() % 4, 0);
            assert!(bytes.len() <= control_room(3, 4));
            assert_eq!(Frame::decode(&bytes).as_ref(), Some(&frame));
            for n in 0..bytes.len() {
                assert_ne!(
                    Frame::decode(&bytes[..n]).as_ref(),
                    Some(&frame),
                    "{n} bytes of {frame:?}"
                );
            }
        }
        assert_eq!(Frame::decode(&[14, 0, 0, 0]), None);
    }

    #[test]
    fn a_failures_text_is_received_short_and_without_control_characters() {
        let text = "\x1b[2J\nrank 0 is root\u{9b}31m ".repeat(100);
        let mut bytes = [5, 1, 4, 0, text.len() as u32].map(u32::to_le_bytes).concat();
        bytes.extend_from_slice(text.as_bytes());
        let Some(Frame::Failure { error: Error::Protocol(received), .. }) = Frame::decode(&bytes)
        else {
            panic!()
        };
        assert!(received.starts_with(" [2J rank 0 is root 31m "), "{received:?}");
        assert!(
            received.chars().count() <= TEXT && !received.contains(char::is_control),
            "{received:?}"
        );
    }

    #[test]
    fn different_operations_have_different_tags_and_texts() {
        use crate::call::Op;
        let collectives = Op::ALL.into_iter().flat_map(|op| {
            let roots = (0..3).map(move |root| Collective::Reduce { op, root });
            [Collective::AllReduce(op), Collective::ReduceScatter(op)].into_iter().chain(roots)
        });
        let moves = (5..9u64).flat_map(|block| {
            let roots = (0..3).map(move |root| Collective::Broadcast { root, block });
            [Collective::AllGather { block }, Collective::AllToAll { block }]
                .into_iter()
                .chain(roots)
        });
        let calls: Vec<Call> = collectives
            .chain(moves)
            .chain([Collective::Barrier, Collective::Refused])
            .flat_map(|collective| {
                let call = Call::from(collective);
                [0, 1, 2]
                    .map(|tag| Call { tag, ..call })
                    .into_iter()
                    .chain([Call { width: Width::Half, ..call }])
            })
            .collect();
        let mut seen = std::collections::HashSet::new();
        for call in calls {
            let (words, block) = call.words();
            assert_eq!(Call::of_words(words, block), Some(call));
            let text = Descriptor { number: 1, length: 4, dtype: Dtype::I32, call }.to_string();
            assert!(seen.insert((0, text.clone())), "{text}");
            for length in (0..8).chain([1 << 20, 1 << 40]) {
                for dtype in Dtype::ALL {
                    let tag = Descriptor { number: 1, length, dtype, call }.tag();
                    assert!(seen.insert((1, tag.to_string())), "{length} {dtype} {call:?}");
                }
            }
        }
        assert_eq!(Call::of_words([8, 0, 0, 0], 0), None);
        assert_eq!(Call::of_words([1 << 9, 0, 0, 0], 0), None);
        assert_eq!(Call::of_words([0, 8, 0, 0], 0), None);
        assert_eq!(Call::of_words([6, 0, 1, 0], 0), None, "a barrier has no root");
    }
}
