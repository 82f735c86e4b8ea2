//! Ownership of addresses: an address of a rank on one port cannot appear on another port.

use std::collections::HashMap;
use std::net::IpAddr;

use super::{Controller, Job, Rank, Refusal};
use crate::plane::FlowSpec;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Address {
    Ip(IpAddr),
    Mac([u8; 6]),
}

/// The location of an address behind a port, as the data plane derives it from a flow.
struct Claim<'a> {
    address: Address,
    ifindex: u32,
    job: &'a Job,
    flow: &'a FlowSpec,
    /// The rank that owns the flow.
    rank: Rank,
}

impl Claim<'_> {
    fn description(&self) -> String {
        match self.address {
            Address::Ip(ip) if ip == self.flow.src => format!("address {ip}"),
            Address::Ip(ip) => format!("--dst {ip}"),
            Address::Mac(_) => format!("the MAC address of {}", self.flow.src),
        }
    }
}

/// The addresses of senders, and those of receivers behind other boxes. If a job has several
/// uplinks, the first one owns such an address.
fn claims<'a>(
    job: &'a Job,
    flows: &'a [FlowSpec],
    sender: impl Fn(Rank) -> Rank,
) -> impl Iterator<Item = Claim<'a>> {
    let by_boxes = flows.iter().filter(|f| f.group_mark != 0);
    let ports: HashMap<_, _> = by_boxes.map(|f| ((f.ring, f.member), f.ifindex)).collect();
    let uplink_flow = job.uplink_flow(flows);
    let further = move |member, ifindex| {
        uplink_flow.is_some_and(|(up, first)| member == up && ifindex != first)
    };
    flows.iter().flat_map(move |flow| {
        let next = flow.member.next(job.spec.member_count());
        let own = (!further(flow.member, flow.ifindex)).then_some(flow.ifindex);
        let receiver = ports.get(&(flow.ring, next)).filter(|&&ifindex| !further(next, ifindex));
        let claims = [
            own.map(|ifindex| (Address::Ip(flow.src), ifindex)),
            own.and_then(|ifindex| Some((Address::Mac(flow.src_mac?), ifindex))),
            receiver.map(|&ifindex| (Address::Ip(flow.dst), ifindex)),
        ];
        let rank = sender(flow.member);
        claims.into_iter().flatten().map(move |(address, ifindex)| Claim {
            address,
            ifindex,
            job,
            flow,
            rank,
        })
    })
}

impl Controller {
    /// Checks that these flows, all flows of a job, do not place an address behind another port
    /// than other flows do. `sender`: the rank that owns a member's connection.
    pub(super) fn check_owners(
        &self,
        name: &str,
        flows: &[FlowSpec],
        sender: impl Fn(Rank) -> Rank,
    ) -> Result<(), Refusal> {
        let others = self.jobs.values().filter(|j| j.spec.name != name);
        let others = others.flat_map(|j| claims(j, &j.flows, |member| j.sender(member)));
        let own = claims(self.job(name)?, flows, sender);
        let mut known: HashMap<Address, Claim<'_>> = HashMap::new();
        for claim in others.chain(own) {
            if self.own.contains(&claim.address) {
                let description = claim.description();
                return Err(Refusal::Exists(format!(
                    "rank {}: {description} belongs to this box itself",
                    claim.rank
                )));
            }
            match known.get(&claim.address) {
                Some(other) if other.ifindex != claim.ifindex => {
                    return Err(Refusal::Exists(self.both_sides(&claim, other)));
                }
                Some(_) => {}
                None => drop(known.insert(claim.address, claim)),
            }
        }
        Ok(())
    }

    fn both_sides(&self, claim: &Claim<'_>, other: &Claim<'_>) -> String {
        let description = claim.description();
        let [here, there] = [claim, other].map(|c| self.port_name(c.ifindex));
        format!(
            "rank {}: {description} is behind port {here}, but is in use by rank {} of job `{}` \
             behind port {there}",
            claim.rank, other.rank, other.job.spec.name
        )
    }
}
