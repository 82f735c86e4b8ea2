//! Measures the time to plan 1,024 hosts below 64 leaves and 16 spines, and a fat-tree of the same
//! size.

use std::time::Instant;

use netsum_plan::generate;
use netsum_plan::plan::{Job, plan};
use netsum_plan::topology::Network;
use netsum_plan::tree::Collective;

fn main() -> Result<(), netsum_plan::topology::Error> {
    for (name, mut topology) in [
        ("64 leaves, 16 spines", generate::leaf_spine(64, 16, 16, 1e11, 1.0)),
        ("fat-tree of 16-port boxes", generate::fat_tree(16, 16, 1e11)),
    ] {
        topology.boxes.iter_mut().for_each(|b| b.aggregation_rate = Some(1e11));
        let start = Instant::now();
        let network = Network::new(&topology)?;
        let members = network.hosts().collect();
        let job =
            Job { name: "train".into(), members, priority: 0, collective: Collective::AllReduce };
        let plan = &plan(&network, &[job])?[0];
        let seconds = start.elapsed().as_secs_f64();
        let (hosts, trees) = (network.hosts().len(), plan.trees.len());
        println!(
            "{name}: {hosts} hosts, {trees} trees, {:.2} of {:.2} GB/s, {seconds:.3} s",
            plan.rate() / 1e9,
            plan.bound / 1e9
        );
    }
    Ok(())
}
