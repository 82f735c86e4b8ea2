//! Finds the job and the numbers of all ranks, from a controller or a list.

use std::net::IpAddr;
use std::time::Duration;

use netsum_api::v1::{self, JobState};

use super::config::{Bootstrap, CommConfig};
use super::network::Network;
use crate::control::Control;
use crate::control::heartbeat::Heartbeat;
use crate::control::interface::{self, Interface};
use netsum_collective::error::Error;
use netsum_collective::numeric::layout::Layout;
use netsum_collective::queue_pairs::{QpInfo, RankQpInfo, SourcePorts};
use netsum_collective::shape::JobShape;
use netsum_common::unmanaged::static_connection;
use netsum_rc::{Psn, Qpn};

/// A job that this rank is a member of.
pub(crate) struct Membership {
    pub shape: JobShape,
    /// In the order of the ring: each sends to the next.
    pub ranks: Vec<RankQpInfo>,
    /// Their numbers.
    pub names: Vec<u32>,
    /// `None` without a controller.
    pub heartbeat: Option<Heartbeat>,
}

/// How long to wait for a controller that cannot be reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RetryFor {
    /// A few seconds: it may be about to start.
    Short,
    /// As long as for other ranks: it was there, and may restart.
    Long,
}

/// Finds the job and exchanges queue pair numbers with the other ranks.
pub(crate) fn bootstrap(
    config: &CommConfig,
    network: &mut dyn Network,
    patience: RetryFor,
) -> Result<Membership, Error> {
    match &config.bootstrap {
        Bootstrap::Static { peers, mtu, message_size, window, rings } => {
            if let Some(group) = &config.group {
                return wrong(format!(
                    "group {group}: groups need a box: set NETSUM_CONTROLLER instead of \
                     NETSUM_PEERS"
                ));
            }
            if peers.len() != config.ranks as usize {
                return wrong(format!(
                    "peers: {} addresses for {} ranks: set one for each rank (NETSUM_PEERS; \
                     NETSUM_RANKS or the launcher's count)",
                    peers.len(),
                    config.ranks
                ));
            }
            let own = peers[config.rank as usize];
            if own != config.ip {
                return wrong(format!(
                    "ip {}: peers has {own} for rank {}",
                    config.ip, config.rank
                ));
            }
            let layout = Layout { message_size: *message_size, window: *window, rings: *rings };
            let shape = JobShape {
                ranks: config.ranks,
                mtu: *mtu,
                layout,
                relaxed: false,
                on_host_ring: false,
                is_sealed: false,
            };
            let shape = sealed(config, shape);
            shape.check().map_err(Error::Config)?;
            check_mtu(config.ip, *mtu, interface::that_holds(config.ip).as_ref())?;
            let numbers = |rank: usize, ring| {
                let c = static_connection(rank as u32, ring);
                let [receive_qpn, send_qpn] = [c.receive_qpn, c.send_qpn]
                    .map(|qpn| Qpn::new(qpn.get() + config.queue_pair_offset()));
                QpInfo { receive_qpn, send_qpn, first_psn: c.first_psn }
            };
            let ranks = peers.iter().enumerate().map(|(rank, ip)| RankQpInfo {
                ip: *ip,
                rings: (0..*rings).map(|ring| numbers(rank, Some(ring))).collect(),
                bypass: numbers(rank, None),
                any_ip_id: false,
                selective: true,
                ports: config.ports_of(rank as u32, peers),
            });
            let names = (0..config.ranks).collect();
            Ok(Membership { shape, ranks: ranks.collect(), names, heartbeat: None })
        }
        Bootstrap::Controller { address, job, .. } => {
            let mut control = control(config)?;
            if patience == RetryFor::Long {
                control.retry_for(config.connect_timeout);
            }
            join(config, network, control, address, &name(config, job))
        }
    }
}

fn sealed(config: &CommConfig, shape: JobShape) -> JobShape {
    if config.secret.is_some() { shape.sealed() } else { shape }
}

/// A client of the job's controller.
pub(crate) fn control(config: &CommConfig) -> Result<Control, Error> {
    match &config.bootstrap {
        Bootstrap::Controller { address, job, token } => {
            let control = Control::new(address, &name(config, job), token, config.tls.as_ref())?;
            Ok(if config.secret.is_some() { control.sealed() } else { control })
        }
        Bootstrap::Static { .. } => wrong("no controller".to_owned()),
    }
}

/// The controller's name of the job, or of its group.
fn name(config: &CommConfig, job: &str) -> String {
    match &config.group {
        Some(group) => format!("{job}/{group}"),
        None => job.to_owned(),
    }
}

fn wrong<T>(text: String) -> Result<T, Error> {
    Err(Error::Config(text))
}

/// Checks that the ranks can reach each other at a list of addresses, as far as the list shows. All
/// ranks have the same list, and all refuse it.
pub(super) fn check_peers(peers: &[IpAddr]) -> Result<(), String> {
    const DO: &str =
        "set NETSUM_IP there (or NETSUM_PEERS at all ranks) to one that the others reach";
    for (rank, ip) in peers.iter().enumerate() {
        let other = |fits: &dyn Fn(&IpAddr) -> bool| peers.iter().position(fits);
        if ip.is_unspecified() || ip.is_multicast() {
            return Err(format!("rank {rank} has the address {ip} of no machine: {DO}"));
        }
        if let Some(far) = other(&|o| !o.is_loopback()).filter(|_| ip.is_loopback()) {
            return Err(format!(
                "rank {rank} has the loopback address {ip}, and rank {far} has {}: other machines \
                 cannot reach loopback addresses: {DO}",
                peers[far]
            ));
        }
        if let Some(far) = other(&|o| o.is_ipv4() != ip.is_ipv4()) {
            return Err(format!(
                "rank {rank} has the address {ip}, and rank {far} has {}: all must be of one \
                 family: set NETSUM_IP",
                peers[far]
            ));
        }
    }
    Ok(())
}

/// IP, UDP, BTH and ICRC, around SENDs without immediate data.
fn headers(ip: IpAddr) -> u32 {
    (if ip.is_ipv4() { 20 } else { 40 }) + 8 + 12 + 4
}

/// Checks that an interface can send packets of the path MTU, before other ranks wait for this one.
fn check_mtu(ip: IpAddr, mtu: u32, interface: Option<&Interface>) -> Result<(), Error> {
    let needed = mtu + headers(ip);
    match interface {
        Some(Interface { name, mtu: Some(has), .. }) if *has < needed => wrong(format!(
            "mtu {mtu}: interface {name}, which has {ip}, has an MTU of {has}, but a path MTU of \
             {mtu} needs at least {needed}"
        )),
        _ => Ok(()),
    }
}

fn join(
    config: &CommConfig,
    network: &mut dyn Network,
    mut control: Control,
    address: &str,
    job: &str,
) -> Result<Membership, Error> {
    let described = match &config.group {
        Some(group) => control.open_group(group, config.ranks, config.connect_timeout)?,
        None => control.describe(config.connect_timeout)?,
    };
    let (own, its) = (config.ranks, described.ranks);
    let (min, max) = (described.min_ranks, described.max_ranks);
    if max > 0 && !(min..=max).contains(&own) {
        return wrong(format!(
            "ranks {own}: job {job} has {min} to {max}: start as many (WORLD_SIZE, NETSUM_RANKS), \
             or create a job for {own}"
        ));
    }
    if max == 0 && its != own {
        return wrong(format!(
            "ranks {own}: job {job} has {its}: start {its} ranks (WORLD_SIZE, NETSUM_RANKS), or \
             create a job for {own}"
        ));
    }
    let layout = Layout {
        message_size: described.message_size,
        window: described.window,
        rings: described.rings,
    };
    let (relaxed, on_host_ring, is_sealed) = (false, false, false);
    let shape =
        JobShape { ranks: own, mtu: described.mtu, layout, relaxed, on_host_ring, is_sealed };
    let shape = sealed(config, shape);
    shape.check().map_err(|e| Error::Config(format!("job {job}: {e}")))?;
    let interface = interface::that_holds(config.ip);
    check_mtu(config.ip, shape.mtu, interface.as_ref())?;
    // Ranks of an earlier epoch may still be registered: this rank joins the next one.
    let epoch = match described.state() {
        JobState::Active | JobState::Failed => described.epoch + 1,
        _ => described.epoch,
    };
    let (rings, bypass) = network.numbers(&shape)?;
    let message = |n: &QpInfo| v1::Connection {
        receive_qpn: n.receive_qpn.get(),
        send_qpn: n.send_qpn.get(),
        first_psn: n.first_psn.get(),
    };
    // Adapters take only what they were prepared for.
    let link = interface.as_ref().and_then(|i| i.mtu).filter(|_| network.selective());
    let ports = network.ports();
    let place = v1::RankAddress {
        rank: config.rank,
        ip: config.ip.to_string(),
        mac: interface.and_then(|i| i.mac).unwrap_or_default(),
        rings: rings.iter().map(message).collect(),
        bypass: Some(message(&bypass)),
        any_ip_id: network.any_ip_id(),
        selective: network.selective(),
        next_port: ports.next.into(),
        previous_port: ports.previous.into(),
        largest_mtu: link.map_or(0, |mtu| mtu.saturating_sub(headers(config.ip))),
    };
    let reply = control.join(place, own, epoch, config.connect_timeout)?;
    let ranks =
        reply.ranks.iter().map(|r| rank_numbers(r, layout.rings)).collect::<Result<Vec<_>, _>>();
    let ranks =
        ranks.map_err(|reason| Error::Controller { address: address.to_owned(), reason })?;
    if ranks.len() != config.ranks as usize {
        let reason = format!("its answer has {} ranks instead of {}", ranks.len(), config.ranks);
        return Err(Error::Controller { address: address.to_owned(), reason });
    }
    let names: Vec<u32> = reply.ranks.iter().map(|r| r.rank).collect();
    if !(0..config.ranks).all(|rank| names.contains(&rank)) {
        let reason = format!("its answer has the ranks {names:?}");
        return Err(Error::Controller { address: address.to_owned(), reason });
    }
    let relaxed = reply.job.as_ref().is_some_and(|j| j.order == "relaxed");
    let mtu = reply.job.as_ref().map_or(shape.mtu, |j| j.mtu);
    let shape = JobShape { mtu, relaxed, on_host_ring: reply.on_host_ring, ..shape };
    shape.check().map_err(|e| Error::Config(format!("job {job}: {e}")))?;
    let epoch = reply.job.as_ref().map_or(epoch, |j| j.epoch);
    let period = Duration::from_millis(u64::from(described.heartbeat_ms.max(100)));
    let heartbeat = Some(Heartbeat::start(control, config.rank, epoch, period)?);
    if reply.on_host_ring && config.rank == 0 && reply.warnings.is_empty() {
        log::warn!(
            "rank 0: no box sums job {job} now: the ranks sum over the hosts' ring; the \
             controller's log has the reason"
        );
    }
    Ok(Membership { shape, ranks, names, heartbeat })
}

fn rank_numbers(r: &v1::RankAddress, rings: u32) -> Result<RankQpInfo, String> {
    let ip: IpAddr =
        r.ip.parse().map_err(|_| format!("rank {} has the address {:?}", r.rank, r.ip))?;
    let qpn = |n| {
        Qpn::checked(n)
            .ok_or_else(|| format!("rank {} has queue pair {n:#x}: more than 24 bits", r.rank))
    };
    let numbers = |c: &v1::Connection| -> Result<QpInfo, String> {
        let first_psn = Psn::new(c.first_psn);
        Ok(QpInfo { receive_qpn: qpn(c.receive_qpn)?, send_qpn: qpn(c.send_qpn)?, first_psn })
    };
    let bypass =
        r.bypass.as_ref().ok_or_else(|| format!("rank {} has no bypass connection", r.rank))?;
    if r.rings.len() != rings as usize {
        return Err(format!("rank {} has {} rings instead of {rings}", r.rank, r.rings.len()));
    }
    let rings = r.rings.iter().map(numbers).collect::<Result<_, _>>()?;
    Ok(RankQpInfo {
        ip,
        rings,
        bypass: numbers(bypass)?,
        any_ip_id: r.any_ip_id,
        selective: r.selective,
        ports: SourcePorts { next: r.next_port as u16, previous: r.previous_port as u16 },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::network::Connections;

    struct Unused;

    impl Network for Unused {
        fn numbers(&mut self, _: &JobShape) -> Result<(Vec<QpInfo>, QpInfo), Error> {
            panic!("numbers follow from the list")
        }
        fn connect(
            self: Box<Self>,
            _: &JobShape,
            _: u32,
            _: &[RankQpInfo],
        ) -> Result<Box<dyn Connections>, Error> {
            panic!("nobody connects")
        }
        fn any_ip_id(&self) -> bool {
            false
        }
        fn selective(&self) -> bool {
            true
        }
        fn ports(&self) -> SourcePorts {
            SourcePorts::ROCE
        }
    }

    #[test]
    fn a_static_list_must_fit() {
        let config = |rank, ranks, peers: &[&str]| {
            let peers = peers.iter().map(|p| p.parse().unwrap()).collect();
            let bootstrap =
                Bootstrap::Static { peers, mtu: 1024, message_size: 4096, window: 2, rings: 1 };
            CommConfig::new(rank, ranks, "127.0.0.1".parse().unwrap(), bootstrap)
        };
        assert!(
            bootstrap(&config(0, 2, &["127.0.0.1", "127.0.0.2"]), &mut Unused, RetryFor::Short)
                .is_ok()
        );
        let Err(Error::Config(e)) =
            bootstrap(&config(0, 2, &["127.0.0.1"]), &mut Unused, RetryFor::Short)
        else {
            panic!()
        };
        assert!(e.contains("1 addresses for 2 ranks"), "{e}");
        let Err(Error::Config(e)) =
            bootstrap(&config(1, 2, &["127.0.0.1", "127.0.0.2"]), &mut Unused, RetryFor::Short)
        else {
            panic!()
        };
        assert!(e.contains("127.0.0.2 for rank 1"), "{e}");
        let group = Some("g".to_owned());
        let config = CommConfig { group, ..config(0, 2, &["127.0.0.1", "127.0.0.2"]) };
        let Err(Error::Config(e)) = bootstrap(&config, &mut Unused, RetryFor::Short) else {
            panic!()
        };
        assert!(e.contains("group g: groups need a box"), "{e}");
    }

    #[test]
    fn addresses_that_cannot_reach_each_other_are_refused() {
        let check = |peers: &[&str]| {
            let peers: Vec<IpAddr> = peers.iter().map(|p| p.parse().unwrap()).collect();
            check_peers(&peers)
        };
        assert_eq!(check(&["127.0.0.1", "127.0.0.2", "127.0.0.1"]), Ok(()));
        assert_eq!(check(&["fd00::1", "fd00::2", "fd00::3"]), Ok(()));
        for (peers, words) in [
            (
                ["10.0.0.1", "127.0.1.1", "10.0.0.2"],
                ["rank 1 has the loopback", "127.0.1.1", "NETSUM_IP"],
            ),
            (
                ["::1", "fd00::1", "fd00::2"],
                ["rank 0 has the loopback", "rank 1 has fd00::1", "NETSUM_IP"],
            ),
            (
                ["10.0.0.1", "10.0.0.2", "fd00::1"],
                ["rank 2 has fd00::1", "one family", "NETSUM_IP"],
            ),
            (["10.0.0.1", "0.0.0.0", "10.0.0.2"], ["rank 1", "0.0.0.0", "NETSUM_IP"]),
        ] {
            let text = check(&peers).unwrap_err();
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
    }

    #[test]
    fn a_queue_pair_number_has_24_bits() {
        let bypass = |send_qpn| Some(v1::Connection { receive_qpn: 2, send_qpn, first_psn: 0 });
        let address_with = |send_qpn| v1::RankAddress {
            ip: "::1".into(),
            bypass: bypass(send_qpn),
            ..Default::default()
        };
        assert!(rank_numbers(&address_with(0xff_fffe), 0).is_ok());
        let e = rank_numbers(&address_with(0x100_0003), 0).unwrap_err();
        assert_eq!(e, "rank 0 has queue pair 0x1000003: more than 24 bits");
    }

    #[test]
    fn an_interface_must_hold_the_path_mtu_and_its_headers() {
        let interface = |mtu| Interface { name: "eth0".into(), mac: None, mtu };
        let (v4, v6) = ("10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap());
        for (ip, least) in [(v4, 1024 + 44), (v6, 1024 + 64)] {
            assert!(check_mtu(ip, 1024, Some(&interface(Some(least)))).is_ok());
            let Err(Error::Config(e)) = check_mtu(ip, 1024, Some(&interface(Some(least - 1))))
            else {
                panic!()
            };
            assert!(
                e.starts_with("mtu 1024: interface eth0")
                    && e.contains(&format!("at least {least}")),
                "{e}"
            );
        }
        assert!(
            check_mtu(v4, 4096, None).is_ok()
                && check_mtu(v4, 4096, Some(&interface(None))).is_ok()
        );
    }
}
