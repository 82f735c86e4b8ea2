//! Parses an interface from the kernel's message. Pure. Attributes that are longer, shorter or
//! newer than expected are skipped, and text that is not UTF-8 is shown as well as possible: a user
//! who may name an interface must not be able to hide it.

use netsum_core::PortInfo;
use netsum_core::bridging::Bridged;
use netsum_core::port::mode_without_xdp;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    pub ifindex: u32,
    pub name: String,
    /// Its alternative names.
    pub alt_names: Vec<String>,
    /// Its type, as in `ip link add type`; empty if it is a card or unknown.
    pub kind: String,
    /// The type of its master, in the same words: a bridge, a bond.
    pub part_of: String,
    pub mac: String,
    /// MTU in bytes.
    pub mtu: u32,
    /// Whether it is up and has a carrier.
    pub up: bool,
    /// Whether it is up, with or without a carrier.
    pub enabled: bool,
    /// The bridge that has it as a port.
    pub bridge: Option<u32>,
    /// The bond that has it as a slave.
    pub bond: Option<u32>,
    /// For a VLAN, macvlan or ipvlan: the interface that it is on.
    pub link: Option<u32>,
    /// For a bond: its mode if that has no native XDP, and its slaves.
    pub mode_without_xdp: Option<&'static str>,
    pub slaves: Vec<Self>,
    /// For a bridge.
    pub settings: BridgeSettings,
    /// The MAC address to which packets come that this machine routes: its own, or its bridge's.
    /// `None` if it routes nothing.
    pub router: Option<[u8; 6]>,
    /// Its bridge sends nothing there by itself, because of spanning tree, or because the port does
    /// not flood.
    pub blocked: bool,
    /// Its spanning tree state; empty if it forwards.
    pub state: &'static str,
    /// Isolated: it forwards nothing to other isolated ports. Locked: it accepts only packets of
    /// known hosts.
    pub isolated: bool,
    pub locked: bool,
    /// How an XDP program is attached: "native" or "skb".
    pub xdp: Option<&'static str>,
    /// Bytes and packets received and sent.
    pub counters: [u64; 4],
}

/// A bridge's settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BridgeSettings {
    /// Whether it runs the spanning tree protocol.
    pub stp: bool,
    pub vlan_filtering: bool,
    /// Whether it passes frames to iptables.
    pub call_iptables: bool,
}

/// Attributes (include/uapi/linux/if_link.h, Linux 6.12).
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_PROP_LIST: u16 = 52;
const IFLA_ALT_IFNAME: u16 = 53;
const IFLA_XDP_ATTACHED: u16 = 2;
const IFLA_BR_STP_STATE: u16 = 5;
const IFLA_BR_VLAN_FILTERING: u16 = 7;
const IFLA_BR_NF_CALL_IPTABLES: u16 = 36;
const IFLA_BOND_MODE: u16 = 1;
const IFLA_BOND_XMIT_HASH_POLICY: u16 = 14;
const IFLA_BRPORT_STATE: u16 = 1;
const IFLA_BRPORT_UNICAST_FLOOD: u16 = 9;
const IFLA_BRPORT_ISOLATED: u16 = 33;
const IFLA_BRPORT_LOCKED: u16 = 39;
const IFLA_INET_CONF: u16 = 1;
const IFLA_INET6_CONF: u16 = 2;
/// States of a bridge's port (include/uapi/linux/if_bridge.h). A port that is down has none of
/// these; its flags show that.
const BR_STATE_LISTENING: u8 = 1;
const BR_STATE_LEARNING: u8 = 2;
const BR_STATE_BLOCKING: u8 = 4;
/// Bytes of `struct ifinfomsg`.
pub(super) const HEADER: usize = 16;
const NLA_TYPE_MASK: u16 = 0x3fff;

impl Interface {
    /// Parses a message about a link, without netlink's header; `None` if it is too short.
    pub(super) fn parse(message: &[u8]) -> Option<Self> {
        let (header, all) = message.split_at_checked(HEADER)?;
        let flags = number(&header[8..12])? as i32;
        let info = nested(all, libc::IFLA_LINKINFO);
        let port = nested(info, libc::IFLA_INFO_SLAVE_DATA);
        let data = nested(info, libc::IFLA_INFO_DATA);
        let families = nested(all, libc::IFLA_AF_SPEC);
        let of = |kind: u16| attribute(all, kind);
        let byte = |of: &[u8], kind: u16| attribute(of, kind).and_then(<[u8]>::first).copied();
        let is_on = |kind: u16| byte(data, kind).is_some_and(|value| value != 0);
        // The first setting of IPv4 and of IPv6 is whether packets are forwarded.
        let forwards = |family: i32, conf: u16| {
            let conf = attribute(nested(families, family as u16), conf)
                .and_then(|conf| number(conf.get(..4)?));
            conf.is_some_and(|on| on != 0)
        };
        let forwards =
            forwards(libc::AF_INET, IFLA_INET_CONF) || forwards(libc::AF_INET6, IFLA_INET6_CONF);
        let mac = of(libc::IFLA_ADDRESS).unwrap_or_default();
        let part_of = attribute(info, libc::IFLA_INFO_SLAVE_KIND).map(text).unwrap_or_default();
        let is_port = part_of == "bridge";
        let state = byte(port, IFLA_BRPORT_STATE);
        let master = |is: bool| of(libc::IFLA_MASTER).and_then(number).filter(|_| is);
        let kind = attribute(info, libc::IFLA_INFO_KIND).map(text).unwrap_or_default();
        let policy = byte(data, IFLA_BOND_XMIT_HASH_POLICY).unwrap_or_default();
        let mode = byte(data, IFLA_BOND_MODE).filter(|_| kind == "bond");
        let counter = |place: usize| {
            let bytes = of(libc::IFLA_STATS64)?.get(8 * place..8 * place + 8)?;
            Some(u64::from_ne_bytes(bytes.try_into().ok()?))
        };
        Some(Self {
            ifindex: number(&header[4..8])?,
            name: of(libc::IFLA_IFNAME).map(text).unwrap_or_default(),
            alt_names: attributes(nested(all, IFLA_PROP_LIST))
                .filter(|(kind, _)| *kind == IFLA_ALT_IFNAME)
                .map(|(_, name)| text(name))
                .collect(),
            mac: mac.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(":"),
            mtu: of(libc::IFLA_MTU).and_then(number).unwrap_or_default(),
            up: flags & (libc::IFF_UP | libc::IFF_LOWER_UP) == libc::IFF_UP | libc::IFF_LOWER_UP,
            enabled: flags & libc::IFF_UP != 0,
            bridge: master(is_port),
            bond: master(part_of == "bond"),
            // For a veth it is the other end. It may be in another namespace.
            link: of(libc::IFLA_LINK)
                .and_then(number)
                .filter(|_| kind.ends_with("vlan") && of(IFLA_LINK_NETNSID).is_none()),
            kind,
            mode_without_xdp: mode.and_then(|mode| mode_without_xdp(mode, policy)),
            slaves: Vec::new(),
            settings: BridgeSettings {
                stp: is_on(IFLA_BR_STP_STATE),
                vlan_filtering: is_on(IFLA_BR_VLAN_FILTERING),
                call_iptables: is_on(IFLA_BR_NF_CALL_IPTABLES),
            },
            router: mac.try_into().ok().filter(|_| forwards),
            blocked: is_port
                && (matches!(state, Some(BR_STATE_LISTENING | BR_STATE_BLOCKING))
                    || byte(port, IFLA_BRPORT_UNICAST_FLOOD) == Some(0)),
            state: match state.filter(|_| is_port) {
                Some(BR_STATE_LISTENING) => "listening",
                Some(BR_STATE_LEARNING) => "learning",
                Some(BR_STATE_BLOCKING) => "blocking",
                _ => "",
            },
            isolated: is_port && byte(port, IFLA_BRPORT_ISOLATED) == Some(1),
            locked: is_port && byte(port, IFLA_BRPORT_LOCKED) == Some(1),
            xdp: match byte(nested(all, libc::IFLA_XDP), IFLA_XDP_ATTACHED) {
                None | Some(0) => None,
                Some(2) => Some("skb"),
                // In the driver, in the card, or at several of these levels.
                Some(_) => Some("native"),
            },
            // rx_bytes, rx_packets, tx_bytes, tx_packets.
            counters: [2, 0, 3, 1].map(|place| counter(place).unwrap_or_default()),
            part_of,
        })
    }

    /// The port in the controller's form.
    pub fn port(&self) -> PortInfo {
        PortInfo {
            name: self.name.clone(),
            ifindex: self.ifindex,
            mtu: self.mtu,
            router: self.router,
        }
    }

    /// Its bridge's settings for it.
    pub fn bridged(&self) -> Bridged {
        let Self { state, isolated, locked, .. } = *self;
        let bridge = self.bridge.unwrap_or_default();
        Bridged { name: self.name.clone(), bridge, blocked: state, isolated, locked }
    }

    /// Whether it has this name.
    pub fn has_name(&self, name: &str) -> bool {
        self.name == name || self.alt_names.iter().any(|alt| alt == name)
    }
}

fn number(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

/// A zero-terminated text of the kernel.
pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.split(|b| *b == 0).next().unwrap_or_default()).into_owned()
}

fn nested(all: &[u8], wanted: u16) -> &[u8] {
    attribute(all, wanted).unwrap_or_default()
}

/// An attribute's value.
pub(super) fn attribute(all: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(all).find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
}

/// Attributes of a netlink message, by type and value.
fn attributes(mut all: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (header, rest) = all.split_first_chunk::<4>()?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let kind = u16::from_ne_bytes([header[2], header[3]]) & NLA_TYPE_MASK;
        let value = rest.get(..length.checked_sub(4)?)?;
        all = rest.get(value.len().next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn attr(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut all =
            [&(4 + value.len() as u16).to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
        all.resize(all.len().next_multiple_of(4), 0);
        all
    }

    /// A message of the kernel about a bridge's port with these names.
    fn message(name: &[u8], alt_name: &[u8]) -> Vec<u8> {
        let mut header = vec![0; HEADER];
        header[4..8].copy_from_slice(&7u32.to_ne_bytes());
        header[8..12].copy_from_slice(&((libc::IFF_UP | libc::IFF_LOWER_UP) as u32).to_ne_bytes());
        let port = [attr(IFLA_BRPORT_STATE, &[3]), attr(IFLA_BRPORT_UNICAST_FLOOD, &[0])].concat();
        let info = [
            attr(libc::IFLA_INFO_KIND, b"veth"),
            attr(libc::IFLA_INFO_SLAVE_KIND, b"bridge\0"),
            attr(libc::IFLA_INFO_SLAVE_DATA, &port),
        ];
        let stats: Vec<u8> = (1..=4u64).flat_map(u64::to_ne_bytes).collect();
        [
            header,
            attr(libc::IFLA_IFNAME, name),
            attr(libc::IFLA_IFALIAS, b"caf\xe9\0"),
            attr(IFLA_PROP_LIST | 0x8000, &attr(IFLA_ALT_IFNAME, alt_name)),
            attr(libc::IFLA_ADDRESS, &[2, 0, 0, 0, 0, 9]),
            attr(libc::IFLA_MTU, &1500u32.to_ne_bytes()),
            attr(libc::IFLA_MASTER, &3u32.to_ne_bytes()),
            attr(libc::IFLA_LINKINFO, &info.concat()),
            attr(
                libc::IFLA_AF_SPEC,
                &attr(libc::AF_INET as u16, &attr(IFLA_INET_CONF, &[1, 0, 0, 0, 0])),
            ),
            attr(libc::IFLA_STATS64, &stats),
            attr(libc::IFLA_XDP, &attr(IFLA_XDP_ATTACHED, &[1])),
        ]
        .concat()
    }

    #[test]
    fn a_port_is_read_also_where_its_alias_and_names_are_not_utf8() {
        let expected = Interface {
            ifindex: 7,
            name: "port1".into(),
            alt_names: vec!["caf\u{fffd}".into()],
            kind: "veth".into(),
            part_of: "bridge".into(),
            mac: "02:00:00:00:00:09".into(),
            mtu: 1500,
            up: true,
            enabled: true,
            bridge: Some(3),
            router: Some([2, 0, 0, 0, 0, 9]),
            blocked: true,
            xdp: Some("native"),
            counters: [3, 1, 4, 2],
            ..Interface::default()
        };
        assert_eq!(Interface::parse(&message(b"port1\0", b"caf\xe9\0")), Some(expected.clone()));
        assert!(
            expected.has_name("port1")
                && expected.has_name("caf\u{fffd}")
                && !expected.has_name("x")
        );
        let odd = Interface::parse(&message(b"caf\xe9\0", b"")).unwrap();
        assert_eq!((odd.name.as_str(), odd.bridge), ("caf\u{fffd}", Some(3)));
        assert_eq!(Interface::parse(&message(b"", b"")[..HEADER - 1]), None);
    }

    #[test]
    fn a_bonds_mode_and_a_slaves_bond_are_read() {
        let interface = |info: &[Vec<u8>]| {
            let master = attr(libc::IFLA_MASTER, &3u32.to_ne_bytes());
            let all = [vec![0; HEADER], master, attr(libc::IFLA_LINKINFO, &info.concat())].concat();
            Interface::parse(&all).unwrap()
        };
        let mode = |mode: u8, policy: u8| {
            let data = [attr(IFLA_BOND_MODE, &[mode]), attr(IFLA_BOND_XMIT_HASH_POLICY, &[policy])];
            let data = attr(libc::IFLA_INFO_DATA, &data.concat());
            interface(&[attr(libc::IFLA_INFO_KIND, b"bond\0"), data]).mode_without_xdp
        };
        assert_eq!([mode(1, 5), mode(4, 0), mode(3, 0)], [None, None, Some("broadcast")]);
        assert!(mode(4, 5).is_some_and(|mode| mode.contains("802.3ad")));
        let slave = interface(&[attr(libc::IFLA_INFO_SLAVE_KIND, b"bond\0")]);
        assert_eq!((slave.bond, slave.bridge), (Some(3), None));
    }

    proptest! {
        #[test]
        fn whatever_is_wrong_behind_the_header_the_interface_is_seen(
            at in HEADER..200usize, by in any::<u8>(), length in HEADER..400usize,
        ) {
            let mut damaged = message(b"port1\0", b"other\0");
            let at = at.min(damaged.len() - 1);
            damaged[at] ^= by;
            damaged.truncate(length);
            prop_assert_eq!(Interface::parse(&damaged).unwrap().ifindex, 7);
        }
    }
}
