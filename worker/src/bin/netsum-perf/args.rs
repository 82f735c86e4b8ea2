//! The command line. Most options of a rank may also be set by the environment.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, Args, Command, FromArgMatches};
use netsum_common::defaults;
use netsum_common::size::{NotASize, Size};
use netsum_worker::numeric::operators::{encoding, unsupported};
use netsum_worker::{
    AdapterRetry, Bootstrap, CommConfig, Communicator, Dtype, Hierarchy, Op, Settings, Tls,
    Transport, Width,
};

use crate::command::{COMMANDS, Collective, Kind};
use crate::{TYPES, nccl_name};

/// A subcommand for each of [`COMMANDS`], with [`Options`].
pub fn program() -> Command {
    let program = Command::new("netsum-perf")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Measure collectives over netsum; start it once for each rank")
        .after_help(
            "Sizes, columns and bandwidths are those of nccl-tests. Times are rank 0's. Two more \
             columns: `by`, the box or the hosts' ring, and `retrans`, packets sent again. \
             NETSUM_SECRET or NETSUM_SECRET_FILE seals the sums.",
        )
        .subcommand_required(true)
        .arg_required_else_help(true);
    COMMANDS.iter().fold(program, |program, collective| {
        let command = Command::new(collective.name)
            .visible_aliases(collective.aliases)
            .about(collective.about);
        let hide = |arg: Arg| {
            let is_taken = collective.kind.takes(arg.get_id().as_str());
            arg.hide(!is_taken)
        };
        program.subcommand(Options::augment_args(command).mut_args(hide))
    })
}

/// Parses a command line, and refuses options that the command does not have.
pub fn parse(
    words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
) -> Result<(&'static Collective, Options), clap::Error> {
    let mut program = program();
    let matches = program.try_get_matches_from_mut(words)?;
    let found = matches
        .subcommand()
        .and_then(|(name, matches)| Some((COMMANDS.iter().find(|c| c.name == name)?, matches)));
    let (collective, matches) =
        found.ok_or_else(|| program.error(ErrorKind::MissingSubcommand, "name a command"))?;
    let is_refused = |arg: &&Arg| {
        let id = arg.get_id().as_str();
        matches.value_source(id) == Some(ValueSource::CommandLine) && !collective.kind.takes(id)
    };
    let command = program.find_subcommand(collective.name);
    let refused = command.and_then(|command| command.get_arguments().find(is_refused));
    if let Some(arg) = refused {
        let takes = |c: &&Collective| c.kind.takes(arg.get_id().as_str());
        let takers: Vec<_> = COMMANDS.iter().filter(takes).map(|c| c.name).collect();
        let text = format!(
            "--{} is not for {}, but for {}",
            arg.get_long().unwrap_or_default(),
            collective.name,
            takers.join(", ")
        );
        return Err(program.error(ErrorKind::UnknownArgument, text));
    }
    Ok((collective, Options::from_arg_matches(matches)?))
}

fn type_parser() -> impl TypedValueParser<Value = Dtype> {
    let values = TYPES.iter().map(|t| PossibleValue::new(t.name()).alias(nccl_name(*t)));
    let named =
        |name: String| TYPES.iter().copied().find(|t| [t.name(), nccl_name(*t)].contains(&&*name));
    PossibleValuesParser::new(values).try_map(move |name| named(name).ok_or("not a type"))
}

fn op_parser() -> impl TypedValueParser<Value = Op> {
    let named = |name: String| Op::ALL.into_iter().find(|op| op.name() == name);
    PossibleValuesParser::new(Op::ALL.map(Op::name))
        .try_map(move |name| named(name).ok_or("not an operator"))
}

#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Smallest size in bytes; K, M and G stand for powers of 1024. Default: 8, or one element for
    /// each rank if sizes are those of all parts and that is more.
    #[arg(short = 'b', long = "minbytes", value_parser = parse_size)]
    pub begin: Option<usize>,
    /// Largest size in bytes.
    #[arg(short = 'e', long = "maxbytes", default_value = "64M", value_parser = parse_size)]
    pub end: usize,
    /// Factor from each size to the next.
    #[arg(short = 'f', long = "stepfactor", default_value_t = 2)]
    pub factor: usize,
    /// Element type.
    #[arg(short = 'd', long, default_value = "f32", value_parser = type_parser())]
    pub dtype: Dtype,
    /// Bits of a float in sums of over 4,096, 32bit or 16bit. Default: those of the type.
    #[arg(long, env = "NETSUM_WIRE")]
    pub wire: Option<Width>,
    /// Whether ranks of one host add their data before they send it: auto, on or off.
    #[arg(long, env = "NETSUM_HIERARCHY", default_value = "auto")]
    pub hierarchy: Hierarchy,
    /// Operator.
    #[arg(short = 'o', long, default_value = "sum", value_parser = op_parser())]
    pub op: Op,
    /// The rank that has the data, or gets the result.
    #[arg(short = 'r', long, default_value_t = 0)]
    pub root: u32,
    /// Operations to measure for each size.
    #[arg(short = 'n', long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub iters: u32,
    /// Operations of each size before the measured ones.
    #[arg(short = 'w', long, default_value_t = 5)]
    pub warmup: u32,
    /// Operations in flight: start this number at once, then wait for all; 1 waits for each.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=Communicator::MAX_IN_FLIGHT as i64))]
    pub inflight: u32,
    /// Tensors to cut each size into, summed in one all-reduce.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536), conflicts_with = "inflight")]
    pub tensors: u32,
    /// Compare the results, bit by bit, with those of one process.
    #[arg(short = 'c', long)]
    pub check: bool,
    /// Print JSON instead of the table.
    #[arg(short = 'j', long)]
    pub json: bool,
    /// HOST:PORT of the controller: of a box's daemon, or of a fabric's manager.
    #[arg(long, env = "NETSUM_CONTROLLER", required_unless_present = "peers")]
    pub controller: Option<String>,
    /// Name of the job.
    #[arg(long, env = "NETSUM_JOB", required_unless_present = "peers")]
    pub job: Option<String>,
    /// The job's token.
    #[arg(long, env = "NETSUM_TOKEN", hide_env_values = true, required_unless_present = "peers")]
    pub token: Option<String>,
    /// Authority of the controller's certificate, a PEM file: enables TLS to the controller.
    #[arg(long, env = "NETSUM_TLS_CA", value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// This worker's certificate, a PEM file, if the controller requires one.
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
    /// Without a controller: the addresses of all ranks, in rank order. The hosts' ring sums.
    #[arg(long, value_delimiter = ',', conflicts_with_all = ["controller", "job", "token"])]
    pub peers: Option<Vec<IpAddr>>,
    /// With --peers: path MTU in bytes.
    #[arg(long, default_value_t = defaults::MTU)]
    pub mtu: u32,
    /// With --peers: bytes of a message.
    #[arg(long, default_value = defaults::MESSAGE_SIZE, value_parser = parse_size)]
    pub message_size: usize,
    /// With --peers: messages without a sum in each ring.
    #[arg(long, default_value_t = defaults::WINDOW)]
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
const MAX_BYTES: usize = 1 << 36;

impl Options {
    /// The elements of each size to measure, or of one rank's part of it.
    pub fn counts(&self, collective: &Collective, element: usize) -> Result<Vec<usize>> {
        let Self { end, factor, root, ranks, .. } = *self;
        if collective.kind == Kind::Barrier {
            return Ok(vec![0]);
        }
        ensure!(root < ranks.max(1), "-r {root}: 0 to {} with {ranks} ranks", ranks.max(1) - 1);
        let (op, dtype) = (self.op, self.dtype);
        ensure!(encoding(dtype, op).is_some(), "-o {op} -d {dtype}: {}", unsupported(dtype, op));
        let (unit, of) = match collective.has_parts {
            true => (element * ranks.max(1) as usize, format!(" for each of {ranks} ranks")),
            false => (element, String::new()),
        };
        let begin = self.begin.unwrap_or(unit.max(8));
        ensure!(begin >= unit, "-b {begin}: at least {unit}, one element{of}");
        ensure!(begin <= end, "-b {begin} is more than -e {end}");
        ensure!(end <= MAX_BYTES, "-e {end}: at most 64G");
        ensure!(factor >= 2 || begin == end, "-f {factor}: at least 2");
        let sizes = std::iter::successors(Some(begin), |s| s.checked_mul(factor.max(2)));
        Ok(sizes.take_while(|s| *s <= end).map(|s| s / unit).collect())
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
            wire: self.wire,
            hierarchy: self.hierarchy,
            secret: Settings::from_environment().secret()?,
            ..CommConfig::new(self.rank, self.ranks, self.ip, bootstrap)
        })
    }
}

fn seconds(option: &str, s: f64) -> Result<Duration> {
    ensure!((0.1..=86_400.0).contains(&s), "{option} {s}: from 0.1 to 86400 seconds");
    Ok(Duration::from_secs_f64(s))
}

/// Bytes, with K, M or G for powers of 1024.
fn parse_size(text: &str) -> Result<usize, NotASize> {
    text.parse().map(|Size(bytes)| bytes as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(command: &str, more: &[&str]) -> Result<Options, clap::Error> {
        let peers = "127.0.0.1,127.0.0.2,127.0.0.3";
        let base = ["netsum-perf", command, "--peers", peers, "--rank", "0", "--ranks", "3"];
        let all = base.iter().chain(&["--ip", "127.0.0.1"]).chain(more);
        parse(all).map(|(_, options)| options)
    }

    fn counts(command: &str, more: &[&str]) -> Result<Vec<usize>> {
        let collective = COMMANDS.iter().find(|c| c.name == command).unwrap();
        options(command, more)?.counts(collective, 4)
    }

    #[test]
    fn sizes_are_multiplied_up() {
        let all_reduce = |more: &[&str]| counts("all_reduce", more).unwrap();
        assert_eq!(all_reduce(&["-b", "8", "-e", "1K", "-f", "4"]), [2, 8, 32, 128]);
        assert_eq!(all_reduce(&["-b", "64M", "-e", "64M"]), [16 << 20]);
        assert_eq!(all_reduce(&["-b", "10", "-e", "20"]), [2, 5]);
        assert_eq!(all_reduce(&["-e", "64"]), [2, 4, 8, 16]);
    }

    #[test]
    fn sizes_are_totals_of_all_parts() {
        for command in ["all_gather", "reduce_scatter", "alltoall"] {
            assert_eq!(counts(command, &["-b", "16", "-e", "64"]).unwrap(), [1, 2, 5]);
            // The default begins with an element for each rank.
            assert_eq!(counts(command, &["-e", "64"]).unwrap(), [1, 2, 4]);
        }
        for command in ["reduce", "broadcast"] {
            assert_eq!(counts(command, &["-b", "16", "-e", "64"]).unwrap(), [4, 8, 16]);
        }
        assert_eq!(counts("barrier", &[]).unwrap(), [0]);
    }

    #[test]
    fn commands_have_aliases_and_types_have_nccl_tests_names() {
        for alias in ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "all_to_all"] {
            options(alias, &[]).unwrap();
        }
        assert_eq!(options("reduce", &["-d", "int32"]).unwrap().dtype, Dtype::I32);
        assert_eq!(options("reduce", &["-o", "avg"]).unwrap().op, Op::Average);
        program().debug_assert();
    }

    #[test]
    fn help_shows_only_the_options_that_a_command_has() {
        for (command, there, absent) in [
            ("all_reduce", "--tensors", "--root"),
            ("reduce", "--root", "--tensors"),
            ("broadcast", "--root", "--op"),
            ("barrier", "--iters", "--check"),
        ] {
            let help = options(command, &["--help"]).unwrap_err().to_string();
            assert!(help.contains(there) && !help.contains(absent), "{help}");
        }
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (command, more, word) in [
            ("all_reduce", &["-b", "1M", "-e", "8"][..], "-b 1048576 is more than -e 8"),
            ("all_reduce", &["-f", "1"], "-f 1"),
            ("all_reduce", &["-b", "0"], "-b 0: at least 4, one element"),
            ("all_reduce", &["-e", "65G"], "at most 64G"),
            ("all_gather", &["-b", "8"], "-b 8: at least 12, one element for each of 3 ranks"),
            ("reduce", &["-r", "3"], "-r 3: 0 to 2 with 3 ranks"),
            ("broadcast", &["-r", "99"], "-r 99: 0 to 2 with 3 ranks"),
            ("all_reduce", &["-d", "int32", "-o", "avg"], "only floats have an average"),
        ] {
            let e = counts(command, more).unwrap_err().to_string();
            assert!(e.contains(word), "{e}");
        }
        for (command, more, word) in [
            ("all_reduce", &["-b", "8X"][..], "must be a number like 65536, 64K"),
            ("all_reduce", &["--iters", "0"], "0 is not in 1.."),
            ("all_reduce", &["--inflight", "0"], "0 is not in 1..=64"),
            ("all_reduce", &["--inflight", "65"], "65 is not in 1..=64"),
            ("all_reduce", &["--inflight", "2", "--tensors", "2"], "cannot be used with"),
            ("all_reduce", &["-r", "0"], "--root is not for all_reduce, but for reduce, broadcast"),
            ("all_reduce", &["-o", "mul"], "'mul'"),
            ("reduce", &["-d", "f8"], "'f8'"),
            ("reduce", &["--tensors", "2"], "--tensors is not for reduce, but for all_reduce"),
            ("broadcast", &["-o", "sum"], "--op is not for broadcast"),
            ("alltoall", &["-o", "avg"], "--op is not for alltoall"),
            ("barrier", &["-b", "8"], "--minbytes is not for barrier"),
            ("barrier", &["-c"], "--check is not for barrier"),
            ("barrier", &["--inflight", "2"], "--inflight is not for barrier"),
            ("sendrecv", &[], "'sendrecv'"),
        ] {
            let e = options(command, more).unwrap_err().to_string();
            assert!(e.contains(word), "{e}");
        }
        let e = options("reduce", &["--timeout", "0"]).unwrap().config().unwrap_err().to_string();
        assert!(e.contains("--timeout 0"), "{e}");
    }
}
