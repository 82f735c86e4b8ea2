//! Tests a box on this machine whose CPU 1 serves the rings, and repeatedly goes offline and
//! returns.
//!
//! Runs in a virtual machine and refuses to run elsewhere: a test must not take the CPUs of its own
//! machine offline.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, DaemonOptions, JobSpec, one_on_each_host};
use netsum_lab::netns;

/// This file exists only in a virtual machine of the lab: its agent.
const AGENT: &str = "/init";
const ONLINE: &str = "/sys/devices/system/cpu/cpu1/online";

/// How long the CPU stays online, and how long offline.
const HOLD: Duration = Duration::from_millis(700);

fn main() -> Result<()> {
    let rounds: u64 = std::env::args().nth(1).context("how many all-reduces?")?.parse()?;
    let first = std::fs::read_link("/proc/1/exe")?;
    ensure!(
        Path::new(AGENT).canonicalize().is_ok_and(|agent| agent == first)
            && Path::new(ONLINE).exists(),
        "this is not a virtual machine of the lab with two CPUs"
    );
    // Soft-RoCE's device is visible in all namespaces, and ranks would use it.
    netns::output(Command::new("rdma").args(["link", "delete", "rxe0"]))?;
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(3))?;
    cluster.start_daemon_as(&DaemonOptions {
        general: "cpus = [1]\n".into(),
        ..DaemonOptions::default()
    })?;
    // The machine is slow: short timeouts would declare live ranks dead.
    let job = JobSpec {
        timeout: Duration::from_secs(60),
        connect_timeout: Duration::from_secs(60),
        ..JobSpec::new("train", 3)
    };
    let token = cluster.create_job(&job)?;
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(3))?;
    // The box sums while both CPUs are online.
    for seed in 0..3 {
        let outcomes = group.all_reduce("i32", 100_000, seed)?;
        ensure!(outcomes.iter().all(|o| o.mode == "box"), "not even before: {outcomes:?}");
    }
    let (over, times) = (AtomicBool::new(false), AtomicU32::new(0));
    let worked = std::thread::scope(|scope| {
        let switching = scope.spawn(|| -> Result<()> {
            while !over.load(Ordering::Relaxed) {
                for word in ["0", "1"] {
                    std::fs::write(ONLINE, word).with_context(|| format!("{word} to {ONLINE}"))?;
                    std::thread::sleep(HOLD);
                }
                times.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        let worked = (3..3 + rounds).try_for_each(|seed| -> Result<()> {
            let outcomes = group.all_reduce("i32", 100_000, seed).with_context(|| {
                let diagnosis =
                    cluster.netsum(&["diagnose", "train"]).unwrap_or_else(|e| format!("{e:#}"));
                format!("operation {seed}\n{diagnosis}{}{}", group.log(), cluster.daemon_log())
            })?;
            let [mode, fallbacks, wrong] = [
                outcomes[0].mode.clone(),
                outcomes[0].fallbacks.to_string(),
                outcomes.iter().map(|o| o.wrong).sum::<u64>().to_string(),
            ];
            // The library has detected a wrong sum and recovered; an application without check
            // lanes would have accepted it.
            ensure!(wrong == "0", "operation {seed}: {wrong} sums of the box were wrong");
            println!("{seed}: {mode}, {} us, {fallbacks} fall-backs", outcomes[0].micros);
            Ok(())
        });
        over.store(true, Ordering::Relaxed);
        switching.join().expect("no panic").and(worked)
    });
    println!("CPU 1 was away {} times", times.load(Ordering::Relaxed));
    print!("{}", cluster.netsum(&["stats", "train"])?);
    worked?;
    ensure!(times.load(Ordering::Relaxed) > 1, "it was all over before the CPU went");
    Ok(())
}
