//! This machine's aggregation rate. Contributions run one by one through a second instance of the
//! programs, which has its own maps: ports, jobs and maps of a working box are not affected.
//!
//! The measurement leaves out the search for a contribution's ring, and the work of drivers and
//! kernel around the programs, so a box's real rate is lower.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use aya::programs::{TestRun as _, TestRunOptions};
use netsum_common::abi::{RingConfig, RingNumber};
use netsum_common::icrc;
use netsum_common::serial::{Psn, Qpn};
use netsum_common::wire::{
    BTH_LEN, Bth, EthHdr, ICRC_LEN, IPPROTO_UDP, Ipv4Hdr, L3, Opcode, ROCE_PORT, UdpHdr,
};
use netsum_core::Rank;
use netsum_core::plane::{FlowSpec, RingSpec};

use super::bpf::BpfDataPlane;
use super::load::{PROBE_AGGREGATE, PROBE_EGRESS};
use super::plane::DataPlane as _;
use super::replica::{LOOPBACK, XDP_REDIRECT};

/// Length of the measurement.
const TIME: Duration = Duration::from_millis(50);
/// Ranks of the ring, as in the benchmarks.
const RANKS: u32 = 4;
const SLOTS: u32 = 256;
const QPN: u32 = 0x100;

/// Bytes of contributions that one CPU adds per second, at this path MTU. Needs the same
/// capabilities as [`BpfDataPlane::load`].
///
/// # Errors
/// If the kernel refuses the programs, or they do not add.
pub fn measure(mtu: u32) -> Result<u64> {
    let mut plane = BpfDataPlane::load_for_test_runs()?;
    let config = RingConfig {
        members: RANKS,
        slots: SLOTS,
        credit: SLOTS / 2,
        mtu,
        ..RingConfig::default()
    };
    let ring = RingSpec { id: RingNumber(1), cpu: 0, config };
    plane.create_ring(&ring)?;
    for rank in 0..RANKS {
        plane.add_flow(&flow(&ring, rank))?;
    }
    plane.activate_ring(&ring, &[LOOPBACK; RANKS as usize])?;
    let mut times = Vec::new();
    let start = Instant::now();
    while times.is_empty() || start.elapsed() < TIME {
        times.push(fragment(&mut plane, times.len() as u32, mtu)?);
    }
    // Interrupts and other processes on the CPU lengthen some times.
    times.sort_unstable();
    let usual = times[times.len() / 2].max(Duration::from_nanos(1));
    Ok((f64::from(RANKS * mtu) / usual.as_secs_f64()) as u64)
}

/// Sums all ranks' contributions to a fragment, and makes the results; returns the time spent in
/// the programs.
fn fragment(plane: &mut BpfDataPlane, index: u32, mtu: u32) -> Result<Duration> {
    let (mut time, mut sum) = (Duration::ZERO, Vec::new());
    for rank in 0..RANKS {
        let frame = frame(rank, index, mtu).context("a frame without headers")?;
        let (verdict, spent, out) = run(plane, PROBE_AGGREGATE, &frame)?;
        if (verdict == XDP_REDIRECT) != (rank == RANKS - 1) {
            bail!("rank {rank}'s contribution to fragment {index}: verdict {verdict}");
        }
        time += spent;
        sum = out;
    }
    for _ in 0..RANKS {
        time += run(plane, PROBE_EGRESS, &sum)?.1;
    }
    Ok(time)
}

fn run(plane: &mut BpfDataPlane, name: &str, frame: &[u8]) -> Result<(u32, Duration, Vec<u8>)> {
    let mut out = vec![0; 4096];
    let options =
        TestRunOptions { data_in: Some(frame), data_out: Some(&mut out), ..TestRunOptions::new() };
    let result = plane
        .program(name)?
        .test_run(options)
        .with_context(|| format!("`{name}` cannot be run"))?;
    out.truncate(result.data_size_out as usize);
    Ok((result.return_value, result.duration, out))
}

fn ip(rank: u32) -> [u8; 4] {
    [10, 0, 0, 1 + (rank % RANKS) as u8]
}

fn flow(ring: &RingSpec, rank: u32) -> FlowSpec {
    FlowSpec {
        ring: ring.id,
        member: Rank(rank),
        base_psn: Psn::new(0),
        ifindex: LOOPBACK,
        src: ip(rank).into(),
        dst: ip(rank + 1).into(),
        qpn: Qpn::new(QPN + rank),
        src_mac: None,
        group_mark: 0,
    }
}

/// A SEND ONLY packet of zeros over IPv4, with the right ICRC.
fn frame(rank: u32, index: u32, mtu: u32) -> Option<Vec<u8>> {
    let udp_len = (UdpHdr::LEN + BTH_LEN + mtu as usize + ICRC_LEN) as u16;
    let mut frame = vec![2, 0, 0, 0, 0, 0xff, 2, 0, 0, 0, 0, rank as u8, 8, 0, 0x45, 0];
    frame.extend((Ipv4Hdr::LEN as u16 + udp_len).to_be_bytes());
    // Identification 0, "don't fragment", and a checksum that is not verified.
    frame.extend([0, 0, 0x40, 0, 64, IPPROTO_UDP, 0, 0]);
    frame.extend([ip(rank), ip(rank + 1)].as_flattened());
    for word in [0xc000, ROCE_PORT, udp_len, 0] {
        frame.extend(u16::to_be_bytes(word));
    }
    frame.extend(Bth::new(Opcode::SEND_ONLY, QPN + rank, index).encode());
    let payload_at = frame.len();
    frame.resize(payload_at + mtu as usize, 0);
    let sum = icrc::of_frame(&frame, L3::V4, EthHdr::LEN, payload_at, mtu as usize)?;
    frame.extend(sum.to_le_bytes());
    Some(frame)
}
