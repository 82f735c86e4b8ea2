//! The demand of a job's rings on links, CPUs and pools, in the planner's terms: the planner does
//! not know about packets.

use netsum_common::abi::{MAX_RANKS, MAX_RINGS, Messages, RingMemory};
use netsum_common::defaults;
use netsum_common::lanes::CHECK_LANES;
use netsum_common::wire::PACKET_OVERHEAD;

use crate::members::Members;
use crate::{JobSpec, Refusal};

/// The demand of one ring of a job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Bytes that a link carries for each byte of a vector: with headers (IPv4) and check lanes.
    pub wire: f64,
    /// Bytes that a box adds for each byte of a vector: with check lanes.
    pub added: f64,
    /// Bytes of vectors in a window.
    pub window: f64,
    /// Bytes of slots of a ring without members, and per member.
    pub slots: u64,
    pub slots_per_member: u64,
    /// Most rings of a box, and most members of a ring there.
    pub rings: u32,
    pub members: usize,
}

impl Cost {
    /// The cost for a job with these properties; it does not depend on the job's ranks.
    ///
    /// # Errors
    /// If every box refuses such a job.
    pub fn new(mtu: u32, message_size: u32, window: Messages) -> Result<Self, Refusal> {
        let spec = JobSpec {
            name: "plan".into(),
            ranks: 2,
            elastic: None,
            mtu,
            largest_mtu: None,
            message_size,
            window,
            rings: 1,
            verify_icrc: true,
            float_lsb: None,
            in_order: None,
            in_band: false,
            token: String::new().into(),
            tenant: defaults::TENANT.into(),
            members: Members::default(),
            host_ring_fallback: false,
            is_group: false,
        };
        spec.cost()
    }
}

impl JobSpec {
    /// The demand of a ring of the job. Histograms of floats, 196 bytes of a message, are left out.
    pub fn cost(&self) -> Result<Cost, Refusal> {
        let slots = self.check()?;
        let least = CHECK_LANES as u32 * 4;
        if self.message_size <= least {
            let size = self.message_size;
            return Err(Refusal::Invalid(format!(
                "--message-size {size}: {least} bytes are check lanes"
            )));
        }
        let vector = f64::from(self.message_size - least);
        let headers = f64::from(self.fragments().0) * PACKET_OVERHEAD as f64;
        let memory = |members| RingMemory { slots, sum_bytes: self.mtu, members }.bytes();
        Ok(Cost {
            wire: (f64::from(self.message_size) + headers) / vector,
            added: f64::from(self.message_size) / vector,
            window: f64::from(self.window.0) * vector,
            slots: memory(0),
            slots_per_member: memory(1) - memory(0),
            rings: MAX_RINGS - 1,
            members: MAX_RANKS,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::job_memory;
    use crate::tests::spec;

    #[test]
    fn a_ring_costs_what_the_pool_charges() {
        for (mtu, message_size, window) in [(1024, 65536, 8), (2048, 65536, 8), (256, 4096, 3)] {
            let spec = JobSpec { mtu, message_size, window: Messages(window), ..spec("train", 5) };
            let cost = spec.cost().unwrap();
            let taken = (cost.slots + 5 * cost.slots_per_member) * u64::from(spec.rings);
            assert_eq!(taken, job_memory(&spec, spec.check().unwrap()));
        }
    }

    #[test]
    fn headers_and_check_lanes_are_counted() {
        let spec = JobSpec { mtu: 1024, message_size: 65536, ..spec("train", 4) };
        let cost = Cost::new(spec.mtu, spec.message_size, spec.window).unwrap();
        assert_eq!(cost, spec.cost().unwrap());
        // 64 packets of 1024 bytes and 82 bytes around each; 76 bytes in all are check lanes.
        assert_eq!(cost.wire, f64::from(64 * 1106) / 65460.0);
        assert_eq!(cost.added, 65536.0 / 65460.0);
        let small = JobSpec { message_size: 64, ..spec };
        assert!(small.cost().unwrap_err().to_string().contains("--message-size 64"));
    }
}
