//! Rank 0's link, and what plays box and rank 1 at its other end.
//!
//! Both ends of the veth pair poll in threads of their own (threaded NAPI), each pinned to a CPU:
//! otherwise a packet is received on the CPU that sends it, and one side would do the other's work.
//! An XDP program is all that there is of rank 1 (`bench/ebpf/src/reflector.rs`).

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::Ebpf;
use aya::maps::Array;
use aya::programs::Xdp;
use aya::programs::xdp::XdpMode;
use netsum_lab::cluster::{JobSpec, RankSpec};
use netsum_lab::netns::{Netns, output};
use netsum_lab::process::Running;
use netsum_lab::{Host, Lab, LabSpec};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use super::rank::{Answer, Order};
use super::{RANK_CPU, REFLECTOR_CPU, Round};
use crate::dataplane::cpu;
use reflected::{MAP, PROGRAM, Reflected};

#[path = "../../ebpf/src/reflected.rs"]
mod reflected;

static OBJECT: &[u8] = aya::include_bytes_aligned!("../../../objects/reflector.bpf.o");

// SAFETY: `repr(C)`, Copy, 'static, integers without padding; every bit pattern is a value.
unsafe impl aya::Pod for Reflected {}

/// Messages in flight: with 8, as by default, bursts of small packets overflow a veth's queue of 256.
const WINDOW: u32 = 4;
/// The timeout of a round beyond its time.
const PATIENCE: Duration = Duration::from_secs(60);

/// Rank 0 and its reflector.
pub struct Reflector {
    rank: Running,
    ebpf: Ebpf,
    /// The threads that receive at rank 0's end and at the reflector's.
    threads: [String; 2],
    /// Dropped last.
    _lab: Lab,
}

impl Reflector {
    /// Connects rank 0 with a path MTU, over AF_XDP or UDP.
    ///
    /// # Errors
    /// If the kernel lacks threaded NAPI for veths, or the rank does not connect.
    pub fn start(mtu: u32, xdp: bool) -> Result<Self> {
        let lab = Lab::new(LabSpec { mtu: link_mtu(mtu), ..LabSpec::hosts(1) })?;
        let (host, box_) = (lab.host(0), lab.box_());
        let port = box_.port(0);
        let mut ebpf = Ebpf::load(OBJECT).context("the kernel does not take the reflector")?;
        let program: &mut Xdp = ebpf.program_mut(PROGRAM).context(PROGRAM)?.try_into()?;
        program.load().context(PROGRAM)?;
        box_.enter(|| program.attach(&port, XdpMode::Driver)).context("the reflector's port")?;

        let threads = [
            receive_thread(host, Host::INTERFACE, RANK_CPU)?,
            receive_thread(box_, &port, REFLECTOR_CPU)?,
        ];
        let job = JobSpec {
            mtu,
            message_size: 65_536,
            window: WINDOW,
            xdp: if xdp { vec![0] } else { vec![] },
            ..JobSpec::new("host", 2)
        };
        let peers = [host.ip(0), box_.ip()];
        let rank = RankSpec::new(&job, 0, &peers, None);
        let mut command = host.command("nice");
        // Other processes would delay it, and packets would be sent again.
        command.args(["-n", "-20"]).arg(std::env::current_exe()?);
        command.args(["--rank", &serde_json::to_string(&rank)?]);
        let mut rank = Running::start("rank 0", &mut command)?;
        let transport = rank.line(PATIENCE)?;
        ensure!(transport.contains("XDP") == xdp, "rank 0 uses {transport}");
        Ok(Self { rank, ebpf, threads, _lab: lab })
    }

    /// All-reduces of `bytes` for `seconds`.
    ///
    /// # Errors
    /// If rank 0 fails, or the reflector dropped a packet.
    pub fn round(&mut self, bytes: usize, seconds: f64) -> Result<Round> {
        let before = self.receive_times()?;
        self.rank.send_line(&serde_json::to_string(&Order { len: bytes / 4, seconds })?)?;
        let line = self.rank.line(Duration::from_secs_f64(seconds) + PATIENCE)?;
        let answer: Answer = serde_json::from_str(&line).with_context(|| line.clone())?;
        let after = self.receive_times()?;
        let map = self.ebpf.map(MAP).context(MAP)?;
        let reflected: Reflected = Array::try_from(map)?.get(&0, 0)?;
        ensure!(reflected.session != 0 && reflected.dropped == 0, "the reflector: {reflected:?}");
        let [receive, reflector] = [0, 1].map(|i| (after[i] - before[i]).as_secs_f64());
        Ok(Round { answer, receive, reflector })
    }

    fn receive_times(&self) -> Result<[Duration; 2]> {
        Ok([cpu::of_thread(&self.threads[0])?, cpu::of_thread(&self.threads[1])?])
    }
}

/// The MTU of a link for a path MTU: with headers and room for the control frames of larger links.
fn link_mtu(path: u32) -> u32 {
    (path + 172).max(1500)
}

/// Makes an interface poll in a thread of its own on a CPU (Linux 5.12,
/// Documentation/networking/napi.rst); returns its PID.
fn receive_thread(netns: &Netns, interface: &str, on: u32) -> Result<String> {
    let name = format!("napi/{interface}-");
    let threads = || cpu::threads(|comm| comm.starts_with(&name));
    let before = threads()?;
    // `ip netns exec` shows the namespace's own devices in /sys.
    let file = format!("/sys/class/net/{interface}/threaded");
    let line = format!("echo 1 > {file}");
    output(Command::new("ip").args(["netns", "exec", netns.name(), "sh", "-c", &line]))
        .context("threaded NAPI")?;
    let mut new = threads()?.into_iter().filter(|pid| !before.contains(pid));
    let (Some(pid), None) = (new.next(), new.next()) else {
        anyhow::bail!("not one new kernel thread `{name}...`")
    };
    let mut only = CpuSet::new();
    only.set(on as usize)?;
    sched_setaffinity(Pid::from_raw(pid.parse()?), &only).with_context(|| name.clone())?;
    // Like a soft interrupt it does not wait for processes; the veth's queue of 256 packets would
    // overflow meanwhile.
    output(Command::new("chrt").args(["--fifo", "--pid", "1", &pid])).with_context(|| name)?;
    Ok(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_carry_their_path_mtu_and_xdp_fits_a_page() {
        assert_eq!([1024, 1408, 2048, 3328].map(link_mtu), [1500, 1580, 2220, 3500]);
    }
}
