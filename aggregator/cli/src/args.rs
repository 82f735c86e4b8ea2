//! The grammar of the command line.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use netsum_api::arguments::number;
use netsum_api::v1 as api;
use netsum_core::members::{self, Group};
use netsum_core::size::Size;

use super::failure::EXIT_STATUS;

const AFTER_HELP: &str = "\
OBJECT := { job | ring | flow | slot | port | stats | prog | tenant }. `list` is `show`, an object alone is its `show`, and every word \
can be cut short while it stays unique: `netsum j s`. `help` works behind every object.";

/// Sums gradients inside the network: the daemon of the box, and its administration.
#[derive(Parser, Debug)]
#[command(
    name = "netsum",
    version,
    infer_subcommands = true,
    override_usage = "netsum [OPTIONS] OBJECT COMMAND\n       netsum [OPTIONS] batch file FILE\n       netsum [OPTIONS] diagnose JOB\n       netsum [OPTIONS] top\n       netsum [OPTIONS] report JOB -o FILE\n       netsum [OPTIONS] trace [--job JOB]\n       netsum [OPTIONS] simulate FILE\n       netsum [OPTIONS] check [--config FILE]\n       netsum [OPTIONS] plan --topology FILE\n       netsum run --config FILE\n       netsum fabric run --config FILE",
    subcommand_value_name = "OBJECT",
    subcommand_help_heading = "Objects, and other commands",
    after_help = AFTER_HELP,
    after_long_help = format!("{AFTER_HELP}\n\nExit status:\n  {}", EXIT_STATUS.replace('\n', "\n  "))
)]
pub struct Cli {
    /// Print JSON; its schemas are in aggregator/schema.
    #[arg(short = 'j', long, global = true)]
    pub json: bool,
    /// Print indented JSON.
    #[arg(short = 'p', long, global = true)]
    pub pretty: bool,
    /// Say on standard error what is done.
    #[arg(short = 'd', long, global = true)]
    pub debug: bool,
    /// The daemon's administration socket.
    #[arg(long, global = true, env = "NETSUM_SOCKET", default_value = netsum_api::DEFAULT_SOCKET, value_name = "PATH")]
    pub socket: PathBuf,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// A line of a batch file: the command line without its options.
#[derive(Parser, Debug)]
#[command(
    name = "netsum",
    no_binary_name = true,
    infer_subcommands = true,
    disable_version_flag = true
)]
pub struct Line {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Objects, and the daemon itself.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Jobs: ranks that all-reduce together.
    Job {
        /// What to do with them.
        #[command(subcommand)]
        command: Option<JobCommand>,
    },
    /// Rings: a job's connections and slots that one CPU of the box serves.
    Ring {
        /// What to do with them.
        #[command(subcommand)]
        command: Option<RingCommand>,
    },
    /// Flows: one rank's connection to the next, as the box sees it.
    #[command(alias = "f")]
    Flow {
        /// What to do with them.
        #[command(subcommand)]
        command: Option<FlowCommand>,
    },
    /// Slots: the box's buffers for fragments.
    #[command(subcommand)]
    Slot(SlotCommand),
    /// Ports: interfaces towards hosts.
    Port {
        /// What to do with them.
        #[command(subcommand)]
        command: Option<PortCommand>,
    },
    /// Statistics: what the data plane has counted, or counts by the second.
    #[command(args_conflicts_with_subcommands = true)]
    Stats {
        /// What to do with them.
        #[command(subcommand)]
        command: Option<StatsCommand>,
        /// Without a command: show.
        #[command(flatten)]
        show: ShowStats,
    },
    /// Programs: what is loaded into the kernel.
    Prog {
        /// What to do with them.
        #[command(subcommand)]
        command: Option<ProgCommand>,
    },
    /// Flows that are not summed, as a box that routes spreads them over its uplinks.
    Spread {
        /// What to do with them.
        #[command(subcommand)]
        command: Option<SpreadCommand>,
    },
    /// Tenants: whose jobs may have how much.
    Tenant {
        /// What to do with them.
        #[command(subcommand)]
        command: Option<TenantCommand>,
    },
    /// Why does a job stand still? Watches it for a moment, and says what to do next.
    Diagnose {
        /// The job.
        job: String,
        /// How long to watch, like 500ms or 2s.
        #[arg(long, default_value = "1s", value_parser = humantime::parse_duration, value_name = "TIME")]
        watch: Duration,
    },
    /// Jobs, ranks, rings and ports at work, live: throughput, how long sums take, who is last. `q`
    /// ends it, `?` shows the keys.
    Top {
        /// Boxes and links of a fabric, at its manager's socket: which answer, what they sum, what
        /// links carry.
        #[arg(long)]
        fabric: bool,
    },
    /// A job watched for a while, as one HTML file: throughput, how long sums take, how late each
    /// rank comes and who is last, drops by reason.
    Report {
        /// The job.
        job: String,
        /// How long to watch, like 500ms or 1min.
        #[arg(long = "for", default_value = "10s", value_parser = interval, value_name = "TIME")]
        watch: Duration,
        /// The file; `-` is standard output.
        #[arg(short = 'o', long, value_name = "FILE")]
        output: PathBuf,
    },
    /// Single packets, and what the box made of each: one line for every program that a packet
    /// meets, until interrupted.
    #[command(long_about = TRACE_HELP)]
    Trace(TraceArgs),
    /// What would the box do with captured frames? Runs them through a copy of its programs and
    /// maps, and explains.
    #[command(long_about = SIMULATE_HELP)]
    Simulate(SimulateArgs),
    /// Is this machine fit for netsum? Looks at the kernel, the bridge and its ports, and says how
    /// to mend what is wrong.
    Check {
        /// The configuration that names the ports.
        #[arg(long, value_name = "FILE", conflicts_with = "bridge")]
        config: Option<PathBuf>,
        /// A bridge, where there is no configuration yet.
        #[arg(long, value_name = "NAME")]
        bridge: Option<String>,
    },
    /// By which trees would jobs sum in a network that a file describes, how fast, and what holds
    /// them back? Asks no daemon.
    #[command(long_about = PLAN_HELP)]
    Plan(PlanArgs),
    /// Many commands at once.
    #[command(subcommand)]
    Batch(BatchCommand),
    /// Several boxes as one: the manager that ranks join at.
    #[command(subcommand)]
    Fabric(FabricCommand),
    /// Run the daemon.
    Run {
        /// Configuration file; see netsum.example.toml.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Drop what an earlier daemon has left. Connections of its jobs that are still at work get
        /// each other's data unsummed: an application that does not check takes it for sums.
        #[arg(long)]
        reset: bool,
        /// Take the programs off the ports when the daemon is told to end, whoever is at work.
        /// Without this they stay as long as connections may still send, and drop what these send;
        /// the next daemon takes them over. With it, what is sent arrives unsummed, and an
        /// application that does not check takes it for sums.
        #[arg(long)]
        detach_now: bool,
    },
}

/// What a fabric's manager does.
#[derive(Subcommand, Debug)]
pub enum FabricCommand {
    /// Run it. Its jobs are created, shown and deleted as those of a box, on its own --socket.
    Run {
        /// Configuration file: the boxes, and the links between them.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Show its boxes and the links between them. Give the manager's --socket, as
    /// /run/netsum/fabric.sock.
    #[command(visible_alias = "list")]
    Show,
    /// Ask all boxes now: for each port, who is at the other end of its cable, whether both ends
    /// hear each other, the rate, and both ends' MTUs.
    Probe {
        /// Measure links first, those that no job has its rings on: frames in a row go over each,
        /// both ways, 2 MiB and a fifth of a second at most, four times. Plans count with what
        /// comes in where it differs from what is known by more than 10 %.
        #[arg(long)]
        measure: bool,
    },
    /// Empty a box for maintenance: it gets no new rings. Jobs that other boxes can sum move there,
    /// with one pause; the rest end where they are. `fabric show` says when it is drained.
    Drain {
        /// The box.
        #[arg(value_name = "BOX")]
        name: String,
        /// Why, for whoever looks: also jobs that are refused for it are told.
        #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
        reason: String,
    },
    /// Show which boxes are below which, and the hosts below them, as the boxes see them; also for
    /// schedulers.
    Topology(TopologyArgs),
    /// A job's trees.
    Job {
        #[command(subcommand)]
        command: FabricJobCommand,
    },
    /// Why does a job stand still? Asks each of its boxes, and names the rank, the box or the link.
    Diagnose {
        /// The job.
        job: String,
        /// How long to watch, like 500ms or 2s.
        #[arg(long, default_value = "1s", value_parser = humantime::parse_duration, value_name = "TIME")]
        watch: Duration,
    },
    /// Let a box have rings again.
    Undrain {
        /// The box.
        #[arg(value_name = "BOX")]
        name: String,
    },
}

/// What a fabric's manager says of a job.
#[derive(Subcommand, Debug)]
pub enum FabricJobCommand {
    /// Show which boxes sum it, and how many of its rings each; what its share of all links would
    /// be by the plan for all jobs that are there; and what its links carry.
    Show {
        /// The job.
        job: String,
    },
}

/// `netsum fabric topology`.
#[derive(Args, Debug)]
pub struct TopologyArgs {
    /// For Graphviz: `| dot -Tsvg`.
    #[arg(long, group = "form")]
    pub dot: bool,
    /// A picture of boxes and links, with the rates that the boxes know.
    #[arg(long, group = "form")]
    pub svg: bool,
    /// Slurm's topology.yaml, for its tree plugin. Of several boxes above a leaf it has the one
    /// that is above most.
    #[arg(long, group = "form")]
    pub slurm: bool,
    /// Labels of nodes for Kueue's topology-aware scheduling, as commands: netsum.dev/block and
    /// netsum.dev/rack.
    #[arg(long, group = "form")]
    pub kueue: bool,
    /// A topology for `netsum plan --topology`, with the rates that the boxes know.
    #[arg(long, group = "form")]
    pub plan: bool,
    /// Names of hosts by their MAC addresses, as ethers(5) has them.
    #[arg(long, default_value = "/etc/ethers", value_name = "FILE")]
    pub ethers: PathBuf,
}

const SIMULATE_HELP: &str = "\
What would the box do with captured frames? Runs each through ingress, aggregate and egress, in the file's order, and says what \
becomes of it and why.

Jobs at work do not notice: the programs are loaded once more, with maps of their own, into which rings, flows, states and slots of \
the running ones are copied; nothing is sent. So it needs root, and the ports' network namespace. What is as on the box: \
the programs, all that they compare packets with, and the slots, as they were at the moment of copying, which takes no pause \
(of a ring at work, some may be newer than others); --fresh begins with empty slots instead. What is not: frames come one by one, \
with no queue that overflows, no other CPU, and nobody who acknowledges, times out or sends again; what is passed on ends \
there, and set-up in band goes as far as the first packet.

A file says what came by, not always where. The port of a frame is --port, or the port that the file names (pcapng) or --map \
gives for the file's interface, or that of the flow or rank with the frame's source address, or the first. `netsum trace --program \
ingress --pcap FILE` and `tcpdump -Q in -i PORT -w FILE` on the box make files that fit. A file from a host has the box's results in it too, \
which look like contributions of the host before it: take only what the host sends (`tcpdump -Q out`).";

/// `netsum simulate`.
#[derive(Args, Debug)]
pub struct SimulateArgs {
    /// A capture of Ethernet frames, pcap or pcapng; `-` is standard input.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// All frames come in by this port.
    #[arg(long, value_name = "IFNAME", conflicts_with = "map")]
    pub port: Option<String>,
    /// Frames of an interface of the file come in by a port: `eth0=port1`. May be given several
    /// times.
    #[arg(long, value_name = "INTERFACE=PORT", value_parser = pair)]
    pub map: Vec<(String, String)>,
    /// Begin with empty slots and no learned MAC addresses, as right after all flows were there.
    #[arg(long)]
    pub fresh: bool,
}

const PLAN_HELP: &str = "\
By which trees would jobs sum in a network that a file describes, how fast, and what holds them back? Asks no daemon.

The file has hosts, boxes and links; the book's chapter on trees explains it. Each job gets its max-min fair share of links and CPUs, \
those of a higher priority first, and the fewest trees that were found to keep 95 % of it by whole rings: a ring is served by one CPU \
and takes its slots from the pool. Rates are those of vectors, without headers. `netsum job create` with the same --rings, --mtu, \
--message-size and --window gets what is planned. Beside a job's rate stands what the links alone would allow, were no other job there and \
no CPU: the least maximum flow from one member to another.";

/// `netsum plan`.
#[derive(Args, Debug)]
pub struct PlanArgs {
    /// The network, as TOML.
    #[arg(long, value_name = "FILE")]
    pub topology: PathBuf,
    /// A job, its hosts and its priority, which is 0 without: `train=h0,h1,h2@1`; `train=*` has all
    /// hosts. May be given several times. Without: one job of all hosts.
    #[arg(long = "job", value_name = "JOB=HOST,..[@PRIORITY]")]
    pub jobs: Vec<String>,
    /// Path MTU of the jobs: packets have headers, so links carry less where it is small.
    #[arg(long, default_value_t = 1024, value_name = "BYTES")]
    pub mtu: u32,
    /// Largest message of the jobs; slots of a ring follow from it and from the window.
    #[arg(long, default_value = netsum_core::job::MESSAGE_SIZE, value_name = "SIZE")]
    pub message_size: Size,
    /// Messages of a window, in each ring.
    #[arg(long, default_value_t = netsum_core::job::WINDOW, value_name = "W")]
    pub window: u32,
    /// How much each job sums, to say how many bytes go to each tree.
    #[arg(long, default_value = "64MiB", value_name = "SIZE")]
    pub bytes: Size,
    /// Print the trees for Graphviz.
    #[arg(long, conflicts_with = "svg")]
    pub dot: bool,
    /// Print the trees as a picture.
    #[arg(long)]
    pub svg: bool,
}

const TRACE_HELP: &str = "\
Single packets, and what the box made of each: one line for every program that a packet meets, until interrupted.

A contribution is seen by `ingress` on its port (steered, dropped or passed on) and by `aggregate` on its ring's CPU, where it \
is checked and added; every clone of a result by `egress`, with the frame that leaves. The verdict is the names of the counters that \
counted the packet there, so lines and `netsum stats` agree. How ring and slot are is shown as it was right afterwards: the lowest index \
that has not been released (low), how many ranks have contributed (has), how many fragments of the rank are missing before it (gap).

Who cannot keep up loses events, never packets, and is told how many. Tracing costs the ring's CPU time; on a busy ring, ask \
for a --verdict or a --program.";

/// `netsum trace`.
#[derive(Args, Debug)]
pub struct TraceArgs {
    /// Of one job; everything that comes by without.
    #[arg(long, value_name = "JOB")]
    pub job: Option<String>,
    /// Of one ring of the job.
    #[arg(long, value_parser = number, value_name = "R", requires = "job")]
    pub ring: Option<u32>,
    /// What one rank sends, and the results that it gets.
    #[arg(long, value_parser = number, value_name = "K")]
    pub rank: Option<u32>,
    /// With one of these verdicts: counters of `netsum stats`, or `drop`, `pass` or `work` for all
    /// of a kind.
    #[arg(long, value_delimiter = ',', value_name = "COUNTER")]
    pub verdict: Vec<String>,
    /// As one program sees them: `ingress`, `aggregate` or `egress`.
    #[arg(long, value_name = "NAME")]
    pub program: Option<String>,
    /// End after so many.
    #[arg(long, short = 'c', value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Write whole frames to a pcapng file, with the verdict as each packet's comment, in place of
    /// text; `-` is standard output.
    #[arg(long, value_name = "FILE")]
    pub pcap: Option<PathBuf>,
    /// Of each frame only so many bytes; 128, which all headers fit, at least.
    #[arg(long, value_name = "BYTES", requires = "pcap", value_parser = clap::value_parser!(u32).range(128..))]
    pub snaplen: Option<u32>,
}

/// Commands for jobs.
#[derive(Subcommand, Debug)]
pub enum JobCommand {
    /// Create a job and reserve its slots.
    Create(Box<api::CreateJobRequest>),
    /// Show a job with its flows, or all.
    #[command(visible_alias = "list")]
    Show {
        /// The job.
        #[arg(value_name = "JOB")]
        name: Option<String>,
        /// Show the job's token too, which is a secret.
        #[arg(long, requires = "name")]
        show_token: bool,
    },
    /// Empty a job's rings and forget its flows: its application connects anew, with other PSNs.
    Restart {
        /// The job.
        #[arg(value_name = "JOB")]
        name: String,
    },
    /// Have a job's ranks connect anew while they are at work, all after the same all-reduce.
    Renew {
        /// The job.
        #[arg(value_name = "JOB")]
        name: String,
    },
    /// Delete a job. Data that its connections still send is dropped, until nothing has come on
    /// them for an hour.
    Delete {
        /// The job.
        #[arg(value_name = "JOB")]
        name: String,
        /// Its ranks have ended: forget their connections at once, so that their queue pair numbers
        /// can be used for others.
        #[arg(long)]
        gone: bool,
    },
}

/// Commands for flows that are spread over uplinks.
#[derive(Subcommand, Debug)]
pub enum SpreadCommand {
    /// Show the uplinks, their flows, and what these have sent.
    #[command(visible_alias = "list")]
    Show,
    /// Have a flow go by an uplink from now on; by another one only when that has no carrier or no
    /// route.
    Pin {
        #[command(flatten)]
        flow: Ends,
        /// The uplink.
        #[arg(value_name = "IFNAME")]
        uplink: String,
    },
    /// Leave a flow to the box again.
    Unpin {
        #[command(flatten)]
        flow: Ends,
    },
}

/// What tells flows to UDP port 4791 apart.
#[derive(Args, Debug)]
pub struct Ends {
    /// The sender's address.
    pub src: String,
    /// Its UDP source port.
    pub src_port: u16,
    /// The receiver's address.
    pub dst: String,
}

/// Commands for tenants.
#[derive(Subcommand, Debug)]
pub enum TenantCommand {
    /// Show a tenant, or all: limits, and what is in use.
    #[command(visible_alias = "list")]
    Show {
        /// The tenant.
        #[arg(value_name = "TENANT")]
        tenant: Option<String>,
    },
}

/// Commands for rings.
#[derive(Subcommand, Debug)]
pub enum RingCommand {
    /// Show the rings of a job, or all: their CPU, and how full they are.
    #[command(visible_alias = "list")]
    Show {
        /// The job.
        job: Option<String>,
    },
}

/// Commands for flows.
#[derive(Subcommand, Debug)]
pub enum FlowCommand {
    /// Register rank K's connection to rank K+1.
    Add {
        /// The job.
        job: String,
        /// The flow.
        #[command(flatten)]
        flow: api::Flow,
    },
    /// Register the connections of netsum's own ranks that were started with --peers, without a
    /// daemon: on each of several boxes that sum for one job, or on one.
    Peers {
        /// The job.
        job: String,
        /// The addresses of all ranks, in rank order: as the ranks have them.
        #[arg(long, value_delimiter = ',', required = true, value_name = "IP,..")]
        peers: Vec<IpAddr>,
        /// The port of each member of the job here, in the order that `netsum job show` has them.
        /// Of a job that this box sums alone, that of each rank. The way up may be left out.
        #[arg(long, value_delimiter = ',', required = true, value_name = "IFNAME,..")]
        ports: Vec<String>,
        /// Which of the ranks' rings the job's here are, where this box is the parent of a part of
        /// them, like 0-1. Not given: all.
        #[arg(long, value_parser = range, value_name = "FIRST-LAST")]
        rings: Option<Group>,
    },
    /// Show the flows of a job, or all, and what has come on them.
    #[command(visible_alias = "list")]
    Show {
        /// The job.
        job: Option<String>,
    },
}

/// Commands for ports.
#[derive(Subcommand, Debug)]
pub enum PortCommand {
    /// Show a port, or all.
    #[command(visible_alias = "list")]
    Show {
        /// The port.
        #[arg(value_name = "IFNAME")]
        port: Option<String>,
    },
}

/// Commands for slots.
#[derive(Subcommand, Debug)]
pub enum SlotCommand {
    /// Show the slots of a job that are in use.
    #[command(visible_alias = "list")]
    Show {
        /// The job.
        job: String,
        /// Of one ring.
        #[arg(long, value_parser = number, value_name = "R")]
        ring: Option<u32>,
    },
}

/// Commands for statistics.
#[derive(Subcommand, Debug)]
pub enum StatsCommand {
    /// Show counters, or rates with `--interval`.
    #[command(visible_alias = "list")]
    Show(ShowStats),
}

/// `netsum stats`.
#[derive(Args, Debug)]
pub struct ShowStats {
    /// Of one job; of the whole box without.
    #[arg(value_name = "JOB", conflicts_with = "named")]
    pub job: Option<String>,
    /// The same, for jobs with the name of a command.
    #[arg(long = "job", id = "named", value_name = "JOB")]
    pub named: Option<String>,
    /// Rates in place of counters, again and again after so long, like 1s or 500ms.
    #[arg(long, short = 'i', value_parser = interval, value_name = "TIME")]
    pub interval: Option<Duration>,
    /// End after so many intervals.
    #[arg(long, short = 'c', value_name = "N", requires = "interval", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
}

/// Commands for programs.
#[derive(Subcommand, Debug)]
pub enum ProgCommand {
    /// Show a program, or all.
    #[command(visible_alias = "list")]
    Show {
        /// The program.
        #[arg(value_name = "NAME")]
        program: Option<String>,
    },
}

/// Where many commands come from.
#[derive(Subcommand, Debug)]
pub enum BatchCommand {
    /// Carry out the commands of a file, one in a line, until one fails. `#` begins a comment.
    File {
        /// The file; `-` is standard input.
        file: PathBuf,
    },
}

/// Two names with `=` between them.
fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((a, b)) if !a.is_empty() && !b.is_empty() => Ok((a.to_owned(), b.to_owned())),
        _ => Err("INTERFACE=PORT is expected, like eth0=port1".into()),
    }
}

fn range(text: &str) -> Result<Group, String> {
    match members::groups("--rings", text).map_err(|e| e.to_string())?[..] {
        [group] => Ok(group),
        _ => Err("one range of rings is possible".to_owned()),
    }
}

fn interval(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|e| e.to_string())?;
    if (Duration::from_millis(10)..=Duration::from_secs(86_400)).contains(&time) {
        Ok(time)
    } else {
        Err("10ms to 1day are possible".into())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn parsed(line: &str) -> Command {
        Cli::try_parse_from(line.split(' ')).unwrap_or_else(|e| panic!("{line}: {e}")).command
    }

    #[test]
    fn the_grammar_is_consistent() {
        Cli::command().debug_assert();
        Line::command().debug_assert();
    }

    #[test]
    fn show_and_list_and_an_object_alone_and_prefixes_are_the_same() {
        for line in ["netsum j s", "netsum job list", "netsum jo l", "netsum -j job show"] {
            assert!(
                matches!(
                    parsed(line),
                    Command::Job { command: Some(JobCommand::Show { name: None, .. }) }
                ),
                "{line}"
            );
        }
        assert!(matches!(parsed("netsum job"), Command::Job { command: None }));
        for line in ["netsum po s", "netsum port list", "netsum port show"] {
            assert!(
                matches!(
                    parsed(line),
                    Command::Port { command: Some(PortCommand::Show { port: None }) }
                ),
                "{line}"
            );
        }
        for line in ["netsum te", "netsum te s vision", "netsum tenant list"] {
            assert!(matches!(parsed(line), Command::Tenant { .. }), "{line}");
        }
        // A tenant, top or trace?
        let error = Cli::try_parse_from(["netsum", "t"]).map(drop).unwrap_err().to_string();
        assert!(["tenant", "top", "trace"].iter().all(|name| error.contains(name)), "{error}");
        for line in [
            "netsum ri l",
            "netsum pr s",
            "netsum pl --topology f",
            "netsum f l app",
            "netsum sl s app",
            "netsum sta s app",
        ] {
            parsed(line);
        }
    }

    #[test]
    fn statistics_take_a_job_with_and_without_a_command() {
        let job = |line: &str| match parsed(line) {
            Command::Stats { command: Some(StatsCommand::Show(show)), .. }
            | Command::Stats { command: None, show } => show.job.or(show.named),
            other => panic!("{other:?}"),
        };
        for line in [
            "netsum stats train",
            "netsum stats show train",
            "netsum stats --job train",
            "netsum stats list --job train",
            "netsum stats --interval 1s --job train --count 3",
        ] {
            assert_eq!(job(line).as_deref(), Some("train"), "{line}");
        }
        assert_eq!(job("netsum stats --job show").as_deref(), Some("show"));
        for wrong in
            ["netsum stats --interval 0s", "netsum stats --count 3", "netsum stats a --job b"]
        {
            assert!(Cli::try_parse_from(wrong.split(' ')).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_prefix_of_two_words_is_refused_with_both() {
        let error = Cli::try_parse_from(["netsum", "s", "show"]).unwrap_err().to_string();
        assert!(error.contains("slot") && error.contains("stats"), "{error}");
    }
}
