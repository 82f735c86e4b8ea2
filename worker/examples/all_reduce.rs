//! Sums a vector over all ranks of a job: start one on each host.
//!
//! ```text
//! cargo run -p netsum-worker --example all_reduce -- 10.0.0.254:4790 JOB TOKEN RANK RANKS OWN-IP
//! ```

// ANCHOR: main
use netsum_worker::{Bootstrap, CommConfig, Communicator};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, job, token, rank, ranks, ip] =
        arguments.try_into().map_err(|_| "six arguments, see the source")?;
    let bootstrap = Bootstrap::Controller { address, job, token };
    let config = CommConfig::new(rank.parse()?, ranks.parse()?, ip.parse()?, bootstrap);

    // Returns when all ranks have joined.
    let mut comm = Communicator::connect(config)?;
    let mut gradient = vec![comm.rank() as f32 + 0.5; 1_000_000];

    // Sums in place, with the same bits at every rank.
    let report = comm.all_reduce(&mut gradient)?;
    println!("{} everywhere, summed by the {} in {:?}", gradient[0], report.mode, report.elapsed);

    comm.barrier()?;
    Ok(())
}
// ANCHOR_END: main
