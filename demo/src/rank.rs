//! One rank of a training over the network.

use std::cell::Cell;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result};
use clap::Args;
use netsum_demo::data::Data;
use netsum_demo::report::{Line, Trained};
use netsum_demo::train::{Step, train};
use netsum_demo::{LAYOUT, PATH_MTU};
use netsum_worker::{Bootstrap, CommConfig, Communicator, Mode, Secret, Transport};

use crate::{Training, finish, print_line};

/// Arguments of `netsum-demo rank`.
#[derive(Args)]
pub struct RankArgs {
    #[command(flatten)]
    training: Training,
    /// This rank, from 0.
    #[arg(long)]
    rank: u32,
    /// This rank's own address.
    #[arg(long)]
    ip: IpAddr,
    /// The address of the box's daemon for workers, HOST:PORT.
    #[arg(long, requires_all = ["job", "token"], required_unless_present = "peers")]
    controller: Option<String>,
    /// Name of the job.
    #[arg(long)]
    job: Option<String>,
    /// The job's token.
    #[arg(long, env = "NETSUM_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// The ranks' secret, which seals all sums.
    #[arg(long, env = "NETSUM_SECRET", hide_env_values = true)]
    secret: Option<String>,
    /// Addresses of all ranks in rank order, instead of a controller: the ranks sum by a ring,
    /// without a job at a box.
    #[arg(long, value_delimiter = ',', conflicts_with = "controller")]
    peers: Vec<IpAddr>,
    /// Stay in the job after the training until standard input ends.
    #[arg(long)]
    stay: bool,
    /// Time that each step takes besides its all-reduce, in seconds, to simulate a larger model.
    #[arg(long, default_value_t = 0.0)]
    compute: f64,
    /// The timeout for a silent rank, in seconds.
    #[arg(long, default_value_t = 10.0)]
    timeout: f64,
}

impl RankArgs {
    fn bootstrap(&self) -> Bootstrap {
        match &self.controller {
            Some(address) => Bootstrap::Controller {
                address: address.clone(),
                job: self.job.clone().unwrap_or_default(),
                token: self.token.clone().unwrap_or_default(),
            },
            None => Bootstrap::Static {
                peers: self.peers.clone(),
                mtu: PATH_MTU,
                message_size: LAYOUT.message_size,
                window: LAYOUT.window,
                rings: LAYOUT.rings,
            },
        }
    }
}

/// Trains, and reports on standard output.
pub fn run(args: &RankArgs) -> Result<()> {
    let (config, data) = (args.training.config(), Data::load()?);
    let timeout = Duration::try_from_secs_f64(args.timeout).context("--timeout")?;
    let compute = Duration::try_from_secs_f64(args.compute).context("--compute")?;
    let ranks = u32::try_from(config.ranks).context("--ranks")?;
    let mut communicator = Communicator::connect(CommConfig {
        timeout,
        // Namespaces have no other transport.
        transport: Transport::Udp,
        secret: args.secret.as_deref().map(Secret::new).transpose().map_err(Error::msg)?,
        ..CommConfig::new(args.rank, ranks, args.ip, args.bootstrap())
    })?;
    print_line(&Line::Connected)?;

    let start = Instant::now();
    let (mut all_reduces, mut by_box) = (0, 0);
    let last = Cell::new((0.0, false));
    let sum = |parts: &[Vec<f32>], total: &mut [f32]| {
        total.copy_from_slice(&parts[0]);
        std::thread::sleep(compute);
        let called = Instant::now();
        let report = communicator.all_reduce(total)?;
        last.set((called.elapsed().as_secs_f64(), report.mode == Mode::Box));
        all_reduces += 1;
        by_box += u64::from(report.mode == Mode::Box);
        Ok(())
    };
    let here = args.rank as usize..args.rank as usize + 1;
    let progress = |s: Step| {
        // Continue without a reader: the other ranks need this one.
        let (took, by_box) = last.get();
        let _ = print_line(&Line::Step { step: s.step, loss: s.loss, took, by_box });
    };
    let model = train(&config, &data, here, sum, progress)?;
    let seconds = start.elapsed().as_secs_f64();
    let statistics = communicator.statistics();
    let trained = Trained {
        steps: config.steps(&data),
        all_reduces,
        by_box,
        sums_verified: statistics.verified,
        is_sealed: communicator.is_sealed(),
        retransmissions: statistics.traffic.unwrap_or_default().retransmissions,
        seconds,
        ..Trained::default()
    };
    finish(&args.training, &data, &model, trained)?;
    if args.stay {
        std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    }
    Ok(())
}
