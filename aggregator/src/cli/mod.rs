//! The command line of `netsum`, in bpftool's grammar: an object, then a command.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`client`] | the connection to the daemon |
//! | [`print`] | tables and JSON |
//! | [`diagnosis`] | the same for `netsum diagnose` |

pub mod client;
pub mod diagnosis;
pub mod print;

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use netsum_api::v1 as api;

use crate::size::Size;
use client::Client;
use print::Format;

/// Sums gradients inside the network: the daemon of the box, and its administration.
#[derive(Parser, Debug)]
#[command(name = "netsum", version, infer_subcommands = true)]
pub struct Cli {
    /// Print JSON.
    #[arg(short = 'j', long, global = true)]
    pub json: bool,
    /// Print indented JSON.
    #[arg(short = 'p', long, global = true)]
    pub pretty: bool,
    /// The daemon's administration socket.
    #[arg(long, global = true, env = "NETSUM_SOCKET", default_value = netsum_api::DEFAULT_SOCKET, value_name = "PATH")]
    pub socket: PathBuf,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Objects, and the daemon itself.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run the daemon.
    Run {
        /// Configuration file; see netsum.example.toml.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Drop what a daemon that was killed has left: its jobs end, and their hosts go on with an ordinary ring.
        #[arg(long)]
        reset: bool,
    },
    /// Jobs: ranks that all-reduce together.
    #[command(subcommand)]
    Job(JobCommand),
    /// Flows: one rank's connection to the next, as the box sees it.
    #[command(subcommand)]
    Flow(FlowCommand),
    /// Ports: interfaces towards hosts.
    #[command(subcommand)]
    Port(PortCommand),
    /// Slots: the box's buffers for fragments.
    #[command(subcommand)]
    Slot(SlotCommand),
    /// Why does a job stand still? Watches it for a moment, and says what to do next.
    Diagnose {
        /// The job.
        job: String,
        /// How long to watch, like 500ms or 2s.
        #[arg(long, default_value = "1s", value_parser = humantime::parse_duration, value_name = "TIME")]
        watch: std::time::Duration,
    },
    /// What the data plane has counted.
    Stats {
        /// Of one job; of the whole box without.
        job: Option<String>,
    },
}

/// Commands for jobs.
#[derive(Subcommand, Debug)]
pub enum JobCommand {
    /// Create a job and reserve its slots.
    Create(CreateJob),
    /// List all jobs.
    List,
    /// Show a job with its flows, or all.
    Show {
        /// The job.
        name: Option<String>,
        /// Show the job's token too, which is a secret.
        #[arg(long, requires = "name")]
        show_token: bool,
    },
    /// Delete a job.
    Delete {
        /// The job.
        name: String,
    },
}

/// `netsum job create`.
#[derive(Args, Debug)]
pub struct CreateJob {
    /// Name of the job: a-z, 0-9, `.`, `_`, `-`.
    pub name: String,
    /// Ranks, 2 to 64.
    #[arg(long, value_name = "N")]
    pub ranks: u32,
    /// Type of the numbers that the box adds.
    #[arg(long, default_value = "i32")]
    pub dtype: String,
    /// Path MTU: 256, 512, 1024 or 2048 bytes.
    #[arg(long, default_value_t = 1024, value_name = "BYTES")]
    pub mtu: u32,
    /// Largest message, like 64K.
    #[arg(long, default_value = "64KiB", value_name = "BYTES")]
    pub message_size: Size,
    /// Messages that a rank may send without having their sums.
    #[arg(long, default_value_t = 2, value_name = "W")]
    pub window: u32,
    /// Rings; each is served by one CPU of the box.
    #[arg(long, default_value_t = 1, value_name = "R")]
    pub rings: u32,
    /// `verify` or `ignore` the ICRC of contributions.
    #[arg(long, default_value = "verify")]
    pub icrc: String,
    /// Release results `in-order`, or `relaxed` for senders that retransmit selectively.
    #[arg(long, default_value = "in-order")]
    pub order: String,
    /// Ranks show up by the first packets of their connections, which begin with a header: for applications that nobody can
    /// register. Prints the token that the header has.
    #[arg(long)]
    pub in_band: bool,
    /// What workers must know to join; made up when not given.
    #[arg(long, default_value = "")]
    pub token: String,
}

/// Commands for flows.
#[derive(Subcommand, Debug)]
pub enum FlowCommand {
    /// Register rank K's connection to rank K+1.
    Add(AddFlow),
    /// List the flows of a job.
    #[command(alias = "show")]
    List {
        /// The job.
        job: String,
    },
}

/// `netsum flow add`.
#[derive(Args, Debug)]
pub struct AddFlow {
    /// The job.
    pub job: String,
    /// Ring, from 0.
    #[arg(long, value_parser = number, value_name = "R")]
    pub ring: u32,
    /// Sending rank, from 0.
    #[arg(long, value_parser = number, value_name = "K")]
    pub rank: u32,
    /// Interface that its packets come in on.
    #[arg(long, value_name = "IFNAME")]
    pub port: String,
    /// The sender's address.
    #[arg(long, value_name = "IP")]
    pub src: String,
    /// The receiver's address.
    #[arg(long, value_name = "IP")]
    pub dst: String,
    /// The receiver's queue pair number, decimal or 0x.
    #[arg(long, value_parser = number)]
    pub qpn: u32,
    /// PSN of the first packet, decimal or 0x.
    #[arg(long, value_parser = number)]
    pub psn: u32,
    /// The sender's MAC address; learned from the first verified packet when not given.
    #[arg(long, default_value = "", value_name = "MAC")]
    pub src_mac: String,
}

/// Commands for ports.
#[derive(Subcommand, Debug)]
pub enum PortCommand {
    /// List the ports.
    #[command(alias = "list")]
    Show,
}

/// Commands for slots.
#[derive(Subcommand, Debug)]
pub enum SlotCommand {
    /// Show the slots of a job that are in use.
    #[command(alias = "list")]
    Show {
        /// The job.
        job: String,
        /// Of one ring.
        #[arg(long, value_parser = number, value_name = "R")]
        ring: Option<u32>,
    },
}

/// A number, decimal or hexadecimal.
fn number(text: &str) -> Result<u32, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| "a number is expected, decimal or 0x".into())
}

/// Carries out a command other than `run`, and prints what the daemon answers.
pub async fn execute(cli: Cli, out: &mut impl Write) -> Result<()> {
    let format = Format::new(cli.json, cli.pretty);
    let mut client = Client::connect(&cli.socket).await?;
    match cli.command {
        Command::Run { .. } => unreachable!("the daemon is not a client"),
        Command::Job(JobCommand::Create(c)) => {
            let request = api::CreateJobRequest {
                name: c.name,
                ranks: c.ranks,
                dtype: c.dtype,
                mtu: c.mtu,
                message_size: u32::try_from(c.message_size.0).map_err(|_| {
                    anyhow::anyhow!("--message-size {}: less than 4 GiB is possible", c.message_size)
                })?,
                window: c.window,
                rings: c.rings,
                icrc: c.icrc,
                order: c.order,
                token: c.token,
                in_band: c.in_band,
            };
            print::created(out, format, &client.create_job(request).await?)
        }
        Command::Job(JobCommand::List | JobCommand::Show { name: None, .. }) => {
            print::jobs(out, format, &client.list_jobs().await?)
        }
        Command::Job(JobCommand::Show { name: Some(name), show_token }) => {
            print::job(out, format, &client.show_job(name, show_token).await?)
        }
        Command::Job(JobCommand::Delete { name }) => client.delete_job(name).await,
        Command::Flow(FlowCommand::Add(f)) => {
            let flow = api::Flow {
                ring: f.ring,
                rank: f.rank,
                port: f.port,
                src: f.src,
                dst: f.dst,
                qpn: f.qpn,
                psn: f.psn,
                src_mac: f.src_mac,
            };
            print::added(out, format, &client.add_flow(f.job, flow).await?)
        }
        Command::Flow(FlowCommand::List { job }) => {
            print::flows(out, format, &client.show_job(job, false).await?)
        }
        Command::Port(PortCommand::Show) => print::ports(out, format, &client.list_ports().await?),
        Command::Slot(SlotCommand::Show { job, ring }) => {
            print::slots(out, format, &client.show_slots(job, ring).await?)
        }
        Command::Diagnose { job, watch } => {
            let watch_ms = u32::try_from(watch.as_millis()).unwrap_or(u32::MAX);
            diagnosis::diagnosis(out, format, &client.diagnose(job, watch_ms).await?)
        }
        Command::Stats { job } => print::stats(out, format, &client.stats(job.unwrap_or_default()).await?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammar_is_consistent() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }

    #[test]
    fn numbers_are_decimal_or_hexadecimal() {
        assert_eq!((number("17"), number("0x11")), (Ok(17), Ok(17)));
        assert!(number("seventeen").is_err() && number("-1").is_err() && number("0xg").is_err());
    }
}
