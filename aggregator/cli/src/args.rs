//! The grammar of the command line.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use netsum_api::arguments::number;
use netsum_api::v1 as api;
use netsum_common::size::Size;
use netsum_core::members::{self, RankRange};

use super::failure::EXIT_STATUS;

const AFTER_HELP: &str = "\
OBJECT := { job | ring | flow | slot | port | stats | prog | spread | tenant | fabric }. `list` is \
`show`. `show` may be omitted, except after `slot` and `fabric`, and every word can be abbreviated \
as long as it is unambiguous: `netsum j s`. `help` works after every object.";

/// Sum gradients inside the network: run the daemon of the box, and administer it.
#[derive(Parser, Debug)]
#[command(
    name = "netsum",
    version,
    infer_subcommands = true,
    override_usage = "netsum [OPTIONS] OBJECT COMMAND
       netsum [OPTIONS] diagnose JOB
       netsum [OPTIONS] path JOB
       netsum [OPTIONS] top
       netsum [OPTIONS] trace [--job JOB]
       netsum [OPTIONS] simulate FILE
       netsum [OPTIONS] check [--config FILE]
       netsum [OPTIONS] plan --topology FILE
       netsum run --config FILE
       netsum fabric run --config FILE",
    subcommand_value_name = "OBJECT",
    subcommand_help_heading = "Objects, and other commands",
    after_help = AFTER_HELP,
    after_long_help =
        format!("{AFTER_HELP}\n\nExit status:\n  {}", EXIT_STATUS.replace('\n', "\n  "))
)]
pub struct Cli {
    /// Print JSON; netsum/schema has its schemas.
    #[arg(short = 'j', long, global = true)]
    pub json: bool,
    /// Print indented JSON.
    #[arg(short = 'p', long, global = true)]
    pub pretty: bool,
    /// The daemon's administration socket.
    #[arg(
        long,
        global = true,
        env = "NETSUM_SOCKET",
        default_value = netsum_api::DEFAULT_SOCKET,
        value_name = "PATH"
    )]
    pub socket: PathBuf,
    /// The object and its command.
    #[command(subcommand)]
    pub command: Command,
}

/// Objects, and the daemon itself.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Manage jobs: groups of ranks that all-reduce together.
    Job {
        /// A command for jobs.
        #[command(subcommand)]
        command: Option<JobCommand>,
    },
    /// Show rings: a job's connections and slots that one CPU of the box serves.
    Ring {
        /// A command for rings.
        #[command(subcommand)]
        command: Option<RingCommand>,
    },
    /// Manage flows: one rank's connection to the next, as the box sees it.
    #[command(alias = "f")]
    Flow {
        /// A command for flows.
        #[command(subcommand)]
        command: Option<FlowCommand>,
    },
    /// Show slots: the box's buffers for fragments.
    #[command(subcommand)]
    Slot(SlotCommand),
    /// Show ports: interfaces towards hosts.
    Port {
        /// A command for ports.
        #[command(subcommand)]
        command: Option<PortCommand>,
    },
    /// Show statistics: counters of the data plane, or their rates.
    #[command(args_conflicts_with_subcommands = true)]
    Stats {
        /// A command for statistics.
        #[command(subcommand)]
        command: Option<StatsCommand>,
        /// Without a command: show.
        #[command(flatten)]
        show: ShowStats,
    },
    /// Show the programs that are loaded into the kernel.
    Prog {
        /// A command for programs.
        #[command(subcommand)]
        command: Option<ProgCommand>,
    },
    /// Show and pin unsummed flows, which a routing box spreads over its uplinks.
    Spread {
        /// A command for these flows.
        #[command(subcommand)]
        command: Option<SpreadCommand>,
    },
    /// Show tenants: their limits, and what they use.
    Tenant {
        /// A command for tenants.
        #[command(subcommand)]
        command: Option<TenantCommand>,
    },
    /// Diagnose a stalled job: watch it for a moment, report the cause and the next step.
    Diagnose(DiagnoseArgs),
    /// Test whether packets get through between a job's ranks. Each rank sends the next one a
    /// packet of the job's path MTU on the bypass connection, with its next heartbeat; operations
    /// continue. Shows which packets were acknowledged, how many of each rank's packets reached the
    /// box, and the cause of losses.
    Path {
        /// The job.
        job: String,
    },
    /// Watch jobs, ranks, rings and ports live: throughput, how long sums take, which rank is last.
    /// `q` quits, `?` shows the keys.
    Top {
        /// Watch a fabric's boxes and links, at its manager's socket: which boxes answer, which
        /// jobs they sum, how loaded the links are.
        #[arg(long)]
        fabric: bool,
    },
    /// Trace single packets and what the box did with each: prints one line for every program that
    /// a packet passes, until interrupted.
    #[command(long_about = TRACE_HELP)]
    Trace(TraceArgs),
    /// Simulate what the box would do with captured frames: run them through a copy of its programs
    /// and maps, and explain the outcome.
    #[command(long_about = SIMULATE_HELP)]
    Simulate(SimulateArgs),
    /// Check whether this machine can run netsum: inspect the kernel, the bridge and its ports, and
    /// give a hint for each problem.
    Check {
        /// The configuration that names the ports.
        #[arg(long, value_name = "FILE", conflicts_with = "bridge")]
        config: Option<PathBuf>,
        /// A bridge, if there is no configuration yet.
        #[arg(long, value_name = "NAME")]
        bridge: Option<String>,
    },
    /// Plan the trees of jobs in a network that a file describes, with their rates and bottlenecks.
    /// Needs no daemon.
    #[command(long_about = PLAN_HELP)]
    Plan(PlanArgs),
    /// Manage several boxes as one: run and query the manager that ranks join at.
    #[command(subcommand)]
    Fabric(FabricCommand),
    /// Run the daemon.
    Run {
        /// Configuration file, such as /etc/netsum/netsum.toml, which explains its settings.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Remove the maps, programs and jobs of an earlier daemon. Connections of its jobs that
        /// are still active then receive each other's data unsummed; an application that does not
        /// verify takes it for sums.
        #[arg(long)]
        reset: bool,
        /// Detach the programs from the ports when the daemon ends, even if jobs are active. Data
        /// then arrives unsummed; an application that does not verify takes it for sums. Without
        /// this option the programs stay as long as connections may still send, and drop their
        /// data; the next daemon takes them over.
        #[arg(long)]
        detach_now: bool,
    },
}

/// `netsum diagnose` and `netsum fabric diagnose`.
#[derive(Args, Debug)]
pub struct DiagnoseArgs {
    /// The job.
    pub job: String,
    /// How long to watch, like 500ms or 2s.
    #[arg(
        long,
        default_value = "1s",
        value_parser = humantime::parse_duration,
        value_name = "TIME"
    )]
    pub watch: Duration,
}

/// Commands of a fabric's manager.
#[derive(Subcommand, Debug)]
pub enum FabricCommand {
    /// Run the manager. Jobs are created, shown and deleted as on a box, over the manager's own
    /// --socket.
    Run {
        /// Configuration file: the boxes, and the links between them.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Show the boxes and the links between them. Needs the manager's --socket, such as
    /// /run/netsum/fabric.sock.
    #[command(visible_alias = "list")]
    Show,
    /// Query all boxes now. Shows for each port the other end of its link, whether LLDP works both
    /// ways, the rate, and both ends' MTUs.
    Probe {
        /// First measure the links that no ring uses. A bandwidth probe crosses each
        /// link in both directions, four times, with at most 2 MiB and for at most a fifth of a
        /// second. Plans use the measured rate if it differs from the known one by more than 10 %.
        #[arg(long)]
        measure: bool,
    },
    /// Drain a box for maintenance: it gets no new rings. Jobs that other boxes can sum move there,
    /// with one pause; the others stay until they end. `fabric show` says when the drain is
    /// complete.
    Drain {
        /// The box.
        #[arg(value_name = "BOX")]
        name: String,
        /// Reason; `fabric show` prints it, and so do the errors of refused jobs.
        #[arg(
            long,
            value_name = "TEXT",
            value_parser = clap::builder::NonEmptyStringValueParser::new()
        )]
        reason: String,
    },
    /// Accept the discovered links with this end. Hosts can forge LLDP, so a discovered link is
    /// unused until you accept it, or until `uplinks` in the manager's file names one of its ends.
    Accept {
        /// The end of the links.
        #[arg(value_name = "BOX/PORT")]
        end: String,
        /// Stop using them.
        #[arg(long)]
        revoke: bool,
    },
    /// Show boxes, hosts and links as a tree, or in the format of a scheduler.
    Topology(TopologyArgs),
    /// Show a job's trees.
    Job {
        #[command(subcommand)]
        command: FabricJobCommand,
    },
    /// Diagnose a stalled job: query each of its boxes, and name the rank, the box or the link.
    Diagnose(DiagnoseArgs),
    /// End a drain: the box gets new rings again.
    Undrain {
        /// The box.
        #[arg(value_name = "BOX")]
        name: String,
    },
}

/// Commands for a job of a fabric.
#[derive(Subcommand, Debug)]
pub enum FabricJobCommand {
    /// Show which boxes sum the job, and for how many of its rings; its fair share of all links, by
    /// the plan for all current jobs; and the load of its links.
    Show {
        /// The job.
        job: String,
    },
}

/// `netsum fabric topology`.
#[derive(Args, Debug)]
pub struct TopologyArgs {
    /// Print for Graphviz: `| dot -Tsvg`.
    #[arg(long, group = "form")]
    pub dot: bool,
    /// Draw boxes and links, with the rates that the boxes know.
    #[arg(long, group = "form")]
    pub svg: bool,
    /// Print Slurm's topology.yaml, for its tree plugin. If a leaf has several boxes above it, this
    /// names the one that is above most leaves.
    #[arg(long, group = "form")]
    pub slurm: bool,
    /// Print node labels for Kueue's topology-aware scheduling, as commands: netsum.dev/block and
    /// netsum.dev/rack.
    #[arg(long, group = "form")]
    pub kueue: bool,
    /// Print a topology for `netsum plan --topology`, with the rates that the boxes know.
    #[arg(long, group = "form")]
    pub plan: bool,
    /// Names of hosts by their MAC addresses, in the format of ethers(5).
    #[arg(long, default_value = "/etc/ethers", value_name = "FILE")]
    pub ethers: PathBuf,
}

const SIMULATE_HELP: &str = "\
Simulate what the box would do with captured frames. Runs each through ingress, aggregate and \
egress, in the file's order, and explains what becomes of it and why.

This does not affect active jobs: it loads the programs once more, with maps of their own, and \
copies rings, flows, states and slots of the running ones into these; it sends nothing. It needs \
root and the ports' network namespace. Programs, everything that they compare packets with, and \
slots are the same as on the box. Slots are copied without a pause, so those of an active ring may \
be from slightly different moments; --fresh starts with empty slots instead. Other things differ: \
frames come one by one, no queue overflows, there is no other CPU, and nobody acknowledges, times \
out or retransmits. Simulation ends where a packet is forwarded, and set-up in band ends at the \
first packet.

A file has the frames but not always their ports. The port of a frame is --port, or the one that \
the file names (pcapng) or --map gives for the file's interface, or that of the flow or rank with \
the frame's source address, or the first. Suitable files come from `netsum trace --program ingress \
--pcap FILE` and `tcpdump -Q in -i PORT -w FILE` on the box. A file from a host also has the box's \
results, which look like contributions of the previous host: capture only what the host sends \
(`tcpdump -Q out`).";

/// `netsum simulate`.
#[derive(Args, Debug)]
pub struct SimulateArgs {
    /// A capture of Ethernet frames, pcap or pcapng; `-` is standard input.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Treat all frames as arriving at this port.
    #[arg(long, value_name = "IFNAME", conflicts_with = "map")]
    pub port: Option<String>,
    /// Treat frames of an interface of the file as arriving at a port: `eth0=port1`. Can be
    /// repeated.
    #[arg(long, value_name = "INTERFACE=PORT", value_parser = pair)]
    pub map: Vec<(String, String)>,
    /// Start with empty slots and no learned MAC addresses, as right after registration of all
    /// flows.
    #[arg(long)]
    pub fresh: bool,
}

const PLAN_HELP: &str = "\
Plan the trees by which jobs would sum in a network that a file describes, with their rates and \
bottlenecks. Needs no daemon.

The file has hosts, boxes and links; the book's chapter on trees explains it. Each job gets its \
max-min fair share of links and CPUs, higher priorities first. It gets the fewest trees found that \
keep 95 % of this share with whole rings: one CPU serves a ring, whose slots come from the pool. \
Rates are those of vectors, without headers. `netsum job create` with --rings as printed and the \
same --mtu, --message-size and --window gets what is planned. Next to a job's rate is the bound of \
the links, without other jobs and without CPUs: the least maximum flow from one member to another.";

/// `netsum plan`.
#[derive(Args, Debug)]
pub struct PlanArgs {
    /// The network, as TOML.
    #[arg(long, value_name = "FILE")]
    pub topology: PathBuf,
    /// A job, its hosts and its priority, which is 0 by default: `train=h0,h1,h2@1`; `train=*` has
    /// all hosts. Can be repeated. Default: one job of all hosts.
    #[arg(long = "job", value_name = "JOB=HOST,..[@PRIORITY]")]
    pub jobs: Vec<String>,
    /// Path MTU of the jobs: the smaller it is, the more of a link's rate headers take.
    #[arg(long, default_value_t = netsum_common::defaults::MTU, value_name = "BYTES")]
    pub mtu: u32,
    /// Largest message of the jobs; with the window it determines the slots of a ring.
    #[arg(long, default_value = netsum_common::defaults::MESSAGE_SIZE, value_name = "SIZE")]
    pub message_size: Size,
    /// Window of each ring, in messages.
    #[arg(long, default_value_t = netsum_common::defaults::WINDOW, value_name = "W")]
    pub window: u32,
    /// Bytes that each job sums, to compute the bytes of each tree.
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
Trace single packets and what the box did with each: prints one line for every program that a \
packet passes, until interrupted.

`ingress` sees a contribution on its port, and steers, drops or forwards it. `aggregate` checks \
and adds it on its ring's CPU. `egress` sees every clone of a result, with the frame that leaves. \
The \
verdict is the names of the counters that counted the packet there, so it agrees with `netsum \
stats`. Ring and slot are shown as they were right after the packet: the lowest index that has not \
been released (low), how many ranks have contributed (has), and how many fragments of the rank are \
missing before it (gap).

A slow reader loses events, never packets; the output says how many were lost. Tracing costs CPU \
time of the ring; on a busy ring, select with --verdict or --program.";

/// `netsum trace`.
#[derive(Args, Debug)]
pub struct TraceArgs {
    /// Trace packets of one job; default: all packets.
    #[arg(long, value_name = "JOB")]
    pub job: Option<String>,
    /// Trace packets of one ring of the job.
    #[arg(long, value_parser = number, value_name = "R", requires = "job")]
    pub ring: Option<u32>,
    /// Trace packets that one rank sends, and the results that it gets.
    #[arg(long, value_parser = number, value_name = "K")]
    pub rank: Option<u32>,
    /// Trace packets with one of these verdicts: counters of `netsum stats`, or `drop`, `pass` or
    /// `work` for all of a kind.
    #[arg(long, value_delimiter = ',', value_name = "COUNTER")]
    pub verdict: Vec<String>,
    /// Trace packets at one program: `ingress`, `aggregate` or `egress`.
    #[arg(long, value_name = "NAME")]
    pub program: Option<String>,
    /// Stop after this many packets.
    #[arg(long, short = 'c', value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Write whole frames to a pcapng file, with the verdict as each packet's comment, instead of
    /// text; `-` is standard output.
    #[arg(long, value_name = "FILE")]
    pub pcap: Option<PathBuf>,
    /// Write only this many bytes of each frame; at least 128, which fits all headers.
    #[arg(
        long,
        value_name = "BYTES",
        requires = "pcap",
        value_parser = clap::value_parser!(u32).range(128..)
    )]
    pub snaplen: Option<u32>,
}

/// Commands for jobs.
#[derive(Subcommand, Debug)]
pub enum JobCommand {
    /// Create a job and reserve its slots.
    Create(Box<api::CreateJobRequest>),
    /// Show one job with its flows, or a summary of all jobs.
    #[command(visible_alias = "list")]
    Show {
        /// The job.
        #[arg(value_name = "JOB")]
        name: Option<String>,
        /// Also show the job's token, which is a secret.
        #[arg(long, requires = "name")]
        show_token: bool,
    },
    /// Empty a job's rings and forget its flows: its application has to reconnect, with other PSNs.
    Restart {
        /// The job.
        #[arg(value_name = "JOB")]
        name: String,
    },
    /// Reconnect the ranks of a running job, all after the same all-reduce.
    Reconnect {
        /// The job.
        #[arg(value_name = "JOB")]
        name: String,
    },
    /// Delete a job. The box drops data that its connections still send, until they have been
    /// silent for an hour.
    Delete {
        /// The job.
        #[arg(value_name = "JOB")]
        name: String,
        /// Forget the job's connections at once, which frees their queue pair numbers. Only safe
        /// after its ranks have ended.
        #[arg(long)]
        forget_connections: bool,
    },
}

/// Commands for flows that are spread over uplinks.
#[derive(Subcommand, Debug)]
pub enum SpreadCommand {
    /// Show the uplinks, their flows, and the bytes that these have sent.
    #[command(visible_alias = "list")]
    Show,
    /// Pin a flow to an uplink. It uses another uplink only while this one lacks a carrier or a
    /// route.
    Pin {
        #[command(flatten)]
        flow: Ends,
        /// The uplink.
        #[arg(value_name = "IFNAME")]
        uplink: String,
    },
    /// Let the box choose a flow's uplink again.
    Unpin {
        #[command(flatten)]
        flow: Ends,
    },
}

/// A flow to UDP port 4791.
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
    /// Show a tenant, or all: limits and use.
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
    /// daemon: on one box, or on each of several boxes that sum one job.
    Peers {
        /// The job.
        job: String,
        /// The addresses of all ranks, in rank order, as given to the ranks.
        #[arg(long, value_delimiter = ',', required = true, value_name = "IP,..")]
        peers: Vec<IpAddr>,
        /// The port of each member of the job on this box, in the order of `netsum job show`. If
        /// this box sums the job alone: the port of each rank. The uplink may be left out.
        #[arg(long, value_delimiter = ',', required = true, value_name = "IFNAME,..")]
        ports: Vec<String>,
        /// The rings of the ranks that the job has here, like 0-1, if this box is the parent of
        /// only some of them. Default: all.
        #[arg(long, value_parser = range, value_name = "FIRST-LAST")]
        rings: Option<RankRange>,
    },
    /// Show the flows of a job, or all, and the packets seen on them.
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
    /// Show the used slots of a job.
    #[command(visible_alias = "list")]
    Show {
        /// The job.
        job: String,
        /// Slots of one ring.
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
    /// One job; default: the whole box.
    #[arg(value_name = "JOB", conflicts_with = "named")]
    pub job: Option<String>,
    /// One job; needed if its name is also that of a command.
    #[arg(long = "job", id = "named", value_name = "JOB")]
    pub named: Option<String>,
    /// Print rates instead of counters, once in each interval, like 1s or 500ms.
    #[arg(long, short = 'i', value_parser = interval, value_name = "TIME")]
    pub interval: Option<Duration>,
    /// Stop after this many intervals.
    #[arg(
        long,
        short = 'c',
        value_name = "N",
        requires = "interval",
        value_parser = clap::value_parser!(u64).range(1..)
    )]
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

/// Two names with `=` between them.
fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((a, b)) if !a.is_empty() && !b.is_empty() => Ok((a.to_owned(), b.to_owned())),
        _ => Err("INTERFACE=PORT is expected, like eth0=port1".into()),
    }
}

fn range(text: &str) -> Result<RankRange, String> {
    match members::groups("--rings", text).map_err(|e| e.to_string())?[..] {
        [group] => Ok(group),
        _ => Err("must be one range of rings, like 0-1".to_owned()),
    }
}

fn interval(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|e| e.to_string())?;
    if (Duration::from_millis(10)..=Duration::from_secs(86_400)).contains(&time) {
        Ok(time)
    } else {
        Err("must be 10ms to 1day".into())
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
