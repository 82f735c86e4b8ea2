//! Polls the uplinks over which flows are spread.

use std::time::{Duration, Instant};

use super::agent::Shared;
use super::netlink::Netlink;

const INTERVAL: Duration = Duration::from_millis(100);

/// Updates the program with changes of the machine's interfaces.
pub async fn follow(shared: Shared, netlink: Netlink) {
    let mut tick = tokio::time::interval(INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let interfaces = netlink.interfaces().await;
        let mut inner = shared.lock();
        let ports: Vec<u32> = inner.controller.ports().iter().map(|port| port.ifindex).collect();
        let Some(spreader) = &mut inner.executor.spread else { return };
        spreader.update(interfaces, &ports, Instant::now());
    }
}
