//! Why a job's packets do not arrive: what each rank lacks, where packets arrived, and how ports
//! are configured. Pure.

use std::net::IpAddr;

use super::{Job, Rank};
use crate::port::{PortFacts, Problem, defects, fatal, tolerable};
use netsum_common::abi::MTU_OVERHEAD;

/// A kind of packet that a rank has not received in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingPackets {
    /// Any packet of the previous rank.
    Previous,
    /// A packet of the full path MTU from the previous rank; smaller ones arrive.
    FullSize,
    /// An acknowledgement of the next rank.
    Acknowledgement,
    /// A sum from the box.
    Sum,
}

/// A rank's packet that arrived at a port that is not the rank's.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Misplaced {
    pub src: IpAddr,
    /// The address and queue pair that it is for, if it is RoCEv2.
    pub to: Option<(IpAddr, u32)>,
    pub port: String,
}

/// Ranks whose packets arrive at another port than the one that they joined behind. For other flows
/// [`crate::diagnose`] reports this by their last packets. Any host can send packets with a rank's
/// address. The cause is fatal only if they are for the next rank's bypass connection, whose random
/// queue pair number a foreign host does not know, and the rank is not at home: then its packets
/// also arrive at its own port.
pub fn misplaced(
    job: &Job,
    strays: &[Misplaced],
    port_name: impl Fn(u32) -> String,
    is_home: impl Fn(Rank) -> bool,
) -> Vec<Problem> {
    let mut all: Vec<Problem> = Vec::new();
    for Misplaced { src, to, port } in strays.iter().filter(|_| job.epoch.is_some()) {
        let Some(flow) = job.flows.iter().find(|flow| flow.src == *src && flow.group_mark == 0)
        else {
            continue;
        };
        let (rank, expected) = (job.sender(flow.member), port_name(flow.ifindex));
        // Other ranks receive at most 300 characters of this.
        let found = fatal(
            format!(
                "packets of rank {rank} ({src}) arrive at {port}, not {expected}, as from a host \
                 with two cards in one subnet"
            ),
            format!(
                "on that host `ip rule add from {src} table 100`, routes in it by the right card, \
                 arp_ignore=1 and arp_announce=2"
            ),
        );
        let is_its_own = to.is_some_and(|(dst, qpn)| bypass_sender(job, *src, dst, qpn).is_some());
        let defect = Problem { is_fatal: is_its_own && !is_home(rank), ..found };
        if !all.contains(&defect) {
            all.push(defect);
        }
    }
    all
}

/// Faults of a job's port, except that it is down, which the missing packets show. `arrive`: sums
/// arrive, because ranks have not fallen back from the box.
pub fn of_port(mtu: u32, facts: &PortFacts, arrive: bool) -> Vec<Problem> {
    let (name, needed) = (&facts.name, mtu + MTU_OVERHEAD);
    let mut all = Vec::new();
    if facts.mtu < needed {
        all.push(fatal(
            format!(
                "port {name} has an MTU of {}: packets of the job's path MTU, {mtu}, need {needed}",
                facts.mtu
            ),
            format!(
                "ip link set {name} mtu {needed}, or give the job a smaller path MTU: netsum job \
                 create --mtu"
            ),
        ));
    }
    // Low rates and too little room for larger jobs do not stop packets.
    let as_it_should =
        PortFacts { up: true, mtu: u32::MAX, interrupts: Vec::new(), ..facts.clone() };
    let named = |d: Problem| Problem { found: format!("port {name}: {}", d.found), ..d };
    all.extend(defects(&as_it_should).into_iter().filter(|d| d.is_fatal || !arrive).map(named));
    all
}

/// Evidence about a job's path.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// Ranks whose packets arrive at another port.
    pub misplaced: Vec<Problem>,
    /// Faults of ports, by [`of_port`].
    pub ports: Vec<Problem>,
    /// Why the bridge may not forward, by [`crate::bridging::obstacles`].
    pub bridging: Vec<Problem>,
    /// Ranks whose packets to the next rank arrived on bypass connections during the observation.
    pub bypass: Vec<Rank>,
    /// Other findings of a diagnosis, the most likely first.
    pub findings: Vec<Problem>,
}

impl Evidence {
    /// All certain and possible obstacles, certain ones first.
    pub fn obstacles(&self) -> Vec<Problem> {
        let mut all = [&self.misplaced[..], &self.ports, &self.bridging].concat();
        all.sort_by_key(|defect| !defect.is_fatal);
        all
    }

    /// Why `rank` lacks something from its neighbours in `ring`; fatal if waiting does not help.
    pub fn cause(&self, missing: MissingPackets, rank: Rank, ring: &[Rank]) -> Option<Problem> {
        if let Some(defect) = self.misplaced.iter().find(|defect| defect.is_fatal) {
            return Some(defect.clone());
        }
        self.besides(missing, rank, ring).or(self.misplaced.first().cloned())
    }

    /// The same, if no rank sends by another card.
    fn besides(&self, missing: MissingPackets, rank: Rank, ring: &[Rank]) -> Option<Problem> {
        let first = |defects: &[Problem]| defects.first().cloned();
        let place = ring.iter().position(|other| *other == rank)?;
        let sender = match missing {
            MissingPackets::Sum => {
                let fatal = |d: &&Problem| d.is_fatal;
                let found = self.ports.iter().find(fatal).or(self.bridging.iter().find(fatal));
                return found.or(self.findings.first()).or(self.ports.first()).cloned();
            }
            MissingPackets::FullSize if !self.ports.is_empty() => return first(&self.ports),
            // The next rank may be late, and the acknowledgement comes with a retransmission.
            MissingPackets::Acknowledgement => {
                return self.bridging.first().map(|d| Problem { is_fatal: false, ..d.clone() });
            }
            MissingPackets::Previous | MissingPackets::FullSize => {
                ring[(place + ring.len() - 1) % ring.len()]
            }
        };
        // The sender's packets reach the box but not the receiver, so the sender is not late.
        let is_cut = self.bypass.contains(&sender);
        let Some(obstacle) = first(&self.bridging) else {
            return is_cut.then(|| {
                tolerable(
                    format!("packets of rank {sender} arrive at the box, but not at the next rank"),
                    "check the firewalls and the neighbour tables (`ip neigh`) of both hosts, and \
                     the switches between them and the box",
                )
            });
        };
        // A port forwards after its spanning tree delay.
        Some(Problem { is_fatal: is_cut && !obstacle.is_fatal, ..obstacle })
    }
}

/// The rank that sent this packet on a bypass connection: from `src` to queue pair `qpn` of `dst`.
pub fn bypass_sender(job: &Job, src: IpAddr, dst: IpAddr, qpn: u32) -> Option<Rank> {
    let epoch = job.epoch.as_ref()?;
    let pairs = epoch.ring.iter().zip(epoch.ring.iter().cycle().skip(1));
    let of = |rank: &Rank| &epoch.ranks[rank.0 as usize];
    pairs.map(|(rank, next)| (of(rank), of(next))).find_map(|(rank, next)| {
        (rank.ip == src && next.ip == dst && next.bypass.receive_qpn == qpn).then_some(rank.rank)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RING: [Rank; 3] = [Rank(0), Rank(1), Rank(2)];

    #[test]
    fn a_cause_is_certain_if_packets_reach_only_the_box() {
        let filter = tolerable("chain bridge f c filters forwarded packets", "nft list chain");
        let mut evidence = Evidence { bridging: vec![filter.clone()], ..Evidence::default() };
        let certain = |evidence: &Evidence, missing| {
            evidence.cause(missing, Rank(1), &RING).map(|defect| defect.is_fatal)
        };
        assert_eq!(certain(&evidence, MissingPackets::Previous), Some(false), "it may be late");
        evidence.bypass = vec![Rank(2)];
        assert_eq!(certain(&evidence, MissingPackets::Previous), Some(false), "that is rank 2's");
        assert_eq!(
            certain(&evidence, MissingPackets::Acknowledgement),
            Some(false),
            "it may be resent late"
        );
        evidence.bypass = vec![Rank(0)];
        assert_eq!(certain(&evidence, MissingPackets::Previous), Some(true));
        // Spanning tree needs time.
        evidence.bridging = vec![fatal("port a does not forward", "wait")];
        assert_eq!(certain(&evidence, MissingPackets::Previous), Some(false));
        evidence.bridging.clear();
        assert_eq!(certain(&evidence, MissingPackets::Previous), Some(false));
        evidence.bypass.clear();
        assert_eq!(certain(&evidence, MissingPackets::Previous), None);
        // A foreign host's packets with a rank's address explain nothing.
        evidence.misplaced =
            vec![tolerable("packets of rank 2 arrive at port0, not port3", "route")];
        assert_eq!(certain(&evidence, MissingPackets::Previous), Some(false));
        // Another card explains everything.
        evidence.misplaced = vec![fatal("packets of rank 2 arrive at port0, not port3", "route")];
        for missing in [
            MissingPackets::Previous,
            MissingPackets::FullSize,
            MissingPackets::Acknowledgement,
            MissingPackets::Sum,
        ] {
            assert_eq!(certain(&evidence, missing), Some(true));
        }
    }

    #[test]
    fn a_missing_sum_is_the_ports_before_it_is_the_ranks() {
        let late = tolerable("no packet of rank 1 has arrived", "look at it");
        let mut evidence = Evidence { findings: vec![late.clone()], ..Evidence::default() };
        assert_eq!(evidence.cause(MissingPackets::Sum, Rank(1), &RING), Some(late));
        let veth = PortFacts {
            name: "port1".into(),
            driver: "veth".into(),
            features: Some(3),
            xdp: true,
            mtu: 4200,
            ..PortFacts::default()
        };
        evidence.ports = of_port(1024, &veth, true);
        let cause = evidence.cause(MissingPackets::Sum, Rank(1), &RING).unwrap();
        assert!(cause.is_fatal && cause.found.starts_with("port port1: "), "{cause:?}");
        assert!(cause.hint.contains("gro on"), "{cause:?}");
    }

    #[test]
    fn a_port_that_is_too_small_for_the_job_is_named() {
        let port =
            |mtu| PortFacts { name: "swp1".into(), mtu, features: Some(7), ..PortFacts::default() };
        assert_eq!(of_port(1024, &port(1024 + MTU_OVERHEAD), true), []);
        let found = of_port(1024, &port(1024 + MTU_OVERHEAD - 1), true);
        assert!(found.len() == 1 && found[0].is_fatal, "{found:?}");
        assert!(found[0].found.contains("port swp1 has an MTU of"), "{found:?}");
        // VLAN tags that the card strips are a cause only if sums are missing.
        let tags = PortFacts { rx_vlan: Some(true), ..port(9000) };
        assert_eq!(of_port(1024, &tags, true), []);
        assert!(of_port(1024, &tags, false)[0].hint.contains("rxvlan off"));
    }
}
