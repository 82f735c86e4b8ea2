//! Links that go down in the middle of an all-reduce, and come up again or do not.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use netsum_lab::cluster::{Cluster, Group, JobSpec, RankReply, TIMEOUT, one_on_each_host};
use netsum_lab::frames::{FrameSpec, lanes};
use netsum_lab::lab::BoxNode;
use netsum_lab::netns::Netns;
use netsum_lab::tap::Tap;
use netsum_lab::udp_ring::{self, Load};
use netsum_lab::{Host, LabSpec};

const RANKS: u32 = 3;
const SECOND: Duration = Duration::from_secs(1);
/// This length takes most of a second, with a window as small as that of [`Busy`].
const LEN: usize = 4_000_000;

/// A job in the middle of an all-reduce.
struct Busy {
    group: Group,
    job: JobSpec,
    files: Vec<std::path::PathBuf>,
    cluster: Cluster,
}

impl Busy {
    fn start(timeout: Duration, v6: bool) -> Self {
        let spec = LabSpec { mtu: 2300, ipv6: v6, ..LabSpec::hosts(RANKS as usize) };
        let cluster = Cluster::start(spec).unwrap();
        let job = JobSpec { timeout, window: 1, ..JobSpec::new("busy", RANKS) };
        let token = cluster.create_job(&job).unwrap();
        let places = one_on_each_host(RANKS);
        let mut group = if v6 {
            cluster.ranks_v6(&job, &token, &places).unwrap()
        } else {
            cluster.ranks(&job, &token, &places).unwrap()
        };
        group.all_reduce("i32", 1000, 0).unwrap();
        let files = group.order_all_reduce("i32", LEN, 1).unwrap();
        let busy = Self { group, job, files, cluster };
        let begun = busy.released() + 1000;
        let start = Instant::now();
        while busy.released() < begun {
            assert!(start.elapsed() < TIMEOUT, "nothing is summed");
        }
        busy
    }

    fn released(&self) -> u64 {
        self.cluster.counter(Some(&self.job.name), "released").unwrap()
    }

    /// Takes a link down, and waits until the sums stop.
    fn down(&self, netns: &Netns, interface: &str) -> Instant {
        let down = Instant::now();
        netns.set_link(interface, false).unwrap();
        let mut seen = self.released();
        loop {
            std::thread::sleep(Duration::from_millis(20));
            let now = self.released();
            if now == seen {
                break;
            }
            assert!(down.elapsed() < SECOND, "{interface} is down, and sums go on");
            seen = now;
        }
        let all = LEN as u64 * 4 / u64::from(self.job.mtu);
        assert!(
            seen < all,
            "the all-reduce was over before {interface} went down: {seen} of {all}"
        );
        down
    }

    /// Checks that all ranks end with the right sum. Returns each rank's mode, and the time.
    fn right(&mut self) -> (Vec<String>, Duration) {
        let outcomes =
            self.group.check_all_reduce("i32", LEN, 1, &self.files).unwrap_or_else(|e| {
                panic!("{e:#}\n{}\n{}", self.group.log(), self.cluster.daemon_log())
            });
        let wrong = outcomes.iter().any(|o| o.wrong > 0);
        assert!(!wrong, "{outcomes:?}\n{}\n{}", self.group.log(), self.cluster.daemon_log());
        let time = outcomes.iter().map(|o| Duration::from_micros(o.micros)).max().unwrap();
        (outcomes.into_iter().map(|o| o.mode).collect(), time)
    }

    /// Checks that all ranks end with an error. Returns the errors by rank.
    fn errors(&mut self) -> Vec<String> {
        let answers = self.group.answers(TIMEOUT).unwrap();
        assert_eq!(answers.len(), RANKS as usize);
        let errors = answers.into_iter().map(|(rank, answer)| match answer {
            RankReply::Error(error) => error,
            RankReply::Done(outcome) => panic!("rank {rank}: {outcome:?}"),
        });
        errors.collect()
    }
}

/// Cuts the path of rank 1 at the box's port, at the host's interface, or all paths at the bridge.
const CUTS: [&str; 3] = ["port", "host", "bridge"];

fn cut(cluster: &Cluster, what: &str) -> (Netns, String) {
    let lab = cluster.lab();
    match what {
        "port" => ((**lab.box_()).clone(), lab.box_().port(1)),
        "host" => ((**lab.host(1)).clone(), Host::INTERFACE.to_owned()),
        _ => ((**lab.box_()).clone(), BoxNode::BRIDGE.to_owned()),
    }
}

/// Cuts the path for `hold`, and returns the modes of the ranks, which all have the right sum.
fn interrupted(what: &str, timeout: Duration, hold: Duration) -> Vec<String> {
    let mut busy = Busy::start(timeout, false);
    let (netns, interface) = cut(&busy.cluster, what);
    let down = busy.down(&netns, &interface);
    // The test is about this interval, so it waits for a fixed time.
    std::thread::sleep(hold);
    netns.set_link(&interface, true).unwrap();
    let up = down.elapsed();
    let (modes, time) = busy.right();
    println!(
        "{what} down for {up:.1?} of an all-reduce of {time:.1?}; the sums come from {modes:?}"
    );
    assert!(time >= hold, "{what}: the all-reduce did not wait for the link");
    modes
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_link_that_comes_up_again_soon_costs_only_time() {
    for what in CUTS {
        assert_eq!(interrupted(what, 10 * SECOND, SECOND / 2), ["box"; RANKS as usize], "{what}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_link_that_is_up_before_the_timeout_costs_a_fallback() {
    // Longer than three tenths of the timeout, after which ranks use the hosts' ring.
    assert_eq!(interrupted("port", 5 * SECOND, 5 * SECOND / 2), ["ring"; RANKS as usize]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_link_that_stays_down_is_an_error_that_names_the_rank_behind_it() {
    let cut_off = |what: &str| {
        let mut busy = Busy::start(2 * SECOND, false);
        let (netns, interface) = cut(&busy.cluster, what);
        let down = busy.down(&netns, &interface);
        let errors = busy.errors();
        println!("{what} down: after {:.1?} {errors:?}", down.elapsed());
        assert!(down.elapsed() < 6 * SECOND, "{what}: {:?}", down.elapsed());
        for (rank, error) in errors.iter().enumerate() {
            if what == "bridge" || rank == 1 {
                let itself = format!("rank {rank} itself may be cut off");
                assert!(error.contains(&itself), "{what}, rank {rank}: {error}");
            } else {
                assert!(error.contains("rank 1 died"), "{what}, rank {rank}: {error}");
                assert!(!error.contains("cut off"), "{what}, rank {rank}: {error}");
            }
        }
    };
    // Each case runs in its own lab, all at once, because they wait for timeouts.
    std::thread::scope(|scope| {
        CUTS.iter().for_each(|what| drop(scope.spawn(move || cut_off(what))))
    });
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_host_that_loses_its_address_with_its_link_is_an_error() {
    // Linux removes IPv6 addresses when the link goes down (`keep_addr_on_down`), and nothing
    // restores them here.
    let mut busy = Busy::start(2 * SECOND, true);
    let (netns, interface) = cut(&busy.cluster, "host");
    let down = busy.down(&netns, &interface);
    netns.set_link(&interface, true).unwrap();
    let errors = busy.errors();
    println!("after {:.1?} {errors:?}", down.elapsed());
    assert!(errors[0].contains("rank 1 died") && errors[2].contains("rank 1 died"), "{errors:?}");
    assert!(errors[1].contains("rank 1 itself may be cut off"), "{errors:?}");
}

/// An interface that comes up accepts packets before its XDP program is attached again.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_port_that_goes_down_and_up_lets_no_contribution_through() {
    let cluster = Cluster::start(LabSpec::hosts(RANKS as usize)).unwrap();
    let lab = cluster.lab();
    let load = Load::new(RANKS);
    let job = JobSpec {
        message_size: load.message_size,
        window: load.window,
        ..JobSpec::new("flap", RANKS)
    };
    cluster.create_job(&job).unwrap();
    for rank in 0..RANKS {
        let at = |rank: u32| lab.host(rank as usize).ip(0);
        let flow = load.flow(0, rank, 0, at(rank), at((rank + 1) % RANKS));
        cluster.add_flow("flap", &flow, &lab.box_().port(rank as usize)).unwrap();
    }
    // Only rank 1 contributes: no sum is ever complete, and rank 2 must receive nothing.
    let frame = FrameSpec::send(2, 3, udp_ring::receive_qpn(2), load.psn(1), lanes(1, 256)).build();
    let (from, to) = (
        Tap::open(lab.host(1), Host::INTERFACE).unwrap(),
        Tap::open(lab.host(2), Host::INTERFACE).unwrap(),
    );
    let over = AtomicBool::new(false);
    let (sent, through) = std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut sent = 0u64;
            while !over.load(Ordering::Relaxed) {
                // There is no carrier while the port is down.
                sent += u64::from(from.send(&frame).is_ok());
            }
            sent
        });
        let receiver = scope.spawn(|| {
            let mut through = 0u64;
            while !over.load(Ordering::Relaxed) {
                let data = |f: &[u8]| f.len() == frame.len() && f[6..12] == frame[6..12];
                through += u64::from(to.receive(Duration::from_millis(50), data).is_ok());
            }
            through
        });
        for _ in 0..200 {
            lab.box_().set_link(&lab.box_().port(1), false).unwrap();
            std::thread::sleep(Duration::from_millis(2));
            lab.box_().set_link(&lab.box_().port(1), true).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
        over.store(true, Ordering::Relaxed);
        (sender.join().unwrap(), receiver.join().unwrap())
    });
    println!("{sent} packets sent");
    assert_eq!(through, 0, "of {sent} sent");
}
