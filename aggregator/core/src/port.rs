//! Faults of a port: missing capabilities of its driver, and unsuitable settings.

use netsum_common::abi::{self, MIN_MTU};

use crate::largest_mtu;
use netsum_common::abi::MTU_OVERHEAD;

/// The largest path MTU.
const MAX_MTU: u32 = abi::MAX_MTU as u32;

/// Drivers that transmit redirected frames on the queue with the CPU's number, and drop them if it
/// does not exist: `i40e_xdp_xmit` (drivers/net/ethernet/intel/i40e/i40e_txrx.c) and
/// `mlx5e_xdp_xmit` (drivers/net/ethernet/mellanox/mlx5/core/en/xdp.c), both of Linux 6.12.
const QUEUE_OF_CPU: [&str; 2] = ["i40e", "mlx5_core"];

const ANOTHER: &str = "connect its hosts to a port whose driver has native XDP with redirects";

/// Bits of `enum netdev_xdp_act` (include/uapi/linux/netdev.h, Linux 6.3).
pub mod xdp_features {
    /// The driver runs XDP programs.
    pub const BASIC: u64 = 1;
    /// Programs may redirect frames.
    pub const REDIRECT: u64 = 2;
    /// Frames may be redirected to the interface.
    pub const NDO_XMIT: u64 = 4;
}

#[derive(Clone, Debug, Default)]
pub struct PortFacts {
    pub name: String,
    /// Its kind and that of its master, as in `ip link add type`; empty for a card.
    pub kind: String,
    pub part_of: String,
    /// A bond's mode, if the mode has no native XDP, and a bond's slaves.
    pub mode_without_xdp: Option<&'static str>,
    pub slaves: Vec<Self>,
    /// Its driver; empty if unknown.
    pub driver: String,
    /// It is up and has a carrier.
    pub up: bool,
    pub mtu: u32,
    /// An XDP program is attached.
    pub xdp: bool,
    /// [`xdp_features`]; `None` before Linux 6.3.
    pub features: Option<u64>,
    /// The driver merges received packets (large receive offload); `None` if unknown.
    pub lro: Option<bool>,
    /// The driver strips VLAN tags of received frames; `None` if unknown.
    pub rx_vlan: Option<bool>,
    /// Receive queues in use; 0 if unknown.
    pub queues: u32,
    /// The CPUs of each of its interrupts.
    pub interrupts: Vec<String>,
    /// The highest number of a CPU that serves rings.
    pub last_cpu: u32,
}

/// A fault of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// It keeps netsum from starting or summing.
    pub is_fatal: bool,
    pub found: String,
    /// How to fix it.
    pub hint: String,
}

pub fn fatal(found: impl Into<String>, hint: impl Into<String>) -> Problem {
    Problem { is_fatal: true, found: found.into(), hint: hint.into() }
}

pub fn tolerable(found: impl Into<String>, hint: impl Into<String>) -> Problem {
    Problem { is_fatal: false, ..fatal(found, hint) }
}

/// The mode of a bond, by the numbers of mode and transmit hash policy, if the mode has no native
/// XDP (`bond_xdp_check` in drivers/net/bonding/bond_main.c, Linux 6.12).
pub fn mode_without_xdp(mode: u8, policy: u8) -> Option<&'static str> {
    const VLAN_SRCMAC: u8 = 5;
    match (mode, policy) {
        (2, VLAN_SRCMAC) => Some("balance-xor with xmit_hash_policy vlan+srcmac"),
        (4, VLAN_SRCMAC) => Some("802.3ad with xmit_hash_policy vlan+srcmac"),
        // balance-rr, active-backup, balance-xor and 802.3ad.
        (0 | 1 | 2 | 4, _) => None,
        (3, _) => Some("broadcast"),
        (5, _) => Some("balance-tlb"),
        (6, _) => Some("balance-alb"),
        _ => Some("unknown to netsum"),
    }
}

/// Why an interface cannot be a port with any driver: XDP programs there do not see what the bridge
/// sees. Its kind and that of its master are as in `ip link add type`; a bond's mode is
/// [`mode_without_xdp`].
pub fn unfit(kind: &str, part_of: &str, mode: Option<&str>) -> Option<Problem> {
    match (kind, part_of) {
        ("bond", _) => mode.map(|mode| {
            fatal(
                format!("a bond whose mode has no native XDP: {mode}"),
                "use active-backup, 802.3ad, balance-xor (not vlan+srcmac) or balance-rr",
            )
        }),
        (_, "bond") => Some(fatal(
            "a slave of a bond: flows are the bond's",
            "make the bond the port, or take the slave out of it",
        )),
        ("team", _) => Some(fatal("a team, which has no native XDP", "make a bond of its cards")),
        (_, "team") => Some(fatal(
            "a card of a team, which netsum does not support: flows are the team's",
            "take it out of the team",
        )),
        ("vlan", _) => Some(fatal(
            "a VLAN of a card: packets come in at the card",
            "make the card the port; hosts may be in VLANs",
        )),
        ("macvlan" | "macvtap" | "ipvlan" | "ipvtap", _) => Some(fatal(
            format!("a {kind} of a card: packets come in at the card"),
            "make the card the port",
        )),
        _ => None,
    }
}

/// All faults of a port.
pub fn defects(p: &PortFacts) -> Vec<Problem> {
    if let Some(defect) = unfit(&p.kind, &p.part_of, p.mode_without_xdp) {
        return vec![defect];
    }
    let name = &p.name;
    let mut all = Vec::new();
    if !p.up {
        all.push(fatal(
            "down, or without a carrier",
            format!("ip link set {name} up; look at the cable"),
        ));
    }
    if p.mtu < MIN_MTU + MTU_OVERHEAD {
        let hint = format!("ip link set {name} mtu {}", MAX_MTU + MTU_OVERHEAD);
        all.push(fatal(format!("MTU {}: too small for any job", p.mtu), hint));
    } else if p.mtu < MAX_MTU + MTU_OVERHEAD {
        all.push(tolerable(
            format!("MTU {}: path MTU {} at the most", p.mtu, largest_mtu(p.mtu)),
            format!(
                "ip link set {name} mtu {} for path MTU {MAX_MTU}, at the hosts too",
                MAX_MTU + MTU_OVERHEAD
            ),
        ));
    }
    if p.kind != "bond" {
        all.extend(of_driver(p));
    }
    // A bond's program also runs on its slaves.
    for slave in p.slaves.iter().map(|slave| PortFacts { xdp: p.xdp, ..slave.clone() }) {
        let named =
            |d: Problem| Problem { found: format!("slave {}: {}", slave.name, d.found), ..d };
        all.extend(of_driver(&slave).into_iter().map(named));
    }
    all
}

/// Faults of a driver, or of its configuration.
fn of_driver(p: &PortFacts) -> Vec<Problem> {
    let name = &p.name;
    let mut all = Vec::from_iter(xdp(p));
    if p.lro == Some(true) {
        all.push(fatal(
            "large receive offload joins packets before XDP sees them",
            format!("ethtool -K {name} lro off"),
        ));
    }
    if p.rx_vlan == Some(true) {
        all.push(tolerable(
            "VLAN tags are taken off before XDP sees them: a job whose hosts are in a VLAN gets \
             no sums",
            format!("ethtool -K {name} rxvlan off, if its hosts are in VLANs"),
        ));
    }
    if QUEUE_OF_CPU.contains(&&*p.driver) && (1..=p.last_cpu).contains(&p.queues) {
        all.push(fatal(
            format!(
                "{} has {} queues, and drops what CPU {} redirects to it: it sends on the queue \
                 of a CPU's number",
                p.driver, p.queues, p.last_cpu
            ),
            format!("ethtool -L {name} combined {}, or `cpus` below {}", p.last_cpu + 1, p.queues),
        ));
    }
    let cpus: std::collections::BTreeSet<&String> = p.interrupts.iter().collect();
    if p.interrupts.len() > 1 && cpus.len() == 1 {
        all.push(tolerable(
            format!("{} interrupts, all served by CPU {}", p.interrupts.len(), p.interrupts[0]),
            "spread them: irqbalance, or /proc/irq/*/smp_affinity_list",
        ));
    }
    all
}

fn xdp(p: &PortFacts) -> Option<Problem> {
    use xdp_features::{BASIC, NDO_XMIT, REDIRECT};
    let driver = if p.driver.is_empty() { "the driver" } else { &p.driver };
    let Some(features) = p.features else {
        // An attached program proves that the driver supports it.
        return (!p.xdp).then(|| {
            tolerable(
                format!("this kernel does not say whether {driver} has native XDP"),
                "start the daemon: it attaches its program or names the reason",
            )
        });
    };
    if features & BASIC == 0 || features & REDIRECT == 0 {
        return Some(fatal(format!("{driver} has no native XDP with redirects"), ANOTHER));
    }
    if features & NDO_XMIT != 0 {
        return None;
    }
    let found = "it takes no frames that XDP redirects to it";
    if p.driver == "veth" {
        let hint = format!("ethtool -K PEER gro on, PEER being the other end of {}", p.name);
        return Some(fatal(found, hint));
    }
    if p.xdp {
        return Some(fatal(found, ANOTHER));
    }
    let hint = "some drivers take redirected frames only with a program of their own attached: \
        start the daemon and look again";
    Some(tolerable(found, hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(change: impl FnOnce(&mut PortFacts)) -> Vec<(bool, String)> {
        let mut port = PortFacts {
            name: "eth1".into(),
            driver: "mlx5_core".into(),
            up: true,
            mtu: 4200,
            features: Some(0x7f),
            lro: Some(false),
            queues: 8,
            interrupts: vec!["0".into(), "1".into()],
            last_cpu: 7,
            ..PortFacts::default()
        };
        change(&mut port);
        defects(&port)
            .into_iter()
            .map(|d| (d.is_fatal, format!("{} -> {}", d.found, d.hint)))
            .collect()
    }

    #[test]
    fn a_good_port_has_no_defect() {
        assert_eq!(after(|_| {}), []);
        assert_eq!(after(|p| (p.queues, p.driver) = (2, "igb".into())), [], "it shares its queues");
        assert_eq!(after(|p| p.queues = 0), [], "it does not say");
        assert_eq!(after(|p| (p.features, p.xdp) = (None, true)), []);
    }

    #[test]
    fn each_defect_is_named_with_its_fix() {
        let one = |found: Vec<(bool, String)>, is_fatal: bool, expected: &str| {
            assert_eq!(found.len(), 1, "{expected}: {found:?}");
            assert!(
                found[0].0 == is_fatal && found[0].1.contains(expected),
                "{expected}: {found:?}"
            );
        };
        one(after(|p| p.up = false), true, "ip link set eth1 up");
        one(after(|p| p.mtu = 1500), false, "path MTU 1408 at the most");
        one(after(|p| p.mtu = 300), true, "too small for any job");
        one(after(|p| p.lro = Some(true)), true, "ethtool -K eth1 lro off");
        one(after(|p| p.rx_vlan = Some(true)), false, "ethtool -K eth1 rxvlan off");
        one(after(|p| p.features = Some(0)), true, "mlx5_core has no native XDP");
        one(after(|p| p.features = None), false, "does not say whether mlx5_core has native XDP");
        one(after(|p| p.features = Some(3)), false, "redirects to it");
        one(after(|p| (p.features, p.xdp) = (Some(3), true)), true, "redirects to it");
        one(after(|p| (p.features, p.driver) = (Some(3), "veth".into())), true, "gro on");
        one(after(|p| p.queues = 7), true, "ethtool -L eth1 combined 8");
        one(after(|p| p.interrupts[1] = "0".into()), false, "all served by CPU 0");
        let bond = |mode| {
            after(|p| {
                (p.kind, p.mode_without_xdp) = ("bond".into(), mode);
                let slave = PortFacts { name: "eth2".into(), features: Some(0), ..p.clone() };
                p.slaves = vec![PortFacts { name: "eth1".into(), ..p.clone() }, slave];
            })
        };
        one(bond(mode_without_xdp(3, 0)), true, "no native XDP: broadcast -> use active-backup");
        one(bond(mode_without_xdp(4, 5)), true, "802.3ad with xmit_hash_policy vlan+srcmac");
        one(bond(mode_without_xdp(4, 1)), true, "slave eth2: mlx5_core has no native XDP");
        one(after(|p| p.part_of = "bond".into()), true, "make the bond the port");
        one(after(|p| p.kind = "team".into()), true, "make a bond of its cards");
        one(
            after(|p| p.part_of = "team".into()),
            true,
            "a card of a team, which netsum does not support",
        );
        one(after(|p| p.kind = "vlan".into()), true, "make the card the port");
        one(after(|p| p.kind = "macvlan".into()), true, "a macvlan of a card");
        assert_eq!(after(|p| (p.kind, p.part_of) = ("veth".into(), "bridge".into())), []);
    }
}
