//! The check lanes of verified sums.
//!
//! A message of netsum's own worker begins with [`CHECK_LANES`] lanes that the box adds up like all
//! others, modulo 2^32:
//!
//! | lane | as a rank sends it | in the sum over N ranks |
//! | --- | --- | --- |
//! | 0, `count` | 1 | N |
//! | 1, `sequence` | a number h of session, ring, message and call | N h |
//! | 2, `rank` | another such number h', plus one of session, ring, rank | N h', plus their sum |
//! | 3 to 18 | [`data_sums`] of the lanes that follow | those of the sum, for they are linear |
//!
//! This detects a contribution that was lost or added twice, sums of other sessions, rings and
//! messages, mixed-up slots, and bits changed in the box, which no ICRC can detect.
//! The book's page "The collective" has the probability that an error passes.

/// Number of check lanes.
pub const CHECK_LANES: usize = 3 + DATA_SUMS;
/// Sums over data lanes: the plain one, a weighted one, and one for each bit of a lane's index.
pub const DATA_SUMS: usize = 2 + INDEX_BITS;

/// Bits of a lane's index that have sums: those of 2^14 lanes, 64 KiB.
const INDEX_BITS: usize = 14;
const COLUMNS: usize = 16;
const ROWS: usize = 16;
const BLOCK: usize = COLUMNS * ROWS * 4;
const _: () = assert!(
    1 << INDEX_BITS >= COLUMNS * ROWS && COLUMNS.is_power_of_two() && ROWS.is_power_of_two()
);
/// Bits of the column, the row and the block in an index.
const COLUMN_BITS: usize = COLUMNS.ilog2() as usize;
const ROW_BITS: usize = ROWS.ilog2() as usize;
const BLOCK_BITS: usize = INDEX_BITS - COLUMN_BITS - ROW_BITS;

/// One lane of each column.
type Row = [u32; COLUMNS];

/// Weights of a block's lanes. They are pseudo-random: with regular weights, exchanging two
/// stretches of equal plain sums could leave the weighted sum unchanged.
const WEIGHTS: [Row; ROWS] = {
    let mut weights = [[0; COLUMNS]; ROWS];
    let (mut row, mut state) = (0, 0x6e65_7473_756du64);
    while row < ROWS {
        let mut column = 0;
        while column < COLUMNS {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            weights[row][column] = mix(state) as u32;
            column += 1;
        }
        row += 1;
    }
    // The first lane of a block is in no sum of an index bit.
    weights[0][0] |= 1;
    weights
};

/// Mixes 64 bits (the finaliser of SplitMix64).
const fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The weight of a block: odd, and therefore invertible, so all bits of its lanes' weights count.
fn block_weight(block: usize) -> u32 {
    mix((block as u64).wrapping_add(0x9e37_79b9_7f4a_7c15)) as u32 | 1
}

/// Sums by column.
struct Columns {
    all: Row,
    weighted: Row,
    /// For the rows whose index has a bit.
    rows: [Row; ROW_BITS],
    /// For the blocks whose index has a bit.
    blocks: [Row; BLOCK_BITS],
}

// Always inlined: callers compile it for the registers that they know of.
#[inline(always)]
fn add_row(sums: &mut Row, row: &Row) {
    for (sum, lane) in sums.iter_mut().zip(row) {
        *sum = sum.wrapping_add(*lane);
    }
}

impl Columns {
    #[inline(always)]
    fn add(&mut self, index: usize, block: &[u8; BLOCK]) {
        let (mut all, mut weighted) = ([0; COLUMNS], [0u32; COLUMNS]);
        for (r, (row, weights)) in
            block.as_chunks::<{ COLUMNS * 4 }>().0.iter().zip(&WEIGHTS).enumerate()
        {
            let mut lanes = [0; COLUMNS];
            for (lane, bytes) in lanes.iter_mut().zip(row.as_chunks::<4>().0) {
                *lane = u32::from_le_bytes(*bytes);
            }
            add_row(&mut all, &lanes);
            for ((sum, lane), weight) in weighted.iter_mut().zip(&lanes).zip(weights) {
                *sum = sum.wrapping_add(lane.wrapping_mul(*weight));
            }
            for (bit, sums) in self.rows.iter_mut().enumerate() {
                if r >> bit & 1 == 1 {
                    add_row(sums, &lanes);
                }
            }
        }
        add_row(&mut self.all, &all);
        let weight = block_weight(index);
        for (sum, lane) in self.weighted.iter_mut().zip(&weighted) {
            *sum = sum.wrapping_add(lane.wrapping_mul(weight));
        }
        for (bit, sums) in self.blocks.iter_mut().enumerate() {
            if index >> bit & 1 == 1 {
                add_row(sums, &all);
            }
        }
    }

    fn finish(&self) -> [u32; DATA_SUMS] {
        let whole = |row: &Row| row.iter().fold(0u32, |sum, lane| sum.wrapping_add(*lane));
        let mut sums = [0; DATA_SUMS];
        sums[0] = whole(&self.all);
        sums[1] = whole(&self.weighted);
        let (columns, rest) = sums[2..].split_at_mut(COLUMN_BITS);
        for (bit, sum) in columns.iter_mut().enumerate() {
            let with = self.all.iter().enumerate().filter(|(column, _)| column >> bit & 1 == 1);
            *sum = with.fold(0, |sum, (_, lane)| sum.wrapping_add(*lane));
        }
        for (sum, row) in rest.iter_mut().zip(self.rows.iter().chain(&self.blocks)) {
            *sum = whole(row);
        }
        sums
    }
}

/// The sums over data lanes, as they are on the wire: little-endian words. A rest of less than a
/// word counts as nothing.
// Always inlined: callers compile it for the registers that they know of.
#[inline(always)]
pub fn data_sums(lanes: &[u8]) -> [u32; DATA_SUMS] {
    let zero = [0; COLUMNS];
    let mut columns =
        Columns { all: zero, weighted: zero, rows: [zero; ROW_BITS], blocks: [zero; BLOCK_BITS] };
    let (blocks, rest) = lanes.as_chunks::<BLOCK>();
    for (index, block) in blocks.iter().enumerate() {
        columns.add(index, block);
    }
    let rest = &rest[..rest.len() & !3];
    if !rest.is_empty() {
        let mut block = [0; BLOCK];
        block[..rest.len()].copy_from_slice(rest);
        columns.add(blocks.len(), &block);
    }
    columns.finish()
}

/// The lanes that identify a message, independent of its data: `count`, `sequence` and `rank`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stamp {
    /// Contributions: 1 as sent, N in a sum.
    pub count: u32,
    /// Hash of session, ring, message and call.
    pub sequence: u32,
    /// Another hash of the message, plus one of session, ring and rank; in a sum, the sum of those.
    pub rank: u32,
}

/// A message of a session, as all ranks know it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MessageId {
    /// A random number that the ranks agree on when they connect.
    pub run: u64,
    pub ring: u32,
    /// Number in the ring, from 0.
    pub number: u64,
    /// Hash of the call that it belongs to.
    pub tag: u32,
}

impl MessageId {
    fn mixed(&self) -> u64 {
        mix(mix(mix(self.run ^ u64::from(self.ring)) ^ self.number) ^ u64::from(self.tag))
    }

    fn member(&self, rank: u32) -> u32 {
        mix(mix(!self.run ^ u64::from(self.ring)) ^ u64::from(rank)) as u32
    }

    /// The lanes that `rank` sends.
    pub fn of(&self, rank: u32) -> Stamp {
        let mixed = self.mixed();
        let member = self.member(rank).wrapping_add((mixed >> 32) as u32);
        Stamp { count: 1, sequence: mixed as u32, rank: member }
    }

    /// The lanes in the sum over all ranks.
    pub fn of_all(&self, ranks: u32) -> Stamp {
        let mixed = self.mixed();
        let members = (0..ranks).fold(0u32, |sum, rank| sum.wrapping_add(self.member(rank)));
        let rank = members.wrapping_add(((mixed >> 32) as u32).wrapping_mul(ranks));
        Stamp { count: ranks, sequence: (mixed as u32).wrapping_mul(ranks), rank }
    }
}

/// The check lanes of a message or of a sum of messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Check {
    /// Its message.
    pub stamp: Stamp,
    /// [`data_sums`].
    pub data: [u32; DATA_SUMS],
}

/// Verdict on a received sum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verification {
    /// The sum over all ranks.
    Sum,
    /// One rank's message as sent: no box summed it.
    Unsummed,
    /// A sum of as many contributions as there are ranks, but not of this message: of another
    /// session, ring or message, or with one rank's contribution in place of another's.
    Stray,
    /// None of these.
    Wrong,
}

impl Check {
    pub fn encode(&self) -> [u32; CHECK_LANES] {
        let mut lanes = [0; CHECK_LANES];
        let Stamp { count, sequence, rank } = self.stamp;
        lanes[..3].copy_from_slice(&[count, sequence, rank]);
        lanes[3..].copy_from_slice(&self.data);
        lanes
    }

    pub fn decode(lanes: [u32; CHECK_LANES]) -> Self {
        let [count, sequence, rank, data @ ..] = lanes;
        Self { stamp: Stamp { count, sequence, rank }, data }
    }

    /// Checks a message that arrived from rank `from`, with `data` as the sums over its data lanes,
    /// where the sum over `ranks` ranks is expected.
    pub fn examine(
        &self,
        id: &MessageId,
        ranks: u32,
        from: u32,
        data: &[u32; DATA_SUMS],
    ) -> Verification {
        if self.data == *data && self.stamp == id.of_all(ranks) {
            Verification::Sum
        } else if self.data == *data && self.stamp == id.of(from) {
            Verification::Unsummed
        } else if self.data == *data && self.stamp.count == ranks {
            Verification::Stray
        } else {
            Verification::Wrong
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: MessageId = MessageId { run: 0x0123_4567_89ab_cdef, ring: 1, number: 77, tag: 5 };

    fn bytes(lanes: &[u32]) -> Vec<u8> {
        lanes.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    fn message(id: MessageId, rank: u32, x: &[u32]) -> Vec<u32> {
        let check = Check { stamp: id.of(rank), data: data_sums(&bytes(x)) };
        [&check.encode()[..], x].concat()
    }

    fn examine(m: &[u32], id: MessageId, ranks: u32) -> Verification {
        let check = Check::decode(m[..CHECK_LANES].try_into().unwrap());
        check.examine(&id, ranks, 1, &data_sums(&bytes(&m[CHECK_LANES..])))
    }

    fn sum(ms: &[Vec<u32>]) -> Vec<u32> {
        let mut s = vec![0u32; ms[0].len()];
        for m in ms {
            for (s, x) in s.iter_mut().zip(m) {
                *s = s.wrapping_add(*x);
            }
        }
        s
    }

    fn messages(id: MessageId, ranks: u32) -> Vec<Vec<u32>> {
        (0..ranks)
            .map(|r| message(id, r, &[r, (1 << 31) + r, 0u32.wrapping_sub(5), 9000 * r]))
            .collect()
    }

    #[test]
    fn sums_are_what_their_definition_says() {
        for len in [0, 1, 15, 16, 17, 255, 256, 257, 1000, 16384, 16385, 40_000] {
            let lanes: Vec<u32> =
                (0..len).map(|i: u32| i.wrapping_mul(0x9e37_79b9) ^ i << 7).collect();
            let mut sums = [0u32; DATA_SUMS];
            for (i, x) in lanes.iter().enumerate() {
                let weight = WEIGHTS[i / 16 % 16][i % 16].wrapping_mul(block_weight(i / 256));
                sums[0] = sums[0].wrapping_add(*x);
                sums[1] = sums[1].wrapping_add(x.wrapping_mul(weight));
                for (bit, sum) in sums[2..].iter_mut().enumerate() {
                    *sum = sum.wrapping_add(x * (i as u32 >> bit & 1));
                }
            }
            let mut bytes = bytes(&lanes);
            assert_eq!(data_sums(&bytes), sums, "{len} lanes");
            bytes.extend([1, 2, 3]);
            assert_eq!(data_sums(&bytes), sums, "{len} lanes and a rest");
        }
    }

    #[test]
    fn sums_of_messages_check_and_others_do_not() {
        for ranks in [2, 3, 4, 64] {
            let m = messages(ID, ranks);
            assert_eq!(examine(&sum(&m), ID, ranks), Verification::Sum);
            assert_eq!(examine(&m[1], ID, ranks), Verification::Unsummed);
            assert_eq!(examine(&m[0], ID, ranks), Verification::Wrong, "not the previous rank's");
            assert_eq!(
                examine(&sum(&m[1..]), ID, ranks),
                if ranks == 2 { Verification::Unsummed } else { Verification::Wrong }
            );
            for other in [
                MessageId { run: ID.run + 1, ..ID },
                MessageId { ring: 0, ..ID },
                MessageId { number: 76, ..ID },
                MessageId { number: ID.number + (1 << 32), ..ID },
                MessageId { tag: 6, ..ID },
            ] {
                assert_eq!(examine(&sum(&m), other, ranks), Verification::Stray, "{other:?}");
                // One contribution of it among the right ones.
                let mut mixed = m.clone();
                mixed[1] = messages(other, ranks).swap_remove(1);
                assert_eq!(examine(&sum(&mixed), ID, ranks), Verification::Stray, "{other:?}");
            }
            for lost in 0..ranks as usize {
                for doubled in (0..ranks as usize).filter(|r| *r != lost) {
                    let mut mixed = m.clone();
                    mixed[lost] = m[doubled].clone();
                    assert_eq!(
                        examine(&sum(&mixed), ID, ranks),
                        Verification::Stray,
                        "{lost} {doubled}"
                    );
                }
            }
            for lane in 0..CHECK_LANES + 4 {
                for bit in [0, 7, 31] {
                    let mut s = sum(&m);
                    s[lane] ^= 1 << bit;
                    assert!(
                        !matches!(
                            examine(&s, ID, ranks),
                            Verification::Sum | Verification::Unsummed
                        ),
                        "lane {lane}"
                    );
                }
            }
            let mut s = sum(&m);
            s.swap(CHECK_LANES + 1, CHECK_LANES + 3);
            assert_eq!(examine(&s, ID, ranks), Verification::Wrong, "lanes exchanged");
        }
    }

    /// The change of the data sums is the data sums of the change.
    fn sparse(len: usize, change: &[(usize, u32)]) -> [u32; DATA_SUMS] {
        let mut lanes = vec![0; len];
        change.iter().for_each(|(i, x)| lanes[*i] = *x);
        data_sums(&bytes(&lanes))
    }

    #[test]
    fn no_change_of_two_or_three_lanes_passes() {
        // Linear, so pairs of top bits pass where two lanes have the same sums; all 16,384 differ.
        let mut seen = std::collections::HashSet::new();
        let mut lanes = vec![0u8; 65536];
        for i in 0..1 << INDEX_BITS {
            lanes[i * 4 + 3] = 0x80;
            assert!(seen.insert(data_sums(&lanes[..(i + 1) * 4])), "lane {i}");
            lanes[i * 4 + 3] = 0;
        }
        let mut state = 1;
        let mut random = |below: usize| {
            state = mix(state).wrapping_add(0x9e37_79b9_7f4a_7c15);
            (state >> 20) as usize % below
        };
        for _ in 0..300 {
            let len = [300, 5000, 16384][random(3)];
            let mut at = [random(len), random(len), random(len)];
            at.sort_unstable();
            if at[0] == at[1] || at[1] == at[2] {
                continue;
            }
            let top = 1 << 31;
            let x = 1u32 << random(32);
            for change in [
                &[(at[0], top), (at[1], top)][..],
                &[(at[0], x), (at[2], x.wrapping_neg())],
                &[(at[0], top), (at[1], top), (at[2], top)],
                &[(at[0], x), (at[1], x), (at[2], x.wrapping_mul(2).wrapping_neg())],
            ] {
                assert_ne!(sparse(len, change), [0; DATA_SUMS], "{change:?}");
            }
        }
        // A flip in a check lane in addition to one in the first data lane, which is in no sum of
        // an index bit.
        assert_eq!(sparse(300, &[(0, 1 << 31)])[..2], [1 << 31, 1 << 31]);
    }

    #[test]
    fn swapped_ranges_with_equal_sums_are_found() {
        for (a, b) in [(0, 256), (256, 1024), (0, 16), (512, 512 + 4096)] {
            let mut lanes = vec![0; 16384];
            (lanes[a + 3], lanes[b + 7]) = (1, 1);
            let before = data_sums(&bytes(&lanes));
            (lanes[a + 3], lanes[b + 7]) = (0, 0);
            (lanes[a + 7], lanes[b + 3]) = (1, 1);
            assert_ne!(data_sums(&bytes(&lanes)), before, "{a} {b}");
        }
    }
}
