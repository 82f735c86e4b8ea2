//! The neighbours that ports see by LLDP, at the other ends of their links.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The port at the other end of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// The port's MAC address.
    pub mac: [u8; 6],
    /// Its machine's LLDP chassis id.
    pub id: String,
    /// Names of the machine and of the port, as announced.
    pub chassis: String,
    pub port: String,
    /// Time until this expires.
    pub ttl: Duration,
}

/// The neighbours of all ports, by interface number.
#[derive(Clone, Debug)]
pub struct LldpNeighbours {
    /// The LLDP chassis id of this daemon.
    pub own: Arc<str>,
    by_port: Arc<Mutex<HashMap<u32, (Neighbour, Instant)>>>,
}

impl LldpNeighbours {
    /// Empty.
    pub fn new(own: &str) -> Self {
        Self { own: own.into(), by_port: Arc::default() }
    }

    /// Records a port's neighbour.
    pub fn set(&self, ifindex: u32, neighbour: Neighbour, now: Instant) {
        self.by_port
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(ifindex, (neighbour, now));
    }

    /// A port's neighbour, and the time since its last frame; `None` if no frame arrived or the
    /// last has expired.
    pub fn get(&self, ifindex: u32, now: Instant) -> Option<(Neighbour, Duration)> {
        let by_port = self.by_port.lock().unwrap_or_else(PoisonError::into_inner);
        let (neighbour, since) = by_port.get(&ifindex)?;
        let age = now.saturating_duration_since(*since);
        (age < neighbour.ttl).then(|| (neighbour.clone(), age))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_neighbour_lasts_for_its_time_to_live() {
        let (neighbours, now) = (LldpNeighbours::new("own"), Instant::now());
        let ttl = Duration::from_secs(3);
        let neighbour = Neighbour {
            mac: [2; 6],
            id: "7".into(),
            chassis: "leaf0".into(),
            port: "swp9".into(),
            ttl,
        };
        neighbours.set(3, neighbour, now);
        let after = |time| neighbours.get(3, now + time).map(|(n, age)| (n.port, age));
        assert_eq!(
            after(ttl - Duration::from_secs(1)),
            Some(("swp9".into(), Duration::from_secs(2)))
        );
        assert_eq!(after(ttl), None);
        assert!(neighbours.get(4, now).is_none());
    }
}
