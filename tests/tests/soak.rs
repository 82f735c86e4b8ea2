//! Endless all-reduces over links that are slow, lose packets and go down, beside a TCP transfer:
//! every sum is right, nothing stalls, nothing grows.

use std::io::Read as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use netsum_lab::cluster::{Cluster, Group, JobSpec, one_on_each_host};
use netsum_lab::faults::Faults;
use netsum_lab::traffic::tcp_transfer;
use netsum_lab::{LabSpec, evidence};

const SECOND: Duration = Duration::from_secs(1);
const RANKS: u32 = 4;
const RATE: &str = "250mbit";
/// The share of all packets that each link loses in each direction.
const LOSS: f64 = 0.001;
const JOB: &str = "soak";
/// Lengths in elements: less than a packet, some packets, some messages, and several windows.
const LENGTHS: [usize; 4] = [100, 5000, 100_000, 500_000];
/// How long the flapping link is down: once for a time that connections outlast, and once for a
/// time after which ranks use the hosts' ring (three tenths of their timeout).
const DOWN: [Duration; 2] = [Duration::from_millis(300), Duration::from_millis(3500)];
const UP: Duration = Duration::from_secs(4);
/// The longest time that an all-reduce may take. The link is down for 3.5 s, and ranks fall back or
/// reconnect within their timeout of 10 s.
const LONGEST: Duration = Duration::from_secs(20);
/// By how much the memory of the daemon and of each rank may grow from the first long down time of
/// the link to the end, in KiB.
const GROWTH: u64 = 8 << 10;

/// All-reduces, and their outcomes.
#[derive(Debug, Default)]
struct Sums {
    by_box: u64,
    by_ring: u64,
    /// Bytes of vectors, at each rank.
    bytes: u64,
    again: u64,
    slowest: Duration,
    /// All-reduces that took longer than allowed.
    hangs: Vec<String>,
}

/// An all-reduce that the ranks have been ordered to do: its number, type and length, and the files
/// for its results.
struct OrderedAllReduce(u64, &'static str, usize, Vec<PathBuf>);

impl OrderedAllReduce {
    /// Uses types and lengths in turn.
    fn start(group: &mut Group, number: u64) -> Result<Self> {
        let len = LENGTHS[number as usize % LENGTHS.len()];
        let dtype = ["i32", "f32"][number as usize / LENGTHS.len() % 2];
        Ok(Self(number, dtype, len, group.order_all_reduce(dtype, len, number)?))
    }
}

impl Sums {
    /// Waits for an all-reduce, and compares it bit by bit at each rank.
    fn add(&mut self, group: &mut Group, order: &OrderedAllReduce) -> Result<()> {
        let OrderedAllReduce(number, dtype, len, files) = order;
        let what = || format!("all-reduce {number}, {len} x {dtype}");
        let outcomes = group.check_all_reduce(dtype, *len, *number, files).with_context(what)?;
        ensure!(
            outcomes.iter().all(|o| o.wrong == 0),
            "{}: ranks found wrong sums: {outcomes:?}",
            what()
        );
        let took = Duration::from_micros(outcomes.iter().map(|o| o.micros).max().unwrap_or(0));
        if took > LONGEST {
            self.hangs.push(format!("{} took {took:.1?}: {outcomes:?}", what()));
        }
        self.slowest = self.slowest.max(took);
        *if outcomes[0].mode == "box" { &mut self.by_box } else { &mut self.by_ring } += 1;
        self.bytes += 4 * *len as u64;
        self.again += outcomes.iter().map(|o| o.retransmissions).sum::<u64>();
        Ok(())
    }
}

/// The private memory of a process, in KiB: `RssAnon` of proc(5).
fn memory(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line =
        status.lines().find_map(|line| line.strip_prefix("RssAnon:")).context("no RssAnon")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

/// The memory of the daemon and of each rank.
fn memories(cluster: &Cluster, group: &Group) -> Result<Vec<u64>> {
    std::iter::once(cluster.daemon_pid()).chain(group.pids()).map(memory).collect()
}

/// Packets that the links have lost.
fn lost(cluster: &Cluster) -> Result<u64> {
    let counts = cluster.lab().hosts().iter().map(|host| host.fault_link()?.counts());
    counts.map(|counts| counts.map(|c| c.up.lost + c.down.lost)).sum()
}

/// Waits, but ends early when `over` is set.
fn wait(time: Duration, over: &AtomicBool) {
    let begun = Instant::now();
    while begun.elapsed() < time && !over.load(Ordering::Relaxed) {
        std::thread::sleep(SECOND / 20);
    }
}

/// Works for this long, or until `over`, and prints the result.
fn soak(time: Duration, over: &AtomicBool) -> Result<()> {
    let hosts = RANKS as usize + 1;
    let rate = Some(RATE.parse()?);
    let cluster = Cluster::start(LabSpec { faulty_links: true, rate, ..LabSpec::hosts(hosts) })?;
    let lab = cluster.lab();
    for (host, seed) in lab.hosts().iter().zip(1..) {
        host.set_faults(Faults::loss(LOSS), Faults::loss(LOSS), seed)?;
    }
    let job = JobSpec { message_size: 65536, ..JobSpec::new(JOB, RANKS) };
    let token = cluster.create_job(&job)?;
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(RANKS))?;
    let (flaps, tcp_bytes) = (AtomicU64::new(0), AtomicU64::new(0));
    let flap = || -> Result<()> {
        for down in DOWN.iter().cycle() {
            wait(UP, over);
            if over.load(Ordering::Relaxed) {
                break;
            }
            lab.box_().set_link(&lab.box_().port(1), false)?;
            // The link always comes up again, because the ranks are still at work.
            std::thread::sleep(*down);
            lab.box_().set_link(&lab.box_().port(1), true)?;
            flaps.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    };
    let (from, to) = (lab.host(hosts - 1), lab.host(0));
    let tcp = || -> Result<()> {
        while !over.load(Ordering::Relaxed) {
            tcp_transfer(from, to, to.ip(0), 4 << 20, LONGEST)?;
            tcp_bytes.fetch_add(4 << 20, Ordering::Relaxed);
        }
        Ok(())
    };
    let (begun, mut sums, mut number, mut first) = (Instant::now(), Sums::default(), 0, None);
    let worked = std::thread::scope(|scope| -> Result<()> {
        let beside = [scope.spawn(flap), scope.spawn(tcp)];
        let mut logged = begun;
        let mut work = || -> Result<()> {
            let mut order = OrderedAllReduce::start(&mut group, 0)?;
            while !over.load(Ordering::Relaxed) && begun.elapsed() < time {
                number += 1;
                // By then the ranks have needed all the memory that they ever need. They are idle
                // while it is measured.
                let is_warm =
                    flaps.load(Ordering::Relaxed) >= 2 && number >= 2 * LENGTHS.len() as u64;
                if first.is_none() && is_warm {
                    sums.add(&mut group, &order)?;
                    first = Some(memories(&cluster, &group)?);
                    order = OrderedAllReduce::start(&mut group, number)?;
                    continue;
                }
                // Ranks continue while results are compared.
                let next = OrderedAllReduce::start(&mut group, number)?;
                sums.add(&mut group, &std::mem::replace(&mut order, next))?;
                if logged.elapsed() > 30 * SECOND {
                    logged = Instant::now();
                    let left = time.saturating_sub(begun.elapsed()).as_secs();
                    let (lost, memory) = (lost(&cluster)?, memories(&cluster, &group)?);
                    eprintln!(
                        "{number} all-reduces, {lost} packets lost, {memory:?} KiB, {left} s left"
                    );
                }
            }
            sums.add(&mut group, &order)
        };
        let worked = work();
        over.store(true, Ordering::Relaxed);
        for thread in beside {
            thread.join().expect("no panic")?;
        }
        worked
    });
    let last = memories(&cluster, &group);
    let Sums { by_box, by_ring, bytes, again, slowest, hangs } = &sums;
    println!(
        "{RANKS} ranks, {RATE}, {} % lost each way, {:.0?}: {} all-reduces, {by_box} by the box \
         and {by_ring} by the ring",
        LOSS * 100.0,
        begun.elapsed(),
        by_box + by_ring
    );
    println!("{bytes} bytes of vectors at each rank; {} by TCP beside", tcp_bytes.into_inner());
    println!(
        "{} packets lost, {again} sent again; the link was down {} times",
        lost(&cluster)?,
        flaps.into_inner()
    );
    println!("slowest all-reduce {slowest:.1?}, {} took longer than {LONGEST:?}", hangs.len());
    println!(
        "KiB of daemon and ranks: {first:?} after the first flaps, {last:?} in the end; {GROWTH} \
         more are allowed"
    );
    if let Err(error) = worked {
        bail!("{error:#}\n{}{}{}", evidence::of(&cluster, JOB), group.log(), cluster.daemon_log());
    }
    println!("0 wrong sums");
    if !hangs.is_empty() {
        bail!("{}\n{}", hangs.join("\n"), group.log());
    }
    if let Some(first) = first {
        let grown = first.iter().zip(last?).any(|(first, last)| last > first + GROWTH);
        ensure!(!grown, "memory has grown");
    }
    Ok(())
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn sums_over_links_that_lose_and_flap_are_right_however_long() {
    // `cargo xtask soak --wire` sets the variable, and closes the input to end the test.
    let long = std::env::var("NETSUM_SOAK_WIRE").ok().map(|seconds| seconds.parse().unwrap());
    static OVER: AtomicBool = AtomicBool::new(false);
    if long.is_some() {
        std::thread::spawn(|| {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            OVER.store(true, Ordering::Relaxed);
        });
    }
    let time = Duration::from_secs(long.unwrap_or(15));
    soak(time, &OVER).unwrap_or_else(|error| panic!("{error:#}"));
}
