//! Trees as pictures. A box's label has the number of members below it.

use std::collections::{BTreeMap, BTreeSet};
use std::f64::consts::TAU;
use std::fmt::Write as _;

use crate::topology::{Network, Node, Resource};
use crate::tree::{Hop, Tree};

const COLOURS: [&str; 8] =
    ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f"];

/// A drawing: nodes with their numbers of members, and for each tree its hops between nodes.
struct Picture<'a> {
    network: &'a Network,
    nodes: BTreeMap<Node, usize>,
    hops: Vec<(usize, &'a Tree, Hop)>,
}

impl<'a> Picture<'a> {
    fn new(network: &'a Network, trees: &'a [&'a Tree]) -> Self {
        let leaf = |hop: &Hop| network.is_host(hop.child) && !network.sums(hop.child);
        let mut below: BTreeMap<Node, BTreeSet<Node>> = BTreeMap::new();
        let mut hops = Vec::new();
        for (n, tree) in trees.iter().enumerate() {
            below.entry(tree.root).or_default();
            for hop in &tree.hops {
                let members = below.entry(hop.parent).or_default();
                if leaf(hop) {
                    members.insert(hop.child);
                } else {
                    below.entry(hop.child).or_default();
                    hops.push((n, *tree, *hop));
                }
            }
        }
        Self {
            network,
            nodes: below.into_iter().map(|(node, members)| (node, members.len())).collect(),
            hops,
        }
    }

    fn label(&self, node: Node, members: usize, line: &str) -> String {
        let name = self.network.name(node).replace('&', "&amp;").replace('<', "&lt;");
        if members == 0 { name } else { format!("{name}{line}{members} hosts") }
    }

    /// Boxes at the same distance from hosts are in a row. If all are, they are in a circle.
    fn places(&self) -> BTreeMap<Node, (f64, f64)> {
        let mut rows: BTreeMap<usize, Vec<Node>> = BTreeMap::new();
        let mut far: BTreeMap<Node, usize> = self
            .nodes
            .iter()
            .filter(|(node, members)| **members > 0 || self.network.is_host(**node))
            .map(|(&node, _)| (node, 0))
            .collect();
        let mut edge: Vec<Node> = far.keys().copied().collect();
        for distance in 1.. {
            let next = edge.iter().flat_map(|&node| self.network.next(node)).copied();
            let next: BTreeSet<Node> =
                next.filter(|n| self.nodes.contains_key(n) && !far.contains_key(n)).collect();
            if next.is_empty() {
                break;
            }
            far.extend(next.iter().map(|&node| (node, distance)));
            edge = next.into_iter().collect();
        }
        for &node in self.nodes.keys() {
            rows.entry(far.get(&node).copied().unwrap_or(0)).or_default().push(node);
        }
        let widest = rows.values().map(Vec::len).max().unwrap_or(1) as f64;
        let mut places = BTreeMap::new();
        for (row, nodes) in &rows {
            for (i, &node) in nodes.iter().enumerate() {
                let part = (i as f64 + 0.5) / nodes.len() as f64;
                let place = if rows.len() == 1 {
                    let radius = 25.0 * widest + 40.0;
                    let angle = TAU * part;
                    (radius * (1.0 + angle.cos()) + 60.0, radius * (1.0 + angle.sin()) + 40.0)
                } else {
                    (part * widest * 100.0 + 20.0, (rows.len() - 1 - row) as f64 * 140.0 + 40.0)
                };
                places.insert(node, place);
            }
        }
        places
    }
}

fn rate(tree: &Tree) -> String {
    format!("{:.2} GB/s", tree.rate / 1e9)
}

/// Trees in Graphviz's language.
pub fn dot(network: &Network, trees: &[&Tree]) -> String {
    let picture = Picture::new(network, trees);
    let mut text = "digraph trees {\n  rankdir = BT; node [shape = box];\n".to_owned();
    for (&node, &members) in &picture.nodes {
        let _ = writeln!(
            text,
            "  \"{}\" [label = \"{}\"];",
            network.name(node),
            picture.label(node, members, "\\n")
        );
    }
    for (n, tree, hop) in &picture.hops {
        let colour = COLOURS[n % COLOURS.len()];
        let ends = [hop.child, hop.parent].map(|node| network.name(node));
        let _ = writeln!(
            text,
            "  \"{}\" -> \"{}\" [color = \"{colour}\", label = \"{}\"];",
            ends[0],
            ends[1],
            rate(tree)
        );
    }
    text + "}\n"
}

/// Trees as SVG. A line's width is its rate relative to the largest.
pub fn svg(network: &Network, trees: &[&Tree]) -> String {
    let legend = |(n, tree): (usize, &&Tree)| {
        format!("tree {n}, root {}: {}", network.name(tree.root), rate(tree))
    };
    lines(network, trees, &trees.iter().enumerate().map(legend).collect::<Vec<_>>(), 4.0)
}

/// All links as SVG, with one colour for each rate. Links go from the box below to the one above.
pub fn links(network: &Network) -> String {
    let mut by_rate: BTreeMap<u64, Vec<Hop>> = BTreeMap::new();
    for edge in (0..network.edges()).step_by(2) {
        let ((child, parent), rate) = (network.ends(edge), network.capacity(Resource::Edge(edge)));
        by_rate.entry(rate as u64).or_default().push(Hop { child, parent, via: None });
    }
    // Links of hosts are not drawn.
    let tree = |(rate, hops): (u64, Vec<Hop>)| Tree {
        root: hops[0].parent,
        hops,
        rate: rate as f64,
        rings: 1,
    };
    let all: Vec<Tree> = by_rate.into_iter().map(tree).collect();
    let is_drawn = |tree: &Tree| tree.hops.iter().any(|hop| !network.is_host(hop.child));
    let (mut drawn, hosts): (Vec<&Tree>, Vec<&Tree>) = all.iter().partition(|tree| is_drawn(tree));
    let legend: Vec<String> = drawn.iter().map(|tree| format!("links of {}", rate(tree))).collect();
    drawn.extend(hosts);
    lines(network, &drawn, &legend, 0.0)
}

/// Draws trees as lines, `apart` from each other where they share a link.
fn lines(network: &Network, trees: &[&Tree], legend: &[String], apart: f64) -> String {
    let picture = Picture::new(network, trees);
    let places = picture.places();
    let width = places.values().map(|place| place.0).fold(0.0, f64::max);
    let height = places.values().map(|place| place.1).fold(0.0, f64::max);
    let [width, height] = [width + 80.0, height + 40.0 + 20.0 * legend.len() as f64];
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
         font-family=\"sans-serif\" font-size=\"11\" text-anchor=\"middle\">\n"
    );
    let most = picture.hops.iter().map(|(_, tree, _)| tree.rate).fold(0.0, f64::max);
    for (n, tree, hop) in &picture.hops {
        let [(x1, y1), (x2, y2)] = [places[&hop.child], places[&hop.parent]];
        let aside = apart * (*n as f64 - (trees.len() - 1) as f64 / 2.0);
        let length = f64::hypot(x2 - x1, y2 - y1).max(1.0);
        let (dx, dy) = ((y2 - y1).abs() / length * aside, (x2 - x1).abs() / length * aside);
        let wide = (4.0 * tree.rate / most).max(0.5);
        let colour = COLOURS[n % COLOURS.len()];
        let _ = writeln!(
            text,
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\" \
             stroke-width=\"{wide:.1}\"/>",
            x1 + dx,
            y1 + dy,
            x2 + dx,
            y2 + dy
        );
    }
    for (&node, &members) in &picture.nodes {
        let (x, y) = places[&node];
        let label = picture.label(node, members, ", ");
        let _ = writeln!(
            text,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"90\" height=\"24\" rx=\"4\" fill=\"#fff\" \
             stroke=\"#333\"/><text x=\"{x:.1}\" y=\"{:.1}\">{label}</text>",
            x - 45.0,
            y - 12.0,
            y + 4.0
        );
    }
    for (n, line) in legend.iter().enumerate() {
        let _ = writeln!(
            text,
            "<text x=\"10\" y=\"{:.1}\" text-anchor=\"start\" fill=\"{}\">{line}</text>",
            height - 20.0 * (legend.len() - n) as f64 + 14.0,
            COLOURS[n % COLOURS.len()],
        );
    }
    text + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate;

    #[test]
    fn members_are_counted_and_hops_between_boxes_drawn() {
        let network = Network::new(&generate::leaf_spine(2, 2, 1, 8e9, 1.0)).unwrap();
        let hop = |child, parent| Hop { child, parent, via: None };
        let hops = vec![hop(0, 4), hop(1, 4), hop(2, 5), hop(3, 5), hop(4, 6), hop(5, 6)];
        let tree = Tree { root: 6, hops, rate: 1e9, rings: 1 };
        let dot = dot(&network, &[&tree]);
        assert!(dot.contains("\"leaf0\" [label = \"leaf0\\n2 hosts\"];"), "{dot}");
        assert_eq!(dot.matches("->").count(), 2);
        let svg = svg(&network, &[&tree]);
        assert_eq!((svg.matches("<line").count(), svg.matches("<rect").count()), (2, 3));
        // The spine is above, in the middle of its leaves.
        assert!(svg.contains(">spine0<") && svg.contains("x=\"120.0\" y=\"44.0\">spine0"), "{svg}");
    }

    #[test]
    fn links_of_one_rate_have_one_colour() {
        let mut topology = generate::leaf_spine(2, 3, 2, 8e9, 1.0);
        topology.links.last_mut().unwrap().bits = 4e9;
        let svg = links(&Network::new(&topology).unwrap());
        assert_eq!((svg.matches("<line").count(), svg.matches("<rect").count()), (4, 4), "{svg}");
        assert_eq!(svg.matches("links of").count(), 2);
        assert!(svg.contains("links of 0.50 GB/s") && svg.contains("leaf1, 3 hosts"), "{svg}");
    }
}
