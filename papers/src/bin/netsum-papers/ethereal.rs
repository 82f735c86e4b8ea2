//! Ethereal (arXiv 2407.00550): its completion times, and those of spraying, REPS and ECMP, with
//! failed links.

use std::collections::BTreeSet;

use anyhow::Result;
use netsum_papers::collectives::{Collective, Scene, leaves_as_hosts};
use netsum_papers::routes::Balance;
use netsum_plan::generate;
use netsum_plan::topology::{Edge, Network, Topology};

use crate::chart::chart;
use crate::table;

const BITS: f64 = 1e11;
const SIZES: [f64; 4] = [4e6, 16e6, 64e6, 256e6];
/// In an all-to-all by ECMP, flows end one by one; ends within this part of the time are taken
/// together.
const STEP: f64 = 0.01;
const RULES: [(&str, Balance); 4] = [
    ("Ethereal", Balance::Ethereal),
    ("spraying", Balance::Spray),
    ("REPS", Balance::Reps),
    ("ECMP", Balance::Ecmp { seed: 0 }),
];

/// A network, the links that fail in it, and how many hosts are below a leaf.
struct Scenario {
    name: &'static str,
    topology: Topology,
    links: Vec<(String, String)>,
    below: usize,
}

fn failed(network: &Network, links: &[(String, String)]) -> BTreeSet<Edge> {
    let both = links.iter().flat_map(|(a, b)| [(a, b), (b, a)]);
    both.filter_map(|(a, b)| network.edge(network.node(a)?, network.node(b)?)).collect()
}

/// Seconds for each of `SIZES`. In this model one part of the time is latency, and the rest is
/// proportional to the bytes.
fn seconds(
    place: &Scenario,
    broken: usize,
    collective: Collective,
    balance: Balance,
) -> Result<Vec<f64>> {
    let ecmp = matches!(balance, Balance::Ecmp { .. });
    let small = collective == Collective::AllToAll && !ecmp;
    let topology = if small { leaves_as_hosts(&place.topology) } else { place.topology.clone() };
    let network = Network::new(&topology)?;
    let failed = failed(&network, &place.links[..broken]);
    // The result depends on the hash; the more flows, the less.
    let seeds = if ecmp && collective != Collective::AllToAll { 8 } else { 1 };
    let (mut flowing, mut latency) = (0.0, 0.0);
    for seed in 0..seeds {
        let balance = if ecmp { Balance::Ecmp { seed } } else { balance };
        let step = if ecmp && collective == Collective::AllToAll { STEP } else { 0.0 };
        let scene = Scene {
            network: &network,
            failed: failed.clone(),
            balance,
            background: Vec::new(),
            step,
        };
        latency = scene.latency(collective);
        let bytes = if small { place.below as f64 } else { 1.0 } * 64e6;
        flowing += (scene.seconds(collective, bytes)? - latency) / seeds as f64;
    }
    if small {
        // Flows that stay below a leaf use the hosts' own links, too.
        let hosts = place.topology.hosts.len() as f64;
        flowing = flowing.max((hosts - 1.0) / hosts * 64e6 * 8.0 / BITS);
    }
    Ok(SIZES.iter().map(|bytes| latency + flowing * bytes / 64e6).collect())
}

pub fn run() -> Result<(String, String)> {
    let link = |a: &str, i: usize, b: &str, j: usize| (format!("{a}{i}"), format!("{b}{j}"));
    let places = [
        Scenario {
            name: "leaf-spine, 256 hosts",
            topology: generate::leaf_spine(16, 16, 16, BITS, 1.0),
            links: (0..4).map(|i| link("leaf", i, "spine", i)).collect(),
            below: 16,
        },
        Scenario {
            name: "fat-tree, 512 hosts",
            topology: generate::fat_tree(16, 8, BITS),
            links: (0..4).map(|i| link("leaf", 8 * i, "mid", 8 * i + i)).collect(),
            below: 8,
        },
    ];
    let mut rows = Vec::new();
    let mut curves: Vec<(String, Vec<(f64, f64)>)> =
        RULES.iter().map(|(name, _)| ((*name).to_owned(), Vec::new())).collect();
    for place in &places {
        for (what, collective) in [
            ("all-to-all", Collective::AllToAll),
            ("ring", Collective::Ring),
            ("double binary tree", Collective::DoubleBinaryTree),
        ] {
            for broken in 0..=place.links.len() {
                let times = RULES.map(|(_, balance)| seconds(place, broken, collective, balance));
                let times = times.into_iter().collect::<Result<Vec<_>>>()?;
                eprintln!("{}, {what}, {broken} failed links: done", place.name);
                for (n, bytes) in SIZES.iter().enumerate() {
                    let mut row = vec![
                        place.name.to_owned(),
                        what.to_owned(),
                        broken.to_string(),
                        format!("{}", bytes / 1e6),
                    ];
                    row.extend(times.iter().map(|times| format!("{:.3}", times[n] * 1e3)));
                    row.extend(
                        times[1..].iter().map(|others| format!("{:.2}", others[n] / times[0][n])),
                    );
                    rows.push(row);
                }
                if collective == Collective::AllToAll && place.below == 16 {
                    for (curve, times) in curves.iter_mut().zip(&times) {
                        curve.1.push((f64::from(1u32 << broken), times[2] * 1e3));
                    }
                }
            }
        }
    }
    let head = [
        "network",
        "collective",
        "failed links",
        "MB",
        "Ethereal, ms",
        "spraying",
        "REPS",
        "ECMP",
        "Ethereal gains over spraying",
        "over REPS",
        "over ECMP",
    ];
    let text = format!(
        "Links of 100 Gb/s, no oversubscription, 1 us for each hop, routing that avoids failed \
         links. The flows are fluid; with ECMP, ends of flows within 1 % of the time are taken \
         together. Times of rings and trees with ECMP are the mean of 8 seeds. The paper's \
         abstract: up to 30 % less time than spraying and 40 % less than REPS, in a packet \
         simulation. Spraying and REPS lose that time to queues and reordering, which a fluid \
         model does not have.\n\n{}",
        table(&head, &rows)
    );
    Ok((text, chart("All-to-all, 256 hosts, 64 MB a host", "2 ^ failed links", "ms", &curves)?))
}
