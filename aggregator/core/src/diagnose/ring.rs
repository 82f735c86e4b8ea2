//! Why a ring is stalled, or what its ranks send in vain.

use netsum_common::counters::{Counter, Kind};
use netsum_common::serial;
use netsum_common::unmanaged::static_connection;

use super::explain::{RefusedPacket, explain};
use super::{COMPARE, Finding, MemberEvidence, RingEvidence, UnknownFlow, lengths, seconds};
use crate::Rank;
use crate::watch::RingView;

/// Why a ring of a job is stalled.
pub(super) fn of_ring(ring: &RingEvidence, unknown_flows: &[UnknownFlow]) -> Vec<Finding> {
    let view = &ring.view;
    let here = |rank: Rank, (what, next): (String, String)| Finding {
        ring: Some(ring.ring),
        rank: Some(rank),
        what,
        next,
        behind: None,
        is_idle: false,
    };
    let lacking = |r: &MemberEvidence| Finding {
        behind: r.behind_port(),
        ..here(r.flow.member, missing_rank(ring, r, unknown_flows))
    };
    if let Some(rank) = view.state.stopped.checked_sub(1)
        && let Some(evidence) = ring.members.get(rank as usize)
    {
        return vec![here(Rank(rank), refused(ring, evidence, Counter::LayoutMismatch))];
    }
    if view.is_held_back() && ring.stalled.is_some() {
        return vec![Finding {
            ring: Some(ring.ring),
            rank: None,
            what: format!(
                "the sum of index {} is complete, and waits for a packet to carry it",
                view.state.low
            ),
            next: "nothing: the daemon sends it shortly".into(),
            behind: None,
            is_idle: false,
        }];
    }
    // A rank that is refused because of its length may be right: the first contribution may have
    // the wrong one.
    let (mut findings, disagree) = lengths::compare(ring);
    // A rank whose packets were never accepted is at fault even if other ranks have not sent yet.
    let never = |r: &&MemberEvidence| {
        !disagree.contains(&r.flow.member)
            && !accepted(r, view)
            && (r.seen.packets > 0 || talks_elsewhere(r, unknown_flows))
    };
    findings.extend(ring.members.iter().filter(never).map(lacking));
    if ring.stalled.is_some() {
        for rank in
            view.missing(&ring.spec.config).into_iter().filter(|rank| !disagree.contains(rank))
        {
            if findings.iter().all(|f| f.rank != Some(rank)) {
                findings.push(lacking(&ring.members[rank.0 as usize]));
            }
        }
    } else {
        findings.extend(
            ring.members
                .iter()
                .filter_map(|r| not_acknowledged(ring, r).map(|f| here(r.flow.member, f))),
        );
    }
    findings
}

/// Whether the slot machine has accepted a contribution of the rank.
fn accepted(rank: &MemberEvidence, view: &RingView) -> bool {
    view.state.expected[rank.flow.member.0 as usize] != 0
        || view.front().is_some_and(|s| s.contributors & 1 << rank.flow.member.0 != 0)
}

fn talks_elsewhere(rank: &MemberEvidence, unknown_flows: &[UnknownFlow]) -> bool {
    rank.seen.packets == 0 && unknown_flow_of(rank, unknown_flows).is_some()
}

/// Data that the rank sends to its neighbour on a connection that is not registered.
fn unknown_flow_of<'a>(
    rank: &MemberEvidence,
    unknown_flows: &'a [UnknownFlow],
) -> Option<&'a UnknownFlow> {
    let flow = &rank.flow;
    // On bypass connections netsum's own ranks tell each other that no box sums.
    let bypass =
        [rank.sender.0 + 1, 0].map(|receiver| static_connection(receiver, None).receive_qpn.get());
    let unknown_flows = || unknown_flows.iter().filter(|s| !bypass.contains(&s.qpn));
    unknown_flows().find(|s| s.src == flow.src && s.dst == flow.dst).or_else(|| {
        unknown_flows()
            .find(|s| s.src == flow.src || s.dst == flow.dst && s.ifindex == flow.ifindex)
    })
}

/// Why a contribution of this rank is missing.
fn missing_rank(
    ring: &RingEvidence,
    rank: &MemberEvidence,
    unknown_flows: &[UnknownFlow],
) -> (String, String) {
    let (flow, seen, port) = (&rank.flow, &rank.seen, &rank.port);
    if !port.up {
        return (
            format!("is behind {}, which is down", port.name),
            format!("check the cable, and `ip link show {}`", port.name),
        );
    }
    if seen.packets == 0 {
        let (what, mut next) = nothing_came(rank, unknown_flow_of(rank, unknown_flows));
        let neighbour = ring.after(flow.member);
        if neighbour.flow.ifindex == flow.ifindex {
            next = format!(
                "number the ranks so that neighbours are behind different ports: {} is behind {}, \
                 too, so their packets to each other bypass the box",
                ring.receiver(rank),
                port.name
            );
        }
        return (what, next);
    }
    let low = ring.view.state.low;
    let psn = flow.base_psn.plus(low).get();
    match seen.last_verdict {
        Some(outcome) if outcome.kind() == Kind::Drop && outcome != Counter::DuplicateRequest => {
            refused(ring, rank, outcome)
        }
        Some(Counter::Stale) if rank.moved > 0 => refused(ring, rank, Counter::Stale),
        _ if rank.moved > 0 => (
            format!(
                "is slow, or its packets are lost: {} packets arrived during the watch, but not \
                 index {low} (PSN {psn:#x})",
                rank.moved
            ),
            format!("look for losses between it and {}, and in its host's counters", port.name),
        ),
        _ => {
            let ago =
                rank.last.map_or("before the watch".into(), |t| format!("{} ago", seconds(t)));
            let alive = match rank.heartbeat {
                Some(t) => format!("; its process is alive (last heartbeat {} ago)", seconds(t)),
                None => String::new(),
            };
            let quiet = match port.received {
                Some(0) => format!("; {} receives no packets of any kind", port.name),
                _ => String::new(),
            };
            (
                format!(
                    "no packet has arrived since PSN {:#x}, {ago}; index {low} (PSN {psn:#x}) is \
                     missing{alive}{quiet}",
                    seen.last_psn
                ),
                rank.behind().map_or(
                    "check whether it is still computing, has stopped, or loses packets on the \
                     way to the box"
                        .into(),
                    |behind| format!("ask `netsum diagnose` of {behind}"),
                ),
            )
        }
    }
}

fn nothing_came(rank: &MemberEvidence, unknown_flow: Option<&UnknownFlow>) -> (String, String) {
    let (flow, port) = (&rank.flow, &rank.port);
    match unknown_flow {
        Some(s) if s.src == flow.src && s.dst == flow.dst => (
            format!(
                "sends to queue pair {:#x} of {}, but {:#x} is registered",
                s.qpn,
                s.dst,
                flow.qpn.get()
            ),
            "register the flow again with the receiver's queue pair number".into(),
        ),
        Some(s) => (
            format!(
                "sends from {} to {} (queue pair {:#x}), but a flow from {} to {} is registered",
                s.src, s.dst, s.qpn, flow.src, flow.dst
            ),
            "register the flow again with these addresses".into(),
        ),
        None => {
            let port_is = match port.received {
                Some(0) => format!("{} is up, but receives no packets of any kind", port.name),
                Some(n) => {
                    format!("{} is up, and received {n} other packets during the watch", port.name)
                }
                None => format!("{} is up", port.name),
            };
            (
                format!(
                    "no packet to queue pair {:#x} of {} has arrived; {port_is}",
                    flow.qpn.get(),
                    flow.dst
                ),
                rank.behind().map_or_else(
                    || {
                        format!(
                            "check whether it runs, whether its packets reach {} (tcpdump -i {} \
                             udp port 4791), and whether it is behind another port",
                            port.name, port.name
                        )
                    },
                    |behind| format!("ask `netsum diagnose` of {behind}"),
                ),
            )
        }
    }
}

/// Its packets arrive and are refused.
fn refused(ring: &RingEvidence, rank: &MemberEvidence, outcome: Counter) -> (String, String) {
    let (flow, seen) = (&rank.flow, &rank.seen);
    let packet = RefusedPacket {
        port: &rank.port.name,
        src: flow.src,
        mtu: ring.spec.config.mtu,
        credit: ring.spec.config.credit,
        base_psn: flow.base_psn.get(),
        psn: seen.last_psn,
        low: ring.view.state.low,
        accepted: accepted(rank, &ring.view),
    };
    let (what, next) =
        jobs_differ(rank, outcome, &packet).unwrap_or_else(|| explain(outcome, &packet));
    let count = match seen.refused {
        0 => String::new(),
        n => format!("; {n} of {} were refused", seen.packets),
    };
    (format!("{what}{count}"), next)
}

/// The fault if another box accepts what this one refuses.
fn jobs_differ(
    rank: &MemberEvidence,
    outcome: Counter,
    packet: &RefusedPacket<'_>,
) -> Option<(String, String)> {
    let (behind, &RefusedPacket { mtu, credit, base_psn, psn, low, accepted, .. }) =
        (rank.behind()?, packet);
    let what = match outcome {
        Counter::Oversized => {
            format!("{behind} sends fragments of more than {mtu} bytes, this job's path MTU")
        }
        Counter::ShortFragment => {
            format!("{behind} sends fragments of less than {mtu} bytes, this job's path MTU")
        }
        Counter::CreditViolation if accepted => format!(
            "{behind} has a larger window: it sends index {}, where {low} to {} are allowed here",
            serial::sub(psn, base_psn),
            serial::sub(serial::add(low, credit), 1)
        ),
        _ => return None,
    };
    Some((what, COMPARE.to_owned()))
}

/// Nothing is pending, but a rank retransmits fragments whose sums have been released: results or
/// acknowledgements are lost.
fn not_acknowledged(ring: &RingEvidence, rank: &MemberEvidence) -> Option<(String, String)> {
    let again = matches!(rank.seen.last_verdict, Some(Counter::Replays | Counter::Stale));
    if rank.moved == 0 || !again {
        return None;
    }
    let (next, receiver) = (ring.after(rank.flow.member), ring.receiver(rank));
    Some((
        format!(
            "keeps retransmitting PSN {:#x}, whose sum has been released: {receiver} behind {} \
             does not acknowledge it",
            rank.seen.last_psn, next.port.name
        ),
        format!(
            "check that sums from {} reach {receiver}, and that its acknowledgements come back to \
             {}; before an application restarts with the same queue pairs and PSNs, run `netsum \
             job restart`, or it may get sums of its last session",
            next.port.name, rank.port.name
        ),
    ))
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::time::Duration;

    use netsum_common::abi::{RingConfig, RingNumber};
    use netsum_common::serial::{Psn, Qpn};
    use netsum_common::slot::{RingState, Slot};

    use super::super::PortEvidence;
    use super::*;
    use crate::JobRing;
    use crate::members::{Member, RankRange};
    use crate::plane::{FlowSpec, FlowStats, RingSpec};

    /// Two ranks of a ring whose lowest unreleased index is 8, and the PSN and outcome of their
    /// last packets.
    fn ring(last: [(u32, Counter); 2]) -> RingEvidence {
        let spec = RingSpec {
            id: RingNumber(1),
            cpu: 0,
            config: RingConfig {
                members: 2,
                slots: 16,
                credit: 8,
                mtu: 1024,
                ..RingConfig::default()
            },
        };
        let seen = last.map(|(last_psn, outcome)| FlowStats {
            packets: 9,
            last_psn,
            last_verdict: Some(outcome),
            ..FlowStats::default()
        });
        let ranks = seen.iter().zip(0..).map(|(&seen, rank)| MemberEvidence {
            flow: FlowSpec {
                ring: RingNumber(1),
                member: Rank(rank),
                base_psn: Psn::default(),
                ifindex: 3 + rank,
                src: [10, 0, 0, 1 + rank as u8].into(),
                dst: [10, 0, 0, 2 - rank as u8].into(),
                qpn: Qpn::new(17),
                src_mac: None,
                group_mark: 0,
            },
            sender: Rank(rank),
            member: Member::Rank(rank),
            seen,
            last: None,
            moved: 0,
            heartbeat: None,
            port: PortEvidence { name: format!("port{rank}"), up: true, received: None },
        });
        let mut state = RingState { low: 8, ..RingState::default() };
        state.expected[..2].fill(8);
        RingEvidence {
            ring: JobRing(0),
            view: RingView {
                state,
                slot: Slot::default(),
                ranks: seen.to_vec(),
                base_psns: vec![Psn::default(); 2],
            },
            stalled: Some(Duration::from_secs(3)),
            members: ranks.collect(),
            spec,
        }
    }

    #[test]
    fn boxes_that_have_made_the_job_differently_are_both_named() {
        let mut findings_text = String::new();
        for (outcome, psn) in [
            (Counter::Oversized, 8),
            (Counter::ShortFragment, 8),
            (Counter::CreditViolation, 20),
            (Counter::BadIcrc, 8),
        ] {
            let mut evidence = ring([(psn, outcome), (8, Counter::Contributions)]);
            evidence.members[0].member = Member::Group(RankRange { first: 0, last: 3 });
            evidence.view.slot =
                Slot { index: 8, flags: Slot::USED, contributors: 2, ..Slot::default() };
            for f in of_ring(&evidence, &[]) {
                let _ = writeln!(findings_text, "{}: {}\n  {}", outcome.name(), f.what, f.next);
            }
        }
        // Sums that the parent refuses do not come down. Meanwhile, ranks that were started without
        // a daemon report on bypass connections that they lack sums.
        let mut evidence = ring([(7, Counter::Contributions), (8, Counter::Contributions)]);
        evidence.members[0].member = Member::Up;
        evidence.members[0].seen = FlowStats::default();
        evidence.view.state.expected[0] = 0;
        evidence.view.slot =
            Slot { index: 8, flags: Slot::USED, contributors: 2, ..Slot::default() };
        let FlowSpec { src, dst, ifindex, .. } = evidence.members[0].flow;
        let bypass = UnknownFlow {
            src,
            dst,
            qpn: static_connection(1, None).receive_qpn.get(),
            ifindex,
            packets: 9,
        };
        for f in of_ring(&evidence, &[bypass]) {
            let _ = writeln!(findings_text, "{}\n  {}", f.what, f.next);
        }
        insta::assert_snapshot!(findings_text, @"
        oversized: the box behind port0 (ranks 0-3) sends fragments of more than 1024 bytes, this job's path MTU
          compare `netsum job show` here and there: path MTU, message size and window must be the same on all boxes
        short_fragment: the box behind port0 (ranks 0-3) sends fragments of less than 1024 bytes, this job's path MTU
          compare `netsum job show` here and there: path MTU, message size and window must be the same on all boxes
        credit_violation: the box behind port0 (ranks 0-3) has a larger window: it sends index 20, where 8 to 15 are allowed here
          compare `netsum job show` here and there: path MTU, message size and window must be the same on all boxes
        rx_icrc_encapsulated: its packets have a wrong ICRC
          find what changes packets between it and the box, or accept them with `netsum job create --icrc ignore`
        no packet to queue pair 0x11 of 10.0.0.2 has arrived; port0 is up
          ask `netsum diagnose` of the parent behind port0
        ");
    }

    #[test]
    fn a_rank_that_has_lost_its_place_is_the_only_finding() {
        // Rank 1 sends a message that no other rank has sent: all others appear to be late.
        let mut evidence = ring([(7, Counter::Replays), (9, Counter::Contributions)]);
        let findings = of_ring(&evidence, &[]);
        assert_eq!(
            findings.iter().map(|f| f.rank).collect::<Vec<_>>(),
            [Some(Rank(0)), Some(Rank(1))],
            "{findings:?}"
        );
        evidence.view.state.stopped = 2;
        let findings = of_ring(&evidence, &[]);
        assert_eq!(
            findings.iter().map(|f| f.rank).collect::<Vec<_>>(),
            [Some(Rank(1))],
            "{findings:?}"
        );
        assert!(findings[0].what.starts_with("has lost its place"), "{findings:?}");
        assert!(findings[0].next.contains("job restart"), "{findings:?}");
    }
}
