//! A job over spines whose links differ in rate: with one tree, with trees that get equal shares,
//! and with planned shares.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use netsum_lab::cluster::{Cluster, JobSpec, PATIENCE, one_on_each_host};
use netsum_lab::{LabSpec, Rate};
use serde::Serialize;

const RANKS: usize = 4;

/// The result of one way of spreading rings.
#[derive(Debug, Serialize)]
pub struct Figures {
    /// `one tree`, `equal shares` or `planned`.
    pub how: &'static str,
    /// The rings of each spine, the fastest first.
    pub rings: Vec<u32>,
    /// Summed bytes of the vector per second; the best of the repetitions.
    pub rate: f64,
    /// The rate divided by the planner's bound, which ignores headers.
    pub of_bound: f64,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rings: Vec<String> = self.rings.iter().map(u32::to_string).collect();
        write!(
            f,
            "{:<14} {:<8} {:>8.1} MB/s {:>6.1} %",
            self.how,
            rings.join(":"),
            self.rate / 1e6,
            100.0 * self.of_bound
        )
    }
}

/// The headings of [`Figures`]' lines.
pub const HEAD: &str = "how            rings        summed   of the bound";

/// Two racks of two hosts, with a spine for each rate, the fastest first. The links' rates are
/// multiples of the slowest.
///
/// # Errors
/// If the lab, the manager or a rank fails, or a sum is wrong.
pub fn measure(rates: &[Rate], bytes: usize, repeat: u64) -> Result<(Vec<Figures>, String)> {
    let slowest = rates.iter().map(|rate| rate.0).min().context("a rate is needed")?;
    let parts = rates.iter().map(|rate| (rate.0 / slowest) as u32).sum();
    let ways = [
        ("planned", parts, true),
        ("equal shares", rates.len() as u32, false),
        ("one tree", 1, false),
    ];
    let (mut all, mut shown, mut bound) = (Vec::new(), String::new(), 0.0);
    for (how, rings, known) in ways {
        let spec = LabSpec {
            hosts: RANKS,
            racks: 2,
            mtu: 2300,
            spines: rates.len(),
            uplink: rates.first().copied(),
            ..LabSpec::default()
        };
        let mut cluster = Cluster::without_daemon(spec)?;
        for (spine, rate) in rates.iter().enumerate() {
            cluster.lab().set_uplink_rate(spine, *rate)?;
        }
        cluster.start_daemon()?;
        cluster.start_leaves()?;
        let manager = cluster.start_manager_with_rates(if known { rates } else { &[] })?;
        let job = JobSpec {
            mtu: 2048,
            message_size: 65536,
            window: 8,
            rings,
            ..JobSpec::new("train", RANKS as u32)
        };
        let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(RANKS as u32))?;
        let mut least = u64::MAX;
        for seed in 0..repeat {
            let outcomes = group.all_reduce("i32", bytes / 4, seed)?;
            ensure!(
                outcomes.iter().all(|o| o.wrong == 0 && o.mode == "box"),
                "{how}: {outcomes:?}\n{}",
                manager.log()
            );
            least = outcomes.iter().map(|o| o.micros).max().unwrap_or(u64::MAX).min(least);
        }
        // The manager shows trees after it has polled the boxes.
        let start = Instant::now();
        let job = loop {
            ensure!(
                start.elapsed() < PATIENCE,
                "{how}: the manager shows no trees: {}",
                manager.log()
            );
            let job = manager.json(&cluster, &["fabric", "job", "show", "train"])?;
            if job["trees"].as_array().is_some_and(|trees| !trees.is_empty()) {
                break job;
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        if known {
            bound = job["plan"]["bound"].as_f64().with_context(|| format!("no bound in {job}"))?;
            shown = manager.netsum(&cluster, &["fabric", "job", "show", "train"])?;
        }
        let trees = job["trees"].as_array().context("trees")?;
        let rings =
            trees.iter().map(|tree| tree["rings"].as_u64().unwrap_or_default() as u32).collect();
        let rate = bytes as f64 / (least as f64 / 1e6);
        all.push(Figures { how, rings, rate, of_bound: rate / bound });
    }
    Ok((all, shown))
}
