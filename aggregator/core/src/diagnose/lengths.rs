//! Ranks whose packets of one index differ in length. The first contribution determines the slot's
//! length; all others are refused, even if the first one is wrong.

use std::collections::BTreeMap;

use netsum_common::counters::{Counter, Kind};
use netsum_common::serial;

use super::{COMPARE, Finding, MemberEvidence, RingEvidence};
use crate::Rank;
use crate::members::Member;

/// Compares the lengths of the packets that ranks have sent for the index that their ring waits
/// for. Returns findings, and the ranks whose lengths are known; both are empty if all lengths
/// agree.
pub(super) fn compare(ring: &RingEvidence) -> (Vec<Finding>, Vec<Rank>) {
    let Some(slot) = ring.view.front() else { return Default::default() };
    let low = ring.view.state.low;
    let len = |r: &MemberEvidence| {
        if slot.contributors & 1 << r.flow.member.0 != 0 {
            return Some(u32::from(slot.len));
        }
        // A newer refusal for another reason takes precedence.
        let reason = r.seen.last_verdict.filter(|outcome| outcome.kind() == Kind::Drop);
        let still =
            matches!(reason, None | Some(Counter::LengthMismatch | Counter::DuplicateRequest));
        let of_index = |psn: u32| serial::sub(psn, r.flow.base_psn.get()) == low;
        r.seen.mismatch.filter(|(psn, _)| still && of_index(*psn)).map(|(_, len)| len)
    };
    let mut by_len: BTreeMap<u32, Vec<&MemberEvidence>> = BTreeMap::new();
    for rank in &ring.members {
        if let Some(len) = len(rank) {
            by_len.entry(len).or_default().push(rank);
        }
    }
    if by_len.len() < 2 {
        return Default::default();
    }
    let most = by_len.values().map(Vec::len).max().unwrap_or_default();
    let mut usual = by_len.iter().filter(|(_, ranks)| ranks.len() == most);
    let findings = match (usual.next(), usual.next()) {
        (Some((usual, by)), None) => by_len
            .iter()
            .filter(|(len, _)| *len != usual)
            .flat_map(|(len, odd)| odd.iter().map(move |rank| (rank, *len)))
            .map(|(rank, len)| {
                let behind = rank.behind();
                let next = "give it the others' message size and path MTU, and reconnect all ranks";
                let next = if behind.is_some() { COMPARE } else { next };
                let who = behind.map(|behind| behind + " ").unwrap_or_default();
                Finding {
                    ring: Some(ring.ring),
                    rank: Some(rank.flow.member),
                    what: format!(
                        "{who}sends {len} bytes at index {low}, where {} send {usual}",
                        names(by)
                    ),
                    next: next.into(),
                    behind: None,
                    is_idle: false,
                }
            })
            .collect(),
        _ => {
            let each: Vec<String> = by_len
                .iter()
                .map(|(len, ranks)| format!("{len} bytes by {}", names(ranks)))
                .collect();
            vec![Finding {
                ring: Some(ring.ring),
                rank: None,
                what: format!(
                    "ranks send different lengths at index {low}: {}; netsum cannot know which are wrong",
                    each.join(", ")
                ),
                next: if ring.members.iter().any(|rank| rank.behind().is_some()) {
                    COMPARE.into()
                } else {
                    "give all ranks the same message size and path MTU, and reconnect all ranks"
                        .into()
                },
                behind: None,
                is_idle: false,
            }]
        }
    };
    (findings, by_len.into_values().flatten().map(|rank| rank.flow.member).collect())
}

fn names(ranks: &[&MemberEvidence]) -> String {
    let is_group = |rank: &&MemberEvidence| matches!(rank.member, Member::Group(group) if group.first < group.last);
    let numbers: Vec<String> = ranks
        .iter()
        .map(|rank| match rank.member {
            Member::Group(group) => format!("{group} behind {}", rank.port.name),
            Member::Rank(_) | Member::Up => rank.sender.to_string(),
        })
        .collect();
    let one = ranks.len() == 1 && !ranks.iter().any(is_group);
    format!("rank{} {}", if one { "" } else { "s" }, numbers.join(", "))
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use netsum_common::abi::{RingConfig, RingNumber};
    use netsum_common::serial::{Psn, Qpn};
    use netsum_common::slot::{RingState, Slot};

    use super::*;
    use crate::JobRing;
    use crate::diagnose::PortEvidence;
    use crate::members::RankRange;
    use crate::plane::{FlowSpec, FlowStats, RingSpec};
    use crate::watch::RingView;

    const LOW: u32 = 7;

    /// A ring that waits for index 7. For each rank: the length of its packet, whether it was
    /// contributed or refused, and the index of a refused one.
    fn ring(ranks: &[Option<(u32, bool, u32)>]) -> RingEvidence {
        let spec = RingSpec {
            id: RingNumber(1),
            cpu: 0,
            config: RingConfig {
                members: ranks.len() as u32,
                slots: 16,
                credit: 8,
                mtu: 1024,
                ..RingConfig::default()
            },
        };
        let mut slot = Slot { index: LOW, flags: Slot::USED, ..Slot::default() };
        let evidence = |(rank, what): (usize, &Option<(u32, bool, u32)>)| {
            let base_psn = Psn::new(0xff_fff0 + rank as u32);
            let mut seen = FlowStats { packets: 9, ..FlowStats::default() };
            match *what {
                Some((len, true, _)) => {
                    (slot.len, slot.contributors) = (len as u16, slot.contributors | 1 << rank)
                }
                Some((len, false, index)) => {
                    seen.mismatch = Some((base_psn.plus(index).get(), len))
                }
                None => {}
            }
            let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
            let flow = FlowSpec {
                ring: RingNumber(1),
                member: Rank(rank as u32),
                base_psn,
                ifindex: 1,
                src: ip,
                dst: ip,
                qpn: Qpn::new(1),
                src_mac: None,
                group_mark: 0,
            };
            let (sender, member) = (flow.member, Member::Rank(rank as u32));
            MemberEvidence {
                flow,
                sender,
                member,
                seen,
                last: None,
                moved: 0,
                heartbeat: None,
                port: PortEvidence::default(),
            }
        };
        let ranks: Vec<_> = ranks.iter().enumerate().map(evidence).collect();
        let view = RingView {
            slot,
            state: RingState { low: LOW, ..RingState::default() },
            ranks: ranks.iter().map(|r| r.seen).collect(),
            base_psns: ranks.iter().map(|r| r.flow.base_psn).collect(),
        };
        RingEvidence { ring: JobRing(0), spec, view, stalled: None, members: ranks }
    }

    fn taken(len: u32) -> Option<(u32, bool, u32)> {
        Some((len, true, LOW))
    }

    fn refused(len: u32, index: u32) -> Option<(u32, bool, u32)> {
        Some((len, false, index))
    }

    #[test]
    fn the_odd_one_out_is_named_whoever_came_first() {
        for (case, odd) in [
            ([taken(64), refused(1024, LOW), refused(1024, LOW)], Rank(0)),
            ([taken(1024), refused(64, LOW), taken(1024)], Rank(1)),
        ] {
            let (findings, known) = compare(&ring(&case));
            assert_eq!(known.len(), 3);
            assert_eq!(findings.len(), 1, "{findings:?}");
            assert_eq!((findings[0].ring, findings[0].rank), (Some(JobRing(0)), Some(odd)));
            assert!(
                findings[0].what.starts_with("sends 64 bytes at index 7, where ranks "),
                "{findings:?}"
            );
            assert!(findings[0].what.ends_with(" send 1024"), "{findings:?}");
        }
    }

    #[test]
    fn a_box_whose_fragments_have_another_length_is_named_with_its_ranks() {
        let mut evidence = ring(&[taken(1024), refused(512, LOW)]);
        for (rank, (first, last)) in evidence.members.iter_mut().zip([(0, 3), (4, 7)]) {
            rank.member = Member::Group(RankRange { first, last });
            rank.port.name = format!("swp{}", first / 4 + 1);
        }
        let (findings, _) = compare(&evidence);
        let what = "ranks send different lengths at index 7: 512 bytes by ranks 4-7 behind swp2, \
            1024 bytes by ranks 0-3 behind swp1; netsum cannot know which are wrong";
        assert_eq!((&*findings[0].what, &*findings[0].next), (what, COMPARE));
        let mut third = evidence.members[0].clone();
        third.flow.member = Rank(2);
        third.member = Member::Rank(8);
        evidence.view.slot.contributors |= 4;
        third.sender = Rank(8);
        evidence.members.push(third);
        let (findings, _) = compare(&evidence);
        let what = "the box behind swp2 (ranks 4-7) sends 512 bytes at index 7, where ranks 0-3 \
            behind swp1, 8 send 1024";
        assert_eq!((&*findings[0].what, &*findings[0].next), (what, COMPARE));
    }

    #[test]
    fn where_it_cannot_be_told_all_are_named() {
        for case in [
            vec![taken(64), refused(1024, LOW)],
            vec![taken(64), refused(1024, LOW), None],
            vec![taken(64), refused(1024, LOW), taken(64), refused(1024, LOW)],
            vec![taken(64), refused(1024, LOW), refused(512, LOW)],
        ] {
            let (findings, _) = compare(&ring(&case));
            assert_eq!(findings.len(), 1, "{findings:?}");
            assert_eq!(findings[0].rank, None);
            assert!(
                findings[0].what.contains("netsum cannot know which are wrong"),
                "{findings:?}"
            );
            assert!(findings[0].what.contains("64 bytes by rank"), "{findings:?}");
        }
    }

    #[test]
    fn the_same_lengths_and_refusals_of_other_indices_are_no_finding() {
        for case in [
            vec![taken(64), None, taken(64)],
            vec![taken(64), refused(1024, LOW - 1), taken(64)],
            vec![None, refused(1024, LOW)],
        ] {
            assert_eq!(compare(&ring(&case)), Default::default());
        }
    }
}
