//! Addresses of the box itself: nothing that comes in by a port may carry one. Ranks would follow a
//! foreign host's ARP away from the daemon, and send it their tokens.

use std::time::Duration;

use anyhow::Result;
use netsum_common::abi::{Address, Owner};
use netsum_core::plane::mapped;

use super::netlink::Netlink;
use super::rtnl::Changes;
use super::state::Shared;

/// The longest between two looks, should notices be lost.
const INTERVAL: Duration = Duration::from_secs(10);

/// Reserves the addresses that this machine has now.
pub async fn look(shared: &Shared, netlink: &Netlink) -> Result<()> {
    let (ips, macs) = netlink.own().await?;
    let own = ips
        .iter()
        .map(|ip| Address::ip(mapped(*ip)))
        .chain(macs.iter().map(|mac| Address::mac(*mac)));
    let mut inner = shared.lock();
    inner.reserved.the_box = own.map(|address| (address, Owner::THE_BOX)).collect();
    inner.controller.set_own(ips, macs);
    inner.reserve()
}

/// Keeps them as they are.
pub async fn keep(shared: Shared, netlink: Netlink, mut changes: Changes) {
    loop {
        if let Err(e) = look(&shared, &netlink).await {
            log::error!("addresses of this box: {e:#}");
        }
        if let Ok(false) = tokio::time::timeout(INTERVAL, changes.next()).await {
            return log::error!(
                "netlink: changes of this box's addresses are not noticed any longer"
            );
        }
    }
}
