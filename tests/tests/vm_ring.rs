//! Foreign implementations as hosts: kernels' Soft-RoCE (rdma_rxe) and an application over
//! libibverbs, through the box.

mod mixed;

use std::time::Duration;

use netsum_common::counters::{Counter, Kind};
use netsum_lab::cluster::Cluster;
use netsum_lab::faults::Faults;
use netsum_lab::verbs_ring::{self, JOB, Operation, RankReport, UnknownFlow, VerbsRingSpec};
use netsum_lab::vm::parts::Kernel;
use netsum_lab::{Lab, LabSpec};

/// The loss of the runs with loss, on every link in each direction.
const LOSS: f64 = 0.01;

/// 0.5 s (4.096 us * 2^17), the delay when the last packet is lost. With 67 ms (14) and this loss,
/// on a busy machine, rdma_rxe ended four of fourteen rings through the box with an error, and none
/// of six without it; the book's `inside/soft-roce.md` says how.
const TIMEOUT: u8 = 17;

/// How long a ring may take: many times the usual time, because emulated machines are slow on busy
/// hosts.
fn deadline_of(spec: &VerbsRingSpec) -> Duration {
    Duration::from_secs(60) + spec.messages * Duration::from_secs(2)
}

/// Counters that rise when a packet was lost, duplicated or early.
const TROUBLE: [&str; 4] =
    ["rcvd_seq_err", "out_of_seq_request", "duplicate_request", "completer_retry_err"];

/// Runs a ring, every sum of which must be right.
fn run(cluster: &Cluster, spec: &VerbsRingSpec) -> Vec<RankReport> {
    let reports = verbs_ring::run(cluster, spec, deadline_of(spec))
        .unwrap_or_else(|e| panic!("{spec:?}: {e:#}"));
    for (rank, report) in reports.iter().enumerate() {
        let outcome = (report.messages, report.wrong);
        assert_eq!(
            outcome,
            (spec.messages.into(), 0),
            "messages and wrong lanes of rank {rank}, {spec:?}"
        );
    }
    reports
}

/// Runs a ring without loss: no host may notice that there is a box.
fn undisturbed(cluster: &Cluster, spec: &VerbsRingSpec) -> Vec<RankReport> {
    let reports = run(cluster, spec);
    for (rank, report) in reports.iter().enumerate() {
        for name in TROUBLE {
            assert_eq!(report.counter(name), 0, "{name} of rank {rank}: {report:?}");
        }
        assert_eq!(report.retransmitted, Some(0), "{report:?}");
    }
    if spec.summed {
        let (packets, ranks) = (spec.packets(), spec.hosts.len() as u64);
        for (name, expected) in [
            ("contributions", ranks * packets),
            ("released", packets),
            ("results", ranks * packets),
            ("replays", 0),
            ("duplicate_request", 0),
            ("stale", 0),
        ] {
            assert_eq!(cluster.counter(Some(JOB), name).unwrap(), expected, "{name}");
        }
        verbs_ring::forget(cluster).unwrap();
    }
    reports
}

/// Runs a ring while every link loses packets in each direction. Also returns the number of lost
/// packets.
fn with_loss(cluster: &Cluster, spec: &VerbsRingSpec) -> (Vec<RankReport>, u64) {
    let hosts = cluster.lab().hosts();
    for host in hosts {
        host.set_faults(Faults::loss(LOSS), Faults::loss(LOSS), 7 + host.number() as u32).unwrap();
    }
    let reports = run(cluster, &VerbsRingSpec { timeout: TIMEOUT, ..spec.clone() });
    let mut lost = 0;
    for host in hosts {
        let counts = host.fault_link().unwrap().counts().unwrap();
        lost += counts.up.lost + counts.down.lost;
        host.set_faults(Faults::NONE, Faults::NONE, 0).unwrap();
    }
    if spec.summed {
        verbs_ring::forget(cluster).unwrap();
    }
    (reports, lost)
}

/// The extent of a test: a little, or everything with `cargo xtask soak --vm`.
struct Extent {
    kernels: Vec<Kernel>,
    messages: u32,
    with_loss: u32,
    rings: Vec<(usize, u32, Operation)>,
}

impl Extent {
    fn new() -> Self {
        use Operation::{Send, Write};
        let Ok(messages) = std::env::var("NETSUM_SOAK_MESSAGES") else {
            return Self {
                kernels: Kernel::ALL.into(),
                messages: 10,
                with_loss: 10,
                rings: vec![(3, 1024, Send), (4, 2048, Write)],
            };
        };
        let kernels = std::env::var("NETSUM_SOAK_KERNELS").expect("all three variables are set");
        let with_loss =
            std::env::var("NETSUM_SOAK_WITH_LOSS").expect("all three variables are set");
        Self {
            with_loss: with_loss.parse().unwrap(),
            kernels: kernels.split(',').map(|kernel| kernel.parse().unwrap()).collect(),
            messages: messages.parse().unwrap(),
            // All pairs of ranks and path MTU, two with each operation.
            rings: vec![(3, 1024, Send), (4, 2048, Send), (3, 2048, Write), (4, 1024, Write)],
        }
    }
}

fn seconds(reports: &[RankReport]) -> f64 {
    reports.iter().map(|report| report.micros).max().unwrap_or_default() as f64 / 1e6
}

fn retransmitted(reports: &[RankReport]) -> u64 {
    reports.iter().filter_map(|report| report.retransmitted).sum()
}

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn stock_hosts_get_every_sum_with_and_without_loss() {
    let Extent { kernels, messages, with_loss: messages_with_loss, rings } = Extent::new();
    // If there are two kernels, neighbours have different ones.
    let vms: Vec<Kernel> = kernels.iter().copied().cycle().take(4).collect();
    let cluster =
        Cluster::start(LabSpec { vms, mtu: 2300, faulty_links: true, ..LabSpec::hosts(6) })
            .unwrap();
    println!(
        "\n{messages} messages of 128 KiB from each rank, {messages_with_loss} with loss; kernels \
         {}; each ring through the box, and without it from neighbour\n\
         to neighbour. lost: packets, at {:.0} % on every link and each way. again: data packets \
         sent again by all ranks, and\n\
         their share of those that there were to send.",
        kernels.iter().map(Kernel::to_string).collect::<Vec<_>>().join(" and "),
        LOSS * 100.0
    );
    println!("ranks  mtu operation        no loss: s      lost       s     again");
    for (ranks, mtu, operation) in rings {
        let spec = VerbsRingSpec::new(ranks, mtu, operation, messages);
        let direct = VerbsRingSpec { summed: false, ..spec.clone() };
        for (what, spec) in [("box", &spec), ("no box", &direct)] {
            let lossless = seconds(&undisturbed(&cluster, spec));
            let lossy = VerbsRingSpec { messages: messages_with_loss, ..spec.clone() };
            let (reports, lost) = with_loss(&cluster, &lossy);
            let again = retransmitted(&reports);
            assert!(lost > 0 && again > 0, "this was to be with loss: {reports:?}");
            let share = 100.0 * again as f64 / (ranks as u64 * lossy.packets()) as f64;
            println!(
                "{ranks:>5} {mtu:>4} {:<9} {what:<6} {lossless:>7.1} {lost:>9} {:>7.1} {again:>9} \
                 {share:>6.1} %",
                format!("{operation:?}"),
                seconds(&reports)
            );
        }
    }
    mixed::rings(&cluster);
    mixed::pairs(&cluster);
}

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn traffic_of_others_passes_untouched_beside_a_ring() {
    let cluster = Cluster::start(LabSpec::vms(3, Kernel::V6_1)).unwrap();
    let lab = cluster.lab();
    let rounds = std::thread::scope(|scope| {
        let others = scope.spawn(|| foreign_traffic(lab));
        let mut rounds = 0;
        while !others.is_finished() {
            run(&cluster, &VerbsRingSpec::new(3, 1024, Operation::Send, 10));
            verbs_ring::forget(&cluster).unwrap();
            rounds += 1;
        }
        others.join().unwrap();
        rounds
    });
    assert!(rounds > 0);
    for counter in Counter::ALL.iter().filter(|counter| counter.kind() == Kind::Drop) {
        assert_eq!(cluster.counter(None, counter.name()).unwrap(), 0, "{}", counter.name());
    }
    // Three perftest programs with 20 times 64 packets each. Acknowledgements and the other two
    // programs add to that.
    let others = cluster.counter(None, "no_flow").unwrap();
    assert!(others > 3 * 20 * 64, "others have sent {others} packets");
}

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn an_application_over_libibverbs_is_set_up_in_band() {
    let cluster = Cluster::start(LabSpec::vms(2, Kernel::V6_1)).unwrap();
    for operation in [Operation::Send, Operation::Write] {
        // The first packets are dropped, and sent again after the timeout.
        let spec = VerbsRingSpec {
            in_band: true,
            timeout: TIMEOUT,
            ..VerbsRingSpec::new(2, 1024, operation, 10)
        };
        run(&cluster, &spec);
        let counter = |name| cluster.counter(Some(JOB), name).unwrap();
        assert_eq!(counter("released"), spec.packets(), "{operation:?}");
        assert!(counter("in_band_first") >= 2, "{operation:?}");
        verbs_ring::forget(&cluster).unwrap();
    }
}

/// Runs perftest and the examples of libibverbs, all at the same time.
fn foreign_traffic(lab: &Lab) {
    let perftest = ["-d", "rxe0", "-x", "1", "-F", "-n", "20", "-s", "65536"];
    // `-c` checks the received data.
    let pingpong = ["-d", "rxe0", "-g", "1", "-n", "100"];
    let programs = [
        ("ib_send_bw", &perftest[..], &[][..]),
        ("ib_write_bw", &perftest, &[]),
        ("ib_read_bw", &perftest, &[]),
        ("ibv_rc_pingpong", &pingpong, &["-c"]),
        ("ibv_ud_pingpong", &pingpong, &["-s", "1000"]),
    ];
    let started: Vec<UnknownFlow> = (18_600..)
        .zip(programs)
        .map(|(port, (name, arguments, more))| {
            let (server, client) = (usize::from(port % 3), usize::from((port + 1) % 3));
            let words = [&[name], arguments, more].concat();
            UnknownFlow::start(lab.host(server), lab.host(client), port, &words).unwrap()
        })
        .collect();
    for foreign in started {
        let what = foreign.what().to_owned();
        let printed = foreign.end(Duration::from_secs(120)).unwrap();
        // perftest prints "65536  20  peak  average  rate"; the others print "100 iters in ...".
        let words = printed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let done = words.into_iter().any(|words| match words[..] {
            // A rate of 0.00 has been seen: perftest divides by the CPU frequency, which it
            // measures itself, and the CPU is emulated. The box counts the data that has passed.
            ["65536", "20", _, average, ..] => average.parse::<f64>().is_ok(),
            ["100", "iters", "in", ..] => true,
            _ => false,
        });
        assert!(done, "{what}:\n{printed}");
    }
}
