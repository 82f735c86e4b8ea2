//! Live frames: the capacity of a core with the kernel's part included.
//!
//! BPF_PROG_TEST_RUN with BPF_F_TEST_XDP_LIVE_FRAMES (Linux 5.18, net/bpf/test_run.c) executes the
//! program's verdict, including redirects to a CPU map. Frames of a recycled pool go through
//! `ingress` to the ring's CPU, `aggregate` there, the device map and `egress`, as they do from a
//! driver. Only programs for CPU and device maps cannot be started in this way, which is not needed
//! here. A test run has one packet and one port. The test program therefore turns it into another
//! rank's packet each time (`bench_live.rs`), and all flows are registered for that one port;
//! results leave by a port for each rank. The sender has a CPU of its own; the benchmark measures
//! the CPU time of the ring's.
//!
//! The figures of the ring's CPU include: taking frames out of the CPU map's queue, `aggregate`,
//! clones, `egress`, handing clones to veths, and the veths' other ends, where an XDP program drops
//! them at once. A network card's driver would replace the last two. They do not include hosts, nor
//! `ingress` and steering, which run on the sender's CPU.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use aya::maps::{Array, CpuMap, DevMap, Map};
use aya::programs::xdp::XdpMode as AyaMode;
use aya::programs::{ProgramFd, TestRun as _, TestRunAttrs, TestRunOptions};
use netsum_common::abi::{FlowKey, RingNumber, maps, programs, ring_flags};
use netsum_common::counters::Counter;
use netsum_common::serial::{Psn, Qpn};
use netsum_core::plane::{FlowSpec, RingSpec};
use netsum_dataplane::{BpfDataPlane, DataPlane as _, count, held_back};
use nix::sched::CpuSet;
use nix::unistd::Pid;
use serde::Serialize;

pub(super) use shared::PAYLOADS;
use shared::{LiveFrame, LiveReceiver, LiveSender};

use super::{DEFAULT_RANKS, OBJECT, Settings, cpu, gbps};
use netsum_lab::cpu::Pinned;
use netsum_lab::frames::{FrameSpec, lanes};
use netsum_lab::programs::{LOOPBACK, flow, host, qpn, ring};
use netsum_lab::{Host, Lab, LabSpec};

#[path = "../../ebpf/src/shared.rs"]
mod shared;

// SAFETY: `repr(C)`, Copy, 'static, integers without implicit padding; every bit pattern is a
// value.
unsafe impl aya::Pod for LiveFrame {}
// SAFETY: as above.
unsafe impl aya::Pod for LiveSender {}
// SAFETY: as above.
unsafe impl aya::Pod for LiveReceiver {}

/// The sender's CPU, and the ring's.
const SENDER_CPU: u32 = 0;
const RING_CPU: u32 = 1;
/// Slots and window of a job with 8 messages of 64 KiB in flight at path MTU 2048.
const SLOTS: u32 = 512;
const WINDOW: u32 = 256;
/// The most frames in flight from sender to ring: less than the pool recycles (1,024), and less
/// than the CPU map's queue holds.
const IN_FLIGHT: u32 = 768;
const QUEUE: u32 = 2048;
/// Frames that are made before their redirects are flushed, as in a driver's poll (NAPI's weight).
const BATCH: u32 = 64;
/// Frames of a system call, or attempts without credit. It is large because each call waits twice
/// for all CPUs, and nothing is sent meanwhile.
const CHUNK: u32 = 262_144;
/// The timeout for the last frames.
const DRAIN: Duration = Duration::from_secs(2);

/// How far contributions go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Setup {
    /// Dropped at ingress: the cost of the sender.
    IngressDrop,
    /// Steered to the ring's CPU, and dropped there.
    SteerDrop,
    /// Steered; the last one of each fragment is broadcast unchanged, without egress: the floor.
    Broadcast,
    /// Summed, ICRC not verified.
    Ignore,
    /// Summed, ICRC verified.
    Verify,
    /// Like [`Setup::Broadcast`], on one CPU: frames arrive on the ring's CPU, without a queue.
    InlineBroadcast,
    /// Like [`Setup::Ignore`], on one CPU.
    InlineIgnore,
    /// Like [`Setup::Verify`], on one CPU.
    InlineVerify,
}

impl Setup {
    pub const ALL: [Self; 8] = [
        Self::IngressDrop,
        Self::SteerDrop,
        Self::Broadcast,
        Self::Ignore,
        Self::Verify,
        Self::InlineBroadcast,
        Self::InlineIgnore,
        Self::InlineVerify,
    ];

    /// Its text in tables.
    pub fn text(self) -> &'static str {
        match self {
            Self::IngressDrop => "made and dropped (the sender's CPU)",
            Self::SteerDrop => "steered, then dropped",
            Self::Broadcast => "floor: steered, clones broadcast",
            Self::Ignore => "summed, ICRC not verified",
            Self::Verify => "summed, ICRC verified",
            Self::InlineBroadcast => "inline floor: clones broadcast",
            Self::InlineIgnore => "inline: summed, ICRC not verified",
            Self::InlineVerify => "inline: summed, ICRC verified",
        }
    }

    /// Whether the sender is on the ring's CPU.
    fn is_inline(self) -> bool {
        matches!(self, Self::InlineBroadcast | Self::InlineIgnore | Self::InlineVerify)
    }

    fn is_verified(self) -> bool {
        matches!(self, Self::Verify | Self::InlineVerify)
    }

    fn is_summed(self) -> bool {
        matches!(self, Self::Ignore | Self::Verify | Self::InlineIgnore | Self::InlineVerify)
    }

    /// The way that it is compared with.
    fn floor(self) -> Self {
        if self.is_inline() { Self::InlineBroadcast } else { Self::Broadcast }
    }
}

/// The load that a core handles.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// How far contributions go.
    pub setup: Setup,
    pub ranks: u32,
    /// Path MTU, and the contributions' payload.
    pub mtu: u32,
    /// Fragments with all contributions received and all results sent.
    pub fragments: u64,
    /// The time for them.
    pub seconds: f64,
    /// CPU time of the ring's CPU in that time: threads of the CPU map, and soft interrupts. The
    /// first way counts the sender's instead, and the inline ways count both.
    pub busy_seconds: f64,
    /// ns of a core for a fragment: all of its contributions, and clones. For inline ways the
    /// sender's part is subtracted, as measured by [`Setup::IngressDrop`].
    pub fragment_ns: f64,
    /// Contributions per second of one core, in millions.
    pub mcontributions: f64,
    /// Their payload, in Gb/s.
    pub gbps: f64,
    /// The time of a fragment divided by that of the floor.
    pub over_floor: f64,
}

/// The result of a round.
#[derive(Clone, Copy, Debug)]
struct Round {
    fragments: u64,
    seconds: f64,
    busy: f64,
}

impl Round {
    fn fragment_ns(&self) -> f64 {
        self.busy * 1e9 / self.fragments as f64
    }
}

/// The reason why this machine cannot measure live frames, if there is one.
pub fn impossible() -> Option<String> {
    let two = CpuSet::new();
    let count = nix::sched::sched_getaffinity(Pid::from_raw(0)).unwrap_or(two);
    let there = |cpu| count.is_set(cpu).unwrap_or(false);
    if !there(SENDER_CPU as usize) || !there(RING_CPU as usize) {
        return Some("two CPUs are needed, one for the sender and one for the ring".into());
    }
    if let Err(error) = cpu::of_thread("self") {
        return Some(format!("the kernel does not report CPU times: {error:#}"));
    }
    None
}

/// Sends live frames with every number of ranks.
pub(super) fn measure(settings: &Settings) -> Result<Vec<Row>> {
    let most = settings.ranks.iter().copied().max().context("no ranks")?.max(DEFAULT_RANKS);
    let mut live = Live::new(most)?;
    let mut rows = Vec::new();
    let mut numbers = settings.ranks.clone();
    numbers.push(DEFAULT_RANKS);
    // The floor's device map can only grow.
    numbers.sort_unstable();
    numbers.dedup();
    for ranks in numbers {
        for &mtu in &settings.mtus {
            if ranks == DEFAULT_RANKS || settings.live_mtus.contains(&mtu) {
                rows.extend(
                    live.point(ranks, mtu, settings)
                        .with_context(|| format!("live frames, {ranks} ranks, path MTU {mtu}"))?,
                );
            }
        }
    }
    Ok(rows)
}

/// A box that is fed with live frames instead of hosts.
struct Live {
    plane: BpfDataPlane,
    ring: Option<(RingSpec, Vec<FlowKey>)>,
    /// The ports, by rank.
    ports: Vec<u32>,
    /// The CPU map's id.
    cpus: u32,
    // The last field: namespaces must be removed after the programs.
    lab: Lab,
}

impl Live {
    fn new(ranks: u32) -> Result<Self> {
        let lab = Lab::new(LabSpec { mtu: 3500, ..LabSpec::hosts(ranks as usize) })?;
        let mut plane = BpfDataPlane::load_object(OBJECT, &[RING_CPU])?;
        for name in [
            "live_ingress",
            "live_ingress_drop",
            "live_ingress_broadcast",
            "live_drop",
            "live_broadcast",
            "bench_empty",
            "bench_fill",
        ] {
            plane.program(name)?.load().with_context(|| name.to_owned())?;
        }
        let mut ports = Vec::new();
        for (i, host) in lab.hosts().iter().enumerate() {
            ports.push(lab.box_().ifindex(&lab.box_().port(i))?);
            // A program at the host's end of its link drops everything at once.
            let end = host.ifindex(Host::INTERFACE)?;
            let drop = plane.program("bench_empty")?;
            host.enter(|| drop.attach_to_if_index(end, AyaMode::Driver))
                .context("the hosts' ends")?;
        }
        let cpus = match plane.map_mut(maps::CPUS)? {
            Map::CpuMap(map) => map.info()?.id(),
            _ => bail!("{} is not a CPU map", maps::CPUS),
        };
        Ok(Self { plane, ring: None, ports, cpus, lab })
    }

    /// All ways with one ring, in turns.
    fn point(&mut self, ranks: u32, mtu: u32, settings: &Settings) -> Result<Vec<Row>> {
        self.make_ring(ranks, mtu)?;
        let mut best: Vec<Option<Round>> = vec![None; Setup::ALL.len()];
        for _ in 0..settings.live_rounds {
            for (setup, best) in Setup::ALL.into_iter().zip(&mut best) {
                let round = self
                    .round(setup, settings.live_seconds)
                    .with_context(|| format!("{setup:?}"))?;
                if best.is_none_or(|b| round.fragment_ns() < b.fragment_ns()) {
                    *best = Some(round);
                }
            }
        }
        let best: Option<Vec<Round>> = best.into_iter().collect();
        Ok(rows(ranks, mtu, &best.context("no rounds")?))
    }

    /// Replaces the ring, and the one that holds the payload.
    fn make_ring(&mut self, ranks: u32, mtu: u32) -> Result<()> {
        let payloads = RingSpec { id: RingNumber(PAYLOADS), ..ring(2, mtu, 2) };
        let payload_flow = FlowSpec {
            src: [10, 1, 0, 1].into(),
            dst: [10, 1, 0, 2].into(),
            qpn: Qpn::new(0x900),
            base_psn: Psn::default(),
            ..flow(&payloads, 0, false)
        };
        if let Some((old, flows)) = self.ring.take() {
            self.plane.delete_ring(old.id, &flows, &self.ports)?;
            self.plane.delete_ring(payloads.id, &[payload_flow.key()], &[LOOPBACK])?;
        }
        let payload = lanes(7, mtu as usize / 4);
        self.plane.create_ring(&payloads)?;
        self.plane.add_flow(&payload_flow)?;
        self.plane.activate_ring(&payloads, &[LOOPBACK; 2])?;
        let mut frame = FrameSpec::send(1, 2, payload_flow.qpn.get(), 0, payload.clone());
        (frame.src, frame.dst) = (vec![10, 1, 0, 1], vec![10, 1, 0, 2]);
        let kept = self.plane.program("bench_fill")?.test_run(TestRunOptions {
            data_in: Some(&frame.build()),
            data_out: Some(&mut [0; 4096]),
            ..TestRunOptions::new()
        })?;
        ensure!(kept.return_value == netsum_lab::programs::DROP, "the payload was not kept");

        let mut spec = ring(ranks, mtu, SLOTS);
        spec.config.credit = WINDOW;
        self.plane.create_ring(&spec)?;
        let mut keys = Vec::new();
        for rank in 0..ranks {
            let flow = FlowSpec {
                base_psn: Psn::default(),
                ifindex: self.ports[0],
                ..flow(&spec, rank, false)
            };
            self.plane.add_flow(&flow)?;
            keys.push(flow.key());
            let to = host((rank + 1) % ranks);
            let frame = FrameSpec::send(host(rank), to, qpn(rank), 0, payload.clone()).build();
            let template = template(&frame).context("a frame without headers")?;
            Array::try_from(self.plane.map_mut(shared::maps::FRAMES)?)?.set(rank, template, 0)?;
        }
        let (plane, ports) = (&mut self.plane, &self.ports[..ranks as usize]);
        self.lab.box_().enter(|| -> Result<()> {
            let mut clones = DevMap::try_from(plane.map_mut(shared::maps::PORTS)?)?;
            for (rank, &port) in ports.iter().enumerate() {
                clones.set(rank as u32, port, None, 0)?;
            }
            Ok(())
        })?;
        self.ring = Some((spec, keys));
        Ok(())
    }

    /// Sets the program for frames that arrive at the ring's CPU.
    fn serve(&mut self, program: &str) -> Result<()> {
        let program: ProgramFd = self.plane.program(program)?.fd()?.try_clone()?;
        Ok(CpuMap::try_from(self.plane.map_mut(maps::CPUS)?)?.set(
            RING_CPU,
            QUEUE,
            Some(&program),
            0,
        )?)
    }

    /// Sends frames for a while.
    fn round(&mut self, setup: Setup, seconds: f64) -> Result<Round> {
        let (mut spec, _) = self.ring.clone().context("the ring was not made")?;
        spec.config.flags = if setup.is_verified() { 0 } else { ring_flags::ICRC_IGNORE };
        let (sender, server) = match setup {
            Setup::IngressDrop => ("live_ingress_drop", programs::AGGREGATE),
            Setup::SteerDrop => ("live_ingress", "live_drop"),
            Setup::Broadcast => ("live_ingress", "live_broadcast"),
            Setup::InlineBroadcast => ("live_ingress_broadcast", programs::AGGREGATE),
            _ => ("live_ingress", programs::AGGREGATE),
        };
        self.serve(server)?;
        self.plane.empty_ring(&spec, 0)?;
        let ports = self.ports[..spec.config.members as usize].to_vec();
        let plane = &mut self.plane;
        self.lab.box_().enter(|| plane.activate_ring(&spec, &ports))?;
        let credit = (IN_FLIGHT / spec.config.members).min(WINDOW);
        Array::try_from(self.plane.map_mut(shared::maps::SENDER)?)?.set(
            0,
            LiveSender { credit, ..LiveSender::default() },
            0,
        )?;
        Array::try_from(self.plane.map_mut(shared::maps::RECEIVER)?)?.set(
            0,
            LiveReceiver::default(),
            0,
        )?;
        self.plane.reset_counters(spec.id)?;

        let len = template_len(spec.config.mtu);
        let (port, plane) = (self.ports[0], &mut self.plane);
        let threads = cpu::of_ring(RING_CPU, self.cpus)?;
        let busy = || threads.iter().map(|pid| cpu::of_thread(pid)).sum::<Result<Duration>>();
        let (sent, start, before) = self.lab.box_().enter(|| -> Result<_> {
            let _pinned = Pinned::to(if setup.is_inline() { RING_CPU } else { SENDER_CPU })?;
            let (start, before) = (Instant::now(), busy()?);
            let own = cpu::of_this_thread()?;
            while start.elapsed().as_secs_f64() < seconds {
                send(plane, sender, len, port)?;
            }
            Ok((cpu::of_this_thread()? - own, start, before))
        })?;
        let (fragments, elapsed) = self.drained(setup, start)?;
        let ring = busy()? - before;
        let busy = match setup {
            Setup::IngressDrop => sent,
            setup if setup.is_inline() => sent + ring,
            _ => ring,
        };
        Ok(Round { fragments, seconds: elapsed.as_secs_f64(), busy: busy.as_secs_f64() })
    }

    /// Waits for frames in flight; returns the number of fragments, and the time since `start`.
    fn drained(&mut self, setup: Setup, start: Instant) -> Result<(u64, Duration)> {
        let (spec, _) = self.ring.clone().context("the ring was not made")?;
        let sender: Array<_, LiveSender> =
            Array::try_from(self.plane.map_mut(shared::maps::SENDER)?)?;
        let sent = sender.get(&0, 0)?.sent;
        // Some ranks may not have sent the last fragment.
        let whole = sent / u64::from(spec.config.members);
        let deadline = Instant::now() + DRAIN;
        loop {
            let elapsed = start.elapsed();
            let counters = self.plane.counters(spec.id)?;
            let of = |counter| count(&counters, counter);
            let receiver: Array<_, LiveReceiver> =
                Array::try_from(self.plane.map_mut(shared::maps::RECEIVER)?)?;
            let done = match setup {
                setup if setup.is_summed() => {
                    // Frames for every rank have passed egress, too.
                    (of(Counter::Results) / u64::from(spec.config.members))
                        .min(of(Counter::Completed))
                }
                _ => receiver.get(&0, 0)?.completed,
            };
            if done == whole && whole > 0 {
                return Ok((done, elapsed));
            }
            if Instant::now() > deadline {
                let counted: Vec<_> =
                    Counter::ALL.iter().map(|&c| (c, of(c))).filter(|c| c.1 > 0).collect();
                bail!(
                    "{done} of {whole} fragments completed; {sent} contributions were sent: \
                     {counted:?}"
                );
            }
            sleep(Duration::from_millis(1));
        }
    }
}

/// Sends many frames by one port in one system call.
fn send(plane: &mut BpfDataPlane, program: &str, len: usize, port: u32) -> Result<()> {
    let frame = vec![0; len];
    let context = held_back::context(len, port);
    plane.program(program)?.test_run(TestRunOptions {
        data_in: Some(&frame),
        ctx_in: Some(&context),
        repeat: CHUNK,
        attrs: TestRunAttrs::new().xdp_live_frames(BATCH),
        ..TestRunOptions::new()
    })?;
    Ok(())
}

/// Headers of an untagged IPv4 SEND.
const HEADERS: usize = 54;

fn template_len(mtu: u32) -> usize {
    HEADERS + mtu as usize + 4
}

/// A frame's headers and ICRC.
fn template(frame: &[u8]) -> Option<LiveFrame> {
    let mut words = [0; 7];
    for (word, bytes) in words.iter_mut().zip(frame.get(..HEADERS)?.chunks(8)) {
        let mut eight = [0; 8];
        eight[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_ne_bytes(eight);
    }
    let icrc = u32::from_le_bytes(*frame.last_chunk()?);
    Some(LiveFrame { words, icrc, reserved: 0 })
}

/// Makes rows from the best rounds, in the order of [`Setup::ALL`].
fn rows(ranks: u32, mtu: u32, best: &[Round]) -> Vec<Row> {
    let of = |setup| {
        Setup::ALL
            .iter()
            .position(|w| *w == setup)
            .and_then(|i| best.get(i))
            .map_or(f64::NAN, Round::fragment_ns)
    };
    // On the ring's CPU, the sender's part is subtracted.
    let own =
        |setup: Setup| of(setup) - if setup.is_inline() { of(Setup::IngressDrop) } else { 0.0 };
    let row = |(setup, round): (Setup, &Round)| {
        let (ns, floor) = (own(setup), own(setup.floor()));
        Row {
            setup,
            ranks,
            mtu,
            fragments: round.fragments,
            seconds: round.seconds,
            busy_seconds: round.busy,
            fragment_ns: ns,
            mcontributions: f64::from(ranks) * 1e3 / ns,
            gbps: gbps(f64::from(ranks * mtu), ns),
            over_floor: ns / floor,
        }
    };
    Setup::ALL.into_iter().zip(best).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_that_is_half_busy_could_do_twice_as_much() {
        let round = |busy| Round { fragments: 1_000_000, seconds: 2.0, busy };
        let rows = rows(4, 1000, &[0.1, 0.5, 1.0, 1.5, 2.0, 0.6, 1.0, 2.1].map(round));
        let inline = rows.last().unwrap();
        assert_eq!((inline.setup, inline.busy_seconds), (Setup::InlineVerify, 2.1));
        assert_eq!((inline.fragment_ns.round(), inline.over_floor.round()), (2000.0, 4.0));
        let verify = rows.iter().find(|r| r.setup == Setup::Verify).unwrap();
        assert_eq!(
            (verify.setup, verify.fragment_ns, verify.over_floor),
            (Setup::Verify, 2000.0, 2.0)
        );
        // 4 contributions of 8,000 bits in 2 us.
        assert_eq!((verify.mcontributions, verify.gbps), (2.0, 16.0));
        assert_eq!(rows.iter().find(|r| r.setup == Setup::Broadcast).unwrap().over_floor, 1.0);
    }

    #[test]
    fn a_template_is_headers_and_icrc() {
        let frame = FrameSpec::send(1, 2, 3, 0, vec![9; 256]).build();
        assert_eq!(frame.len(), template_len(256));
        let template = template(&frame).unwrap();
        let bytes: Vec<u8> = template.words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        assert_eq!((&bytes[..54], &bytes[54..]), (&frame[..54], &[0, 0][..]));
        assert_eq!(template.icrc.to_le_bytes(), frame[frame.len() - 4..]);
    }
}
