//! Rings of stock hosts, one after the other, under loss and with a timer that fires often: a ring
//! may stall only for a known reason, and no sum may ever be wrong.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use netsum_lab::cluster::{Cluster, program};
use netsum_lab::faults::Faults;
use netsum_lab::process::Running;
use netsum_lab::verbs_ring::{self, JOB, Operation, Outcome, VerbsRing, VerbsRingSpec};
use netsum_lab::vm::parts::Kernel;
use netsum_lab::{LabSpec, evidence};
use nix::sys::signal::Signal;

/// How long nothing may be released before a ring counts as stalled.
const STILL: Duration = Duration::from_secs(30);

/// Loss towards the hosts, towards the box, and both.
const WAYS: [(&str, bool, bool); 3] =
    [("down", false, true), ("up", true, false), ("both", true, true)];

/// The value of a variable, or a default that keeps the test short.
fn variable(name: &str, otherwise: u32) -> u32 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

/// The same limit once a sender has lost its place: then the ring cannot continue.
const LOST: Duration = Duration::from_secs(5);

/// Runs until the ring ends, a rank fails, for which the others would wait in vain, or the ring
/// stalls.
fn until_it_stands(cluster: &Cluster, ring: &mut VerbsRing) -> Result<(), String> {
    let (mut released, mut since) = (0, Instant::now());
    let failed =
        |ring: &VerbsRing| ring.outcomes().flatten().any(|outcome| outcome.error.is_some());
    while !ring.is_over(Duration::from_millis(250)).unwrap() && !failed(ring) {
        let now = cluster.counter(Some(JOB), "released").unwrap();
        if now != released {
            (released, since) = (now, Instant::now());
        }
        let lost = cluster.counter(Some(JOB), "layout_mismatch").unwrap() > 0;
        if since.elapsed() > if lost { LOST } else { STILL } {
            return Err(evidence::of(cluster, JOB));
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test --all"]
fn no_ring_of_stock_hosts_stalls_without_a_reason() {
    let rings = variable("NETSUM_SOAK_RINGS", 6);
    let first = variable("NETSUM_SOAK_FIRST", 0);
    // 67 ms (4.096 us * 2^14).
    let timeout = variable("NETSUM_SOAK_TIMEOUT", 14) as u8;
    let loss = f64::from(variable("NETSUM_SOAK_LOSS", 1)) / 100.0;
    let kernel =
        std::env::var("NETSUM_SOAK_KERNELS").map_or(Kernel::V6_1, |text| text.parse().unwrap());
    let keep: Option<PathBuf> = std::env::var_os("NETSUM_SOAK_KEEP").map(Into::into);
    let lab = LabSpec { vms: vec![kernel; 4], mtu: 2300, faulty_links: true, ..LabSpec::hosts(4) };
    let cluster = Cluster::start(lab).unwrap();
    let (mut stood, mut lost, mut failed) = (Vec::new(), 0, 0);
    for n in first..first + rings {
        let (way, up, down) = WAYS[n as usize % WAYS.len()];
        for host in cluster.lab().hosts() {
            let lost = |here| if here { Faults::loss(loss) } else { Faults::NONE };
            host.set_faults(lost(up), lost(down), 16 * n + host.number() as u32).unwrap();
        }
        let spec = VerbsRingSpec {
            sizes: vec![64 << 10],
            timeout,
            ..VerbsRingSpec::new(4, 1024, Operation::Send, 50)
        };
        let trace = keep.as_ref().map(|folder| folder.join(format!("{n}-{way}.pcapng")));
        let tracing = trace.as_ref().map(|path| {
            let mut command = cluster.lab().box_().command(program("netsum").unwrap());
            command
                .args(["--socket", &cluster.socket(), "trace", "--snaplen", "128", "--pcap"])
                .arg(path);
            Running::start("netsum trace", &mut command).unwrap()
        });
        let start = Instant::now();
        let mut ring = VerbsRing::start(&cluster, &spec, Duration::from_secs(240)).unwrap();
        if let Err(evidence) = until_it_stands(&cluster, &mut ring) {
            // This is rdma_rxe's own fault, which must be known by name.
            let named = evidence.contains("has lost its place");
            println!(
                "{n:>4} {way:<4} stands still{}",
                if named { ": a sender has lost its place" } else { "" }
            );
            match &keep {
                _ if named => lost += 1,
                Some(folder) => {
                    std::fs::write(folder.join(format!("{n}-{way}.txt")), &evidence).unwrap()
                }
                None => println!("{evidence}"),
            }
            if !named {
                stood.push(n);
            }
        }
        let outcomes: Vec<Option<Outcome>> =
            ring.outcomes().map(|outcome| outcome.cloned()).collect();
        for (rank, outcome) in outcomes.iter().enumerate() {
            let Some(Outcome { report, error }) = outcome else { continue };
            assert_eq!(report.wrong, 0, "wrong lanes of rank {rank} in ring {n}");
            if let Some(error) = error {
                println!("{n:>4} {way:<4} rank {rank}: {error}");
            }
        }
        let has_failed = outcomes.iter().flatten().any(|outcome| outcome.error.is_some());
        failed += u32::from(has_failed);
        if let (Some(tracing), Some(trace)) = (tracing, trace) {
            tracing.signal(Signal::SIGINT).unwrap();
            println!("{}", tracing.end(Duration::from_secs(10)).unwrap().stderr);
            if !has_failed && stood.last() != Some(&n) {
                std::fs::remove_file(trace).unwrap();
            }
        }
        println!("{n:>4} {way:<4} {:>5.1} s", start.elapsed().as_secs_f64());
        // This ends ranks that are still running.
        drop(ring);
        verbs_ring::forget(&cluster).unwrap();
    }
    println!(
        "{rings} rings: {} stood still, in {lost} a sender lost its place, {failed} failed",
        stood.len()
    );
    assert!(stood.is_empty(), "these stood still: {stood:?}");
    assert!(lost + failed < rings, "no ring came to its end");
}
