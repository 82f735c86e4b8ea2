//! Allocates queue pair numbers and PSNs at random: late packets of an earlier session do not match
//! those of this one.

use std::hash::{BuildHasher, Hasher, RandomState};

use netsum_collective::error::Error;
use netsum_collective::queue_pairs::QpInfo;
use netsum_rc::{Psn, Qpn};
use zeroize::Zeroizing;

/// The QPN and PSN allocator.
pub(crate) struct QpAllocator {
    used: Vec<Qpn>,
}

/// A random number that distinguishes this session's sums from all others.
pub(crate) fn nonce() -> u64 {
    // RandomState is seeded by the system, and differs at every call.
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(0);
    hasher.finish()
}

/// For a sealed session: random for an adversary, too.
pub(crate) fn seal_random() -> Result<Zeroizing<[u8; 64]>, Error> {
    let mut random = Zeroizing::new([0; 64]);
    getrandom::fill(&mut *random)
        .map_err(|e| Error::Config(format!("the system gives no random numbers: {e}")))?;
    Ok(random)
}

impl QpAllocator {
    pub fn new() -> Self {
        Self { used: Vec::new() }
    }

    /// Any PSN.
    pub fn psn(&self) -> Psn {
        Psn::new(nonce() as u32)
    }

    /// Excludes 0 and 1, which are special, and all ones, which means multicast.
    fn qpn(&mut self) -> Qpn {
        loop {
            let n = Qpn::new(self.psn().get());
            if n.get() > 1 && n.get() < 0xff_ffff && !self.used.contains(&n) {
                self.used.push(n);
                return n;
            }
        }
    }

    pub fn connection(&mut self) -> QpInfo {
        QpInfo { receive_qpn: self.qpn(), send_qpn: self.qpn(), first_psn: self.psn() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_session_draws_other_keys() {
        assert_ne!(*seal_random().unwrap(), *seal_random().unwrap());
    }

    #[test]
    fn allocated_numbers_are_unique_and_in_range() {
        let mut allocator = QpAllocator::new();
        for _ in 0..500 {
            let c = allocator.connection();
            assert!(
                [c.receive_qpn, c.send_qpn].iter().all(|qpn| (2..0xff_ffff).contains(&qpn.get()))
            );
        }
        let mut used = allocator.used.clone();
        used.sort_unstable_by_key(|qpn| qpn.get());
        used.dedup();
        assert_eq!(used.len(), 1000);
    }
}
