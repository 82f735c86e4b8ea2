//! Names, addresses and lines for `ip`.
//!
//! `ip -batch` does the work, with one process for each namespace, and each line can be tried by
//! hand. With a netlink crate, links, addresses, bridge options and namespaces take several times
//! the code.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::spec::LabSpec;

/// The interface through which the lab reaches a box that is a virtual machine.
pub(super) const AGENT: &str = "agent";
/// The machine's address on that interface.
pub const BOX_AGENT: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);

/// The line that makes the box's bridge.
pub(crate) fn bridge_line() -> String {
    format!("link add {} address 02:00:00:00:00:fe {BRIDGE}\n", BRIDGE_NAME)
}

/// The lines that start the box's bridge and give it its addresses.
pub(super) fn box_addresses(spec: &LabSpec) -> String {
    let v6 = if spec.ipv6 { "address add fd00::fe/64 dev br0 nodad\n" } else { "" };
    up("br0") + "address add 10.0.0.254/16 dev br0\n" + v6
}

/// A box's own address; `None` is the first spine or the only box.
pub(crate) fn box_ip(number: Option<usize>) -> IpAddr {
    IpAddr::V4(
        number.map_or(Ipv4Addr::new(10, 0, 0, 254), |n| Ipv4Addr::new(10, 0, 253, n as u8 + 1)),
    )
}

/// The box's bridge, and a leaf's port towards the first spine.
pub const BRIDGE_NAME: &str = "br0";
pub const UPLINK: &str = "uplink";

/// A leaf's port towards a spine.
pub fn uplink(spine: usize) -> String {
    if spine == 0 { UPLINK.to_owned() } else { format!("{UPLINK}{spine}") }
}

/// Options of a bridge.
pub(crate) const BRIDGE: &str = "type bridge stp_state 0 forward_delay 0 mcast_snooping 0";

/// The other end of a virtual machine's interface: the box's port, or an end of the fault-injecting
/// link.
pub(super) fn tap(spec: &LabSpec, host: usize) -> String {
    format!("{}{host}", if spec.has_wire() { "up" } else { "port" })
}

/// A host's addresses, with the lengths of their prefixes. From its link-local address it confirms
/// that a neighbour is there (`ndisc_send_ns` in net/ipv6/ndisc.c, Linux 6.12): without it, a
/// router is lost after a few seconds.
pub(super) fn addresses(spec: &LabSpec, host: usize, routed: bool) -> Vec<(IpAddr, u8)> {
    let of = |k: usize| {
        let v6 = spec.ipv6.then(|| (host_ipv6(routed, host, k), 64));
        std::iter::once((host_ip(routed, host, k), 16)).chain(v6)
    };
    let link_local = spec.ipv6.then(|| (link_local(host as u16 + 1), 64));
    (0..spec.ips_per_host).flat_map(of).chain(link_local).collect()
}

fn link_local(end: u16) -> IpAddr {
    IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, end))
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
pub(super) fn new_tap(name: &str, options: &str, mtu: u32) -> String {
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
pub(super) fn batch(ip: &mut Command, lines: &str) -> Result<()> {
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
        let printed = String::from_utf8_lossy(&out.stderr);
        bail!("ip -batch: {}\nof\n{lines}", printed.trim());
    }
    Ok(())
}
