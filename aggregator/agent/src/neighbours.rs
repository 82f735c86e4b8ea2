//! The neighbours that ports have heard at the other ends of their links.

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

/// What ports have heard, by interface number.
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

    /// A port's neighbour, and the time since it was heard; `None` if nothing was heard or it has
    /// expired.
    pub fn get(&self, ifindex: u32, now: Instant) -> Option<(Neighbour, Duration)> {
        let heard = self.by_port.lock().unwrap_or_else(PoisonError::into_inner);
        let (neighbour, since) = heard.get(&ifindex)?;
        let age = now.saturating_duration_since(*since);
        (age < neighbour.ttl).then(|| (neighbour.clone(), age))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_heard_holds_for_its_time() {
        let (heard, now) = (LldpNeighbours::new("own"), Instant::now());
        let ttl = Duration::from_secs(3);
        let said = Neighbour {
            mac: [2; 6],
            id: "7".into(),
            chassis: "leaf0".into(),
            port: "swp9".into(),
            ttl,
        };
        heard.set(3, said, now);
        let after = |time| heard.get(3, now + time).map(|(n, age)| (n.port, age));
        assert_eq!(
            after(ttl - Duration::from_secs(1)),
            Some(("swp9".into(), Duration::from_secs(2)))
        );
        assert_eq!(after(ttl), None);
        assert!(heard.get(4, now).is_none());
    }
}
