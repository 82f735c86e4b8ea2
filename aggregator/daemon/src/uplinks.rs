//! Looks at the uplinks over which flows are spread.

use std::time::{Duration, Instant};

use super::netlink::Netlink;
use super::state::Shared;

/// How often.
const INTERVAL: Duration = Duration::from_millis(100);

/// Keeps what the program is told as the machine is.
pub async fn keep(shared: Shared, netlink: Netlink) {
    let mut tick = tokio::time::interval(INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let interfaces = netlink.interfaces().await;
        let mut inner = shared.lock();
        let ports: Vec<u32> = inner.controller.ports().iter().map(|port| port.ifindex).collect();
        let Some(spreader) = &mut inner.spread else { return };
        spreader.keep(interfaces, &ports, Instant::now());
    }
}
