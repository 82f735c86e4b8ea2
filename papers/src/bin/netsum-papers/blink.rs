//! Blink (MLSys 2020): trees compared with NCCL's rings, for every set of GPUs that a job may get
//! in a DGX-1.

use anyhow::Result;
use netsum_plan::generate;
use netsum_plan::plan::{Job, plan};
use netsum_plan::topology::{Network, Node, Resource};
use netsum_plan::tree::Collective;

use crate::chart::chart;
use crate::table;

/// NCCL uses PCIe 3.0 x16 where NVLinks do not form a ring; here at its nominal rate.
const PCIE: f64 = 15.75e9;
/// The table counts the sets that gain at least this much.
const GAINS: [f64; 4] = [1.1, 1.5, 2.0, 4.0];

pub fn run() -> Result<(String, String)> {
    let mut rows = Vec::new();
    let mut curves = Vec::new();
    for (name, topology, link) in [
        ("DGX-1P", generate::dgx_1p(), generate::NVLINK_1),
        ("DGX-1V", generate::dgx_1v(), generate::NVLINK_2),
    ] {
        let network = Network::new(&topology)?;
        let mut points = Vec::new();
        for count in 2..=8u32 {
            let sets = (0u32..256).filter(|set| set.count_ones() == count);
            let sets: Vec<Vec<Node>> =
                sets.map(|set| (0..8).filter(|gpu| set >> gpu & 1 == 1).collect()).collect();
            let (mut gains, mut no_ring, mut no_tree, mut trees) = (Vec::new(), 0, 0, 0);
            for members in &sets {
                let job = Job {
                    name: name.into(),
                    members: members.clone(),
                    priority: 0,
                    collective: Collective::AllReduce,
                };
                let spread = f64::from(count) / (2.0 * f64::from(count - 1));
                let rings = rings(&network, link / 8.0, members);
                no_ring += usize::from(rings == 0);
                let ring = if rings == 0 { PCIE } else { rings as f64 * link / 8.0 } * spread;
                // Trees also use PCIe where NVLinks do not connect all GPUs.
                let tree = plan(&network, &[job]).map(|mut plans| plans.remove(0));
                no_tree += usize::from(tree.is_err());
                trees = trees.max(tree.as_ref().map_or(0, |plan| plan.trees.len()));
                gains.push(tree.map_or(ring, |plan| plan.rate().max(PCIE * spread)) / ring);
            }
            let mean = (gains.iter().map(|gain| gain.ln()).sum::<f64>() / gains.len() as f64).exp();
            let [least, most] =
                [f64::min, f64::max].map(|f| gains.iter().copied().reduce(f).unwrap_or(1.0));
            let mut row = vec![name.to_owned()];
            row.extend(
                [count as usize, sets.len(), no_ring, no_tree, trees].map(|n| n.to_string()),
            );
            row.extend([least, mean, most].map(|gain| format!("{gain:.2}")));
            row.extend(
                GAINS.map(|least| gains.iter().filter(|gain| **gain >= least).count().to_string()),
            );
            rows.push(row);
            points.push((f64::from(count), mean));
        }
        curves.push((name.to_owned(), points));
    }
    let head = [
        "machine",
        "GPUs",
        "sets",
        "without a ring",
        "not connected",
        "most trees",
        "least gain",
        "mean",
        "most",
        "sets that gain 1.1",
        "1.5",
        "2",
        "4",
    ];
    let text = format!(
        "The gain is the all-reduce rate of trees divided by that of NCCL's rings, with all links \
         at their nominal rates. NCCL sums over PCIe in a set whose NVLinks form no ring; both do \
         in a set that NVLinks do not connect. The mean is geometric. The paper's abstract: up to \
         8 times NCCL, measured. PCIe is slower in a real machine than its nominal rate, and so is \
         NCCL.\n\n{}",
        table(&head, &rows)
    );
    Ok((
        text,
        chart(
            "Trees compared with NCCL's rings, mean over all sets of GPUs",
            "GPUs",
            "times as fast",
            &curves,
        )?,
    ))
}

/// The number of directed rings of NVLinks that NCCL finds: cycles through all members that share
/// no link; each cycle gives two rings.
fn rings(network: &Network, link: f64, members: &[Node]) -> usize {
    let links = |a: Node, b: Node| {
        network
            .edge(a, b)
            .map_or(0, |edge| (network.capacity(Resource::Edge(edge)) / link).round() as i32)
    };
    let n = members.len();
    if n == 2 {
        return links(members[0], members[1]) as usize;
    }
    let mut left = vec![vec![0; n]; n];
    for (i, j) in (0..n).flat_map(|i| (0..n).map(move |j| (i, j))) {
        left[i][j] = links(members[i], members[j]);
    }
    let mut circles = Vec::new();
    extend(&left, &mut vec![0], &mut circles);
    2 * most(&mut left, &circles)
}

/// Cycles through all members, each in one direction.
fn extend(left: &[Vec<i32>], path: &mut Vec<usize>, circles: &mut Vec<Vec<usize>>) {
    let (n, last) = (left.len(), path[path.len() - 1]);
    if path.len() == n {
        if left[last][0] > 0 && path[1] < last {
            circles.push(path.clone());
        }
        return;
    }
    for next in 1..n {
        if left[last][next] > 0 && !path.contains(&next) {
            path.push(next);
            extend(left, path, circles);
            path.pop();
        }
    }
}

fn most(left: &mut [Vec<i32>], circles: &[Vec<usize>]) -> usize {
    let n = left.len();
    // Each cycle takes two links of each GPU.
    let bound = left.iter().map(|row| row.iter().sum::<i32>() / 2).min().unwrap_or(0) as usize;
    let mut best = 0;
    for (at, circle) in circles.iter().enumerate() {
        let ends = || (0..n).map(|i| (circle[i], circle[(i + 1) % n]));
        if ends().any(|(a, b)| left[a][b] <= 0) {
            continue;
        }
        ends().for_each(|(a, b)| (left[a][b], left[b][a]) = (left[a][b] - 1, left[b][a] - 1));
        best = best.max(1 + most(left, &circles[at..]));
        ends().for_each(|(a, b)| (left[a][b], left[b][a]) = (left[a][b] + 1, left[b][a] + 1));
        if best == bound {
            break;
        }
    }
    best
}
