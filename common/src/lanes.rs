//! The check lanes of verified sums.
//!
//! A message of netsum's own worker begins with four lanes that the box adds up like all others: `count` = 1,
//! `sequence` = the message number, `A` = sum of x_i and `B` = sum of (i+1) x_i, all modulo 2^32, over the lanes that
//! follow. All are linear, so the sum over N ranks can be checked: count = N, sequence = N times the number, and A and B
//! against the lanes that arrived. That finds a contribution lost or added twice, slots mixed up and bits changed in
//! the box, which no ICRC can.

/// Number of check lanes.
pub const CHECK_LANES: usize = 4;

/// The four check lanes of a message or of a sum of messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Check {
    /// Contributions: 1 as sent, N in a sum.
    pub count: u32,
    /// Message number, summed.
    pub sequence: u32,
    /// Sum of the lanes.
    pub a: u32,
    /// Weighted sum of the lanes.
    pub b: u32,
}

/// What a received sum is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Finding {
    /// The sum over all ranks.
    Sum,
    /// One rank's message as sent: no box summed it.
    Unsummed,
    /// Neither.
    Wrong,
}

/// The sums A and B over lanes. Little-endian 32-bit integers, wrapping.
pub fn sums(lanes: &[i32]) -> (u32, u32) {
    // B = sum of (i+1) x_i = sum over i of the suffix sums; written with an index so that it vectorises.
    let (mut a, mut b) = (0u32, 0u32);
    for (i, &x) in lanes.iter().enumerate() {
        a = a.wrapping_add(x as u32);
        b = b.wrapping_add((x as u32).wrapping_mul(i as u32 + 1));
    }
    (a, b)
}

/// As [`sums`], over lanes as they are on the wire: little-endian words. A rest of less than a word counts as nothing.
// Always inlined: callers compile it for the registers that they know of.
#[inline(always)]
pub fn sums_of_bytes(lanes: &[u8]) -> (u32, u32) {
    let (mut a, mut b) = (0u32, 0u32);
    for (i, &x) in lanes.as_chunks::<4>().0.iter().enumerate() {
        let x = u32::from_le_bytes(x);
        a = a.wrapping_add(x);
        b = b.wrapping_add(x.wrapping_mul(i as u32 + 1));
    }
    (a, b)
}

impl Check {
    /// The check lanes of message `number` that carries `lanes`.
    pub fn of(number: u32, lanes: &[i32]) -> Self {
        let (a, b) = sums(lanes);
        Self { count: 1, sequence: number, a, b }
    }

    /// As lanes.
    pub const fn encode(self) -> [i32; CHECK_LANES] {
        [self.count as i32, self.sequence as i32, self.a as i32, self.b as i32]
    }

    /// From lanes.
    pub const fn decode(l: [i32; CHECK_LANES]) -> Self {
        Self { count: l[0] as u32, sequence: l[1] as u32, a: l[2] as u32, b: l[3] as u32 }
    }

    /// What a received message is, that should be the sum of message `number` over `ranks` ranks.
    pub fn examine(self, number: u32, ranks: u32, lanes: &[i32]) -> Finding {
        self.examine_sums(number, ranks, sums(lanes))
    }

    /// As [`Check::examine`], for a caller that has computed the sums A and B over the lanes.
    pub fn examine_sums(self, number: u32, ranks: u32, sums: (u32, u32)) -> Finding {
        if (self.a, self.b) != sums {
            Finding::Wrong
        } else if self.count == ranks && self.sequence == number.wrapping_mul(ranks) {
            Finding::Sum
        } else if self.count == 1 && self.sequence == number {
            Finding::Unsummed
        } else {
            Finding::Wrong
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(number: u32, x: &[i32]) -> Vec<i32> {
        [&Check::of(number, x).encode()[..], x].concat()
    }

    fn examine(m: &[i32], number: u32, ranks: u32) -> Finding {
        Check::decode(m[..4].try_into().unwrap()).examine(number, ranks, &m[4..])
    }

    fn sum(ms: &[Vec<i32>]) -> Vec<i32> {
        let mut s = vec![0i32; ms[0].len()];
        for m in ms {
            for (s, x) in s.iter_mut().zip(m) {
                *s = s.wrapping_add(*x);
            }
        }
        s
    }

    #[test]
    fn bytes_sum_as_lanes_do() {
        let lanes: Vec<i32> = (0..1001).map(|i: i32| i.wrapping_mul(0x3779_b9f1)).collect();
        let bytes: Vec<u8> = lanes.iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(sums_of_bytes(&bytes), sums(&lanes));
    }

    #[test]
    fn sums_of_messages_check_and_others_do_not() {
        let m: Vec<_> = (0..3).map(|r| message(77, &[r, i32::MIN + r, -5, 9000 * r])).collect();
        assert_eq!(examine(&sum(&m), 77, 3), Finding::Sum);
        assert_eq!(examine(&m[1], 77, 3), Finding::Unsummed);
        assert_eq!(examine(&sum(&m[..2]), 77, 3), Finding::Wrong, "a contribution lost");
        assert_eq!(examine(&sum(&[m[0].clone(), m[1].clone(), m[1].clone()]), 78, 3), Finding::Wrong);
        assert_eq!(examine(&sum(&m), 76, 3), Finding::Wrong, "another message's slot");
        for lane in 0..8 {
            let mut s = sum(&m);
            s[lane] ^= 1 << 7;
            assert_eq!(examine(&s, 77, 3), Finding::Wrong, "lane {lane} changed");
        }
        let mut s = sum(&m);
        s.swap(5, 7);
        assert_eq!(examine(&s, 77, 3), Finding::Wrong, "lanes exchanged");
    }
}
