//! A lab to play with, which stands until it is taken down. `cargo xtask lab` runs it, after
//! preparing the machine.

use std::os::unix::process::CommandExt;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser};
use netsum_lab::lab::{self, BoxNode, Host, STANDING, tear_down};
use netsum_lab::netns::Netns;
use netsum_lab::vm::Card;
use netsum_lab::vm::parts::Kernel;
use netsum_lab::{Lab, LabSpec, Rate, cleaner, vm};

/// Network namespaces with hosts and a box, to play with.
#[derive(Parser, Debug)]
#[command(name = "cargo xtask lab", bin_name = "cargo xtask lab")]
enum LabCommand {
    /// Builds a lab that stands until `lab down`.
    Up(UpArgs),
    /// The same with hosts that are virtual machines, with a kernel's Soft-RoCE (rdma_rxe) on their
    /// interfaces.
    Vm(VmArgs),
    /// Removes it with all that runs in it.
    Down,
    /// Runs a command on one of its hosts.
    Exec {
        /// `h0`, `h1` ... (or just the number), `box`, or in a lab with racks `leaf0` ..., and
        /// `spine1` ... with spines.
        host: String,
        /// The command and its arguments.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
}

#[derive(Args, Debug)]
struct UpArgs {
    /// Hosts on the box's ports, in all racks together. Default: 4.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
    hosts: Option<u16>,
    /// MTU of the links in bytes.
    #[arg(long, default_value_t = 1500, value_parser = clap::value_parser!(u32).range(576..=65535))]
    mtu: u32,
    /// Give the hosts IPv6 addresses too.
    #[arg(long)]
    ipv6: bool,
    /// IP addresses on each host.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    ips: u8,
    /// Bandwidth of every host's link, each way, as 100mbit or 2.5gbit. Without it links are as
    /// fast as the machine.
    #[arg(long)]
    rate: Option<Rate>,
    /// Spread the hosts over N racks, each with a box of its own, a leaf; `box` is the spine
    /// between them then.
    #[arg(long, default_value_t = 0)]
    racks: u8,
    /// With --racks: hosts in each, in place of --hosts.
    #[arg(long, requires = "racks", conflicts_with = "hosts", value_parser = clap::value_parser!(u16).range(1..))]
    hosts_per_rack: Option<u16>,
    /// With --racks: spines, each with a link to every leaf: `box`, `spine1` and so on. Leaves send
    /// nothing to further spines by themselves, only what netsum sums there.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    spines: u8,
    /// With --racks: bandwidth of each leaf's link to a spine, each way.
    #[arg(long, requires = "racks")]
    uplink_rate: Option<Rate>,
    /// Wait for Ctrl-C and take the lab down then.
    #[arg(long)]
    wait: bool,
}

#[derive(Args, Debug)]
struct VmArgs {
    /// Virtual machines on the box's ports.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(..=16))]
    hosts: u16,
    /// Hosts on further ports that are network namespaces.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(..=32))]
    namespaces: u16,
    /// The box is a virtual machine, too, with two CPUs. `--hosts 0 --namespaces 3` starts no other
    /// one.
    #[arg(long = "box")]
    box_: bool,
    /// With --box: the network cards that it has, by their driver: igb, virtio_net or vmxnet3.
    #[arg(long, requires = "box_", default_value_t)]
    driver: Card,
    /// The machines' kernel: 6.1, 6.12, or newest, which is that of Debian's testing suite.
    #[arg(long, default_value_t)]
    kernel: Kernel,
    /// MTU of the links in bytes. A path MTU of 2048 needs 2200.
    #[arg(long, default_value_t = 1500, value_parser = clap::value_parser!(u32).range(576..=9000))]
    mtu: u32,
    /// Give the hosts IPv6 addresses too.
    #[arg(long)]
    ipv6: bool,
    /// IP addresses on each host.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    ips: u8,
    /// Wait for Ctrl-C and take the lab down then.
    #[arg(long)]
    wait: bool,
    /// Only fetch and build what the machines with kernels 6.1 and 6.12 boot.
    #[arg(long)]
    prepare: bool,
}

fn main() -> Result<()> {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info"))
        .format_timestamp(None)
        .init();
    match LabCommand::parse() {
        LabCommand::Up(args) => {
            let racks = args.racks.into();
            let per_rack = args.hosts_per_rack.map(|hosts| racks * usize::from(hosts));
            let spec = LabSpec {
                hosts: per_rack.unwrap_or(args.hosts.unwrap_or(4).into()),
                mtu: args.mtu,
                ipv6: args.ipv6,
                ips_per_host: args.ips.into(),
                rate: args.rate,
                racks,
                spines: args.spines.into(),
                uplink: args.uplink_rate,
                ..LabSpec::default()
            };
            up(spec, args.wait)
        }
        // `cargo xtask lab` has prepared the parts already.
        LabCommand::Vm(args) if args.prepare => Ok(()),
        LabCommand::Vm(args) => {
            let spec = LabSpec {
                hosts: (args.hosts + args.namespaces).into(),
                mtu: args.mtu,
                ipv6: args.ipv6,
                ips_per_host: args.ips.into(),
                vms: vec![args.kernel; args.hosts.into()],
                box_vm: args.box_.then_some((args.kernel, args.driver)),
                vm_cpus: if args.box_ { 2 } else { 1 },
                ..LabSpec::default()
            };
            ensure!(spec.hosts > 0, "--hosts 0 needs --namespaces");
            up(spec, args.wait)
        }
        LabCommand::Down => {
            cleaner::clean_stale()?;
            println!(
                "{}",
                if tear_down(STANDING)? { "the lab is gone" } else { "there is no lab" }
            );
            Ok(())
        }
        LabCommand::Exec { host, command } => exec(&host, &command),
    }
}

fn up(spec: LabSpec, wait: bool) -> Result<()> {
    if cleaner::labs().iter().any(|lab| lab == STANDING) {
        bail!("a lab already exists: `cargo xtask lab down` removes it");
    }
    // Ctrl-C removes the lab while it is being built, and with --wait also later: the cleaner does
    // that.
    let lab = Lab::new(LabSpec { name: Some(STANDING.to_owned()), ..spec })?;
    println!("{:<14} {:<8} {:<16} address", "namespace", "port", "interface");
    println!("{:<14} {:<8} {:<16} {}", lab.box_().name(), "", BoxNode::BRIDGE, lab.box_().ip());
    for spine in (1..lab.spec().spines).map(|spine| lab.spine(spine)) {
        println!("{:<14} {:<8} {:<16} {}", spine.name(), "", BoxNode::BRIDGE, spine.ip());
    }
    let mut rack = None;
    for host in lab.hosts() {
        let of = lab.spec().rack(host.number());
        if let Some(of) = of.filter(|of| rack != Some(*of)) {
            let (leaf, port) = (lab.leaf(of), lab.box_().rack_port(of));
            println!("{:<14} {port:<8} {:<16} {}", leaf.name(), BoxNode::UPLINK, leaf.ip());
            for uplink in (1..lab.spec().spines).map(BoxNode::uplink) {
                println!("{:<14} {port:<8} {uplink:<16}", "");
            }
        }
        rack = of;
        let port = lab.box_of(host.number()).port(host.number());
        let interface = if host.vm().is_some() { "eth0 (VM)" } else { Host::INTERFACE };
        println!("{:<14} {port:<8} {interface:<16} {}", host.name(), host.ip(0));
    }
    if wait {
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
    let netns = Netns::open(&format!("{STANDING}-{node}")).with_context(|| {
        format!(
            "no host `{host}`: h0, h1 ..., box, or with racks leaf0 ... and spine1 ..., after \
            `cargo xtask lab up`"
        )
    })?;
    let number = node.strip_prefix('h').and_then(|number| number.parse::<usize>().ok());
    let mut program = match number {
        // A VM's namespace does not have the host's interface.
        Some(number) if netns.ifindex(Host::INTERFACE).is_err() => {
            let box_ = Netns::open(&format!("{STANDING}-box"))?;
            vm::command_at(&box_, lab::host_ip(false, number, 0), &command[0])
        }
        // The bridge is inside the box's virtual machine.
        None if netns.ifindex(BoxNode::BRIDGE).is_err() => {
            vm::command_at(&netns, lab::BOX_AGENT.into(), &command[0])
        }
        _ => netns.free_command(&command[0]),
    };
    let error = program.args(&command[1..]).exec();
    Err(error).with_context(|| format!("cannot run `{}` in {}", command.join(" "), netns.name()))
}
