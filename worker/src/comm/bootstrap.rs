//! From a configuration to everything that the connections need.

use std::net::IpAddr;
use std::time::Duration;

use netsum_api::v1::{self, JobState};

use super::config::{Bootstrap, CommConfig, JobShape, static_connection};
use super::error::Error;
use super::links::{Numbers, RankNumbers};
use crate::control::Control;
use crate::control::heartbeat::Heartbeat;
use crate::control::interface::{self, Interface};
use crate::numeric::layout::Layout;

/// A job that this rank is a member of.
pub(crate) struct Membership {
    pub shape: JobShape,
    pub ranks: Vec<RankNumbers>,
    /// `None` without a daemon.
    pub heartbeat: Option<Heartbeat>,
}

/// Finds the job, and the other ranks. The socket must be open already: others may send at once.
pub(crate) fn bootstrap(config: &CommConfig) -> Result<Membership, Error> {
    match &config.bootstrap {
        Bootstrap::Static { peers, mtu, message_size, window, rings } => {
            if peers.len() != config.ranks as usize {
                return wrong(format!("peers: {} addresses for {} ranks", peers.len(), config.ranks));
            }
            let own = peers[config.rank as usize];
            if own != config.ip {
                return wrong(format!("ip {}: peers has {own} for rank {}", config.ip, config.rank));
            }
            let layout = Layout { message_size: *message_size, window: *window, rings: *rings };
            let shape = JobShape { ranks: config.ranks, mtu: *mtu, layout };
            shape.check().map_err(Error::Config)?;
            check_mtu(config.ip, *mtu, interface::that_holds(config.ip).as_ref())?;
            let numbers = |rank: usize, ring| {
                let c = static_connection(rank as u32, ring);
                Numbers { receive_qpn: c.receive_qpn, send_qpn: c.send_qpn, first_psn: c.first_psn }
            };
            let ranks = peers.iter().enumerate().map(|(rank, ip)| RankNumbers {
                ip: *ip,
                rings: (0..*rings).map(|ring| numbers(rank, Some(ring))).collect(),
                plain: numbers(rank, None),
            });
            Ok(Membership { shape, ranks: ranks.collect(), heartbeat: None })
        }
        Bootstrap::Controller { address, job, token } => join(config, address, job, token),
    }
}

fn wrong<T>(text: String) -> Result<T, Error> {
    Err(Error::Config(text))
}

/// That packets of a path MTU can leave by an interface: before anybody waits for this rank.
fn check_mtu(ip: IpAddr, mtu: u32, interface: Option<&Interface>) -> Result<(), Error> {
    // IP, UDP, BTH and ICRC, around SENDs without immediate data.
    let needed = mtu + if ip.is_ipv4() { 20 } else { 40 } + 8 + 12 + 4;
    match interface {
        Some(Interface { name, mtu: Some(has), .. }) if *has < needed => wrong(format!(
            "mtu {mtu}: interface {name}, which has {ip}, has an MTU of {has}; at least {needed} is needed for a path MTU of {mtu}"
        )),
        _ => Ok(()),
    }
}

fn join(config: &CommConfig, address: &str, job: &str, token: &str) -> Result<Membership, Error> {
    let mut control = Control::new(address, job, token, config.tls.as_ref())?;
    let described = control.describe(config.connect_timeout)?;
    if described.ranks != config.ranks {
        return wrong(format!("ranks {}: job {job} has {}", config.ranks, described.ranks));
    }
    let layout =
        Layout { message_size: described.message_size, window: described.window, rings: described.rings };
    let shape = JobShape { ranks: described.ranks, mtu: described.mtu, layout };
    shape.check().map_err(|e| Error::Config(format!("job {job}: {e}")))?;
    let interface = interface::that_holds(config.ip);
    check_mtu(config.ip, shape.mtu, interface.as_ref())?;
    // Ranks of an earlier run may still be registered; a new epoch begins anew.
    let epoch = match described.state() {
        JobState::Active | JobState::Failed => described.epoch + 1,
        _ => described.epoch,
    };
    let mut numbers = Fresh::new(config.rank);
    let own = v1::RankAddress {
        rank: config.rank,
        ip: config.ip.to_string(),
        mac: interface.and_then(|i| i.mac).unwrap_or_default(),
        rings: (0..layout.rings).map(|_| numbers.connection()).collect(),
        plain: Some(numbers.connection()),
    };
    let reply = control.join(own, epoch, config.connect_timeout)?;
    let ranks = reply.ranks.iter().map(|r| rank_numbers(r, layout.rings)).collect::<Result<Vec<_>, _>>();
    let ranks = ranks.map_err(|reason| Error::Controller { address: address.to_owned(), reason })?;
    if ranks.len() != config.ranks as usize {
        let reason = format!("names {} ranks of {}", ranks.len(), config.ranks);
        return Err(Error::Controller { address: address.to_owned(), reason });
    }
    let epoch = reply.job.as_ref().map_or(epoch, |j| j.epoch);
    let period = Duration::from_millis(u64::from(described.heartbeat_ms.max(100)));
    let heartbeat = Some(Heartbeat::start(control, config.rank, epoch, period)?);
    Ok(Membership { shape, ranks, heartbeat })
}

fn rank_numbers(r: &v1::RankAddress, rings: u32) -> Result<RankNumbers, String> {
    let ip: IpAddr = r.ip.parse().map_err(|_| format!("rank {} has the address {:?}", r.rank, r.ip))?;
    let numbers = |c: &v1::Connection| Numbers {
        receive_qpn: c.receive_qpn,
        send_qpn: c.send_qpn,
        first_psn: c.first_psn,
    };
    let plain = r.plain.as_ref().ok_or_else(|| format!("rank {} has no plain connection", r.rank))?;
    if r.rings.len() != rings as usize {
        return Err(format!("rank {} has {} rings of {rings}", r.rank, r.rings.len()));
    }
    Ok(RankNumbers { ip, rings: r.rings.iter().map(numbers).collect(), plain: numbers(plain) })
}

/// Queue pair numbers and PSNs that nobody used a moment ago: late packets of an earlier run find no receiver.
struct Fresh {
    state: u64,
    used: Vec<u32>,
}

impl Fresh {
    fn new(rank: u32) -> Self {
        use std::hash::{BuildHasher, Hasher, RandomState};
        // RandomState is seeded by the system.
        let mut hasher = RandomState::new().build_hasher();
        hasher.write_u32(rank);
        Self { state: hasher.finish(), used: Vec::new() }
    }

    fn number(&mut self) -> u32 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) as u32 & 0xff_ffff
    }

    /// Not 0 or 1, which are special, nor all ones, which means multicast.
    fn qpn(&mut self) -> u32 {
        loop {
            let n = self.number();
            if n > 1 && n < 0xff_ffff && !self.used.contains(&n) {
                self.used.push(n);
                return n;
            }
        }
    }

    fn connection(&mut self) -> v1::Connection {
        v1::Connection { receive_qpn: self.qpn(), send_qpn: self.qpn(), first_psn: self.number() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fresh_numbers_are_unique_and_in_range() {
        let mut fresh = Fresh::new(0);
        for _ in 0..500 {
            let c = fresh.connection();
            assert!(c.receive_qpn > 1 && c.send_qpn > 1 && c.receive_qpn < 0xff_ffff);
            assert!(c.first_psn < 1 << 24);
        }
        let mut used = fresh.used.clone();
        used.sort_unstable();
        used.dedup();
        assert_eq!(used.len(), 1000);
    }

    #[test]
    fn a_static_list_must_fit() {
        let config = |rank, ranks, peers: &[&str]| {
            let peers = peers.iter().map(|p| p.parse().unwrap()).collect();
            let bootstrap = Bootstrap::Static { peers, mtu: 1024, message_size: 4096, window: 2, rings: 1 };
            CommConfig::new(rank, ranks, "127.0.0.1".parse().unwrap(), bootstrap)
        };
        assert!(bootstrap(&config(0, 2, &["127.0.0.1", "127.0.0.2"])).is_ok());
        let Err(Error::Config(e)) = bootstrap(&config(0, 2, &["127.0.0.1"])) else { panic!() };
        assert!(e.contains("1 addresses for 2 ranks"), "{e}");
        let Err(Error::Config(e)) = bootstrap(&config(1, 2, &["127.0.0.1", "127.0.0.2"])) else { panic!() };
        assert!(e.contains("127.0.0.2 for rank 1"), "{e}");
    }
    #[test]
    fn an_interface_must_hold_the_path_mtu_and_its_headers() {
        let interface = |mtu| Interface { name: "eth0".into(), mac: None, mtu };
        let (v4, v6) = ("10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap());
        for (ip, least) in [(v4, 1024 + 44), (v6, 1024 + 64)] {
            assert!(check_mtu(ip, 1024, Some(&interface(Some(least)))).is_ok());
            let Err(Error::Config(e)) = check_mtu(ip, 1024, Some(&interface(Some(least - 1)))) else {
                panic!()
            };
            assert!(
                e.starts_with("mtu 1024: interface eth0") && e.contains(&format!("at least {least}")),
                "{e}"
            );
        }
        assert!(check_mtu(v4, 4096, None).is_ok() && check_mtu(v4, 4096, Some(&interface(None))).is_ok());
    }
}
