//! An upper bound from the links, whatever sums: no rate exceeds the smallest maximum flow from one
//! member to another.

use std::collections::{BTreeMap, BTreeSet};

use petgraph::algo::dinics;
use petgraph::graph::{DiGraph, NodeIndex};

use crate::topology::{Network, Node, Resource};
use crate::tree::Collective;

/// Bytes per second: the minimum over all members v of maxflow(first member, v) and, for sums, also
/// of maxflow(v, first member). Infinite for one member.
pub fn bound(network: &Network, collective: Collective, members: &[Node]) -> f64 {
    let rate = |from, to| {
        network.edge(from, to).map_or(0.0, |edge| network.capacity(Resource::Edge(edge)))
    };
    let mut least = f64::INFINITY;
    // A host with one link is merged with its box; its link bounds the rate by itself.
    let mut ends: Vec<Node> = Vec::new();
    let mut seen = BTreeSet::new();
    for (n, &member) in members.iter().enumerate() {
        let end = match network.next(member) {
            [only] if members.len() > 1 && !network.is_host(*only) => {
                let up = collective == Collective::AllReduce || n == 0;
                let down = collective == Collective::AllReduce || n > 0;
                least = least.min(if up { rate(member, *only) } else { f64::INFINITY });
                least = least.min(if down { rate(*only, member) } else { f64::INFINITY });
                *only
            }
            _ => member,
        };
        if seen.insert(end) {
            ends.push(end);
        }
    }
    // Flow does not pass through hosts that do not relay, nor through relays that are not members.
    let nodes: BTreeSet<Node> = network.boxes().chain(ends.iter().copied()).collect();
    let mut graph = DiGraph::<(), u64>::new();
    let index: BTreeMap<Node, NodeIndex> =
        nodes.into_iter().map(|node| (node, graph.add_node(()))).collect();
    for (&from, &start) in &index {
        for next in network.next(from) {
            if let (Some(&end), Some(edge)) = (index.get(next), network.edge(from, *next)) {
                // Rounded up: the bound must not fall below the true value.
                graph.add_edge(start, end, network.capacity(Resource::Edge(edge)).ceil() as u64);
            }
        }
    }
    let flow = |from: Node, to: Node| dinics(&graph, index[&from], index[&to]).0 as f64;
    let Some((&root, others)) = ends.split_first() else { return least };
    for &other in others {
        least = least.min(flow(root, other));
        if collective == Collective::AllReduce {
            least = least.min(flow(other, root));
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate;

    fn of(topology: &crate::topology::Topology, collective: Collective, members: &[Node]) -> f64 {
        bound(&Network::new(topology).unwrap(), collective, members)
    }

    #[test]
    fn the_narrowest_cut_bounds() {
        let all: Vec<Node> = (0..8).collect();
        // Each leaf has uplinks of 16 Gb/s, and each host a link of 8.
        assert_eq!(of(&generate::leaf_spine(2, 4, 2, 8e9, 2.0), Collective::AllReduce, &all), 1e9);
        assert_eq!(of(&generate::leaf_spine(2, 4, 2, 8e9, 8.0), Collective::AllReduce, &all), 5e8);
        // Each GPU has four links of 20 GB/s, or six of 25.
        assert_eq!(of(&generate::dgx_1p(), Collective::Broadcast, &all), 80e9);
        assert_eq!(of(&generate::dgx_1v(), Collective::Broadcast, &all), 150e9);
        assert_eq!(of(&generate::dgx_1v(), Collective::Broadcast, &[0, 1, 6]), 0.0);
    }

    #[test]
    fn directions_count_apart() {
        let mut topology = generate::rack(2, 8e9);
        topology.links[0].bits_back = Some(4e9);
        assert_eq!(of(&topology, Collective::AllReduce, &[0, 1]), 5e8);
        assert_eq!(of(&topology, Collective::Broadcast, &[0, 1]), 1e9);
        assert_eq!(of(&topology, Collective::Broadcast, &[1, 0]), 5e8);
        let mut pair = generate::dgx_1p();
        pair.links.retain(|link| link.from == "gpu0" && link.to == "gpu1");
        pair.links[0].bits_back = Some(8e9);
        assert_eq!(of(&pair, Collective::Broadcast, &[0, 1]), 20e9);
    }
}
