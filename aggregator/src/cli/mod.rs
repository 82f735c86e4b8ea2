//! The command line of `netsum`, in bpftool's grammar: an object, then a command.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`args`] | the grammar |
//! | [`failure`] | why a command failed, and its exit code |
//! | [`client`] | the connection to the daemon |
//! | [`view`] | what is printed as JSON; [`schema`]: its schemas |
//! | [`print`] | text and JSON of each object; [`layout`]: aligned lines |
//! | [`tenants`] | `netsum tenant show` |
//! | [`timing`] | how long sums take and who is last; [`rates`]: `netsum stats --interval` |
//! | [`top`] | `netsum top`; [`report`]: `netsum report` |
//! | [`diagnosis`] | `netsum diagnose` |
//! | [`trace`] | `netsum trace`; [`capture`]: frames in pcapng and pcap files |
//! | [`simulate`] | `netsum simulate` |
//! | [`batch`] | `netsum batch` |

pub mod args;
pub mod batch;
pub mod capture;
pub mod client;
pub mod diagnosis;
pub mod failure;
pub mod layout;
pub mod print;
pub mod rates;
pub mod report;
pub mod schema;
pub mod simulate;
pub mod tenants;
pub mod timing;
pub mod top;
pub mod trace;
pub mod view;

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use netsum_api::v1 as api;

use args::{
    BatchCommand, CreateJob, FlowCommand, JobCommand, PortCommand, ProgCommand, RingCommand, ShowStats,
    SlotCommand, StatsCommand, TenantCommand,
};
pub use args::{Cli, Command};
use client::Client;
use failure::{Failure, Kind, Result};
use print::Format;
use view::Programs;

/// Carries out a command other than `run`, and prints what the daemon answers.
///
/// # Errors
/// Why it failed. With `--json` that is printed already, and the message is empty.
pub async fn execute(cli: Cli, out: &mut impl Write) -> Result<()> {
    let format = Format::new(cli.json, cli.pretty);
    let done = async {
        if let Command::Check { config, bridge } = cli.command {
            return crate::check::run(out, format, config.as_deref(), bridge).await;
        }
        if let Command::Top = cli.command {
            return top::run(&cli.socket).await;
        }
        let mut client = Client::connect(&cli.socket).await?;
        match cli.command {
            Command::Batch(BatchCommand::File { file }) => batch::file(&file, format, &mut client, out).await,
            Command::Trace(args) => trace::run(args, format, &mut client, out).await,
            Command::Simulate(args) => simulate::run(args, format, &mut client, out).await,
            command => one(command, format, &mut client, out).await,
        }
    };
    let Err(failure) = done.await else { return Ok(()) };
    let error = view::Error { error: failure.message.clone(), exit: failure.kind as u8 };
    if !failure.message.is_empty() && format.json(out, &error)? {
        return Err(Failure::new(failure.kind, ""));
    }
    Err(failure)
}

/// Carries out one command.
async fn one(command: Command, format: Format, client: &mut Client, out: &mut impl Write) -> Result<()> {
    match command {
        Command::Run { .. }
        | Command::Batch(_)
        | Command::Check { .. }
        | Command::Top
        | Command::Trace(_)
        | Command::Simulate(_) => {
            let message = "`run`, `batch`, `check`, `top`, `trace` and `simulate` stand alone";
            Err(Failure::new(Kind::Failed, message))
        }
        Command::Job { command: Some(JobCommand::Create(job)) } => {
            print::job(out, format, client.create_job(create_request(job)?).await?)
        }
        Command::Job { command: None | Some(JobCommand::Show { name: None, .. }) } => {
            print::jobs(out, format, client.list_jobs().await?)
        }
        Command::Job { command: Some(JobCommand::Show { name: Some(name), show_token }) } => {
            print::job(out, format, client.show_job(name, show_token).await?)
        }
        Command::Job { command: Some(JobCommand::Restart { name }) } => {
            print::added(out, format, client.restart_job(name).await?)
        }
        Command::Job { command: Some(JobCommand::Renew { name }) } => client.renew_job(name).await,
        Command::Job { command: Some(JobCommand::Delete { name, gone }) } => {
            client.delete_job(name, gone).await
        }
        Command::Ring { command } => {
            let job = command.and_then(|RingCommand::Show { job }| job);
            print::rings(out, format, client.list_rings(job.unwrap_or_default()).await?)
        }
        Command::Flow { command: Some(FlowCommand::Add(f)) } => {
            let flow = api::Flow {
                ring: f.ring,
                rank: f.rank,
                port: f.port,
                src: f.src,
                dst: f.dst,
                qpn: f.qpn,
                psn: f.psn,
                src_mac: f.src_mac,
                seen: None,
            };
            print::added(out, format, client.add_flow(f.job, flow).await?)
        }
        Command::Flow { command: Some(FlowCommand::Show { job: Some(job) }) } => {
            print::flows(out, format, vec![client.show_job(job, false).await?])
        }
        Command::Flow { command: None | Some(FlowCommand::Show { job: None }) } => {
            print::flows(out, format, client.list_jobs().await?)
        }
        Command::Port { command } => {
            let wanted = command.and_then(|PortCommand::Show { port }| port);
            let ports = client.list_ports().await?;
            print::ports(out, format, only(ports, "IFNAME", wanted, |p| &p.name)?)
        }
        Command::Tenant { command } => {
            let wanted = command.and_then(|TenantCommand::Show { tenant }| tenant);
            let all = client.list_tenants().await?;
            tenants::tenants(out, format, only(all, "TENANT", wanted, |t| &t.name)?)
        }
        Command::Slot(SlotCommand::Show { job, ring }) => {
            print::slots(out, format, client.show_slots(job, ring).await?)
        }
        Command::Prog { command } => {
            let wanted = command.and_then(|ProgCommand::Show { program }| program);
            let mut programs = Programs::from(client.list_programs().await?);
            programs.programs = only(programs.programs, "NAME", wanted, |p| &p.name)?;
            print::programs(out, format, programs)
        }
        Command::Diagnose { job, watch } => {
            let watch_ms = u32::try_from(watch.as_millis()).unwrap_or(u32::MAX);
            diagnosis::diagnosis(out, format, client.diagnose(job, watch_ms).await?)
        }
        Command::Report { job, watch, output } => report::run(out, format, client, job, watch, &output).await,
        Command::Stats { command: Some(StatsCommand::Show(show)), .. }
        | Command::Stats { command: None, show } => stats(show, format, client, out).await,
    }
}

/// All objects, or the one with the name that is wanted.
fn only<T>(all: Vec<T>, what: &str, wanted: Option<String>, name: impl Fn(&T) -> &String) -> Result<Vec<T>> {
    let Some(wanted) = wanted else { return Ok(all) };
    let names: Vec<&str> = all.iter().map(|t| name(t).as_str()).collect();
    let message = format!("{what} `{wanted}`: there are {}", names.join(", "));
    let found: Vec<T> = all.into_iter().filter(|t| *name(t) == wanted).collect();
    if found.is_empty() { Err(Failure::new(Kind::NotFound, message)) } else { Ok(found) }
}

fn create_request(c: CreateJob) -> Result<api::CreateJobRequest> {
    let message_size = u32::try_from(c.message_size.0).map_err(|_| {
        let message = format!("--message-size {}: less than 4 GiB is possible", c.message_size);
        Failure::new(Kind::Usage, message)
    })?;
    Ok(api::CreateJobRequest {
        name: c.name,
        ranks: c.ranks,
        dtype: c.dtype,
        mtu: c.mtu,
        message_size,
        window: c.window,
        rings: c.rings,
        icrc: c.icrc,
        order: c.order,
        token: c.token,
        in_band: c.in_band,
        tenant: c.tenant,
    })
}

/// Counters once, or rates time and again.
async fn stats(show: ShowStats, format: Format, client: &mut Client, out: &mut impl Write) -> Result<()> {
    let job = show.job.or(show.named).unwrap_or_default();
    let mut before = client.stats(job.clone()).await?;
    let Some(interval) = show.interval else { return print::stats(out, format, &before, !job.is_empty()) };
    let mut printer = rates::Printer::new(format);
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // The first one comes at once.
    ticks.tick().await;
    let mut left = show.count;
    while left != Some(0) {
        ticks.tick().await;
        let after = client.stats(job.clone()).await?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        printer.print(out, &rates::between(&before, &after, now.as_secs_f64()))?;
        before = after;
        left = left.map(|n| n - 1);
    }
    Ok(())
}
