//! The interfaces that a configuration names. Pure.

use anyhow::{Result, bail};

use super::link::Interface;
use crate::config::Ports;

/// The interfaces that a configuration names, by interface number. The first interface found under
/// a name stays chosen, even if it is renamed, until it is removed.
#[derive(Clone, Debug)]
pub struct PortSelection {
    ports: Ports,
    /// The bridge's number, or those of the interfaces in order; 0 if it does not exist.
    ifindexes: Vec<u32>,
}

impl PortSelection {
    /// Before the first look at the interfaces.
    pub fn of(ports: Ports) -> Self {
        let names = ports.names().len();
        Self { ports, ifindexes: vec![0; names] }
    }

    /// Finds the interfaces, and returns them.
    ///
    /// # Errors
    /// If an interface is missing, or a bridge without ports.
    pub fn new(ports: Ports, all: &[Interface]) -> Result<(Self, Vec<Interface>)> {
        let mut chosen = Self::of(ports);
        let found = chosen.find(all);
        let names = chosen.ports.names().iter().zip(&chosen.ifindexes);
        let missing = names.filter(|(_, ifindex)| **ifindex == 0).map(|(name, _)| name).next();
        match (&chosen.ports, missing) {
            (Ports::Bridge(_), Some(name)) => {
                bail!("bridge = {name:?}: there is no such interface")
            }
            (Ports::List(_), Some(name)) => bail!("ports: there is no interface {name:?}"),
            (Ports::Bridge(name), None) if found.is_empty() => {
                bail!("bridge = {name:?}: the bridge has no ports, or {name} is not a bridge")
            }
            _ => Ok((chosen, found)),
        }
    }

    /// The numbers found last, of the bridge or of the interfaces; 0 if it does not exist.
    pub fn ifindexes(&self) -> &[u32] {
        &self.ifindexes
    }

    /// The chosen interfaces that exist, out of all interfaces.
    pub fn find(&mut self, all: &[Interface]) -> Vec<Interface> {
        let of = |ifindex: u32| all.iter().find(|l| l.ifindex == ifindex);
        for (name, ifindex) in self.ports.names().iter().zip(&mut self.ifindexes) {
            if of(*ifindex).is_none() {
                *ifindex = all.iter().find(|l| l.has_name(name)).map_or(0, |l| l.ifindex);
            }
        }
        if let Ports::Bridge(_) = self.ports {
            return all
                .iter()
                .filter(|l| l.bridge.is_some_and(|b| self.ifindexes.contains(&b)))
                .cloned()
                .collect();
        }
        let mut found: Vec<Interface> = Vec::new();
        for interface in self.ifindexes.iter().filter_map(|i| of(*i)) {
            // The list may name an interface twice.
            if found.iter().all(|l| l.ifindex != interface.ifindex) {
                found.push(interface.clone());
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(ifindex: u32, names: &[&str], bridge: Option<u32>) -> Interface {
        let (name, alt_names) =
            (names[0].to_owned(), names[1..].iter().map(|n| (*n).to_owned()).collect());
        Interface { ifindex, name, alt_names, bridge, ..Interface::default() }
    }

    fn numbers(found: Vec<Interface>) -> Vec<u32> {
        found.into_iter().map(|l| l.ifindex).collect()
    }

    #[test]
    fn an_interface_is_found_and_kept_by_any_of_its_names() {
        let list = Ports::List(["eth1", "other", "eth0"].map(str::to_owned).to_vec());
        let mut all = vec![interface(4, &["eth0"], None), interface(5, &["eth1", "other"], None)];
        let (mut chosen, found) = PortSelection::new(list, &all).unwrap();
        assert_eq!(numbers(found), [5, 4]);
        // eth1 is renamed, and another interface takes that name.
        all[1] = interface(5, &["late"], None);
        all.push(interface(6, &["eth1"], None));
        assert_eq!(numbers(chosen.find(&all)), [5, 4]);
        all.remove(1);
        assert_eq!(numbers(chosen.find(&all)), [6, 4], "the first is gone");
        assert_eq!(numbers(chosen.find(&all[..1])), [4]);
    }

    #[test]
    fn a_bridge_keeps_its_ports_under_every_name_until_there_is_another() {
        let bridge = Ports::Bridge("br0".into());
        let mut all = vec![
            interface(3, &["br0"], None),
            interface(4, &["a"], Some(3)),
            interface(5, &["b"], Some(9)),
        ];
        let (mut chosen, found) = PortSelection::new(bridge.clone(), &all).unwrap();
        assert_eq!(numbers(found), [4]);
        all[0].name = "core".into();
        assert_eq!(numbers(chosen.find(&all)), [4]);
        all[0] = interface(9, &["br0"], None);
        assert_eq!(numbers(chosen.find(&all)), [5]);
        let why = |ports: Ports, all: &[Interface]| {
            PortSelection::new(ports, all).unwrap_err().to_string()
        };
        assert!(why(bridge.clone(), &all[1..]).contains("there is no such interface"));
        assert!(why(bridge, &all[..1]).contains("has no ports"));
        assert!(
            why(Ports::List(vec!["eth7".into()]), &all).contains("there is no interface \"eth7\"")
        );
    }
}
