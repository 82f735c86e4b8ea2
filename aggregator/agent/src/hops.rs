//! Next hops of members that this box routes to. Other packets are forwarded by the kernel, which
//! finds their next hops itself. Results bypass its forwarding, so their next hops are polled from
//! its tables.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::Result;
use netsum_common::abi::{Address, Hop};
use netsum_controller::message::mac_from_text;
use netsum_core::RoutedConnection;
use netsum_core::plane::mapped;

use super::agent::Shared;
use super::netlink::{Netlink, NextHop, resolve_neighbour};
use super::own_addresses::is_link_local;

/// Poll intervals: for new rings and missing next hops, and for changes.
const INTERVAL: Duration = Duration::from_millis(100);
const CHANGES: Duration = Duration::from_secs(1);

/// Keeps the next hops of all active rings equal to the kernel's.
pub async fn update_next_hops(shared: Shared, netlink: Netlink) {
    let mut tick = tokio::time::interval(INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut last, mut at) = (Vec::new(), Instant::now());
    let mut unknown = HashSet::new();
    loop {
        tick.tick().await;
        let connections: Vec<RoutedConnection> =
            shared.lock().controller.routed_connections().collect();
        if connections == last && unknown.is_empty() && at.elapsed() < CHANGES {
            continue;
        }
        if let Err(e) = update(&shared, &netlink, &connections, &mut unknown).await {
            log::error!("cannot update next hops: {e:#}");
        }
        (last, at) = (connections, Instant::now());
    }
}

/// One look. `unknown` holds the addresses whose next hop has no MAC address and that have been
/// logged.
async fn update(
    shared: &Shared,
    netlink: &Netlink,
    connections: &[RoutedConnection],
    unknown: &mut HashSet<IpAddr>,
) -> Result<()> {
    unknown.retain(|ip| connections.iter().any(|connection| connection.dst == *ip));
    if connections.is_empty() {
        let mut inner = shared.lock();
        inner.executor.next_hops.clear();
        inner.executor.reserved.routers.clear();
        return inner.executor.reserve();
    }
    let interfaces = netlink.interfaces().await?;
    let mac = |ifindex: u32| {
        mac_from_text(&interfaces.iter().find(|l| l.ifindex == ifindex)?.mac)
            .filter(|mac| *mac != [0; 6])
    };
    let (mut next_hops, mut routers, mut hops) = (HashMap::new(), HashMap::new(), HashMap::new());
    for &connection in connections {
        let RoutedConnection { dst, .. } = connection;
        let next_hop = match next_hops.entry(dst) {
            Entry::Occupied(next_hop) => *next_hop.get(),
            Entry::Vacant(place) => *place.insert(netlink.next_hop_to(dst).await?),
        };
        match next_hop {
            Some(NextHop { mac: Some(next), ifindex, next: hop, .. }) => {
                unknown.remove(&dst);
                if let Some(port) = router_port(&connection, hop, ifindex, next) {
                    routers.entry(hop).or_insert_with(HashSet::new).insert(port);
                }
                if let Some(src) = mac(ifindex) {
                    hops.insert(connection, Hop { own: connection.own, dst: next, src });
                }
            }
            Some(NextHop { mac: None, next, .. }) => {
                resolve_neighbour(dst);
                if unknown.insert(dst) {
                    log::debug!(
                        "no MAC address of {next} is known, by which this box would route to {dst}"
                    );
                }
            }
            None => {}
        }
    }
    let mut inner = shared.lock();
    // A ring may have passed to another job meanwhile.
    let now: HashSet<RoutedConnection> = inner.controller.routed_connections().collect();
    for (connection, hop) in hops.iter().filter(|(connection, _)| now.contains(connection)) {
        inner.executor.plane.set_hop(connection.to, hop)?;
    }
    inner.executor.next_hops =
        hops.into_iter().map(|(connection, hop)| ((connection.dst, connection.own), hop)).collect();
    // A router on several ports has no place.
    let place = |(hop, ports): (IpAddr, HashSet<u32>)| {
        let port = ports.iter().next().filter(|_| ports.len() == 1)?;
        Some((Address::ip(mapped(hop)), *port))
    };
    inner.executor.reserved.routers = routers.into_iter().filter_map(place).collect();
    inner.executor.reserve()
}

/// The port that the router of a connection's next member is behind: this machine routes to it by
/// that port, or the member's packets come from its MAC address. Otherwise the member is in a
/// network in which this machine has no address, and the router need not be on its way.
fn router_port(
    connection: &RoutedConnection,
    hop: IpAddr,
    ifindex: u32,
    mac: [u8; 6],
) -> Option<u32> {
    let is_behind = connection.port == Some(ifindex) || connection.mac == Some(mac);
    connection.port.filter(|_| is_behind && hop != connection.dst && !is_link_local(hop))
}

#[cfg(test)]
mod tests {
    use netsum_common::abi::{HopKey, RingNumber};

    use super::*;

    #[test]
    fn a_router_is_behind_a_members_port_only_if_the_member_is_behind_it() {
        let [hop, dst] = [[10, 0, 0, 1], [10, 1, 0, 5]].map(IpAddr::from);
        let (own, router) = ([2, 0, 0, 0, 0, 5], [2, 0, 0, 0, 0, 9]);
        let port = |port, mac, ifindex| {
            let to = HopKey { ring: RingNumber(1), member: 1 };
            let connection = RoutedConnection { to, dst, own: [2; 6], port: Some(port), mac };
            router_port(&connection, hop, ifindex, router)
        };
        assert_eq!(port(2, Some(own), 1), None, "the bridge's gateway");
        assert_eq!(port(3, Some(router), 1), Some(3));
        assert_eq!(port(9, None, 9), Some(9), "that routes");
        assert_eq!(port(10, None, 9), None, "another one of equal cost");
    }
}
