//! Tests all-reduces by a box on this machine and its kernel, bit by bit, at several path MTUs,
//! with and without loss.
//!
//! Runs in a virtual machine of the lab, whose kernel differs from the surrounding machine's.
//! Prints what `netsum prog` reports of the verifier's work.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec, one_on_each_host};
use netsum_lab::faults::{Fault, Faults};
use netsum_lab::netns;

const RANKS: u32 = 3;
const LOSS: f64 = 0.01;

fn main() -> Result<()> {
    // Soft-RoCE's device is visible in all namespaces, and ranks would use it.
    netns::output(Command::new("rdma").args(["link", "delete", "rxe0"]))?;
    let cluster = Cluster::start(LabSpec {
        mtu: 3500,
        faulty_links: true,
        ..LabSpec::hosts(RANKS as usize)
    })?;
    for program in cluster.netsum_json(&["prog"])?["programs"].as_array().context("no programs")? {
        println!("{} {}", program["name"].as_str().unwrap_or_default(), program["verified_insns"]);
    }
    // The second job has a rank that sends and receives over AF_XDP.
    for (mtu, xdp) in [(1024, vec![]), (3328, vec![0])] {
        // The machine is slow: short timeouts would declare live ranks dead.
        let patient = Duration::from_secs(60);
        let job = JobSpec {
            mtu,
            xdp,
            timeout: patient,
            connect_timeout: patient,
            ..JobSpec::new("train", RANKS)
        };
        let token = cluster.create_job(&job)?;
        let mut group = cluster.ranks(&job, &token, &one_on_each_host(RANKS))?;
        for (loss, seed) in [(0.0, 1), (LOSS, 2)] {
            for host in cluster.lab().hosts() {
                let faults = Faults::of(Fault::Loss, loss);
                host.set_faults(faults, faults, seed * 64 + host.number() as u32)?;
            }
            for dtype in ["i32", "f32"] {
                let outcomes = group.all_reduce(dtype, 200_000, seed.into())?;
                let right =
                    outcomes.iter().all(|o| o.mode == "box" && o.wrong == 0 && o.fallbacks == 0);
                ensure!(
                    right,
                    "path MTU {mtu}, loss {loss}, {dtype}: {outcomes:?}\n{}",
                    cluster.daemon_log()
                );
            }
            let lost: u64 = cluster
                .lab()
                .hosts()
                .iter()
                .map(|h| {
                    h.fault_link()
                        .context("no faulty link")?
                        .counts()
                        .map(|c| c.up.lost + c.down.lost)
                })
                .sum::<Result<u64>>()?;
            ensure!((lost > 0) == (loss > 0.0), "{lost} packets lost");
            eprintln!("path MTU {mtu}: right to the bit, {lost} packets lost");
        }
        drop(group);
        cluster.netsum(&["job", "delete", "train"])?;
    }
    Ok(())
}
