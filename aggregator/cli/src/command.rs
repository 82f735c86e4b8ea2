//! The commands that send the daemon one request, once or repeatedly.

use std::io::{BufRead, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::args::{
    Command, DiagnoseArgs, FabricCommand, FabricJobCommand, FlowCommand, JobCommand, PortCommand,
    ProgCommand, RingCommand, ShowStats, SlotCommand, SpreadCommand, StatsCommand, TenantCommand,
};
use crate::client::Client;
use crate::failure::{Failure, Kind, Result};
use crate::format::Format;
use crate::{diagnosis, fabric, path_test, peers, print, rates, spread, tenants, topology, trees};

/// Reads the token from the first line: every user of a machine can see the arguments of a command.
fn token(mut input: impl BufRead) -> Result<String> {
    let mut line = String::new();
    let read = input.read_line(&mut line);
    match line.trim() {
        _ if read.is_err() => {
            Err(Failure::new(Kind::Failed, "--token -: cannot read standard input"))
        }
        "" => Err(Failure::new(Kind::Failed, "--token -: standard input has no token")),
        token => Ok(token.to_owned()),
    }
}

/// Carries out one command.
pub async fn one(
    command: Command,
    format: Format,
    client: &mut Client,
    out: &mut impl Write,
) -> Result<()> {
    match command {
        Command::Run { .. }
        | Command::Fabric(FabricCommand::Run { .. })
        | Command::Check { .. }
        | Command::Plan(_)
        | Command::Top { .. }
        | Command::Trace(_)
        | Command::Simulate(_) => {
            let message = "`run`, `fabric run`, `check`, `plan`, `top`, `trace` and `simulate` \
                           cannot run in this way";
            Err(Failure::new(Kind::Failed, message))
        }
        Command::Job { command: Some(JobCommand::Create(mut job)) } => {
            if job.token == "-" {
                job.token = token(std::io::stdin().lock())?;
            }
            print::job(out, format, client.create_job(*job).await?)
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
        Command::Job { command: Some(JobCommand::Reconnect { name }) } => {
            client.reconnect_job(name).await
        }
        Command::Job { command: Some(JobCommand::Delete { name, forget_connections }) } => {
            client.delete_job(name, forget_connections).await
        }
        Command::Ring { command } => {
            let job = command.and_then(|RingCommand::Show { job }| job);
            print::rings(out, format, client.list_rings(job.unwrap_or_default()).await?)
        }
        Command::Flow { command: Some(FlowCommand::Add { job, flow }) } => {
            print::added(out, format, client.add_flow(job, flow).await?)
        }
        Command::Flow { command: Some(FlowCommand::Peers { job, peers, ports, rings }) } => {
            let shown = client.show_job(job.clone(), false).await?;
            let flows = peers::flows(&shown, &peers, &ports, rings)
                .map_err(|why| Failure::new(Kind::Refused, why))?;
            // A repeated command adds only the flows that are missing after a refusal.
            let missing: Vec<_> =
                flows.into_iter().filter(|f| !peers::is_there(&shown, f)).collect();
            let mut with = shown;
            for flow in missing {
                with = client.add_flow(job.clone(), flow).await?;
            }
            print::added(out, format, with)
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
        Command::Fabric(FabricCommand::Show) => {
            fabric::show(out, format, client.show_fabric(false, false).await?)
        }
        Command::Fabric(FabricCommand::Probe { measure }) => {
            fabric::probe(out, format, client.show_fabric(true, measure).await?, measure)
        }
        Command::Fabric(FabricCommand::Topology(args)) => {
            topology::show(out, format, &args, client.show_fabric(true, false).await?)
        }
        Command::Fabric(FabricCommand::Job { command: FabricJobCommand::Show { job } }) => {
            let fabric = client.show_fabric(false, false).await?;
            trees::show(out, format, &fabric, client.list_jobs().await?, &job)
        }
        Command::Fabric(FabricCommand::Drain { name, reason }) => {
            client.drain_box(name, Some(reason)).await
        }
        Command::Fabric(FabricCommand::Accept { end, revoke }) => {
            client.accept_link(end, revoke).await
        }
        Command::Fabric(FabricCommand::Undrain { name }) => client.drain_box(name, None).await,
        Command::Spread { command: None | Some(SpreadCommand::Show) } => {
            spread::show(out, format, client.show_spread().await?)
        }
        Command::Spread { command: Some(SpreadCommand::Pin { flow, uplink }) } => {
            client.pin_flow(flow, Some(uplink)).await
        }
        Command::Spread { command: Some(SpreadCommand::Unpin { flow }) } => {
            client.pin_flow(flow, None).await
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
            let mut programs = client.list_programs().await?;
            programs.programs = only(programs.programs, "NAME", wanted, |p| &p.name)?;
            print::programs(out, format, programs)
        }
        Command::Diagnose(DiagnoseArgs { job, watch })
        | Command::Fabric(FabricCommand::Diagnose(DiagnoseArgs { job, watch })) => {
            let watch_ms = u32::try_from(watch.as_millis()).unwrap_or(u32::MAX);
            diagnosis::diagnosis(out, format, client.diagnose(job, watch_ms).await?)
        }
        Command::Path { job } => path_test::path_test(out, format, client.path_test(job).await?),
        Command::Stats { command: Some(StatsCommand::Show(show)), .. }
        | Command::Stats { command: None, show } => stats(show, format, client, out).await,
    }
}

/// All objects, or the one with the requested name.
fn only<T>(
    all: Vec<T>,
    what: &str,
    wanted: Option<String>,
    name: impl Fn(&T) -> &String,
) -> Result<Vec<T>> {
    let Some(wanted) = wanted else { return Ok(all) };
    let names: Vec<&str> = all.iter().map(|t| name(t).as_str()).collect();
    let message = format!("{what} `{wanted}` does not exist: there are {}", names.join(", "));
    let found: Vec<T> = all.into_iter().filter(|t| *name(t) == wanted).collect();
    if found.is_empty() { Err(Failure::new(Kind::NotFound, message)) } else { Ok(found) }
}

/// Counters once, or rates repeatedly.
async fn stats(
    show: ShowStats,
    format: Format,
    client: &mut Client,
    out: &mut impl Write,
) -> Result<()> {
    let job = show.job.or(show.named).unwrap_or_default();
    let mut before = client.stats(job.clone()).await?;
    let Some(interval) = show.interval else {
        return print::stats(out, format, &before, !job.is_empty());
    };
    let mut printer = rates::Printer::new(format);
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // The first tick is immediate.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_can_come_by_standard_input() {
        assert_eq!(token(&b"sesame\nmore\n"[..]).unwrap(), "sesame");
        assert!(token(&b"\n"[..]).unwrap_err().to_string().contains("has no token"));
        assert!(token(&b"\xff"[..]).unwrap_err().to_string().contains("cannot read"));
    }
}
