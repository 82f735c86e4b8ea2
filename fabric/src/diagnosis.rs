//! Merges the diagnoses of a job's boxes into one answer: the causes of a stall. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use netsum_api::v1 as api;

use crate::config::{End, Link};

/// A box's diagnosis of a job, or the error of the request.
pub type BoxDiagnosis = (String, Result<api::Diagnosis, String>);

/// Merges the answers. If a box's finding refers to another box, it counts only if that box has no
/// finding of its own: then the link between them is at fault. `age` is that of a rank's last
/// heartbeat.
pub fn merge(
    reports: &[BoxDiagnosis],
    links: &[Link],
    age: impl Fn(u32) -> Option<Duration>,
) -> api::Diagnosis {
    let answers: BTreeMap<&str, &api::Diagnosis> =
        reports.iter().filter_map(|(name, d)| Some((&**name, d.as_ref().ok()?))).collect();
    let silent = reports.iter().filter_map(|(name, d)| Some((&**name, d.as_ref().err()?)));
    let mut causes: Vec<api::Finding> = silent
        .clone()
        .map(|(name, why)| api::Finding {
            what: format!("box {name} does not answer the manager: {why}"),
            next: format!(
                "check whether `netsum run` runs at {name}; its programs may sum without it"
            ),
            ..api::Finding::default()
        })
        .collect();
    let mut explained: BTreeSet<&str> = silent.map(|(name, _)| name).collect();
    for (name, diagnosis) in &answers {
        for cause in diagnosis.findings.iter().filter(|f| f.behind.is_empty() && !f.idle) {
            // An obstacle at a bridge does not explain losses of a link.
            let is_of_job = cause.ring.is_none() && cause.rank.is_none();
            if !is_of_job || diagnosis.state() != api::JobState::Active {
                explained.insert(name);
            }
            // A box gets no heartbeats: ranks of a fabric send them to the manager.
            let alive = cause.rank.and_then(&age);
            let alive =
                alive.map(|t| format!("; its last heartbeat arrived {:.1} s ago", t.as_secs_f64()));
            let what = format!("{}{} (at box {name})", cause.what, alive.unwrap_or_default());
            causes.push(api::Finding { what, ..cause.clone() });
        }
    }
    // Ranks first: other causes usually follow from theirs.
    causes.sort_by_key(|cause| (cause.rank.is_none(), cause.rank, cause.ring));
    let mut suspects = BTreeSet::new();
    for (name, diagnosis) in &answers {
        for finding in diagnosis.findings.iter().filter(|f| !f.behind.is_empty()) {
            let here = End { of: (*name).to_owned(), port: finding.behind.clone() };
            let link = links.iter().find(|link| link.below == here || link.above == here);
            let there = link.map(|link| if link.below == here { &link.above } else { &link.below });
            let Some((link, there)) = link.zip(there) else {
                causes.push(api::Finding {
                    what: format!(
                        "box {name} misses data from {here}, which is not an end of a link"
                    ),
                    next: "check the links in the manager's file".to_owned(),
                    ..finding.clone()
                });
                continue;
            };
            let other = answers.get(&*there.of);
            // The other box misses data itself, which does not come from here; nor has a box above
            // the total before it has this box's part.
            let waits = |of: &api::Diagnosis| {
                let lacks = |f: &api::Finding| *there == link.above || f.behind != there.port;
                of.findings.iter().any(|f| !f.behind.is_empty() && lacks(f))
            };
            let known = explained.contains(name) || explained.contains(&*there.of);
            if known || other.is_some_and(|d| waits(d)) {
                continue;
            }
            if suspects.insert((&link.below.of, &link.below.port)) {
                // Each box numbers a job's rings from 0.
                causes.push(api::Finding {
                    what: format!(
                        "link {} to {}: box {name} misses data that box {} has",
                        link.below, link.above, there.of
                    ),
                    next: format!(
                        "check for losses at both ends (`ip -s link show {}`), and whether both \
                         are connected as in the manager's file",
                        here.port
                    ),
                    ..api::Finding::default()
                });
            }
        }
    }
    if causes.is_empty() {
        // No box finds a fault: the one with sums in flight knows most.
        let mut all = answers.values().flat_map(|d| d.findings.iter().map(move |f| (d, f)));
        let first = all.clone().next();
        let found = all.find(|(d, f)| f.idle && has_sums_in_flight(d)).or(first);
        causes.extend(found.map(|(_, finding)| finding.clone()));
    }
    if reports.is_empty() {
        causes.push(api::Finding {
            what: "no box sums the job".to_owned(),
            next: "check the manager's log: the ranks sum over the hosts' ring, or are about to reconnect"
                .to_owned(),
            ..api::Finding::default()
        });
    }
    let mut drops: BTreeMap<&str, api::Counter> = BTreeMap::new();
    for counter in answers.values().flat_map(|d| &d.drops) {
        let sum = drops
            .entry(&counter.name)
            .or_insert_with(|| api::Counter { value: 0, ..counter.clone() });
        sum.value += counter.value;
    }
    let drops = drops.into_values().collect();
    api::Diagnosis { findings: causes, drops, ..api::Diagnosis::default() }
}

fn has_sums_in_flight(diagnosis: &api::Diagnosis) -> bool {
    diagnosis.rings.iter().any(|ring| ring.stalled_ms.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank or none, the finding, and the port towards a box that may know more.
    type FindingRow<'a> = (Option<u32>, &'a str, &'a str);

    fn merged(reports: &[(&str, Result<&[FindingRow<'_>], &str>)]) -> Vec<(Option<u32>, String)> {
        let finding = |&(rank, what, behind): &FindingRow<'_>| api::Finding {
            ring: rank.map(|_| 0),
            rank,
            what: what.into(),
            next: "look".into(),
            behind: behind.into(),
            idle: [NOTHING_PENDING, IN_PROGRESS].contains(&what),
        };
        let answer = |found: &[FindingRow<'_>]| api::Diagnosis {
            job: "train".into(),
            state: api::JobState::Active.into(),
            findings: found.iter().map(finding).collect(),
            rings: vec![api::RingDiagnosis {
                stalled_ms: found.iter().any(|(_, what, _)| *what == IN_PROGRESS).then_some(1),
                ..api::RingDiagnosis::default()
            }],
            ..api::Diagnosis::default()
        };
        let reports: Vec<BoxDiagnosis> = reports
            .iter()
            .map(|(name, reports)| ((*name).to_owned(), reports.map(answer).map_err(str::to_owned)))
            .collect();
        let end = |text: &str| End::try_from(text.to_owned()).unwrap();
        let links = [("a/up", "s/1"), ("b/up", "s/2")].map(|(below, above)| Link {
            below: end(below),
            above: end(above),
            rate: None,
        });
        let age = |rank| (rank == 3).then_some(Duration::from_millis(400));
        merge(&reports, &links, age).findings.into_iter().map(|f| (f.rank, f.what)).collect()
    }

    const LACKS: &str = "no packet has arrived";
    const IN_PROGRESS: &str = "sums are in progress";
    const NOTHING_PENDING: &str = "nothing is pending";

    #[test]
    fn a_rank_is_named_by_its_own_box_and_not_by_those_that_wait_for_it() {
        let found = merged(&[
            ("a", Ok(&[(Some(3), LACKS, "up")])),
            ("b", Ok(&[(Some(3), LACKS, ""), (Some(1), LACKS, "up")])),
            ("s", Ok(&[(Some(3), LACKS, "2")])),
        ]);
        let what = "no packet has arrived; its last heartbeat arrived 0.4 s ago (at box b)";
        assert_eq!(found, [(Some(3), what.to_owned())]);
    }

    #[test]
    fn data_that_one_box_has_and_the_next_lacks_is_the_links_fault() {
        // b has sent its sum up, and waits for the total.
        let found = merged(&[
            ("a", Ok(&[(Some(3), LACKS, "up")])),
            ("b", Ok(&[(Some(1), LACKS, "up")])),
            ("s", Ok(&[(Some(3), LACKS, "2")])),
        ]);
        assert_eq!(
            found,
            [(None, "link b/up to s/2: box s misses data that box b has".to_owned())]
        );
        // An obstacle at b may be no fault.
        let found = merged(&[
            ("a", Ok(&[(Some(3), LACKS, "up")])),
            ("b", Ok(&[(Some(1), LACKS, "up"), (None, "a filter forwards", "")])),
            ("s", Ok(&[(Some(3), LACKS, "2")])),
        ]);
        let link = "link b/up to s/2: box s misses data that box b has".to_owned();
        let filter = "a filter forwards (at box b)".to_owned();
        assert_eq!(found, [(None, filter), (None, link)]);
        // s has the total, and a does not get it.
        let found = merged(&[
            ("a", Ok(&[(Some(3), LACKS, "up")])),
            ("b", Ok(&[(None, "nothing is pending", "")])),
            ("s", Ok(&[(None, "nothing is pending", "")])),
        ]);
        assert_eq!(
            found,
            [(None, "link a/up to s/1: box a misses data that box s has".to_owned())]
        );
    }

    #[test]
    fn a_box_that_does_not_answer_explains_what_others_lack_from_it() {
        let found =
            merged(&[("a", Ok(&[(Some(3), LACKS, "up")])), ("s", Err("no answer within 2s"))]);
        let what = "box s does not answer the manager: no answer within 2s";
        assert_eq!(found, [(None, what.to_owned())]);
    }

    #[test]
    fn idle_findings_of_boxes_are_merged() {
        let found = merged(&[
            ("a", Ok(&[(None, NOTHING_PENDING, "")])),
            ("s", Ok(&[(None, IN_PROGRESS, "")])),
        ]);
        assert_eq!(found, [(None, IN_PROGRESS.to_owned())]);
        // An obstacle at a bridge is of no rank and no ring.
        let found = merged(&[
            ("a", Ok(&[(None, "a filter drops forwarded packets", "")])),
            ("s", Ok(&[(None, IN_PROGRESS, "")])),
        ]);
        assert_eq!(found, [(None, "a filter drops forwarded packets (at box a)".to_owned())]);
    }

    #[test]
    fn a_port_that_no_link_has_is_told() {
        let found = merged(&[("a", Ok(&[(Some(3), LACKS, "swp7")]))]);
        assert!(found[0].1.contains("a/swp7, which is not an end of a link"), "{found:?}");
    }
}
