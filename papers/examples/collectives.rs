//! Collectives of 16,384 hosts in the fluid network, and how long it takes to compute them.

use std::collections::BTreeSet;
use std::time::Instant;

use netsum_papers::collectives::{Collective, Scene};
use netsum_papers::routes::Balance;
use netsum_plan::generate;
use netsum_plan::topology::Network;

fn main() -> Result<(), netsum_plan::topology::Error> {
    let network = Network::new(&generate::leaf_spine(256, 64, 64, 1e11, 1.0))?;
    let compute = |name: &str, balance, collective| {
        let start = Instant::now();
        let scene = Scene {
            network: &network,
            failed: BTreeSet::new(),
            balance,
            background: Vec::new(),
            step: 0.0,
        };
        let seconds = scene.seconds(collective, 256e6)?;
        let took = start.elapsed().as_secs_f64();
        println!("{name}, {collective:?}: {:.2} ms, computed in {took:.1} s", seconds * 1e3);
        Ok(())
    };
    for (name, balance) in [
        ("ECMP", Balance::Ecmp { seed: 1 }),
        ("spraying", Balance::Spray),
        ("REPS", Balance::Reps),
        ("Ethereal", Balance::Ethereal),
    ] {
        for collective in
            [Collective::Ring, Collective::DoubleBinaryTree, Collective::HalvingDoubling]
        {
            compute(name, balance, collective)?;
        }
    }
    // Netsum's trees come from the planner; the balancing rule makes no difference to them.
    compute("trees", Balance::Spray, Collective::Netsum)
}
