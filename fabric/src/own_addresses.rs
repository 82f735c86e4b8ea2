//! Addresses that boxes reserve for the ports behind which they are: those of ranks at other boxes,
//! and the manager's own.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use netsum_api::v1 as api;
use netsum_controller::message::mac_text;
use nix::ifaddrs::getifaddrs;

use crate::boxes::{Boxes, ManagerLocation};
use crate::config::End;
use crate::layout::Paths;

/// Repeat interval of reservations: a restarted box has none.
pub const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// This machine's addresses, and where each is.
#[derive(Default)]
pub struct ManagerAddresses {
    places: BTreeMap<String, ManagerLocation>,
    updated: Option<Instant>,
}

impl ManagerAddresses {
    pub fn places(&self) -> &BTreeMap<String, ManagerLocation> {
        &self.places
    }

    /// Finds where the addresses are. An address whose place is unknown keeps its last place, so
    /// nobody else can take it meanwhile.
    pub async fn update(&mut self, boxes: &Boxes) {
        if self.updated.is_some_and(|at| at.elapsed() < RETRY_INTERVAL) {
            return;
        }
        let own = match callable() {
            Ok(own) => own,
            Err(e) => return log::warn!("cannot list this machine's addresses: {e}"),
        };
        self.updated = Some(Instant::now());
        let (mut places, mut by_mac) = (BTreeMap::new(), HashMap::new());
        for (ip, mac) in own {
            let place = match by_mac.entry(mac) {
                Entry::Occupied(place) => place.into_mut(),
                Entry::Vacant(place) => place.insert(boxes.place_of(mac).await),
            };
            // A box's own MAC addresses come by all its links.
            let is_behind = matches!(place, Some(ManagerLocation::Behind(_)));
            for address in [Some(ip.to_string()), is_behind.then(|| mac_text(mac))] {
                let Some(address) = address else { continue };
                let before = self.places.get(&address);
                place.as_ref().or(before).map(|place| places.insert(address, place.clone()));
            }
        }
        self.places = places;
    }
}

/// IP addresses of this machine that others can reach, and their interfaces' MAC addresses.
fn callable() -> nix::Result<Vec<(IpAddr, [u8; 6])>> {
    let (mut ips, mut macs) = (Vec::new(), HashMap::new());
    for interface in getifaddrs()? {
        let Some(address) = interface.address else { continue };
        // An address may have a label, like `eth0:1`.
        let name = interface.interface_name.split(':').next().unwrap_or_default().to_owned();
        if let Some(mac) = address.as_link_addr().and_then(|link| link.addr()) {
            macs.insert(name, mac);
        } else if let Some(ip) = address.as_sockaddr_in() {
            let ip = ip.ip();
            ips.extend((!ip.is_loopback() && !ip.is_link_local()).then_some((name, ip.into())));
        } else if let Some(ip) = address.as_sockaddr_in6() {
            let ip = ip.ip();
            let is_callable = !ip.is_loopback() && !ip.is_unicast_link_local();
            ips.extend(is_callable.then_some((name, ip.into())));
        }
    }
    let mac = |name: &String| macs.get(name).copied().filter(|mac| *mac != [0; 6]);
    Ok(ips.into_iter().filter_map(|(name, ip)| Some((ip, mac(&name)?))).collect())
}

/// What a box is to reserve: addresses of ranks that are behind other boxes, and of the manager.
pub fn reservations<'a>(
    at: &str,
    paths: &Paths,
    ranks: impl Iterator<Item = (&'a String, &'a End)>,
    own: Option<&BTreeMap<String, ManagerLocation>>,
) -> Vec<api::Reservation> {
    let reservation = |address: &String, port: &str, lapses| api::Reservation {
        address: address.clone(),
        port: port.to_owned(),
        lapses,
    };
    let towards = |of: &str| paths.towards(at, of).filter(|_| of != at);
    let ranks =
        ranks.filter_map(|(address, end)| Some(reservation(address, towards(&end.of)?, false)));
    let own = own.into_iter().flatten().filter_map(|(address, place)| match place {
        ManagerLocation::Behind(end) if end.of == at => {
            Some(reservation(address, &end.port, false))
        }
        ManagerLocation::Behind(End { of, .. }) | ManagerLocation::On(of) => {
            Some(reservation(address, towards(of)?, true))
        }
    });
    ranks.chain(own).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Link;

    #[test]
    fn the_managers_addresses_are_kept_for_the_ports_by_which_it_calls() {
        let end = |text: &str| End::try_from(text.to_owned()).unwrap();
        let link = |below, above| Link { below: end(below), above: end(above), rate: None };
        let links = [link("a/up", "s/1"), link("b/up", "s/2")];
        let first = links.iter().map(|link| (link.below.of.clone(), link.clone())).collect();
        let paths = Paths { links: links.to_vec(), first, ..Paths::default() };
        let at = |at: &str, place: ManagerLocation| {
            let own = BTreeMap::from([("10.0.0.9".to_owned(), place)]);
            let ranks = ("10.0.0.1".to_owned(), end("b/p0"));
            let ranks = [(&ranks.0, &ranks.1)].into_iter();
            let all = reservations(at, &paths, ranks, Some(&own)).into_iter();
            all.map(|r| format!("{} {} {}", r.address, r.port, r.lapses)).collect::<Vec<_>>()
        };
        let rank = "10.0.0.1 up false";
        let behind = ManagerLocation::Behind(end("a/p7"));
        assert_eq!(at("a", behind.clone()), [rank, "10.0.0.9 p7 false"]);
        assert_eq!(at("b", behind.clone()), ["10.0.0.9 up true"]);
        assert_eq!(at("s", behind), ["10.0.0.1 2 false", "10.0.0.9 1 true"]);
        let on = ManagerLocation::On("s".into());
        assert_eq!(at("a", on.clone()), [rank, "10.0.0.9 up true"]);
        assert_eq!(at("s", on), ["10.0.0.1 2 false"], "its own, which it reserves by itself");
    }
}
