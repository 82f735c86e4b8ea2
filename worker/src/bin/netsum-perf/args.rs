//! The command line. Every option of a rank may also be set by the environment.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};
use netsum_worker::{AdapterRetry, Bootstrap, CommConfig, Communicator, Tls, Transport};

#[derive(Parser)]
#[command(
    name = "netsum-perf",
    version,
    about = "Measure all-reduces over netsum; start it once for each rank"
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Sum over all ranks, in place.
    #[command(name = "all_reduce", visible_alias = "all-reduce")]
    AllReduce(Options),
}

/// Element type.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Type {
    /// 32-bit integers.
    I32,
    /// Single precision floats.
    F32,
}

#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Smallest size in bytes; K, M and G stand for powers of 1024.
    #[arg(short = 'b', long = "minbytes", default_value = "8", value_parser = parse_size)]
    pub begin: usize,
    /// Largest size in bytes.
    #[arg(short = 'e', long = "maxbytes", default_value = "64M", value_parser = parse_size)]
    pub end: usize,
    /// Factor from each size to the next.
    #[arg(short = 'f', long = "stepfactor", default_value_t = 2)]
    pub factor: usize,
    /// Element type.
    #[arg(short = 'd', long, value_enum, default_value_t = Type::F32)]
    pub dtype: Type,
    /// All-reduces to measure for each size.
    #[arg(short = 'n', long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub iters: u32,
    /// All-reduces of each size before the measured ones.
    #[arg(short = 'w', long, default_value_t = 5)]
    pub warmup: u32,
    /// All-reduces in flight: start so many at once and then wait for all; 1 waits for each.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=Communicator::MAX_IN_FLIGHT as i64))]
    pub inflight: u32,
    /// Tensors to cut each size into, summed in one all-reduce.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536), conflicts_with = "inflight")]
    pub tensors: u32,
    /// Compare the sums, bit by bit, with those of one process.
    #[arg(short = 'c', long)]
    pub check: bool,
    /// Print JSON instead of the table.
    #[arg(short = 'j', long)]
    pub json: bool,
    /// HOST:PORT where the box's daemon listens for workers.
    #[arg(long, env = "NETSUM_CONTROLLER", required_unless_present = "peers")]
    pub controller: Option<String>,
    /// Name of the job.
    #[arg(long, env = "NETSUM_JOB", required_unless_present = "peers")]
    pub job: Option<String>,
    /// The job's token.
    #[arg(long, env = "NETSUM_TOKEN", hide_env_values = true, required_unless_present = "peers")]
    pub token: Option<String>,
    /// Authority of the daemon's certificate, a PEM file: enables TLS to the daemon.
    #[arg(long, env = "NETSUM_TLS_CA", value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// This worker's certificate, a PEM file, if the daemon requires one.
    #[arg(
        long,
        env = "NETSUM_TLS_CERT",
        value_name = "FILE",
        requires = "tls_ca",
        requires = "tls_key"
    )]
    pub tls_cert: Option<PathBuf>,
    /// The certificate's private key, a PEM file.
    #[arg(long, env = "NETSUM_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Without a daemon: the addresses of all ranks, in rank order. The hosts' ring sums.
    #[arg(long, value_delimiter = ',', conflicts_with_all = ["controller", "job", "token"])]
    pub peers: Option<Vec<IpAddr>>,
    /// With --peers: path MTU in bytes.
    #[arg(long, default_value_t = 1024)]
    pub mtu: u32,
    /// With --peers: bytes of a message.
    #[arg(long, default_value = "64K", value_parser = parse_size)]
    pub message_size: usize,
    /// With --peers: messages without a sum in each ring.
    #[arg(long, default_value_t = 4)]
    pub window: u32,
    /// With --peers: rings.
    #[arg(long, default_value_t = 1)]
    pub rings: u32,
    /// This rank, from 0.
    #[arg(long, env = "NETSUM_RANK")]
    pub rank: u32,
    /// Ranks of the job.
    #[arg(long, env = "NETSUM_RANKS")]
    pub ranks: u32,
    /// This rank's own address.
    #[arg(long, env = "NETSUM_IP")]
    pub ip: IpAddr,
    /// Transport of packets: auto, udp, xdp or verbs. auto is the RDMA adapter that has the rank's
    /// address as a GID for RoCE v2, if there is one, else UDP. xdp needs CAP_NET_RAW,
    /// CAP_NET_ADMIN and CAP_BPF. Ranks of a job may differ.
    #[arg(long, env = "NETSUM_TRANSPORT", default_value = "auto")]
    pub transport: Transport,
    /// Over an RDMA adapter: timeout without an acknowledgement, 4.096 us x 2^N; as
    /// NCCL_IB_TIMEOUT.
    #[arg(long, env = "NETSUM_IB_TIMEOUT", value_name = "N", default_value_t = AdapterRetry::default().timeout)]
    pub ib_timeout: u8,
    /// Over an RDMA adapter: retries before the connection is restarted; as NCCL_IB_RETRY_CNT.
    #[arg(long, env = "NETSUM_IB_RETRY_CNT", value_name = "N", default_value_t = AdapterRetry::default().count)]
    pub ib_retry_cnt: u8,
    /// Seconds of silence after which a rank is dead.
    #[arg(long, env = "NETSUM_TIMEOUT", default_value_t = 10.0)]
    pub timeout: f64,
    /// Seconds to wait for the other ranks at the start.
    #[arg(long, env = "NETSUM_CONNECT_TIMEOUT", default_value_t = 60.0)]
    pub connect_timeout: f64,
}

/// The largest size.
const MOST: usize = 1 << 36;

impl Options {
    /// The sizes to measure, in bytes, whole elements.
    pub fn sizes(&self) -> Result<Vec<usize>> {
        let Self { begin, end, factor, .. } = *self;
        ensure!(begin >= 4, "-b {begin}: at least 4, one element");
        ensure!(begin <= end, "-b {begin} is more than -e {end}");
        ensure!(end <= MOST, "-e {end}: at most 64G");
        ensure!(factor >= 2 || begin == end, "-f {factor}: at least 2");
        let sizes = std::iter::successors(Some(begin), |s| s.checked_mul(factor.max(2)));
        Ok(sizes.take_while(|s| *s <= end).map(|s| s / 4 * 4).collect())
    }

    /// The communicator's configuration.
    pub fn config(&self) -> Result<CommConfig> {
        let bootstrap = match (&self.peers, &self.controller, &self.job, &self.token) {
            (Some(peers), ..) => Bootstrap::Static {
                peers: peers.clone(),
                mtu: self.mtu,
                message_size: u32::try_from(self.message_size)?,
                window: self.window,
                rings: self.rings,
            },
            (None, Some(controller), Some(job), Some(token)) => Bootstrap::Controller {
                address: controller.clone(),
                job: job.clone(),
                token: token.clone(),
            },
            _ => bail!("--controller, --job and --token are required, or --peers"),
        };
        Ok(CommConfig {
            transport: self.transport,
            retry: AdapterRetry { timeout: self.ib_timeout, count: self.ib_retry_cnt },
            timeout: seconds("--timeout", self.timeout)?,
            connect_timeout: seconds("--connect-timeout", self.connect_timeout)?,
            tls: self
                .tls_ca
                .clone()
                .map(|ca| Tls { ca, identity: self.tls_cert.clone().zip(self.tls_key.clone()) }),
            ..CommConfig::new(self.rank, self.ranks, self.ip, bootstrap)
        })
    }
}

fn seconds(option: &str, s: f64) -> Result<Duration> {
    ensure!((0.1..=86_400.0).contains(&s), "{option} {s}: from 0.1 to 86400 seconds");
    Ok(Duration::from_secs_f64(s))
}

/// Bytes, with K, M or G for powers of 1024.
fn parse_size(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.char_indices().last() {
        Some((i, 'k' | 'K')) => (&text[..i], 1 << 10),
        Some((i, 'm' | 'M')) => (&text[..i], 1 << 20),
        Some((i, 'g' | 'G')) => (&text[..i], 1 << 30),
        _ => (text, 1),
    };
    let wrong = || format!("{text:?} is not a size: write bytes, or a number with K, M or G");
    digits.parse::<usize>().ok().and_then(|n| n.checked_mul(unit)).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(more: &[&str]) -> Result<Options, clap::Error> {
        let base = [
            "netsum-perf",
            "all_reduce",
            "--peers",
            "127.0.0.1,127.0.0.2",
            "--rank",
            "0",
            "--ranks",
            "2",
        ];
        let all = base.iter().chain(&["--ip", "127.0.0.1"]).chain(more);
        Cli::try_parse_from(all).map(|c| {
            let Command::AllReduce(options) = c.command;
            options
        })
    }

    #[test]
    fn sizes_are_multiplied_up() {
        let o = options(&["-b", "8", "-e", "1K", "-f", "4"]).unwrap();
        assert_eq!(o.sizes().unwrap(), [8, 32, 128, 512]);
        assert_eq!(options(&["-b", "64M", "-e", "64M"]).unwrap().sizes().unwrap(), [64 << 20]);
        assert_eq!(options(&["-b", "10", "-e", "20"]).unwrap().sizes().unwrap(), [8, 20]);
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (more, word) in [
            (&["-b", "1M", "-e", "8"][..], "-b 1048576 is more than -e 8"),
            (&["-f", "1"], "-f 1"),
            (&["-b", "0"], "-b 0"),
            (&["-e", "65G"], "at most 64G"),
        ] {
            let e = options(more).unwrap().sizes().unwrap_err().to_string();
            assert!(e.contains(word), "{e}");
        }
        let e = options(&["-b", "8X"]).unwrap_err().to_string();
        assert!(e.contains("8X") && e.contains("not a size"), "{e}");
        assert!(options(&["--iters", "0"]).is_err());
        for more in [
            &["--inflight", "0"][..],
            &["--inflight", "65"],
            &["--inflight", "2", "--tensors", "2"],
        ] {
            assert!(options(more).is_err(), "{more:?}");
        }
        assert!(
            options(&["--timeout", "0"])
                .unwrap()
                .config()
                .unwrap_err()
                .to_string()
                .contains("--timeout 0")
        );
    }
}
