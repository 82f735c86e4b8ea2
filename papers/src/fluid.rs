//! A network of fluid flows: each has its max-min fair rate, until a flow begins or ends.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use petgraph::unionfind::UnionFind;

/// A flow. It uses `part` of its rate on each of its links, which lets one flow take many paths.
#[derive(Clone, Debug, PartialEq)]
pub struct Flow {
    pub bytes: f64,
    /// When it begins, in seconds.
    pub start: f64,
    /// Links, and the part of the flow on each.
    pub links: Vec<(usize, f64)>,
}

/// Floats in a heap; they are never NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Level(f64);

impl Eq for Level {}

impl PartialOrd for Level {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Level {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// Bytes per second of each flow: all rates rise together, and flows stop when one of their links
/// is full.
pub fn rates(capacities: &[f64], flows: &[&Flow]) -> Vec<f64> {
    let mut on: Vec<Vec<(usize, f64)>> = vec![Vec::new(); capacities.len()];
    let mut parts = vec![0.0; capacities.len()];
    for (f, flow) in flows.iter().enumerate() {
        for &(link, part) in &flow.links {
            on[link].push((f, part));
            parts[link] += part;
        }
    }
    // The capacity left for flows that still rise; they begin at 0.
    let mut left = capacities.to_vec();
    let level =
        |link: usize, left: &[f64], parts: &[f64]| Level((left[link] / parts[link]).max(0.0));
    let mut heap: BinaryHeap<Reverse<(Level, usize)>> = (0..capacities.len())
        .filter(|&link| parts[link] > 0.0)
        .map(|link| Reverse((level(link, &left, &parts), link)))
        .collect();
    let mut rates = vec![f64::INFINITY; flows.len()];
    while let Some(Reverse((was, link))) = heap.pop() {
        // Subtracted parts leave a rounding error.
        if parts[link] < 1e-9 {
            continue;
        }
        let now = level(link, &left, &parts);
        if now > was {
            heap.push(Reverse((now, link)));
            continue;
        }
        for &(f, _) in &on[link] {
            if rates[f] == f64::INFINITY {
                rates[f] = now.0;
                for &(link, part) in &flows[f].links {
                    left[link] -= part * now.0;
                    parts[link] -= part;
                }
            }
        }
    }
    rates
}

/// A set of flows that shares no link that may become full with flows outside it.
struct Part {
    capacities: Vec<f64>,
    flows: Vec<Flow>,
    /// Their numbers among all flows.
    of: Vec<usize>,
}

/// Splits flows into independent sets. A link that all its flows together cannot fill limits no
/// flow, and does not connect them.
fn parts(capacities: &[f64], flows: &[Flow]) -> Vec<Part> {
    let most = |flow: &Flow| {
        flow.links.iter().map(|&(link, part)| capacities[link] / part).fold(f64::INFINITY, f64::min)
    };
    let alone: Vec<f64> = flows.iter().map(most).collect();
    let mut asked = vec![0.0; capacities.len()];
    for (flow, most) in flows.iter().zip(&alone) {
        flow.links.iter().for_each(|&(link, part)| asked[link] += part * most);
    }
    let may_fill: Vec<bool> = asked
        .iter()
        .zip(capacities)
        .map(|(asked, capacity)| *asked > capacity * (1.0 + 1e-9))
        .collect();
    let shared = |flow: &Flow| -> Vec<(usize, f64)> {
        flow.links.iter().copied().filter(|&(link, _)| may_fill[link]).collect()
    };
    let mut sets = UnionFind::<usize>::new(capacities.len());
    for flow in flows {
        let shared = shared(flow);
        for pair in shared.windows(2) {
            sets.union(pair[0].0, pair[1].0);
        }
    }
    // Each set numbers its links from 0.
    let mut local = vec![usize::MAX; capacities.len()];
    let mut by_set: BTreeMap<usize, usize> = BTreeMap::new();
    let mut parts: Vec<Part> = Vec::new();
    for (n, (flow, &most)) in flows.iter().zip(&alone).enumerate() {
        let mut links = shared(flow);
        let next = parts.len();
        let number =
            links.first().map_or(next, |&(link, _)| *by_set.entry(sets.find(link)).or_insert(next));
        if number == next {
            parts.push(Part { capacities: Vec::new(), flows: Vec::new(), of: Vec::new() });
        }
        let part = &mut parts[number];
        let mut held = f64::INFINITY;
        for (link, share) in &mut links {
            held = held.min(capacities[*link] / *share);
            if local[*link] == usize::MAX {
                local[*link] = part.capacities.len();
                part.capacities.push(capacities[*link]);
            }
            *link = local[*link];
        }
        // A link that was left out may still be the only limit of this flow.
        if most < held {
            links.push((part.capacities.len(), 1.0));
            part.capacities.push(most);
        }
        part.flows.push(Flow { bytes: flow.bytes, start: flow.start, links });
        part.of.push(n);
    }
    parts
}

/// When each flow ends, in seconds. Rates stay unchanged for the time `step` after an event, which
/// makes one event of many ends that are close together. The capacity that they free is used late,
/// so the last end is off by a few times `step`. With 0 the result is exact.
pub fn run(capacities: &[f64], flows: &[Flow], step: f64) -> Vec<f64> {
    let mut ends = vec![f64::INFINITY; flows.len()];
    for part in parts(capacities, flows) {
        let of = together(&part.capacities, &part.flows, step);
        part.of.into_iter().zip(of).for_each(|(flow, end)| ends[flow] = end);
    }
    ends
}

/// The same without splitting the flows into sets.
fn together(capacities: &[f64], flows: &[Flow], step: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..flows.len()).collect();
    order.sort_by(|&a, &b| flows[a].start.total_cmp(&flows[b].start));
    let mut waiting = order.into_iter().peekable();
    let mut left: Vec<f64> = flows.iter().map(|flow| flow.bytes).collect();
    let mut ends = vec![f64::INFINITY; flows.len()];
    let mut active: Vec<usize> = Vec::new();
    let mut now: f64 = 0.0;
    loop {
        if active.is_empty() {
            match waiting.peek() {
                Some(&next) => now = now.max(flows[next].start),
                None => return ends,
            }
        }
        while let Some(next) = waiting.next_if(|&next| flows[next].start <= now) {
            active.push(next);
        }
        let of: Vec<&Flow> = active.iter().map(|&f| &flows[f]).collect();
        let rates = rates(capacities, &of);
        let first = active
            .iter()
            .zip(&rates)
            .map(|(&f, rate)| now + left[f] / rate)
            .fold(f64::INFINITY, f64::min);
        let begins = waiting.peek().map_or(f64::INFINITY, |&next| flows[next].start);
        if first.min(begins) == f64::INFINITY {
            // A link carries nothing: the remaining flows never end.
            return ends;
        }
        let until = (first * (1.0 + step)).min(begins).max(first.min(begins));
        for (&f, rate) in active.iter().zip(&rates) {
            let end = now + left[f] / rate;
            // Rounding must not keep a flow for another round.
            if end <= until * (1.0 + 1e-12) {
                ends[f] = end;
            }
            left[f] -= rate * (until - now);
        }
        active.retain(|&f| ends[f] == f64::INFINITY);
        now = until;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn flow(bytes: f64, start: f64, links: &[usize]) -> Flow {
        Flow { bytes, start, links: links.iter().map(|&link| (link, 1.0)).collect() }
    }

    #[test]
    fn shares_are_max_min_fair() {
        // The textbook example: one long flow, and one short flow on each link, of which one is
        // narrow.
        let flows = [
            flow(1.0, 0.0, &[0, 1]),
            flow(1.0, 0.0, &[0]),
            flow(1.0, 0.0, &[1]),
            flow(1.0, 0.0, &[1]),
        ];
        assert_eq!(rates(&[10.0, 6.0], &flows.iter().collect::<Vec<_>>()), [2.0, 8.0, 2.0, 2.0]);
    }

    #[test]
    fn an_ended_flow_frees_its_share_and_a_new_one_takes_it() {
        let flows = [flow(4.0, 0.0, &[0]), flow(8.0, 0.0, &[0]), flow(1.0, 5.5, &[0])];
        // Both have rate 1 until 4; the second alone has 2 until 5.5, with 1 left; then both have
        // 1.
        assert_eq!(run(&[2.0], &flows, 0.0), [4.0, 6.5, 6.5]);
    }

    #[test]
    fn a_dead_link_ends_nothing() {
        assert_eq!(
            run(&[0.0, 1.0], &[flow(1.0, 0.0, &[0]), flow(1.0, 0.0, &[1])], 0.0),
            [f64::INFINITY, 1.0]
        );
    }

    #[test]
    fn links_that_cannot_be_full_connect_no_flows() {
        // Two flows pass link 2, which has capacity for both; the third shares link 0 with the
        // first.
        let flows = [flow(4.0, 0.0, &[0, 2]), flow(4.0, 0.0, &[1, 2]), flow(4.0, 0.0, &[0])];
        let of: Vec<Vec<usize>> =
            parts(&[2.0, 2.0, 4.0], &flows).into_iter().map(|part| part.of).collect();
        assert_eq!(of, [vec![0, 2], vec![1]]);
        assert_eq!(run(&[2.0, 2.0, 4.0], &flows, 0.0), [4.0, 2.0, 4.0]);
    }

    proptest! {
        #[test]
        fn no_link_is_above_its_rate_and_each_flow_has_one_that_is_full(
            capacities in prop::collection::vec(1u8..50, 1..6),
            flows in prop::collection::vec(prop::collection::btree_map(0usize..6, 1u8..5, 1..4),
                1..12),
        ) {
            let capacities: Vec<f64> = capacities.into_iter().map(f64::from).collect();
            let links = |map: &std::collections::BTreeMap<usize, u8>| {
                map.iter().map(|(link, part)| (link % capacities.len(), f64::from(*part) / 4.0))
                    .collect()
            };
            let flows: Vec<Flow> = flows.iter()
                .map(|map| Flow { bytes: 1.0, start: 0.0, links: links(map) }).collect();
            let rates = rates(&capacities, &flows.iter().collect::<Vec<_>>());
            let mut loads = vec![0.0; capacities.len()];
            for (flow, rate) in flows.iter().zip(&rates) {
                flow.links.iter().for_each(|(link, part)| loads[*link] += part * rate);
            }
            for (load, capacity) in loads.iter().zip(&capacities) {
                prop_assert!(*load <= capacity * (1.0 + 1e-9));
            }
            // It is among the fastest flows of a full link.
            for (flow, rate) in flows.iter().zip(&rates) {
                let is_held = |link: &usize| {
                    let fastest = flows.iter().zip(&rates)
                        .filter(|(f, _)| f.links.iter().any(|(l, _)| l == link));
                    loads[*link] >= capacities[*link] * (1.0 - 1e-9)
                        && fastest.map(|(_, rate)| *rate).fold(0.0, f64::max) <= rate * (1.0 + 1e-9)
                };
                prop_assert!(flow.links.iter().any(|(link, _)| is_held(link)));
            }
        }

        #[test]
        fn apart_or_together_flows_end_at_the_same_time(
            capacities in prop::collection::vec(0u8..50, 6),
            flows in prop::collection::vec((1u8..50, 0u8..9,
                prop::collection::btree_map(0usize..6, 1u8..5, 1..3)), 1..12),
        ) {
            let capacities: Vec<f64> = capacities.into_iter().map(f64::from).collect();
            let flows: Vec<Flow> = flows.into_iter().map(|(bytes, start, links)| Flow {
                bytes: bytes.into(),
                start: start.into(),
                links: links.into_iter().map(|(link, part)| (link, f64::from(part) / 4.0))
                    .collect(),
            }).collect();
            for (apart, together) in run(&capacities, &flows, 0.0).into_iter()
                .zip(together(&capacities, &flows, 0.0)) {
                prop_assert!(
                    apart == together || (apart / together - 1.0).abs() < 1e-6,
                    "{apart}, not {together}"
                );
            }
        }

        #[test]
        fn steps_are_off_by_a_few_times_what_they_say(
            flows in prop::collection::vec((1u8..50, 0usize..3, 0usize..3), 1..20),
        ) {
            let flows: Vec<Flow> = flows.into_iter().map(|(bytes, a, b)| {
                flow(bytes.into(), 0.0,
                    if a == b { &[0] } else { [&[0, 1][..], &[1, 2], &[2, 3]][a] })
            }).collect();
            let last = |step| run(&[3.0, 5.0, 2.0, 7.0], &flows, step).into_iter()
                .fold(0.0, f64::max);
            let (exact, near) = (last(0.0), last(0.01));
            prop_assert!((near / exact - 1.0).abs() < 0.05, "{near}, not {exact}");
        }
    }
}
