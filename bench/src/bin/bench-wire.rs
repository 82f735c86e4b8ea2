//! All-reduces of netsum, Gloo and Open MPI on links with a bandwidth, in turns: `cargo xtask bench wire`.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use netsum_bench::contest::link::{Link, Wire};
use netsum_bench::contest::report::{Row, picture, tables};
use netsum_bench::contest::wire::{Part, who};
use netsum_bench::keep::Keep;
use netsum_cli::args::CreateJob;
use netsum_core::size::Size;
use netsum_lab::cluster::JobSpec;

/// All-reduces of f32 in a lab whose links have a bandwidth each way: netsum beside Gloo and Open MPI, in turns.
///
/// The time is that of the slowest rank, the median over all rounds; `limit` is the least time for a sum in the network, vector by
/// rate, as a share of it. With `cpu` a processor of the machine was busy nearly all the time, so the time is its and not the links'. Gloo
/// and Open MPI have the best of their settings, by one all-reduce with each.
#[derive(Parser)]
struct Args {
    /// Bandwidths of the links, each way; `none` is as fast as the machine.
    #[arg(long, value_delimiter = ',', default_value = "100mbit,250mbit,500mbit,1gbit")]
    rates: Vec<Link>,
    /// Numbers of hosts.
    #[arg(long, value_delimiter = ',', default_value = "4,8", value_parser = clap::value_parser!(u32).range(2..=64))]
    hosts: Vec<u32>,
    /// Sizes of each rank's vector, as 64K,16M. Without it one for each rate: 16 MiB up to 250mbit, 32 MiB at 500mbit, else 64 MiB.
    #[arg(long, value_delimiter = ',')]
    sizes: Vec<Size>,
    /// Only these: netsum, netsum-xdp, netsum-ring, gloo, openmpi, openmpi-ucx, openmpi5, mpich, oneccl;
    /// and netsum-ring-no-offload, gloo-no-offload and openmpi-no-offload, which take part without being asked where the rate is `none`.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Rounds of each contestant with each size, in each launch.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// How often all contestants are started.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    launches: u32,
    /// Seconds that a round takes at least: small vectors are reduced more than once in it.
    #[arg(long, default_value_t = 0.3)]
    seconds: f64,
    /// Shares of all packets that each link loses, each way, as 0,0.001. Not without a rate.
    #[arg(long, value_delimiter = ',', default_value = "0")]
    losses: Vec<f64>,
    /// MTUs of the links.
    #[arg(long, value_delimiter = ',', default_value = "1500")]
    link_mtus: Vec<u32>,
    /// netsum's path MTU. Not given, it is what `netsum job create` chooses by default, as with the next three.
    #[arg(long)]
    mtu: Option<u32>,
    /// netsum's message size.
    #[arg(long)]
    message_size: Option<Size>,
    /// netsum's window in messages.
    #[arg(long)]
    window: Option<u32>,
    /// netsum's rings.
    #[arg(long)]
    rings: Option<u32>,
    #[command(flatten)]
    keep: Keep,
}

/// `netsum job create`, for its defaults.
#[derive(Parser)]
struct Create {
    #[command(flatten)]
    job: CreateJob,
}

impl Args {
    fn job(&self, ranks: u32, link_mtu: u32) -> Result<JobSpec> {
        let default = Create::try_parse_from(["create", "wire", "--ranks", &ranks.to_string()])?.job;
        let message_size = self.message_size.unwrap_or(default.message_size);
        Ok(JobSpec {
            mtu: self.mtu.unwrap_or(netsum_core::largest_mtu(link_mtu)),
            message_size: message_size
                .0
                .try_into()
                .with_context(|| format!("--message-size {message_size}"))?,
            window: self.window.unwrap_or(default.window),
            rings: self.rings.unwrap_or(default.rings),
            ..JobSpec::new("wire", ranks)
        })
    }

    fn sizes(&self, link: Link) -> Result<Vec<usize>> {
        if self.sizes.is_empty() {
            return Ok(vec![link.usual_size()]);
        }
        for size in &self.sizes {
            ensure!(
                size.0 >= 4 && size.0.is_multiple_of(4),
                "--sizes {size}: a multiple of 4 bytes is needed"
            );
        }
        Ok(self.sizes.iter().map(|size| size.0 as usize).collect())
    }

    fn measure(&self, hosts: u32, wire: Wire) -> Result<Vec<Row>> {
        let (who, missing) = who(&self.only, wire.rate)?;
        missing.iter().for_each(|line| eprintln!("{line}"));
        let part = Part {
            job: self.job(hosts, wire.mtu)?,
            wire,
            sizes: self.sizes(wire.rate)?,
            who,
            launches: self.launches,
            rounds: self.rounds,
            seconds: self.seconds,
        };
        part.measure().with_context(|| format!("{hosts} hosts, {wire}"))
    }
}

fn main() -> Result<()> {
    env_logger::init();
    let args = Args::parse();
    let JobSpec { message_size, window, rings, .. } = args.job(2, 1500)?;
    args.keep.print(format_args!(
        "All-reduces of f32 on one machine, {} launches of {} rounds.\n\
         netsum: messages of {message_size} B, window {window}, rings {rings}.\n",
        args.launches, args.rounds
    ));
    let mut rows = Vec::new();
    for &hosts in &args.hosts {
        for &mtu in &args.link_mtus {
            for &loss in &args.losses {
                for &rate in &args.rates {
                    let these = args.measure(hosts, Wire { rate, mtu, loss })?;
                    args.keep.print(tables(&these));
                    rows.extend(these);
                }
            }
        }
    }
    args.keep.write(&rows, || picture(&rows))
}
