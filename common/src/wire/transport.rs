//! Base and extended transport headers (IBTA volume 1, chapter 9).

use super::DEFAULT_PKEY;

/// BTH opcode, with what follows from it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct Opcode(pub u8);

impl Opcode {
    pub const SEND_FIRST: Self = Self(0x00);
    pub const SEND_MIDDLE: Self = Self(0x01);
    pub const SEND_LAST: Self = Self(0x02);
    pub const SEND_LAST_IMM: Self = Self(0x03);
    pub const SEND_ONLY: Self = Self(0x04);
    pub const SEND_ONLY_IMM: Self = Self(0x05);
    pub const WRITE_FIRST: Self = Self(0x06);
    pub const WRITE_MIDDLE: Self = Self(0x07);
    pub const WRITE_LAST: Self = Self(0x08);
    pub const WRITE_LAST_IMM: Self = Self(0x09);
    pub const WRITE_ONLY: Self = Self(0x0a);
    pub const WRITE_ONLY_IMM: Self = Self(0x0b);
    /// RC acknowledge (ACK and NAK).
    pub const ACK: Self = Self(0x11);
    /// Congestion notification packet.
    pub const CNP: Self = Self(0x81);

    /// Its name for people; `None` where RC does not define it.
    pub const fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            0x00 => "SEND_FIRST",
            0x01 => "SEND_MIDDLE",
            0x02 => "SEND_LAST",
            0x03 => "SEND_LAST_IMM",
            0x04 => "SEND_ONLY",
            0x05 => "SEND_ONLY_IMM",
            0x06 => "WRITE_FIRST",
            0x07 => "WRITE_MIDDLE",
            0x08 => "WRITE_LAST",
            0x09 => "WRITE_LAST_IMM",
            0x0a => "WRITE_ONLY",
            0x0b => "WRITE_ONLY_IMM",
            0x0c => "READ_REQUEST",
            0x0d => "READ_FIRST",
            0x0e => "READ_MIDDLE",
            0x0f => "READ_LAST",
            0x10 => "READ_ONLY",
            0x11 => "ACK",
            0x12 => "ATOMIC_ACK",
            0x13 => "CMP_SWAP",
            0x14 => "FETCH_ADD",
            0x16 => "SEND_LAST_INV",
            0x17 => "SEND_ONLY_INV",
            0x81 => "CNP",
            _ => return None,
        })
    }

    /// SEND or WRITE of a reliable connection: what a flow carries and the box adds up.
    #[inline(always)]
    pub const fn is_rc_data(self) -> bool {
        self.0 <= 0x0b
    }

    /// Data for a responder in a form that the box does not add up: atomic operations and SEND with
    /// invalidate of RC (ATOMIC WRITE is 0x1d), and SEND, WRITE and the like of an unreliable
    /// connection, 0x20 on, or of an extended reliable one, 0xa0 on.
    #[inline(always)]
    pub const fn is_other_data(self) -> bool {
        matches!(
            self.0,
            0x13 | 0x14 | 0x16 | 0x17 | 0x1d | 0x20..=0x2b | 0xa0..=0xab | 0xb3 | 0xb4 | 0xb6 | 0xb7
        )
    }

    /// Asks the responder of a reliable connection for something (IBTA table 38), be it data or
    /// not.
    #[inline(always)]
    pub const fn is_rc_request(self) -> bool {
        matches!(self.0, 0x00..=0x0c | 0x13 | 0x14 | 0x16 | 0x17)
    }

    /// Defined for reliable connections (IBTA table 38), or a CNP.
    #[inline(always)]
    pub const fn is_known(self) -> bool {
        matches!(self.0, 0x00..=0x14 | 0x16 | 0x17) || self.0 == Self::CNP.0
    }

    /// A RETH follows the BTH.
    #[inline(always)]
    pub const fn has_reth(self) -> bool {
        matches!(self.0, 0x06 | 0x0a | 0x0b)
    }

    /// Immediate data precedes the payload.
    #[inline(always)]
    pub const fn has_immediate(self) -> bool {
        matches!(self.0, 0x03 | 0x05 | 0x09 | 0x0b)
    }

    /// The first packet of its message.
    #[inline(always)]
    pub const fn is_first(self) -> bool {
        matches!(self.0, 0x00 | 0x04 | 0x05 | 0x06 | 0x0a | 0x0b)
    }

    /// The last packet of its message.
    #[inline(always)]
    pub const fn is_last(self) -> bool {
        matches!(self.0, 0x02..=0x05 | 0x08..=0x0b)
    }

    /// Bytes of RETH and immediate data between BTH and payload of RC data.
    #[inline(always)]
    pub const fn extended_len(self) -> usize {
        (if self.has_reth() { super::RETH_LEN } else { 0 })
            + (if self.has_immediate() { super::IMM_LEN } else { 0 })
    }

    /// The opcode of a data packet at a place in its message.
    pub const fn data(write: bool, first: bool, last: bool, immediate: bool) -> Self {
        let base = if write { 0x06 } else { 0x00 };
        Self(
            base + match (first, last) {
                (true, false) => 0,
                (false, false) => 1,
                (false, true) => 2 + immediate as u8,
                (true, true) => 4 + immediate as u8,
            },
        )
    }
}

/// In a sum that a relaxed ring releases: the sums of all packets before it have been released. A
/// reserved bit of [`Bth::flags`]'s byte, which may change on the way.
pub const IN_ORDER: u8 = 1;
/// In the same place: the box lacks a packet that the sender sent before this one.
pub const PAST_GAP: u8 = 2;
/// In the same byte, between boxes in levels: the packet holds a total sum, not a contribution.
pub const TOTAL: u8 = 0x20;
/// In the same place, towards the parent: the [`group_mark`] of the ranks that a box has added up.
/// A box that has stopped adding forwards packets with another mark.
pub const GROUP_MARK: u8 = 0x1f;

/// The mark of a sum of this many ranks, at least 1 and at most 65,535. It never decreases as ranks
/// are added, and a sum of at least half as many again has another one.
pub const fn group_mark(ranks: u32) -> u8 {
    let octave = ranks.ilog2();
    let upper_half = ranks << 1 >> octave & 1;
    (2 * octave + upper_half) as u8 + 1
}

/// Whether a packet carries the required mark if another box forwards it: that of a group, or
/// [`TOTAL`].
#[inline(always)]
pub const fn has_group_mark(flags: u8, wanted: u8) -> bool {
    flags & (if wanted == TOTAL { TOTAL } else { GROUP_MARK }) == wanted
}

/// Base transport header, 12 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bth {
    /// Its kind.
    pub opcode: Opcode,
    /// Solicited event.
    pub solicited: bool,
    /// MigReq bit.
    pub migration: bool,
    /// Pad bytes between payload and ICRC, 0 to 3.
    pub pad: u8,
    /// Transport header version, 0.
    pub version: u8,
    /// Partition key.
    pub pkey: u16,
    /// FECN, BECN and six reserved bits, of which one is [`IN_ORDER`]; not covered by the ICRC.
    pub flags: u8,
    /// Destination queue pair number, 24 bits.
    pub qpn: u32,
    /// The sender asks for an acknowledgement.
    pub ack_request: bool,
    /// Packet sequence number, 24 bits.
    pub psn: u32,
}

impl Bth {
    /// A header with the usual defaults: MigReq set as Linux does, version 0, default partition.
    pub const fn new(opcode: Opcode, qpn: u32, psn: u32) -> Self {
        Self {
            opcode,
            solicited: false,
            migration: false,
            pad: 0,
            version: 0,
            pkey: DEFAULT_PKEY,
            flags: 0,
            qpn,
            ack_request: false,
            psn,
        }
    }

    /// Reads the header; every bit pattern is a header.
    #[inline(always)]
    pub const fn decode(b: &[u8; 12]) -> Self {
        Self {
            opcode: Opcode(b[0]),
            solicited: b[1] & 0x80 != 0,
            migration: b[1] & 0x40 != 0,
            pad: b[1] >> 4 & 3,
            version: b[1] & 0x0f,
            pkey: u16::from_be_bytes([b[2], b[3]]),
            flags: b[4],
            qpn: u32::from_be_bytes([0, b[5], b[6], b[7]]),
            ack_request: b[8] & 0x80 != 0,
            psn: u32::from_be_bytes([0, b[9], b[10], b[11]]),
        }
    }

    /// Writes the header; reserved bits are zero.
    #[inline(always)]
    pub const fn encode(&self) -> [u8; 12] {
        let (k, q, p) = (self.pkey.to_be_bytes(), self.qpn.to_be_bytes(), self.psn.to_be_bytes());
        [
            self.opcode.0,
            (self.solicited as u8) << 7
                | (self.migration as u8) << 6
                | (self.pad & 3) << 4
                | self.version & 0x0f,
            k[0],
            k[1],
            self.flags,
            q[1],
            q[2],
            q[3],
            (self.ack_request as u8) << 7,
            p[1],
            p[2],
            p[3],
        ]
    }
}

/// RDMA extended transport header, 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reth {
    /// Virtual address to write to.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
    /// Bytes of the whole message.
    pub length: u32,
}

impl Reth {
    pub fn decode(b: &[u8; 16]) -> Self {
        let word = |i: usize| u32::from_be_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        Self { address: (word(0) as u64) << 32 | word(4) as u64, rkey: word(8), length: word(12) }
    }

    pub fn encode(&self) -> [u8; 16] {
        let mut b = [0; 16];
        b[..8].copy_from_slice(&self.address.to_be_bytes());
        b[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        b[12..].copy_from_slice(&self.length.to_be_bytes());
        b
    }
}

/// Why a responder refuses (IBTA table 47).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Nak {
    /// A PSN is missing; the sender goes back to the PSN in the BTH.
    SequenceError,
    /// The request is malformed.
    InvalidRequest,
    RemoteAccess,
    RemoteOperation,
}

/// Kinds of an AETH (IBTA 9.7.5.1.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Syndrome {
    /// Everything up to the BTH's PSN has arrived. The code is the credit count, 0x1f for no limit.
    Ack(u8),
    /// Receiver not ready: try again after the coded time (IBTA table 46).
    RnrNak(u8),
    /// Refused.
    Nak(Nak),
    /// A reserved bit pattern.
    Reserved(u8),
}

impl Syndrome {
    /// Reads the syndrome byte.
    pub const fn decode(b: u8) -> Self {
        match (b >> 5, b & 0x1f) {
            (0, credits) => Self::Ack(credits),
            (1, timer) => Self::RnrNak(timer),
            (3, 0) => Self::Nak(Nak::SequenceError),
            (3, 1) => Self::Nak(Nak::InvalidRequest),
            (3, 2) => Self::Nak(Nak::RemoteAccess),
            (3, 3) => Self::Nak(Nak::RemoteOperation),
            _ => Self::Reserved(b),
        }
    }

    /// Writes the syndrome byte.
    pub const fn encode(self) -> u8 {
        match self {
            Self::Ack(credits) => credits & 0x1f,
            Self::RnrNak(timer) => 0x20 | timer & 0x1f,
            Self::Nak(Nak::SequenceError) => 0x60,
            Self::Nak(Nak::InvalidRequest) => 0x61,
            Self::Nak(Nak::RemoteAccess) => 0x62,
            Self::Nak(Nak::RemoteOperation) => 0x63,
            Self::Reserved(b) => b,
        }
    }
}

/// ACK extended transport header, 4 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Aeth {
    /// Acknowledged or refused, and why.
    pub syndrome: Syndrome,
    /// Messages completed by the responder, modulo 2^24.
    pub msn: u32,
}

impl Aeth {
    pub const fn decode(b: &[u8; 4]) -> Self {
        Self { syndrome: Syndrome::decode(b[0]), msn: u32::from_be_bytes([0, b[1], b[2], b[3]]) }
    }

    pub const fn encode(&self) -> [u8; 4] {
        let m = self.msn.to_be_bytes();
        [self.syndrome.encode(), m[1], m[2], m[3]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bth_survives_a_round_trip() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..4096 {
            let mut b = [0u8; 12];
            rng.fill(&mut b);
            b[8] &= 0x80; // reserved bits are not kept
            assert_eq!(Bth::decode(&b).encode(), b);
        }
    }

    #[test]
    fn every_syndrome_survives_a_round_trip() {
        for b in 0..=255 {
            assert_eq!(Syndrome::decode(b).encode(), b);
        }
        assert_eq!(Syndrome::decode(0x1f), Syndrome::Ack(0x1f));
        assert_eq!(Syndrome::decode(0x60), Syndrome::Nak(Nak::SequenceError));
    }

    #[test]
    fn data_opcodes_match_their_table() {
        use Opcode as O;
        for (write, first, last, imm, expected) in [
            (false, true, false, false, O::SEND_FIRST),
            (false, false, false, false, O::SEND_MIDDLE),
            (false, false, true, false, O::SEND_LAST),
            (false, false, true, true, O::SEND_LAST_IMM),
            (false, true, true, false, O::SEND_ONLY),
            (false, true, true, true, O::SEND_ONLY_IMM),
            (true, true, false, false, O::WRITE_FIRST),
            (true, false, false, false, O::WRITE_MIDDLE),
            (true, false, true, false, O::WRITE_LAST),
            (true, false, true, true, O::WRITE_LAST_IMM),
            (true, true, true, false, O::WRITE_ONLY),
            (true, true, true, true, O::WRITE_ONLY_IMM),
        ] {
            let op = O::data(write, first, last, imm);
            assert_eq!(op, expected);
            assert_eq!(op.is_first(), first);
            assert_eq!(op.is_last(), last);
            assert_eq!(op.has_immediate(), imm);
            assert_eq!(op.has_reth(), write && first);
            assert!(op.is_rc_data() && op.is_known());
        }
        assert!(!O(0x15).is_known() && !O(0x18).is_known() && !O(0x12).is_rc_data());
    }
}
