//! All-reduces of netsum and its peers on links with a bandwidth, in turns: `cargo xtask bench
//! wire`.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use netsum_api::v1::CreateJobRequest;
use netsum_bench::contest::collective::Collective;
use netsum_bench::contest::link::{Link, Uplinks, Wire};
use netsum_bench::contest::plan::{self, Slice};
use netsum_bench::contest::report::{collectives, picture, tables};
use netsum_bench::contest::start::Peer;
use netsum_bench::contest::wire::{Part, Progress, wanted, without_missing};
use netsum_bench::keep::Keep;
use netsum_common::size::Size;
use netsum_lab::cluster::JobSpec;

/// Measure all-reduces of f32 in a lab whose links have a bandwidth each way: netsum and its peers,
/// in turns.
///
/// Without rates, hosts, sizes, losses and MTUs it measures a plan: large vectors with 2 to 16
/// hosts at 100mbit to 2.5gbit and without a rate, MTUs of 1500 and 2200, vectors of 4 KiB to 256
/// MiB, and all peers once. With any of these options it measures all combinations.
///
/// A time is that of the slowest rank, the median over all rounds. `limit` is the least time for a
/// sum in the network, vector by rate, as a share of the measured time. `cpu` means that one of the
/// machine's CPUs was busy nearly all the time, so the time is limited by it and not by the links.
/// Each peer uses its best setting, as found by one all-reduce with each.
#[derive(Parser)]
struct Args {
    /// Bandwidths of the links, each way; `none` is as fast as the machine. Default outside the
    /// plan: 100mbit,250mbit,500mbit,1gbit.
    #[arg(long, value_delimiter = ',')]
    rates: Vec<Link>,
    /// Numbers of hosts. Default outside the plan: 4,8.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(2..=64))]
    hosts: Vec<u32>,
    /// Ranks of each host, which share its address and its link; for netsum, Gloo and Open MPI.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    ranks_per_host: u32,
    /// Sizes of each rank's vector, such as 64K,16M. Default: one for each rate: 8 MiB up to
    /// 100mbit, 16 MiB at 250mbit, 32 MiB at 500mbit, else 64 MiB.
    #[arg(long, value_delimiter = ',')]
    sizes: Vec<Size>,
    /// Measure only these: netsum, netsum-xdp, netsum-ring, gloo, openmpi, openmpi-ucx, openmpi5,
    /// mpich, oneccl; and netsum-ring-no-offload, gloo-no-offload and openmpi-no-offload, which are
    /// included by default if the rate is `none`; netsum-flat, netsum-16bit, netsum-sealed and
    /// gloo-16bit, which never are.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Rounds of each contestant with each size, in each launch.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of times that all contestants are started.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    launches: u32,
    /// The least time of a round, in seconds; small vectors are reduced more than once in it.
    #[arg(long, default_value_t = 0.3)]
    seconds: f64,
    /// Fractions of all packets that each link loses, each way, such as 0,0.001. Needs a rate.
    /// Default outside the plan: 0.
    #[arg(long, value_delimiter = ',')]
    losses: Vec<f64>,
    /// Spread the hosts over this many racks, each with a box, and connect the boxes by a spine.
    /// Needs a rate.
    #[arg(long, value_delimiter = ',')]
    racks: Vec<u32>,
    /// With --racks: the rate of a rack's hosts together, divided by that of its uplink.
    #[arg(long, value_delimiter = ',', default_value = "1",
        value_parser = clap::value_parser!(u32).range(1..))]
    oversubscription: Vec<u32>,
    /// MTUs of the links. Default outside the plan: 1500.
    #[arg(long, value_delimiter = ',')]
    link_mtus: Vec<u32>,
    /// Measure every collective of netsum beside Gloo's, from rank 0 as the root, in one table.
    /// Sizes are those of nccl-tests. Default: 4 hosts, rates 1gbit and none, sizes of 4 KiB to 64
    /// MiB.
    #[arg(long)]
    collectives: bool,
    /// netsum's path MTU. Its default, and that of the next three, is that of `netsum job create`.
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
    job: CreateJobRequest,
}

impl Args {
    fn job(&self, ranks: u32, link_mtu: u32) -> Result<JobSpec> {
        let default =
            Create::try_parse_from(["create", "wire", "--ranks", &ranks.to_string()])?.job;
        let message_size = self.message_size.unwrap_or(Size(default.message_size));
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
            let all = vec![4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20];
            return Ok(if self.collectives { all } else { vec![link.usual_size()] });
        }
        for size in &self.sizes {
            ensure!(
                size.0 >= 4 && size.0.is_multiple_of(4),
                "--sizes {size}: use a multiple of 4 bytes"
            );
        }
        Ok(self.sizes.iter().map(|size| size.0 as usize).collect())
    }

    /// The slices to measure: all combinations of the options, or the plan.
    fn slices(&self) -> Result<Vec<Slice>> {
        let Self { rates, hosts, sizes, losses, link_mtus, racks, ranks_per_host, .. } = self;
        let ranks_per_host = *ranks_per_host;
        if !self.collectives
            && rates.is_empty()
            && hosts.is_empty()
            && sizes.is_empty()
            && losses.is_empty()
            && link_mtus.is_empty()
            && racks.is_empty()
            && ranks_per_host == 1
        {
            return Ok(plan::usual());
        }
        let rates = match &**rates {
            [] if self.collectives => vec!["1gbit".parse()?, Link(None)],
            [] => ["100mbit", "250mbit", "500mbit", "1gbit"]
                .iter()
                .map(|rate| rate.parse())
                .collect::<Result<_>>()?,
            rates => rates.to_vec(),
        };
        let or =
            |given: &[u32], usual: &[u32]| if given.is_empty() { usual } else { given }.to_vec();
        let losses = if losses.is_empty() { vec![0.0] } else { losses.clone() };
        let mut all = Vec::new();
        for hosts in or(hosts, if self.collectives { &[4] } else { &[4, 8] }) {
            for mtu in or(link_mtus, &[1500]) {
                for &loss in &losses {
                    for &rate in &rates {
                        for uplinks in self.uplinks(hosts, rate)? {
                            let (wire, who) =
                                (Wire { rate, mtu, loss, uplinks, ranks_per_host }, Vec::new());
                            all.push(Slice { hosts, wire, sizes: self.sizes(rate)?, who });
                        }
                    }
                }
            }
        }
        Ok(all)
    }

    /// One box for all, or each number of racks with each oversubscription.
    fn uplinks(&self, hosts: u32, rate: Link) -> Result<Vec<Option<Uplinks>>> {
        if self.racks.is_empty() {
            return Ok(vec![None]);
        }
        let rate = rate.0.context("--racks needs --rates other than none")?;
        let mut all = Vec::new();
        for &racks in &self.racks {
            ensure!(
                racks > 1 && hosts.is_multiple_of(racks) && hosts > racks,
                "--racks {racks}: {hosts} hosts do not suffice for two or more in each rack"
            );
            let with = |&by: &u32| Some(Uplinks::new(racks, hosts, rate, by));
            all.extend(self.oversubscription.iter().map(with));
        }
        Ok(all)
    }

    /// A slice with the selected contestants, for each collective; none if no contestant is in it.
    fn parts(&self, mut slice: Slice) -> Result<Vec<Part>> {
        if !self.collectives {
            return Ok(self.part(slice)?.into_iter().collect());
        }
        if self.only.is_empty() {
            slice.who = vec!["netsum".to_owned(), "gloo".to_owned()];
        }
        let mut parts = Vec::new();
        for collective in Collective::ALL {
            let Some(part) = self.part(slice.clone())? else { continue };
            let sizes = collective.sizes(&part.sizes, part.job.ranks);
            let who: Vec<_> = part.who.iter().copied().filter(|who| who.has(collective)).collect();
            if !who.is_empty() {
                parts.push(Part { collective, sizes, who, ..part });
            }
        }
        Ok(parts)
    }

    fn part(&self, slice: Slice) -> Result<Option<Part>> {
        let Slice { hosts, wire, sizes, who } = slice;
        let asked =
            |who: &Peer| self.only.is_empty() || self.only.iter().any(|name| name == who.name());
        let mut who = wanted(if who.is_empty() { &self.only } else { &who }, wire.rate)?;
        who.retain(|who| asked(who) && (wire.ranks_per_host == 1 || who.shares_hosts()));
        let job = self.job(hosts * wire.ranks_per_host, wire.mtu)?;
        let (launches, rounds, round_seconds) = (self.launches, self.rounds, self.seconds);
        Ok((!who.is_empty()).then_some(Part {
            job,
            wire,
            collective: Collective::AllReduce,
            sizes,
            who,
            launches,
            rounds,
            round_seconds,
        }))
    }
}

fn main() -> Result<()> {
    env_logger::init();
    let args = Args::parse();
    let JobSpec { message_size, window, rings, .. } = args.job(2, 1500)?;
    args.keep.print(format_args!(
        "{} of f32 on one machine, {} launches of {} rounds.\n\
         netsum: messages of {message_size} B, window {window}, rings {rings}.\n",
        if args.collectives { "Collectives" } else { "All-reduces" },
        args.launches,
        args.rounds
    ));
    let parts =
        args.slices()?.into_iter().map(|slice| args.parts(slice)).collect::<Result<Vec<_>>>()?;
    let mut parts: Vec<Part> = parts.into_iter().flatten().collect();
    for line in without_missing(&mut parts)? {
        args.keep.print(format_args!("{line}\n"));
    }
    let (mut rows, mut failed, mut progress) = (Vec::new(), 0, Progress::of(&parts));
    for part in &parts {
        match part.measure(&mut progress) {
            Ok(these) => {
                if !args.collectives {
                    args.keep.print(tables(&these));
                }
                rows.extend(these);
            }
            // The figures of other parts are kept.
            Err(error) => {
                failed += 1;
                let Part { wire, collective, .. } = part;
                let what = format!("{} hosts, {wire}, {collective}", part.hosts());
                args.keep.print(format_args!("\n{what}: failed\n"));
                eprintln!("{what}: {error:#}");
            }
        }
    }
    if args.collectives {
        args.keep.print(collectives(&rows));
    }
    args.keep.write(&rows, || picture(&rows))?;
    ensure!(failed == 0, "{failed} of {} parts failed", parts.len());
    Ok(())
}
