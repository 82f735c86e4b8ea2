//! Queue pair numbers and PSNs that nobody used a moment ago: late packets of an earlier run find no receiver.

use std::hash::{BuildHasher, Hasher, RandomState};

use netsum_collective::queue_pairs::Numbers;

/// Chooses numbers.
pub(crate) struct Fresh {
    state: u64,
    used: Vec<u32>,
}

/// A random number: what tells this run's sums from all others.
pub(crate) fn nonce() -> u64 {
    // RandomState is seeded by the system.
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(0);
    hasher.finish()
}

impl Fresh {
    pub fn new() -> Self {
        Self { state: nonce(), used: Vec::new() }
    }

    /// Any PSN.
    pub fn psn(&mut self) -> u32 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) as u32 & 0xff_ffff
    }

    /// Not 0 or 1, which are special, nor all ones, which means multicast.
    fn qpn(&mut self) -> u32 {
        loop {
            let n = self.psn();
            if n > 1 && n < 0xff_ffff && !self.used.contains(&n) {
                self.used.push(n);
                return n;
            }
        }
    }

    /// All of a connection.
    pub fn connection(&mut self) -> Numbers {
        Numbers { receive_qpn: self.qpn(), send_qpn: self.qpn(), first_psn: self.psn() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fresh_numbers_are_unique_and_in_range() {
        let mut fresh = Fresh::new();
        for _ in 0..500 {
            let c = fresh.connection();
            assert!(c.receive_qpn > 1 && c.send_qpn > 1 && c.receive_qpn < 0xff_ffff);
            assert!(c.first_psn < 1 << 24);
        }
        let mut used = fresh.used.clone();
        used.sort_unstable();
        used.dedup();
        assert_eq!(used.len(), 1000);
    }
}
