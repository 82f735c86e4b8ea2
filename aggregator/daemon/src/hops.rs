//! Next hops of members that this box routes to. Packets that the kernel forwards get theirs from
//! its tables; results do not come by the kernel, so theirs are looked up there, again and again.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::Result;
use netsum_common::abi::{Address, Hop};
use netsum_core::Edge;
use netsum_core::plane::mapped;

use super::message::mac_from_text;
use super::netlink::{Netlink, Way, ask_for};
use super::state::Shared;

/// How often it is looked whether rings have begun or next hops are missing, and how often for what
/// has changed.
const INTERVAL: Duration = Duration::from_millis(100);
const CHANGES: Duration = Duration::from_secs(1);

/// Keeps the next hops of all active rings as the kernel's tables have them.
pub async fn keep_hops(shared: Shared, netlink: Netlink) {
    let mut tick = tokio::time::interval(INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut last, mut at) = (Vec::new(), Instant::now());
    let mut unknown = HashSet::new();
    loop {
        tick.tick().await;
        let edges: Vec<Edge> = shared.lock().edges().collect();
        if edges == last && unknown.is_empty() && at.elapsed() < CHANGES {
            continue;
        }
        if let Err(e) = look(&shared, &netlink, &edges, &mut unknown).await {
            log::error!("next hops: {e:#}");
        }
        (last, at) = (edges, Instant::now());
    }
}

/// One look. `unknown` are the addresses whose next hop has no MAC address, of which somebody has
/// been told.
async fn look(
    shared: &Shared,
    netlink: &Netlink,
    edges: &[Edge],
    unknown: &mut HashSet<IpAddr>,
) -> Result<()> {
    unknown.retain(|ip| edges.iter().any(|edge| edge.dst == *ip));
    if edges.is_empty() {
        let mut inner = shared.lock();
        inner.next_hops.clear();
        inner.reserved.routers.clear();
        return inner.reserve();
    }
    let interfaces = netlink.interfaces().await?;
    let mac = |ifindex: u32| {
        mac_from_text(&interfaces.iter().find(|l| l.ifindex == ifindex)?.mac)
            .filter(|mac| *mac != [0; 6])
    };
    let (mut ways, mut routers, mut hops) = (HashMap::new(), HashMap::new(), HashMap::new());
    for &edge in edges {
        let Edge { dst, port, .. } = edge;
        let way = match ways.entry(dst) {
            Entry::Occupied(way) => *way.get(),
            Entry::Vacant(place) => *place.insert(netlink.way_to(dst).await?),
        };
        match way {
            Some(Way { mac: Some(next), ifindex, next: hop, .. }) => {
                unknown.remove(&dst);
                if let Some(port) = port.filter(|_| hop != dst) {
                    routers.insert(Address::ip(mapped(hop)), port);
                }
                if let Some(src) = mac(ifindex) {
                    hops.insert(edge, Hop { own: edge.own, dst: next, src });
                }
            }
            Some(Way { mac: None, next, .. }) => {
                ask_for(dst);
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
    // A ring may have become another job's meanwhile.
    let now: HashSet<Edge> = inner.edges().collect();
    for (edge, hop) in hops.iter().filter(|(edge, _)| now.contains(edge)) {
        inner.plane.set_hop(edge.to, hop)?;
    }
    inner.next_hops = hops.into_iter().map(|(edge, hop)| ((edge.dst, edge.own), hop)).collect();
    inner.reserved.routers = routers;
    inner.reserve()
}
