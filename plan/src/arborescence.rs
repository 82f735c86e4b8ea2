//! The cheapest tree of arcs from a root to all nodes: the algorithm of Chu and Liu, and of Edmonds
//! ("Optimum Branchings", 1967).

/// From, to, cost.
pub type Arc = (usize, usize, f64);

/// Indices of the tree's arcs, or None if a node of 0..nodes cannot be reached. Among equally cheap
/// trees it returns the first.
pub fn cheapest(nodes: usize, root: usize, arcs: &[Arc]) -> Option<Vec<usize>> {
    const NONE: usize = usize::MAX;
    let mut best = vec![NONE; nodes];
    for (i, &(from, to, cost)) in arcs.iter().enumerate() {
        if from != to && to != root && (best[to] == NONE || cost < arcs[best[to]].2) {
            best[to] = i;
        }
    }
    if (0..nodes).any(|node| node != root && best[node] == NONE) {
        return None;
    }
    // A cycle of cheapest arcs is contracted to one node.
    let mut circle = vec![NONE; nodes];
    let mut seen = vec![NONE; nodes];
    let mut circles = 0;
    for start in 0..nodes {
        let mut node = start;
        while node != root && seen[node] == NONE {
            seen[node] = start;
            node = arcs[best[node]].0;
        }
        if node != root && seen[node] == start && circle[node] == NONE {
            let first = node;
            loop {
                circle[node] = circles;
                node = arcs[best[node]].0;
                if node == first {
                    break;
                }
            }
            circles += 1;
        }
    }
    if circles == 0 {
        return Some((0..nodes).filter(|&node| node != root).map(|node| best[node]).collect());
    }
    let mut number = circle.clone();
    let mut count = circles;
    for n in number.iter_mut().filter(|n| **n == NONE) {
        *n = count;
        count += 1;
    }
    let mut origin = Vec::new();
    let mut inner = Vec::new();
    for (i, &(from, to, cost)) in arcs.iter().enumerate() {
        if number[from] != number[to] {
            let saved = if circle[to] == NONE { 0.0 } else { arcs[best[to]].2 };
            inner.push((number[from], number[to], cost - saved));
            origin.push(i);
        }
    }
    let mut chosen: Vec<usize> =
        cheapest(count, number[root], &inner)?.into_iter().map(|i| origin[i]).collect();
    // Each cycle keeps all its arcs except the one into the node where it is entered.
    let entered: Vec<usize> = chosen.iter().map(|&i| arcs[i].1).collect();
    let kept = (0..nodes).filter(|&node| circle[node] != NONE && !entered.contains(&node));
    chosen.extend(kept.map(|node| best[node]));
    Some(chosen)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cost(arcs: &[Arc], chosen: &[usize]) -> f64 {
        chosen.iter().map(|&i| arcs[i].2).sum()
    }

    fn is_tree(nodes: usize, root: usize, arcs: &[Arc], chosen: &[usize]) -> bool {
        let mut above = vec![None; nodes];
        for &i in chosen {
            if above[arcs[i].1].replace(arcs[i].0).is_some() {
                return false;
            }
        }
        (0..nodes).all(|mut node| {
            for _ in 0..nodes {
                node = if node == root { root } else { above[node].unwrap_or(usize::MAX) };
                if node == usize::MAX {
                    return false;
                }
            }
            node == root
        })
    }

    #[test]
    fn a_cycle_is_entered_where_it_is_cheapest() {
        let arcs = [(1, 2, 1.0), (2, 3, 1.0), (3, 1, 1.0), (0, 1, 10.0), (0, 3, 9.0)];
        let chosen = cheapest(4, 0, &arcs).unwrap();
        assert_eq!(cost(&arcs, &chosen), 11.0);
        assert_eq!(cheapest(5, 0, &arcs), None);
    }

    proptest! {
        #[test]
        fn none_is_cheaper(arcs in prop::collection::vec((0usize..5, 0usize..5, 1u8..9), 0..9)) {
            let arcs: Vec<Arc> = arcs.into_iter().map(|(a, b, c)| (a, b, c.into())).collect();
            let subsets = (0u32..1 << arcs.len()).filter(|s| s.count_ones() == 4);
            let chosen = subsets.map(|s| (0..arcs.len()).filter(|i| s >> i & 1 == 1)
                .collect::<Vec<_>>());
            let best = chosen.filter(|c| is_tree(5, 0, &arcs, c)).map(|c| cost(&arcs, &c))
                .min_by(f64::total_cmp);
            let found = cheapest(5, 0, &arcs);
            if let Some(found) = &found {
                prop_assert!(is_tree(5, 0, &arcs, found));
            }
            prop_assert_eq!(found.map(|f| cost(&arcs, &f)), best);
        }
    }
}
