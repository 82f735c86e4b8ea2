//! The network around a box: its interfaces, and the hosts behind them.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use anyhow::Result;
use netsum_controller::message::{mac_from_text, mac_text};
use netsum_core::port::Problem;

use super::link::Interface;
use super::netlink::{Netlink, NextHop, PortLookup};

/// The network around a box.
#[derive(Clone)]
pub enum Network {
    /// As the kernel knows it: the bridge's forwarding table and, for hosts behind routers, its
    /// routes.
    Kernel(Netlink),
    /// None, for tests and benchmarks: ports are up, and have no counters. The function finds the
    /// port of a host by its MAC address.
    Fixed(Arc<dyn Fn([u8; 6]) -> Option<u32> + Send + Sync>),
}

impl Network {
    pub fn netlink(&self) -> Option<&Netlink> {
        match self {
            Self::Kernel(netlink) => Some(netlink),
            Self::Fixed(_) => None,
        }
    }

    /// All interfaces.
    pub async fn interfaces(&self) -> Result<Vec<Interface>> {
        match self {
            Self::Kernel(netlink) => netlink.interfaces().await,
            Self::Fixed(_) => Ok(Vec::new()),
        }
    }

    /// How this machine sends to an address.
    pub async fn next_hop_to(&self, ip: IpAddr) -> Result<Option<NextHop>> {
        match self {
            Self::Kernel(netlink) => netlink.next_hop_to(ip).await,
            Self::Fixed(_) => Ok(None),
        }
    }

    /// Which of these ports a host is behind.
    pub async fn port_of(&self, mac: [u8; 6], ip: IpAddr, ports: &[u32]) -> Result<PortLookup> {
        match self {
            Self::Kernel(netlink) => netlink.port_of(mac, ip, ports).await,
            Self::Fixed(find) => {
                Ok(find(mac).map_or(PortLookup::NotSeen { router: None }, |ifindex| {
                    PortLookup::Port { ifindex, mac }
                }))
            }
        }
    }

    /// The interfaces that these hosts are behind, by MAC address, if known.
    pub async fn hosts(&self, macs: &[String]) -> Result<HashMap<String, u32>> {
        match self {
            Self::Kernel(netlink) => {
                let hosts = netlink.hosts().await?;
                Ok(hosts.into_iter().map(|(ifindex, mac)| (mac_text(mac), ifindex)).collect())
            }
            Self::Fixed(find) => {
                let at = |text: &String| Some((text.clone(), find(mac_from_text(text)?)?));
                Ok(macs.iter().filter_map(at).collect())
            }
        }
    }

    /// Why the bridge may not forward between these ports.
    pub async fn obstacles(&self, ports: &HashSet<u32>) -> Vec<Problem> {
        let Self::Kernel(netlink) = self else { return Vec::new() };
        netlink.obstacles(ports).await.unwrap_or_else(|e| {
            log::warn!("cannot read whether the bridge forwards between ports: {e:#}");
            Vec::new()
        })
    }
}
