//! The header that a message's first packet begins with where a job is set up in band.
//!
//! Its bytes, and what of it is NetReduce's, are in the book, `reference/protocol.md`. The fields
//! are little-endian lanes, because the box adds them up like all others: so a receiver can
//! recognise a sum by them.

use core::fmt;

/// Length of the header in bytes.
pub const JOB_HEADER_LEN: usize = 48;
/// Offset of the token.
pub const JOB_TOKEN_AT: usize = 8;
/// Lane 0: `nsum`.
pub const JOB_MAGIC: u32 = u32::from_le_bytes(*b"nsum");
/// The version that this is.
pub const JOB_VERSION: u8 = 1;

const LANES: usize = JOB_HEADER_LEN / 4;

/// The part of a job's token in packets: it allows to claim a rank, and does not reveal the token
/// for the API.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct InBandToken(pub [u8; 16]);

impl fmt::Debug for InBandToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InBandToken(hidden)")
    }
}

/// Kind of lanes 0 and 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeaderKind {
    /// No header.
    Other,
    /// A header of another version.
    Version(u8),
    /// A header.
    Header,
}

/// Looks at lanes 0 and 1.
#[inline(always)]
pub const fn beginning(b: [u8; 8]) -> HeaderKind {
    if u32::from_le_bytes([b[0], b[1], b[2], b[3]]) != JOB_MAGIC {
        HeaderKind::Other
    } else if b[4] != JOB_VERSION {
        HeaderKind::Version(b[4])
    } else {
        HeaderKind::Header
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct JobHeader {
    /// Data type, [`DTYPE_I32`], with the two bytes above it.
    pub dtype: u32,
    /// The job.
    pub token: InBandToken,
    /// Ring of the job, from 0.
    pub ring: u32,
    /// The sending rank, from 0.
    pub rank: u32,
    /// Ranks of the job.
    pub ranks: u32,
    /// Number of the message on its connection, from 0.
    pub message: u32,
    /// Packets of the message.
    pub fragments: u32,
    /// Packets of all messages before it, modulo 2^24: the index of its first fragment.
    pub index: u32,
}

/// Data type of the numbers that the box adds.
pub const DTYPE_I32: u32 = 1;

impl JobHeader {
    /// Nothing but magic and version.
    pub const EMPTY: Self = Self {
        dtype: 0,
        token: InBandToken([0; 16]),
        ring: 0,
        rank: 0,
        ranks: 0,
        message: 0,
        fragments: 0,
        index: 0,
    };

    fn lanes(&self) -> [u32; LANES] {
        let t = &self.token.0;
        let token = |i: usize| u32::from_le_bytes([t[i], t[i + 1], t[i + 2], t[i + 3]]);
        [
            JOB_MAGIC,
            JOB_VERSION as u32 | self.dtype << 8,
            token(0),
            token(4),
            token(8),
            token(12),
            self.ring,
            self.rank,
            self.ranks,
            self.message,
            self.fragments,
            self.index,
        ]
    }

    pub fn encode(&self) -> [u8; JOB_HEADER_LEN] {
        bytes(self.lanes())
    }

    /// Reads a header; `None` if the bytes are not a header of this version.
    pub fn decode(b: &[u8; JOB_HEADER_LEN]) -> Option<Self> {
        if beginning([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]) != HeaderKind::Header {
            return None;
        }
        let lane =
            |i: usize| u32::from_le_bytes([b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3]]);
        let mut token = [0; 16];
        token.copy_from_slice(&b[JOB_TOKEN_AT..JOB_TOKEN_AT + 16]);
        Some(Self {
            dtype: lane(1) >> 8,
            token: InBandToken(token),
            ring: lane(6),
            rank: lane(7),
            ranks: lane(8),
            message: lane(9),
            fragments: lane(10),
            index: lane(11),
        })
    }
}

fn bytes(lanes: [u32; LANES]) -> [u8; JOB_HEADER_LEN] {
    let mut b = [0; JOB_HEADER_LEN];
    for (b, lane) in b.as_chunks_mut::<4>().0.iter_mut().zip(lanes) {
        *b = lane.to_le_bytes();
    }
    b
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(rank: u32, ranks: u32) -> JobHeader {
        let token = InBandToken(core::array::from_fn(|i| 0xf0 + i as u8));
        JobHeader {
            dtype: 1,
            token,
            ring: 2,
            rank,
            ranks,
            message: 77,
            fragments: 64,
            index: 0xff_ffc0,
        }
    }

    #[test]
    fn every_byte_is_where_the_table_says() {
        let token = InBandToken(core::array::from_fn(|i| 0x10 + i as u8));
        let h = JobHeader {
            dtype: 1,
            token,
            ring: 0x0201,
            rank: 0x0403,
            ranks: 0x0605,
            message: 0x0a09_0807,
            fragments: 0x0e0d_0c0b,
            index: 0x0012_1110,
        };
        let expected = [
            b"nsum".as_slice(),
            &[1, 1, 0, 0],
            &(0x10..0x20).collect::<Vec<u8>>(),
            &[1, 2, 0, 0, 3, 4, 0, 0, 5, 6, 0, 0, 7, 8, 9, 10, 11, 12, 13, 14, 0x10, 0x11, 0x12, 0],
        ]
        .concat();
        assert_eq!(h.encode().as_slice(), expected);
        assert_eq!(JobHeader::decode(&h.encode()), Some(h));
        assert_eq!(h.encode()[JOB_TOKEN_AT..][..16], token.0);
        assert_eq!(h.encode()[44..], 0x12_1110u32.to_le_bytes());
    }

    #[test]
    fn other_beginnings_are_no_header() {
        let mut b = header(0, 3).encode();
        b[4] = 2;
        assert_eq!(
            (JobHeader::decode(&b), beginning(*b.first_chunk().unwrap())),
            (None, HeaderKind::Version(2))
        );
        b[3] ^= 1;
        assert_eq!(
            (JobHeader::decode(&b), beginning(*b.first_chunk().unwrap())),
            (None, HeaderKind::Other)
        );
    }

    #[test]
    fn a_token_is_not_printed() {
        assert!(!format!("{:?}{:#?}", header(0, 2), header(0, 2).token).contains("24"));
        assert!(format!("{:?}", header(0, 2)).contains("hidden"));
    }
}
