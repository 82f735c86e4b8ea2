//! Collects data about a stalled job.

use std::fmt::Write;
use std::time::Duration;

use anyhow::Result;

use crate::Host;
use crate::cluster::{Cluster, program};
use crate::process::Running;
use crate::verbs_ring;

/// How long packets are traced.
const WATCH: Duration = Duration::from_secs(4);
/// The most packets to trace.
const PACKETS: &str = "4000";

/// The box's view of a job, the kernels' view of their queue pairs, and the packets of some
/// seconds.
pub fn of(cluster: &Cluster, job: &str) -> String {
    let mut text = String::new();
    let mut part = |title: &str, what: Result<String>| {
        let what = what.unwrap_or_else(|error| format!("{error:#}"));
        let _ = writeln!(text, "== {title}\n{what}");
    };
    let hosts = cluster.lab().hosts();
    let before: Vec<_> = hosts.iter().map(verbs_ring::hw_counters).collect();
    for arguments in [
        &["stats", job][..],
        &["diagnose", job],
        &["-j", "diagnose", job],
        &["-j", "slot", "show", job],
        &["-j", "job", "show", job],
    ] {
        part(&arguments.join(" "), cluster.netsum(arguments));
    }
    part("trace", trace(cluster));
    for (host, before) in hosts.iter().zip(before) {
        if host.vm().is_some() {
            part(&format!("queue pairs of {}", host.name()), queue_pairs(host));
            let counters = before.and_then(|before| Ok((before, verbs_ring::hw_counters(host)?)));
            part("its counters, before and now", counters.map(|both| format!("{both:?}")));
        }
        part(
            "its faulty link",
            host.fault_link().and_then(|link| Ok(format!("{:?}", link.counts()?))),
        );
    }
    text
}

fn trace(cluster: &Cluster) -> Result<String> {
    let mut command = cluster.lab().box_().command(program("netsum")?);
    command.args(["--socket", &cluster.socket(), "trace", "--count", PACKETS]);
    let mut running = Running::start("netsum trace", &mut command)?;
    std::thread::sleep(WATCH);
    if running.is_running() {
        running.signal(nix::sys::signal::Signal::SIGINT)?;
    }
    let ended = running.end(Duration::from_secs(10))?;
    Ok(ended.stdout + &ended.stderr)
}

fn queue_pairs(host: &Host) -> Result<String> {
    let show = ["-d", "resource", "show", "qp", "type", "RC"];
    Running::start("rdma", host.command("rdma").args(show))?.success(Duration::from_secs(30))
}
