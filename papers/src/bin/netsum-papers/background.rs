//! Collectives that share their links with other jobs' flows.

use std::collections::BTreeSet;

use anyhow::Result;
use netsum_papers::collectives::{Collective, Scene};
use netsum_papers::routes::{Balance, Demand};
use netsum_plan::generate;
use netsum_plan::topology::Network;

use crate::chart::chart;
use crate::table;

const BITS: f64 = 1e11;
const BELOW: usize = 16;
const BYTES: f64 = 64e6;
/// Bytes per second that one core adds, as measured: BENCHMARKS.md, "Data plane".
const CORE: f64 = 1.64e9;
/// The other jobs' traffic on each host's link, as a fraction of the link's rate.
const LOADS: [f64; 5] = [0.0, 0.125, 0.25, 0.5, 1.0];
const COLLECTIVES: [(&str, Collective); 5] = [
    ("netsum", Collective::Netsum),
    ("ring", Collective::Ring),
    ("double binary tree", Collective::DoubleBinaryTree),
    ("halving and doubling", Collective::HalvingDoubling),
    ("all-to-all", Collective::AllToAll),
];

pub fn run() -> Result<(String, String)> {
    let network = Network::new(&generate::leaf_spine(16, BELOW, 16, BITS, 1.0))?;
    let (mut rows, mut curves) = (Vec::new(), Vec::new());
    for (rule, balance) in [("spraying", Balance::Spray), ("ECMP", Balance::Ecmp { seed: 0 })] {
        for (name, collective) in COLLECTIVES {
            let seconds = |load: f64| {
                let hosts = network.hosts().len();
                // Each host sends to the host at the same place below the next leaf.
                let other = |host| Demand {
                    from: host,
                    to: (host + BELOW) % hosts,
                    bytes: load * BITS / 8.0,
                };
                let background =
                    if load > 0.0 { network.hosts().map(other).collect() } else { Vec::new() };
                let scene = Scene {
                    network: &network,
                    failed: BTreeSet::new(),
                    balance,
                    background,
                    step: 0.0,
                };
                scene.seconds(collective, BYTES)
            };
            let times = LOADS.into_iter().map(seconds).collect::<Result<Vec<_>, _>>()?;
            let mut row = vec![rule.to_owned(), name.to_owned()];
            row.extend(times.iter().map(|time| format!("{:.2}", time * 1e3)));
            rows.push(row);
            if balance == Balance::Spray {
                let points =
                    LOADS.iter().zip(&times).skip(1).map(|(load, time)| (load * 100.0, time * 1e3));
                curves.push((name.to_owned(), points.collect()));
            }
            eprintln!("{rule}, {name}: done");
        }
    }
    let adds = (BELOW + 1) as f64 * BITS / 8.0;
    let loads = LOADS.map(|load| format!("{} %, ms", load * 100.0));
    let head: Vec<&str> =
        ["flows go by", "collective"].into_iter().chain(loads.iter().map(String::as_str)).collect();
    let text = format!(
        "256 hosts below 16 leaves, 16 spines, links of 100 Gb/s, no oversubscription, 64 MB a \
         host. The other jobs' load is one flow from each host to a host below the next leaf; the \
         column gives its rate as a part of the link's. A flow that asks for no more than its fair \
         share of a link gets what it asks for. Boxes keep up with their links: for netsum a leaf \
         adds {:.1} GB/s, which takes {:.0} cores that add {} GB/s each.\n\n{}",
        adds / 1e9,
        (adds / CORE).ceil(),
        CORE / 1e9,
        table(&head, &rows)
    );
    Ok((
        text,
        chart(
            "64 MB a host, with other jobs' flows, spraying",
            "other jobs' load, %",
            "ms",
            &curves,
        )?,
    ))
}
