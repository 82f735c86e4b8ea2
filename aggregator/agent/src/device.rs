//! What a driver reports about its interface: XDP features over generic netlink, and its identity
//! over ethtool's ioctl.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use anyhow::{Context, Result, bail};
use netsum_core::port::{PortFacts, Problem, defects, unfit, xdp_features};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, setsockopt, socket,
    sockopt,
};
use nix::sys::time::TimeVal;

use crate::link::{Interface, attribute};

/// Gathers the facts about a port, for rings served by these CPUs.
///
/// # Errors
/// If a query fails, or its answer is malformed.
pub fn facts(interface: &Interface, cpus: &[u32]) -> Result<PortFacts> {
    let settings = ethtool(interface.ifindex)?;
    Ok(PortFacts {
        name: interface.name.clone(),
        kind: interface.kind.clone(),
        part_of: interface.part_of.clone(),
        mode_without_xdp: interface.mode_without_xdp,
        slaves: interface.slaves.iter().map(|l| facts(l, cpus)).collect::<Result<_>>()?,
        driver: settings.driver.clone(),
        up: interface.up,
        mtu: interface.mtu,
        xdp: interface.xdp.is_some(),
        features: features(interface.ifindex)?,
        lro: settings.lro,
        // On a veth, the other end decides whether frames keep their tags.
        rx_vlan: settings.rx_vlan.filter(|_| settings.driver != "veth"),
        queues: settings.queues,
        interrupts: interrupts(
            &interface.name,
            &fs::read_to_string("/proc/interrupts").unwrap_or_default(),
        ),
        last_cpu: cpus.iter().copied().max().unwrap_or_default(),
    })
}

/// Packets of this MTU fit a page of 4 KiB, beside the headroom and metadata that every driver
/// reserves for XDP. Some drivers support larger ones.
const ONE_PAGE_MTU: u32 = 3400;

/// Makes an interface a port by `attach`, if possible. An XDP program that is already attached
/// belongs to another application, unless the interface was ours a moment ago.
///
/// Why the interface cannot be a port.
pub fn attach(
    interface: &Interface,
    was_ours: bool,
    attach: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let Interface { kind, part_of, mode_without_xdp, slaves, .. } = interface;
    if let Some(Problem { found, hint, .. }) = unfit(kind, part_of, *mode_without_xdp) {
        bail!("{found}; {hint}");
    }
    for slave in slaves {
        if slave.xdp.is_some() {
            bail!("an XDP program is attached to its slave {}; detach it first", slave.name);
        }
        let wanted = xdp_features::BASIC | xdp_features::REDIRECT;
        if features(slave.ifindex)?.is_some_and(|features| features & wanted != wanted) {
            bail!(
                "its slave {} has no native XDP with redirects; take it out of the bond",
                slave.name
            );
        }
    }
    if let Some(mode) = interface.xdp.filter(|_| !was_ours) {
        bail!("an XDP program of somebody else is attached ({mode}); detach it first");
    }
    let Err(e) = attach() else { return Ok(()) };
    let number = e.chain().find_map(|c| c.downcast_ref::<io::Error>()?.raw_os_error());
    let mut why = String::from("cannot attach");
    if number == Some(libc::EOPNOTSUPP) {
        // Linux before 6.3 does not tell which slave.
        let slaves: Vec<_> = slaves.iter().map(|slave| format!("slave {}", slave.name)).collect();
        why += &match &slaves[..] {
            [] => ": its driver has no native XDP".to_owned(),
            some => format!(": it has a slave without native XDP among {}", some.join(", ")),
        };
    }
    if interface.mtu > ONE_PAGE_MTU {
        why += &format!(
            "; a packet has to fit a page, and the port has an MTU of {}: {ONE_PAGE_MTU} always \
             fits",
            interface.mtu
        );
    }
    Err(e.context(why))
}

/// Logs why a chosen interface cannot be a port.
pub fn log_unfit_port(interface: &Interface, why: &anyhow::Error) {
    let name = &interface.name;
    log::error!(NETSUM_PORT = name; "port {name} cannot be used, and ranks behind it are refused: \
        {why:#}");
}

/// Logs defects of ports that have their programs.
pub fn log_defects(interfaces: &[Interface], cpus: &[u32]) {
    for interface in interfaces {
        match facts(interface, cpus) {
            Ok(facts) => {
                for defect in defects(&PortFacts { xdp: true, ..facts }) {
                    log::warn!(NETSUM_PORT = interface.name; "port {}: {}; {}", interface.name, defect.found, defect.hint);
                }
            }
            Err(e) => log::warn!(NETSUM_PORT = interface.name; "port {}: {e:#}", interface.name),
        }
    }
}

/// The CPUs that serve an interface's interrupts. Most drivers name their interrupts after the
/// interface.
fn interrupts(name: &str, table: &str) -> Vec<String> {
    let of_port = |line: &str| {
        let last = line.split_whitespace().last()?;
        let named = last == name || last.split(['-', '@', ':']).any(|part| part == name);
        let number = line.split(':').next()?.trim();
        (named && number.bytes().all(|b| b.is_ascii_digit())).then(|| number.to_owned())
    };
    let cpus = |number: String| {
        let file = format!("/proc/irq/{number}/effective_affinity_list");
        Some(fs::read_to_string(file).ok()?.trim().to_owned())
    };
    table.lines().filter_map(of_port).filter_map(cpus).collect()
}

/// `nlctrl` (include/uapi/linux/genetlink.h).
const GENL_ID_CTRL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
/// The family `netdev` (include/uapi/linux/netdev.h, Linux 6.3).
const NETDEV_CMD_DEV_GET: u8 = 1;
const NETDEV_A_DEV_IFINDEX: u16 = 1;
const NETDEV_A_DEV_XDP_FEATURES: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;

/// An interface's XDP features, as bits; `None` if the kernel does not support the query (before
/// Linux 6.3).
fn features(ifindex: u32) -> Result<Option<u64>> {
    let netlink = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkGeneric,
    )
    .context("generic netlink")?;
    setsockopt(&netlink, sockopt::ReceiveTimeout, &TimeVal::new(2, 0))
        .context("generic netlink")?;
    let family = request(GENL_ID_CTRL, CTRL_CMD_GETFAMILY, CTRL_ATTR_FAMILY_NAME, b"netdev\0");
    let Some(answer) = query(&netlink, &family)? else { return Ok(None) };
    let Some(&[low, high]) = attribute(&answer, CTRL_ATTR_FAMILY_ID) else {
        bail!("generic netlink: a family without a number")
    };
    let family = u16::from_ne_bytes([low, high]);
    let device = request(family, NETDEV_CMD_DEV_GET, NETDEV_A_DEV_IFINDEX, &ifindex.to_ne_bytes());
    let Some(answer) = query(&netlink, &device)? else { return Ok(None) };
    let features = attribute(&answer, NETDEV_A_DEV_XDP_FEATURES).and_then(|v| v.try_into().ok());
    Ok(features.map(u64::from_ne_bytes))
}

/// A request with one attribute.
fn request(family: u16, command: u8, attribute: u16, value: &[u8]) -> Vec<u8> {
    let length = 20 + 4 + value.len();
    let mut message = Vec::with_capacity(length + 3);
    message.extend((length as u32).to_ne_bytes());
    message.extend(family.to_ne_bytes());
    message.extend(NLM_F_REQUEST.to_ne_bytes());
    message.extend([0; 8]);
    message.extend([command, 1, 0, 0]);
    message.extend((4 + value.len() as u16).to_ne_bytes());
    message.extend(attribute.to_ne_bytes());
    message.extend(value);
    message.resize(length.next_multiple_of(4), 0);
    message
}

/// Returns the answer's attributes; `None` if the kernel does not know the object.
fn query(netlink: &OwnedFd, request: &[u8]) -> Result<Option<Vec<u8>>> {
    send(netlink.as_raw_fd(), request, MsgFlags::empty()).context("generic netlink")?;
    let mut answer = vec![0; 16 << 10];
    let length =
        recv(netlink.as_raw_fd(), &mut answer, MsgFlags::empty()).context("generic netlink")?;
    answer.truncate(length);
    attributes(&answer).context("generic netlink")
}

/// The attributes of a message; `None` if it reports that the object does not exist.
fn attributes(message: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let short = || io::Error::other("an answer that is too short");
    let kind =
        u16::from_ne_bytes(message.get(4..6).ok_or_else(short)?.try_into().map_err(|_| short())?);
    if kind == NLMSG_ERROR {
        let code = message.get(16..20).ok_or_else(short)?.try_into().map_err(|_| short())?;
        return match -i32::from_ne_bytes(code) {
            libc::ENOENT | libc::EOPNOTSUPP => Ok(None),
            code => Err(io::Error::from_raw_os_error(code)),
        };
    }
    Ok(Some(message.get(20..).ok_or_else(short)?.to_vec()))
}

/// The answers of ethtool's ioctl (include/uapi/linux/ethtool.h).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Ethtool {
    /// The driver; empty if unknown.
    driver: String,
    /// Whether it joins received packets; `None` if unknown.
    lro: Option<bool>,
    /// Whether it takes VLAN tags off received frames; `None` if unknown.
    rx_vlan: Option<bool>,
    /// Receive queues in use; 0 if unknown.
    queues: u32,
}

const ETHTOOL_GSET: u32 = 0x1;
const ETHTOOL_GDRVINFO: u32 = 0x3;
const ETHTOOL_GFLAGS: u32 = 0x25;
const ETHTOOL_GCHANNELS: u32 = 0x3c;
const ETH_FLAG_RXVLAN: u32 = 1 << 8;
const ETH_FLAG_LRO: u32 = 1 << 15;
const SIOCETHTOOL: libc::Ioctl = 0x8946;

/// Sends one ethtool command; `None` if the driver does not support it.
fn query_driver(socket: &OwnedFd, ifindex: u32, command: u32) -> Option<[u32; 64]> {
    // The name as raw bytes, which need not be UTF-8.
    let name = nix::net::if_::if_indextoname(ifindex).ok()?;
    // struct ethtool_drvinfo has 196 bytes, ethtool_cmd 44, ethtool_channels 36, ethtool_value 8.
    // They consist of 32-bit words.
    let mut data = [0u32; 64];
    data[0] = command;
    // SAFETY: an `ifreq` consists of integers and pointers, for which zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.as_bytes_with_nul()) {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = data.as_mut_ptr().cast();
    // SAFETY: the request and what it points to outlive the call; the kernel writes less than 256
    // bytes for these commands.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &mut request) };
    (done == 0).then_some(data)
}

fn questions() -> nix::Result<OwnedFd> {
    socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)
}

/// A port's link rate in bits per second, as its driver reports it; 0 if unknown.
pub fn rate(ifindex: u32) -> u64 {
    let data = questions().ok().and_then(|socket| query_driver(&socket, ifindex, ETHTOOL_GSET));
    // speed and speed_hi, two bytes each.
    let [low, high] = [3, 7].map(|word| data.map_or(0, |data| u32::from(half(data[word]))));
    match high << 16 | low {
        u32::MAX => 0,
        megabits => u64::from(megabits) * 1_000_000,
    }
}

/// The first two bytes of a word.
fn half(word: u32) -> u16 {
    let [a, b, ..] = word.to_ne_bytes();
    u16::from_ne_bytes([a, b])
}

/// Runs all ethtool queries; facts that a driver does not report are left out.
fn ethtool(ifindex: u32) -> Result<Ethtool> {
    let socket = questions()?;
    let query = |command| query_driver(&socket, ifindex, command);
    let driver = query(ETHTOOL_GDRVINFO).map(|data| {
        let bytes: Vec<u8> =
            data[1..9].iter().flat_map(|w| w.to_ne_bytes()).take_while(|&b| b != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    });
    // rx_count and combined_count.
    let queues = query(ETHTOOL_GCHANNELS).map_or(0, |data| data[5] + data[8]);
    let flags = query(ETHTOOL_GFLAGS).map(|data| data[1]);
    let [lro, rx_vlan] =
        [ETH_FLAG_LRO, ETH_FLAG_RXVLAN].map(|flag| flags.map(|flags| flags & flag != 0));
    Ok(Ethtool { driver: driver.unwrap_or_default(), lro, rx_vlan, queues })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_found_and_malformed_ones_are_ignored() {
        let message = request(7, 1, 2, b"netdev\0");
        assert_eq!(message.len() % 4, 0);
        let all = attributes(&message).unwrap().unwrap();
        assert_eq!(attribute(&all, 2), Some(&b"netdev\0"[..]));
        let mut two = all.clone();
        two.extend([12, 0, 3, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(attribute(&two, 3).map(<[u8]>::len), Some(8));
        for broken in [&[0, 0, 9, 0][..], &[200, 0, 2, 0], &[3, 0], &[]] {
            assert_eq!(attribute(broken, 2), None);
        }
        assert!(attributes(&[0; 5]).is_err());
    }

    #[test]
    fn a_missing_attribute_is_not_an_error() {
        let error = |code: i32| {
            let mut message = vec![0; 36];
            message[4..6].copy_from_slice(&NLMSG_ERROR.to_ne_bytes());
            message[16..20].copy_from_slice(&(-code).to_ne_bytes());
            message
        };
        assert!(attributes(&error(libc::ENOENT)).unwrap().is_none());
        assert_eq!(attributes(&error(libc::EPERM)).unwrap_err().raw_os_error(), Some(libc::EPERM));
    }

    #[test]
    fn the_loopback_answers_as_any_interface_does() {
        let ifindex = nix::net::if_::if_nametoindex("lo").unwrap();
        assert_eq!(ethtool(ifindex).unwrap().lro, Some(false));
        assert_eq!(ethtool(i32::MAX as u32).unwrap(), Ethtool::default());
        // The loopback's driver does not support redirects.
        assert_eq!(features(ifindex).unwrap().unwrap_or(0) & 2, 0);
    }
}
