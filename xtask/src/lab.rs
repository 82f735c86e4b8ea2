//! `cargo xtask lab`: a lab that stands until it is taken down, to play with.

use std::os::unix::process::CommandExt;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use netsum_lab::lab::{BoxNode, Host, STANDING, tear_down};
use netsum_lab::netns::Netns;
use netsum_lab::{Lab, LabSpec, janitor};

use crate::setup;

/// Arguments of `cargo xtask lab`.
#[derive(Args, Debug)]
pub struct LabArgs {
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(Subcommand, Debug)]
enum LabCommand {
    /// Builds a lab that stands until `lab down`.
    Up(UpArgs),
    /// Removes it with all that runs in it.
    Down,
    /// Runs a command on one of its hosts.
    Exec {
        /// `h0`, `h1` ... (or just the number), or `box`.
        host: String,
        /// The command and its arguments.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
}

#[derive(Args, Debug)]
struct UpArgs {
    /// Hosts on the box's ports.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    hosts: u16,
    /// MTU of the links in bytes.
    #[arg(long, default_value_t = 1500, value_parser = clap::value_parser!(u32).range(576..=65535))]
    mtu: u32,
    /// Give the hosts IPv6 addresses too.
    #[arg(long)]
    ipv6: bool,
    /// IP addresses on each host.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    ips: u8,
    /// Wait for Ctrl-C and take the lab down then.
    #[arg(long)]
    wait: bool,
}

/// Runs `cargo xtask lab`.
pub fn run(args: LabArgs) -> Result<()> {
    match args.command {
        LabCommand::Up(args) => up(&args),
        LabCommand::Down => {
            janitor::clean_stale()?;
            println!("{}", if tear_down(STANDING)? { "the lab is gone" } else { "there is no lab" });
            Ok(())
        }
        LabCommand::Exec { host, command } => exec(&host, &command),
    }
}

fn up(args: &UpArgs) -> Result<()> {
    setup::require_lab()?;
    if janitor::labs().iter().any(|lab| lab == STANDING) {
        bail!("there is a lab already; `cargo xtask lab down` removes it");
    }
    // While it is built, and with --wait for good, Ctrl-C removes it: the janitor sees to that.
    let lab = Lab::new(LabSpec {
        hosts: args.hosts.into(),
        mtu: args.mtu,
        ipv6: args.ipv6,
        ips_per_host: args.ips.into(),
        name: Some(STANDING.to_owned()),
        ..LabSpec::default()
    })?;
    println!("{:<14} {:<8} {:<16} address", "namespace", "port", "interface");
    println!("{:<14} {:<8} {:<16} {}", lab.box_().name(), "", BoxNode::BRIDGE, lab.box_().ip());
    for host in lab.hosts() {
        let port = lab.box_().port(host.number());
        println!("{:<14} {port:<8} {:<16} {}", host.name(), Host::INTERFACE, host.ip(0));
    }
    if args.wait {
        println!("Ctrl-C takes it down");
        loop {
            std::thread::park();
        }
    }
    println!("try: cargo xtask lab exec h0 ip address; cargo xtask lab down removes it");
    lab.keep();
    Ok(())
}

fn exec(host: &str, command: &[String]) -> Result<()> {
    let node = if host.parse::<u8>().is_ok() { format!("h{host}") } else { host.to_owned() };
    let netns = Netns::open(&format!("{STANDING}-{node}"))
        .with_context(|| format!("no host `{host}`: h0, h1 ... or box, after `cargo xtask lab up`"))?;
    let error = netns.free_command(&command[0]).args(&command[1..]).exec();
    Err(error).with_context(|| format!("cannot run `{}` in {}", command.join(" "), netns.name()))
}
