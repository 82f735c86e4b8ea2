//! The contributors to a box's sums, if boxes are in levels.
//!
//! A job's ranks keep their numbers, and the ranks below one box are neighbours. So a box's members
//! are contiguous: ranks, and groups of ranks behind boxes below. The connection that leaves a
//! group, that of its last rank, identifies it. A box with a parent has one more member behind all
//! others, the uplink: it receives the connection of the rank before the first one here.

use std::fmt;

use netsum_common::abi::MAX_RANKS;
use netsum_common::wire::{TOTAL, group_mark};
use serde::{Deserialize, Serialize};

use crate::Refusal;
use crate::uplinks::Uplinks;

/// Contiguous ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RankRange {
    pub first: u32,
    pub last: u32,
}

impl RankRange {
    /// The mark that their sum carries upwards.
    fn group_mark(self) -> u8 {
        group_mark(self.last - self.first + 1)
    }
}

impl fmt::Display for RankRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            return write!(f, "{}", self.first);
        }
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// The members of each of a job's rings on this box; by default all ranks of the job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Members {
    /// Groups of ranks behind boxes below.
    pub groups: Vec<RankRange>,
    /// Ranks directly below this box. `None`: all ranks, or none if there are groups.
    pub ranks: Option<RankRange>,
    /// The port towards the parent box of each ring.
    pub uplink: Option<Uplinks>,
    /// The ranks in the order of their connections; empty if that is the order of their numbers.
    /// Ranges of ranks in other fields are then ranges of places in this list.
    pub order: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Member {
    Rank(u32),
    Group(RankRange),
    /// The parent box.
    Up,
}

impl Member {
    /// The mark that its packets carry ([`crate::plane::FlowSpec::group_mark`]).
    pub fn group_mark(&self) -> u8 {
        match self {
            Self::Rank(_) => 0,
            Self::Group(group) => group.group_mark(),
            Self::Up => TOTAL,
        }
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rank(rank) => write!(f, "{rank}"),
            Self::Group(group) => write!(f, "{group}"),
            Self::Up => f.write_str("up"),
        }
    }
}

/// Parses groups: `0-3,4-7`.
///
/// # Errors
/// If the text is not a list of groups.
pub fn groups(option: &str, text: &str) -> Result<Vec<RankRange>, Refusal> {
    let group = |text: &str| {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let group = RankRange { first: first.parse().ok()?, last: last.parse().ok()? };
        (group.first <= group.last).then_some(group)
    };
    text.split(',')
        .map(|part| {
            group(part).ok_or_else(|| {
                Refusal::Invalid(format!("{option} {text}: `{part}` is not a range like 0-3"))
            })
        })
        .collect()
}

impl Members {
    /// Whether this box is one of several.
    pub fn is_part(&self) -> bool {
        *self != Self::default()
    }

    /// All members, in the order of their connections, for a job with this many ranks.
    pub fn list(&self, ranks: u32) -> Vec<Member> {
        let own = match (self.ranks, self.groups.is_empty()) {
            (Some(group), _) => Some(group),
            (None, true) => Some(RankRange { first: 0, last: ranks.saturating_sub(1) }),
            (None, false) => None,
        };
        let mut all: Vec<(u32, Member)> =
            self.groups.iter().map(|g| (g.first, Member::Group(*g))).collect();
        all.extend(
            own.into_iter().flat_map(|g| g.first..=g.last).map(|rank| (rank, Member::Rank(rank))),
        );
        all.sort_by_key(|(first, _)| *first);
        all.into_iter()
            .map(|(_, member)| member)
            .chain(self.uplink.iter().map(|_| Member::Up))
            .collect()
    }

    /// The number of members.
    pub fn count(&self, ranks: u32) -> u32 {
        if self.is_part() { self.list(ranks).len() as u32 } else { ranks }
    }

    /// The member that a rank's connection belongs to, with its place in the ring; `None` if no
    /// connection of that rank reaches this box.
    pub fn of(&self, rank: u32, ranks: u32) -> Option<(u32, Member)> {
        let rank = self.order.iter().position(|r| *r == rank).map_or(rank, |place| place as u32);
        let all = self.list(ranks);
        let before = all.first().map(|first| (Self::span(first).0 + ranks - 1) % ranks);
        let found = all.into_iter().enumerate().find(|(_, member)| match member {
            Member::Up => before == Some(rank),
            member => Self::span(member).1 == rank,
        });
        found.map(|(place, member)| (place as u32, member))
    }

    /// The rank that owns the connection of the member at this place.
    pub fn sender(&self, place: u32, ranks: u32) -> Option<u32> {
        let all = self.list(ranks);
        let last = match all.get(place as usize)? {
            Member::Up => (Self::span(all.first()?).0 + ranks - 1) % ranks,
            member => Self::span(member).1,
        };
        Some(self.order.get(last as usize).copied().unwrap_or(last))
    }

    /// The mark that the sum of all members below carries upwards; 0 without an uplink.
    pub fn group_mark(&self, ranks: u32) -> u8 {
        match (&self.uplink, self.below(ranks)) {
            (Some(_), Some(below)) => below.group_mark(),
            _ => 0,
        }
    }

    /// The ranks below this box.
    fn below(&self, ranks: u32) -> Option<RankRange> {
        let all = self.list(ranks);
        let below = || all.iter().filter(|member| **member != Member::Up).map(Self::span);
        Some(RankRange { first: below().next()?.0, last: below().next_back()?.1 })
    }

    /// First and last rank of a member below this box.
    fn span(member: &Member) -> (u32, u32) {
        match *member {
            Member::Rank(rank) => (rank, rank),
            Member::Group(group) => (group.first, group.last),
            Member::Up => (u32::MAX, u32::MAX),
        }
    }

    /// Checks that these can be the members of a job's rings.
    ///
    /// # Errors
    /// If two of them contradict each other.
    pub fn check(&self, ranks: u32) -> Result<(), Refusal> {
        if !self.is_part() {
            return Ok(());
        }
        let invalid = |message: String| Err(Refusal::Invalid(message));
        if let Some(group) = self.groups.iter().chain(&self.ranks).find(|g| g.last >= ranks) {
            return invalid(format!(
                "--members {group}: the job has ranks 0 to {}",
                ranks.saturating_sub(1)
            ));
        }
        let mut order = self.order.clone();
        order.sort_unstable();
        if !order.is_empty() && !order.iter().copied().eq(0..ranks) {
            let last = ranks.saturating_sub(1);
            return invalid(format!(
                "--ring-order {:?}: each of the ranks 0 to {last} is needed, once",
                self.order
            ));
        }
        let all = self.list(ranks);
        let below = &all[..all.len() - usize::from(self.uplink.is_some())];
        for pair in below.windows(2) {
            let ((_, end), (start, _)) = (Self::span(&pair[0]), Self::span(&pair[1]));
            if start <= end {
                return invalid(format!(
                    "members {} and {}: both have rank {start}",
                    pair[0], pair[1]
                ));
            }
            if start != end + 1 {
                return invalid(format!(
                    "members {} and {}: ranks between them are missing; those below one box \
                     follow each other",
                    pair[0], pair[1]
                ));
            }
        }
        let (Some(first), Some(last)) = (below.first(), below.last()) else {
            return invalid("--members: none".into());
        };
        let sum = RankRange { first: Self::span(first).0, last: Self::span(last).1 };
        let whole = sum.first == 0 && sum.last + 1 == ranks;
        match &self.uplink {
            Some(uplink) if whole => invalid(format!(
                "--uplink {uplink}: all {ranks} ranks are below this box, so nothing is left for \
                 a parent to add"
            )),
            None if !whole => invalid(format!(
                "members {first} to {last}: not all of the {ranks} ranks; the others need an \
                 --uplink"
            )),
            // If this box stops adding, the parent receives the last group's sum in place of that
            // of all members.
            Some(uplink) if below.len() > 1 && last.group_mark() == sum.group_mark() => {
                invalid(format!(
                    "--groups {last} and --uplink {uplink}: the parent could take the sum of {last} \
                 for that of {sum}; the last group may have two thirds of the ranks below a box at \
                 the most"
                ))
            }
            _ if all.len() < 2 || all.len() > MAX_RANKS => {
                invalid(format!("{} members: must be 2 to {MAX_RANKS}", all.len()))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(ranks: &str, groups_: &str, uplink: &str) -> Members {
        let some = |text: &str| (!text.is_empty()).then(|| groups("--groups", text).unwrap());
        Members {
            groups: some(groups_).unwrap_or_default(),
            ranks: some(ranks).map(|groups| groups[0]),
            uplink: (!uplink.is_empty()).then(|| uplink.parse().unwrap()),
            order: Vec::new(),
        }
    }

    #[test]
    fn a_leaf_has_its_ranks_and_the_way_up() {
        let leaf = members("4-7", "", "swp9");
        leaf.check(8).unwrap();
        assert_eq!(leaf.count(8), 5);
        assert_eq!(leaf.of(4, 8), Some((0, Member::Rank(4))));
        assert_eq!(leaf.of(7, 8), Some((3, Member::Rank(7))));
        assert_eq!(leaf.of(3, 8), Some((4, Member::Up)), "the connection that comes down");
        assert_eq!(leaf.of(0, 8), None);
        assert_eq!(
            [0, 3, 4, 5].map(|place| leaf.sender(place, 8)),
            [Some(4), Some(7), Some(3), None]
        );
        assert_eq!(members("0-3", "", "swp9").of(7, 8), Some((4, Member::Up)));
    }

    #[test]
    fn ranks_keep_their_numbers_where_the_ring_has_another_order() {
        let leaf = Members { order: vec![0, 2, 1, 3], ..members("0-1", "", "swp9") };
        leaf.check(4).unwrap();
        assert_eq!([0, 1, 2].map(|place| leaf.sender(place, 4)), [Some(0), Some(2), Some(3)]);
        assert_eq!((leaf.of(2, 4), leaf.of(1, 4)), (Some((1, Member::Rank(1))), None));
        let parent = Members { order: vec![0, 2, 1, 3], ..members("", "0-1,2-3", "") };
        assert_eq!(parent.of(2, 4).map(|m| m.0), Some(0), "its connection leaves the first box");
        let twice = Members { order: vec![0, 2, 2, 3], ..leaf };
        assert!(
            twice
                .check(4)
                .unwrap_err()
                .to_string()
                .contains("each of the ranks 0 to 3 is needed, once")
        );
    }

    #[test]
    fn a_parent_has_groups_and_ranks_of_its_own() {
        let parent = members("4-5", "0-3,6-7", "");
        parent.check(8).unwrap();
        let list: Vec<String> = parent.list(8).iter().map(Member::to_string).collect();
        assert_eq!(list, ["0-3", "4", "5", "6-7"]);
        assert_eq!(parent.of(3, 8), Some((0, Member::Group(RankRange { first: 0, last: 3 }))));
        assert_eq!((parent.of(2, 8), parent.of(7, 8).map(|m| m.0)), (None, Some(3)));
    }

    #[test]
    fn a_box_between_two_levels_has_groups_and_the_way_up() {
        let middle = members("", "4-5,6-7", "swp9");
        middle.check(16).unwrap();
        assert_eq!(
            (middle.of(7, 16).map(|m| m.0), middle.of(3, 16)),
            (Some(1), Some((2, Member::Up)))
        );
        let marks: Vec<u8> = middle.list(16).iter().map(Member::group_mark).collect();
        assert_eq!(
            (&marks[..], middle.group_mark(16)),
            (&[group_mark(2), group_mark(2), TOTAL][..], group_mark(4))
        );
        // A single group's sum is that of all.
        members("", "4-7", "swp9").check(16).unwrap();
        assert_eq!(
            (members("", "0-3,4-7", "").group_mark(8), members("4-7", "", "swp9").group_mark(8)),
            (0, group_mark(4))
        );
    }

    #[test]
    fn a_group_that_lacks_a_third_of_its_ranks_has_another_mark() {
        for all in 2..4096u32 {
            assert!(
                group_mark(all - 1) <= group_mark(all)
                    && group_mark(all) <= netsum_common::wire::GROUP_MARK,
                "{all}"
            );
            assert!(group_mark(all * 2 / 3) < group_mark(all), "{all}");
        }
    }

    #[test]
    fn by_default_every_rank_is_a_member() {
        let all = Members::default();
        all.check(3).unwrap();
        assert_eq!((all.count(3), all.of(2, 3)), (3, Some((2, Member::Rank(2)))));
    }

    #[test]
    fn members_that_contradict_each_other_are_refused_with_both_names() {
        for (ranks, groups, uplink, why) in [
            ("", "0-3,3-7", "", "members 0-3 and 3-7: both have rank 3"),
            ("", "0-3,5-7", "", "members 0-3 and 5-7: ranks between them are missing"),
            ("0-3", "", "", "not all of the 8 ranks"),
            ("0-7", "", "swp9", "nothing is left for a parent"),
            ("0-8", "", "swp9", "--members 0-8: the job has ranks 0 to 7"),
            ("", "0-7", "", "1 members: must be 2 to 64"),
            (
                "",
                "0,1-4",
                "swp9",
                "--groups 1-4 and --uplink swp9: the parent could take the sum of 1-4 for that of \
                 0-4",
            ),
        ] {
            let error = members(ranks, groups, uplink).check(8).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        for text in ["", "3-1", "a", "0-", "0--1"] {
            assert!(groups("--groups", text).is_err(), "{text}");
        }
    }
}
