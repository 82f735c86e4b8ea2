//! Runs the XDP programs, one packet at a time, with BPF_PROG_TEST_RUN.
//!
//! In a test run, packets arrive by the loopback interface, number 1, and redirects end with their
//! verdict. The programs for CPU and device maps cannot be test-run; their `probe_` twins can.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use aya::programs::{TestRun, TestRunOptions};
use netsum_common::abi::{self, FlowKey, RingConfig, RingNumber, programs};
use netsum_common::counters::Counter;
use netsum_common::serial::{Psn, Qpn};
use netsum_core::Rank;
use netsum_core::plane::{FlowSpec, RingSpec};
use netsum_dataplane::{BpfDataPlane, DataPlane, OBJECT, count};

use crate::cpu::Pinned;
use crate::frames::{FrameSpec, lanes};

/// The loopback interface, by which packets of a test run arrive.
pub const LOOPBACK: u32 = 1;
const RING_CPU: u32 = 0;
/// First PSN of every rank, unless a test changes it.
pub const BASE_PSN: u32 = 0x00ff_fff0;

/// XDP verdict: drop.
pub const DROP: u32 = 1;
/// XDP verdict: pass to the bridge.
pub const PASS: u32 = 2;
/// XDP verdict: redirect to the ring's CPU, or to ports.
pub const REDIRECT: u32 = 4;

/// A verdict of `guard`: continue with the next program (include/uapi/linux/bpf.h).
const TCX_NEXT: i32 = -1;

/// Result of running a program on a packet.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    /// XDP verdict.
    pub action: u32,
    /// The packet afterwards.
    pub packet: Vec<u8>,
    /// Time of one run, averaged over the repetitions.
    pub duration: Duration,
}

/// Programs with one ring. `ingress` redirects all packets of a flow to the ring's CPU; but see
/// [`Bench::at_home`].
pub struct Bench {
    /// The loaded programs.
    pub plane: BpfDataPlane,
    pub ring: RingSpec,
    pub keys: Vec<FlowKey>,
}

/// Ring number 1, of `ranks` ranks with `slots` slots.
pub fn ring(ranks: u32, mtu: u32, slots: u32) -> RingSpec {
    let config =
        RingConfig { members: ranks, slots, credit: slots / 2, mtu, ..RingConfig::default() };
    RingSpec { id: RingNumber(1), cpu: 0, config }
}

/// Last byte of a rank's IP and MAC addresses.
pub fn host(rank: u32) -> u8 {
    rank as u8 + 1
}

/// Queue pair on which the rank's next neighbour receives.
pub fn qpn(rank: u32) -> u32 {
    0x100 + rank
}

pub fn fragment(rank: u32, ranks: u32, index: u32, payload: Vec<u8>) -> FrameSpec {
    let psn = (BASE_PSN + index) & 0xff_ffff;
    let spec = FrameSpec::send(host(rank), host((rank + 1) % ranks), qpn(rank), psn, payload);
    // The box does not verify UDP checksums, because the hardware may still have to compute them.
    FrameSpec { udp_checksum: 0xabcd * (index % 2) as u16, ..spec }
}

pub fn flow(ring: &RingSpec, rank: u32, v6: bool) -> FlowSpec {
    let ip = |rank: u32| -> IpAddr {
        if v6 {
            IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, host(rank) as u16])
        } else {
            IpAddr::from([10, 0, 0, host(rank)])
        }
    };
    FlowSpec {
        ring: ring.id,
        member: Rank(rank),
        base_psn: Psn::new(BASE_PSN),
        ifindex: LOOPBACK,
        src: ip(rank),
        dst: ip((rank + 1) % ring.config.members),
        qpn: Qpn::new(qpn(rank)),
        src_mac: None,
        group_mark: 0,
    }
}

impl Bench {
    /// Loads the programs and starts a ring with a flow for each rank.
    pub fn new(ring: RingSpec, v6: bool) -> Result<Self> {
        let flows = (0..ring.config.members).map(|rank| flow(&ring, rank, v6)).collect();
        Self::with_flows(ring, flows)
    }

    /// Loads the programs and starts a ring with these flows.
    pub fn with_flows(ring: RingSpec, flows: Vec<FlowSpec>) -> Result<Self> {
        Self::with_object(OBJECT, &["probe_aggregate", "probe_egress"], ring, flows)
    }

    /// Loads another object, with further programs, and starts a ring with these flows.
    pub fn with_object(
        object: &[u8],
        programs: &[&str],
        ring: RingSpec,
        flows: Vec<FlowSpec>,
    ) -> Result<Self> {
        let mut plane = BpfDataPlane::load_object(object, &[RING_CPU])?;
        plane.set_inline(false)?;
        for name in programs {
            plane.program(name)?.load()?;
        }
        plane.create_ring(&ring)?;
        let mut keys = Vec::new();
        for flow in flows {
            plane.add_flow(&flow)?;
            keys.push(flow.key());
        }
        plane.activate_ring(&ring, &vec![LOOPBACK; ring.config.members as usize])?;
        Ok(Self { plane, ring, keys })
    }

    /// Runs fragments of ranks 0 and 1 of a ring of two through `aggregate`. Each step has rank,
    /// index and expected verdict.
    pub fn sequence(&mut self, steps: &[(u32, u32, u32)]) -> Result<()> {
        for (i, &(rank, index, action)) in steps.iter().enumerate() {
            let out = self.aggregate(&fragment(rank, 2, index, lanes(rank + index, 64)).build())?;
            ensure!(
                out.action == action,
                "step {i}, rank {rank}, index {index}: {}, {:?}",
                out.action,
                self.counters()?
            );
        }
        Ok(())
    }

    /// A packet arrives on the ring's CPU, where it may be summed inline.
    pub fn at_home(&mut self, packet: &[u8]) -> Result<Outcome> {
        let _here = Pinned::to(RING_CPU)?;
        self.plane.set_inline(true)?;
        let out = self.run(programs::INGRESS, packet);
        self.plane.set_inline(false)?;
        out
    }

    pub fn run(&mut self, program: &str, packet: &[u8]) -> Result<Outcome> {
        self.repeat(program, packet, 1)
    }

    /// Runs a program on a packet several times. The packet keeps the changes of all runs.
    pub fn repeat(&mut self, program: &str, packet: &[u8], times: u32) -> Result<Outcome> {
        let mut out = vec![0; 4096];
        let result = self.plane.program(program)?.test_run(TestRunOptions {
            data_in: Some(packet),
            data_out: Some(&mut out),
            repeat: times,
            ..TestRunOptions::new()
        })?;
        out.truncate(result.data_size_out as usize);
        Ok(Outcome { action: result.return_value, packet: out, duration: result.duration })
    }

    /// Whether `guard` lets a packet pass that reached the kernel by the loopback interface behind
    /// `ingress`; and the time of one run.
    pub fn guard(&mut self, packet: &[u8], times: u32) -> Result<(bool, Duration)> {
        let options =
            TestRunOptions { data_in: Some(packet), repeat: times, ..TestRunOptions::new() };
        let result = self.plane.guard_program()?.test_run(options)?;
        Ok((result.return_value as i32 == TCX_NEXT, result.duration))
    }

    /// A contribution arrives at the ring's CPU.
    pub fn aggregate(&mut self, packet: &[u8]) -> Result<Outcome> {
        self.run("probe_aggregate", packet)
    }

    /// A packet leaves by the loopback interface.
    pub fn egress(&mut self, packet: &[u8]) -> Result<Outcome> {
        self.run("probe_egress", packet)
    }

    /// All counters of the ring and of no ring that are not zero.
    pub fn counters(&self) -> Result<Vec<(Counter, u64)>> {
        let (ring, none) =
            (self.plane.counters(self.ring.id)?, self.plane.counters(RingNumber::NONE)?);
        Ok(Counter::ALL
            .iter()
            .map(|&c| (c, count(&ring, c) + count(&none, c)))
            .filter(|(_, n)| *n > 0)
            .collect())
    }

    /// Resets the ring and keeps its maps, which is much faster than [`Bench::restart`]: ranks,
    /// slots and path MTU stay.
    pub fn reset(&mut self, ring: RingSpec) -> Result<()> {
        self.plane.empty_ring(&ring, 0)?;
        self.plane.activate_ring(&ring, &vec![LOOPBACK; ring.config.members as usize])?;
        self.ring = ring;
        Ok(())
    }

    /// Creates the ring again, optionally with other properties.
    pub fn restart(&mut self, ring: RingSpec, flows: &[FlowSpec]) -> Result<()> {
        self.plane.delete_ring(self.ring.id, &self.keys, &[LOOPBACK])?;
        self.plane.create_ring(&ring)?;
        self.keys.clear();
        for flow in flows {
            self.plane.add_flow(flow)?;
            self.keys.push(flow.key());
        }
        self.plane.activate_ring(&ring, &vec![LOOPBACK; ring.config.members as usize])?;
        self.ring = ring;
        Ok(())
    }
}

/// The tag that a released packet carries.
pub fn tag(packet: &[u8]) -> abi::ReleaseTag {
    let word = |i: usize| u32::from_ne_bytes(packet[i..i + 4].try_into().expect("four bytes"));
    let half = |i: usize| u16::from_ne_bytes(packet[i..i + 2].try_into().expect("two bytes"));
    abi::ReleaseTag { ring: word(0), index: word(4), rank: half(8), payload: half(10) }
}
