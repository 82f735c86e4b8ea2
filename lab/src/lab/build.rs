//! Builds a lab: the lines for `ip`, and the virtual machines.
//!
//! `ip -batch` does the work, with one process for each namespace, and each line can be tried by
//! hand. With a netlink crate, links, addresses, bridge options and namespaces take several times
//! the code.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::{BoxNode, LabSpec};
use crate::netns::{self, Netns};
use crate::topology;
use crate::vm::parts::Kernel;
use crate::vm::{Vm, VmSpec};

/// Starts the virtual machines, and waits until all have booted.
pub(super) fn boot(spec: &LabSpec, prefix: &str) -> Result<Vec<Vm>> {
    let box_ = Netns::open(&format!("{prefix}-box"))?;
    let start = |(i, &kernel): (usize, &Kernel)| {
        let taps = if spec.has_wire() { "wire".to_owned() } else { spec.box_of(i) };
        let taps = Netns::open(&format!("{prefix}-{taps}"))?;
        Vm::start(&VmSpec {
            kernel,
            cpus: spec.vm_cpus,
            memory: spec.vm_memory,
            tap: (&taps, tap(spec, i)),
            cards: None,
            lab: &box_,
            mac: mac(i),
            mtu: spec.mtu,
            addresses: addresses(spec, i, false),
            disk: false,
            line: "",
        })
    };
    let mut vms = spec.vms.iter().enumerate().map(start).collect::<Result<Vec<_>>>()?;
    vms.iter_mut().try_for_each(Vm::wait)?;
    Ok(vms)
}

/// Starts the box's virtual machine, if it is one, and sets up its bridge, unless the owner does
/// that.
pub(super) fn boot_box(spec: &LabSpec, prefix: &str) -> Result<Option<Vm>> {
    let Some((kernel, card)) = spec.box_vm else { return Ok(None) };
    let box_ = Netns::open(&format!("{prefix}-box"))?;
    let mut vm = Vm::start(&VmSpec {
        kernel,
        cpus: spec.vm_cpus,
        memory: spec.vm_memory,
        tap: (&box_, AGENT.to_owned()),
        cards: Some((card, (0..spec.hosts).map(|i| format!("card{i}")).collect())),
        lab: &box_,
        mac: mac(0xfd),
        mtu: 1500,
        addresses: vec![(BOX_AGENT.into(), 16)],
        disk: spec.box_debian,
        line: &spec.box_line,
    })?;
    vm.wait()?;
    if spec.box_debian {
        return Ok(Some(vm));
    }
    let mut lines = bridge_line();
    for i in 0..spec.hosts {
        lines += &format!(
            "link set eth{} name port{i} mtu {}\nlink set port{i} master br0\n",
            i + 1,
            spec.mtu
        );
        lines += &up(&format!("port{i}"));
    }
    lines += &box_addresses(spec);
    if spec.box_line.contains("ipv6.disable=1") {
        lines = lines
            .lines()
            .filter(|l| !l.contains("addrgenmode"))
            .map(|l| format!("{l}\n"))
            .collect();
    }
    batch(&mut vm.command("/usr/bin/ip"), &lines)?;
    Ok(Some(vm))
}

/// The interface through which the lab reaches a box that is a virtual machine.
const AGENT: &str = "agent";
/// The machine's address on that interface.
pub const BOX_AGENT: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);

/// The line that makes the box's bridge.
pub(crate) fn bridge_line() -> String {
    format!("link add {} address 02:00:00:00:00:fe {BRIDGE}\n", BoxNode::BRIDGE)
}

/// The lines that start the box's bridge and give it its addresses.
fn box_addresses(spec: &LabSpec) -> String {
    let v6 = if spec.ipv6 { "address add fd00::fe/64 dev br0 nodad\n" } else { "" };
    up("br0") + "address add 10.0.0.254/16 dev br0\n" + v6
}

/// A box's own address; `None` is the first spine or the only box.
pub(crate) fn box_ip(number: Option<usize>) -> IpAddr {
    IpAddr::V4(
        number.map_or(Ipv4Addr::new(10, 0, 0, 254), |n| Ipv4Addr::new(10, 0, 253, n as u8 + 1)),
    )
}

/// Options of a bridge.
pub(crate) const BRIDGE: &str = "type bridge stp_state 0 forward_delay 0 mcast_snooping 0";

/// The other end of a virtual machine's interface: the box's port, or an end of the fault-injecting
/// link.
fn tap(spec: &LabSpec, host: usize) -> String {
    format!("{}{host}", if spec.has_wire() { "up" } else { "port" })
}

/// A host's addresses, with the lengths of their prefixes.
fn addresses(spec: &LabSpec, host: usize, routed: bool) -> Vec<(IpAddr, u8)> {
    let of = |k: usize| {
        let v6 = spec.ipv6.then(|| (host_ipv6(routed, host, k), 64));
        std::iter::once((host_ip(routed, host, k), 16)).chain(v6)
    };
    (0..spec.ips_per_host).flat_map(of).collect()
}

/// Second byte of IPv4 addresses and fourth word of IPv6 addresses, at the bridge or behind the
/// router.
pub(crate) fn network(routed: bool) -> u8 {
    if routed { 100 } else { 0 }
}

pub(crate) fn mac(host: usize) -> String {
    format!("02:00:00:00:00:{:02x}", host + 1)
}

/// The `k`-th IPv4 address of a host, at the bridge or behind the router.
pub fn host_ip(routed: bool, host: usize, k: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, network(routed), k as u8, host as u8 + 1))
}

pub(crate) fn host_ipv6(routed: bool, host: usize, k: usize) -> IpAddr {
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, network(routed).into(), 0, 0, k as u16, host as u16 + 1))
}

/// Creates namespaces, links and addresses.
pub(super) fn build(spec: &LabSpec, prefix: &str) -> Result<()> {
    let hosts = 0..spec.hosts;
    let mtu = spec.mtu;
    let mut namespaces = format!("netns add {prefix}-box\n");
    if spec.has_wires() {
        namespaces += &format!("netns add {prefix}-wire\n");
    }
    for i in 0..spec.hosts + spec.routed {
        namespaces += &format!("netns add {prefix}-h{i}\n");
    }
    for number in spec.boxes() {
        namespaces += &format!("netns add {prefix}-{}\n", spec.node(Some(number)));
    }
    ip_batch(None, &namespaces)?;

    if spec.has_wire() {
        let mut wire = String::from("link set lo up\n");
        for i in hosts.clone() {
            wire += &towards_host(spec, prefix, i);
            let box_ = format!("{prefix}-{}", spec.box_of(i));
            wire += &veth(&format!("down{i}"), &format!("port{i}"), mtu, &box_);
            if spec.rate.is_none() {
                wire += &format!("link add cable{i} {BRIDGE}\n");
                wire +=
                    &format!("link set up{i} master cable{i}\nlink set down{i} master cable{i}\n");
                wire += &up(&format!("cable{i}"));
            }
            wire += &(up(&format!("up{i}")) + &up(&format!("down{i}")));
        }
        ip_batch(Some(&format!("{prefix}-wire")), &wire)?;
    }
    let mut box_ = String::from("link set lo up\n");
    if spec.box_vm.is_none() {
        box_ += &bridge_line();
    }
    for i in hosts.clone().filter(|_| spec.racks == 0) {
        if !spec.has_wire() {
            box_ += &towards_host(spec, prefix, i);
        }
        let mut bridge = "br0".to_owned();
        if let Some((_, card)) = spec.box_vm {
            bridge = format!("pair{i}");
            let queues = if card.queues() > 1 { " multi_queue" } else { "" };
            box_ += &format!(
                "link add {bridge} {BRIDGE}\n{}",
                new_tap(&format!("card{i}"), queues, spec.mtu)
            );
            box_ += &format!(
                "link set card{i} master {bridge}\n{}",
                up(&format!("card{i}")) + &up(&bridge)
            );
        }
        box_ += &format!("link set port{i} master {bridge}\n{}", up(&format!("port{i}")));
        if spec.box_vm.is_some() && i < spec.vms.len() {
            // The route to the agent in that host, which bypasses the box.
            let here = format!("10.0.254.{}", i + 1);
            box_ += &format!("address add {here}/32 dev {bridge}\n");
            box_ += &format!("route add {}/32 dev {bridge} src {here}\n", host_ip(false, i, 0));
        }
    }
    if spec.box_vm.is_some() {
        box_ += &(new_tap(AGENT, "", 1500) + &up(AGENT));
        box_ += &format!("address add 10.1.0.254/16 dev {AGENT}\n");
    } else {
        box_ += &box_addresses(spec);
    }
    ip_batch(Some(&format!("{prefix}-box")), &box_)?;
    topology::racks(spec, prefix)?;
    if spec.box_vm.is_some() {
        // Each bridge must answer for its own address only: the machine has all of these bridges.
        let file = "/proc/sys/net/ipv4/conf/all/arp_ignore";
        Netns::open(&format!("{prefix}-box"))?.enter(|| std::fs::write(file, "1").context(file))?;
    }

    for i in hosts {
        let (is_vm, host_node) = (i < spec.vms.len(), format!("h{i}"));
        if !is_vm {
            let host =
                String::from("link set lo up\n") + &up("eth0") + &address_lines(spec, i, false);
            ip_batch(Some(&format!("{prefix}-{host_node}")), &host)?;
        }
        // A veth's peer must poll (NAPI), or frames that XDP redirects to it vanish; GRO enables
        // polling.
        let (mut ends, box_) = (Vec::new(), spec.box_of(i));
        if spec.has_wire() || !is_vm {
            ends.push((&*box_, format!("port{i}")));
        }
        if !is_vm {
            ends.push((&host_node, "eth0".to_owned()));
        }
        if spec.has_wire() {
            ends.push(("wire", format!("down{i}")));
        }
        if spec.has_wire() && !is_vm {
            ends.push(("wire", format!("up{i}")));
        }
        for (node, interface) in ends {
            let mut ethtool = Netns::open(&format!("{prefix}-{node}"))?.command("ethtool");
            // Behind an interface with TCP segmentation offload, a veth hands packets to its CPU's
            // backlog and does not poll (`veth_skb_is_eligible_for_gro`). Then two CPUs can reorder
            // packets, which a real link never does.
            ethtool.args(["-K", &interface, "gro", "on", "tso", "off"]);
            if spec.cables && interface == "eth0" {
                // A redirect loses the note that a checksum has still to be computed, and so it is
                // computed at once.
                ethtool.args(["tx", "off"]);
            }
            if !spec.tagged.is_empty() {
                // On a real link, tags are in the frames; a veth may keep them beside the frames,
                // where XDP programs do not see them.
                ethtool.args(["txvlan", "off"]);
            }
            netns::output(&mut ethtool)?;
        }
    }
    if let Some(rate) = spec.rate {
        topology::shape(spec, prefix, rate)?;
    }
    if spec.routes {
        topology::route_racks(spec, prefix)?;
    }
    if spec.routed > 0 { topology::route(spec, prefix) } else { Ok(()) }
}

/// The lines that add a host's addresses.
pub(crate) fn address_lines(spec: &LabSpec, host: usize, routed: bool) -> String {
    let mut lines = String::new();
    for (ip, len) in addresses(spec, host, routed) {
        let nodad = if ip.is_ipv6() { " nodad" } else { "" };
        lines += &format!("address add {ip}/{len} dev eth0{nodad}\n");
    }
    lines
}

/// The lines that make a host's link: a veth pair with the host's `eth0`, or a tap for QEMU.
pub(crate) fn towards_host(spec: &LabSpec, prefix: &str, i: usize) -> String {
    let (here, mtu) = (tap(spec, i), spec.mtu);
    if i < spec.vms.len() {
        return new_tap(&here, "", mtu);
    }
    veth(&here, &format!("eth0 address {}", mac(i)), mtu, &format!("{prefix}-h{i}"))
}

/// The lines that make a tap device. Its queue holds a window's packets.
fn new_tap(name: &str, options: &str, mtu: u32) -> String {
    format!(
        "tuntap add dev {name} mode tap vnet_hdr{options}\nlink set {name} mtu {mtu} txqueuelen \
         8192\n"
    )
}

/// The line that makes a veth pair: `here`, and `there` (a name, optionally with options) in
/// another namespace.
pub(crate) fn veth(here: &str, there: &str, mtu: u32, namespace: &str) -> String {
    format!("link add {here} mtu {mtu} type veth peer name {there} mtu {mtu} netns {namespace}\n")
}

/// The lines that start an interface, without a link-local address to reduce unrelated traffic.
pub(crate) fn up(interface: &str) -> String {
    format!("link set {interface} addrgenmode none\nlink set {interface} up\n")
}

/// Runs lines of `ip` commands in a namespace, or in the present one.
pub(crate) fn ip_batch(namespace: Option<&str>, lines: &str) -> Result<()> {
    let mut ip = Command::new("ip");
    if let Some(namespace) = namespace {
        ip.args(["-n", namespace]);
    }
    batch(&mut ip, lines).with_context(|| format!("in {}", namespace.unwrap_or("our namespace")))
}

/// Passes lines of commands to `ip`.
fn batch(ip: &mut Command, lines: &str) -> Result<()> {
    let mut ip = ip
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start `ip` (Debian package iproute2)")?;
    // If the write fails, `ip` reports it.
    let _ = ip.stdin.take().map(|mut stdin| stdin.write_all(lines.as_bytes()));
    let out = ip.wait_with_output()?;
    if !out.status.success() {
        let said = String::from_utf8_lossy(&out.stderr);
        bail!("ip -batch: {}\nof\n{lines}", said.trim());
    }
    Ok(())
}
