//! Why a bridge may not forward between a job's ports. The XDP programs sum regardless, but
//! acknowledgements between hosts are lost.

use crate::port::{Problem, fatal, tolerable};

/// How the bridge treats a port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bridged {
    pub name: String,
    pub bridge: u32,
    /// Its spanning tree state; empty if it forwards.
    pub blocked: &'static str,
    /// It forwards nothing to other isolated ports.
    pub isolated: bool,
    /// It drops packets of hosts that are not in the forwarding table (IEEE 802.1X).
    pub locked: bool,
}

/// A netfilter chain that sees forwarded packets of the bridge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Its name, as its tool prints it.
    pub chain: String,
    /// The command that lists it.
    pub list: String,
    /// It drops packets that none of its rules accepts.
    pub drops: bool,
}

/// All obstacles between these ports, certain ones first.
pub fn obstacles(ports: &[Bridged], filters: &[Filter]) -> Vec<Problem> {
    let mut all = Vec::new();
    for Bridged { name, blocked, .. } in ports.iter().filter(|p| !p.blocked.is_empty()) {
        all.push(fatal(
            format!("port {name} does not forward: its spanning tree state is {blocked}"),
            "wait until it forwards; without loops `ip link set BRIDGE type bridge stp_state 0 \
             forward_delay 0`",
        ));
    }
    let isolated = |port: &&Bridged| port.isolated;
    for port in ports.iter().filter(isolated) {
        let Some(other) =
            ports.iter().filter(isolated).find(|o| o.bridge == port.bridge && o.name > port.name)
        else {
            continue;
        };
        let (one, other) = (&port.name, &other.name);
        all.push(tolerable(
            format!("ports {one} and {other} are isolated from each other"),
            format!(
                "bridge link set dev {one} isolated off, unless their ranks are not \
                     neighbours"
            ),
        ));
    }
    for Bridged { name, .. } in ports.iter().filter(|p| p.locked) {
        all.push(tolerable(
            format!(
                "port {name} is locked: it drops packets of hosts that are not in the \
                forwarding table"
            ),
            format!(
                "bridge fdb replace MAC dev {name} master static, or bridge link set dev {name} \
                 locked off"
            ),
        ));
    }
    for Filter { chain, list, drops } in filters {
        let policy = if *drops { ", policy drop" } else { "" };
        all.push(tolerable(
            format!("chain {chain} filters forwarded packets{policy}"),
            format!("check that it accepts UDP port 4791: {list}"),
        ));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_obstacle_is_named_with_its_ports() {
        let port = |name: &str| Bridged { name: name.into(), ..Bridged::default() };
        let isolated = |name: &str| Bridged { isolated: true, ..port(name) };
        let filter = |drops| [Filter { chain: "bridge f c".into(), list: "nft".into(), drops }];
        assert_eq!(obstacles(&[port("a"), port("b")], &[]), []);
        assert_eq!(obstacles(&[isolated("a"), port("b")], &[]), [], "isolated from nobody");
        for (ports, filters, is_fatal, words) in [
            (
                vec![isolated("a"), port("b"), isolated("c")],
                vec![],
                false,
                "ports a and c are isolated from each other",
            ),
            (vec![Bridged { blocked: "learning", ..port("a") }], vec![], true, "state is learning"),
            (vec![Bridged { locked: true, ..port("a") }], vec![], false, "port a is locked"),
            (
                vec![],
                filter(true).to_vec(),
                false,
                "bridge f c filters forwarded packets, policy drop",
            ),
            (vec![], filter(false).to_vec(), false, "bridge f c filters"),
        ] {
            let found = obstacles(&ports, &filters);
            assert!(found.len() == 1 && found[0].is_fatal == is_fatal, "{found:?}");
            assert!(found[0].found.contains(words), "{found:?}");
        }
        let elsewhere = Bridged { bridge: 2, ..isolated("b") };
        assert_eq!(obstacles(&[isolated("a"), elsewhere], &[]), [], "two bridges");
    }
}
