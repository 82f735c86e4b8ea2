//! Well-known networks.
//!
//! NVLink has its nominal rate in each direction: 20 GB/s for a link of the first kind (P100), 25
//! for the second (V100). A P100 has four links and a V100 six (NVIDIA, "NVIDIA DGX-1 With Tesla
//! V100 System Architecture", WP-08437). Both are connected as the hybrid cube mesh that is shown
//! there; Blink (MLSys 2020, section 2) draws both. DGX-2 is 16 V100, each with six links to
//! NVSwitches that connect all (NVIDIA, "NVIDIA NVSwitch", 2018).

use crate::topology::Topology;

/// Bits per second of one NVLink of a P100.
pub const NVLINK_1: f64 = 160e9;
/// Bits per second of one NVLink of a V100.
pub const NVLINK_2: f64 = 200e9;

/// Hosts h0, h1, ... around the box `leaf0`.
pub fn rack(hosts: usize, bits: f64) -> Topology {
    leaf_spine(1, hosts, 0, bits, 1.0)
}

/// `leaves` with `hosts` each, all linked to all `spines`. A leaf's uplinks carry
/// 1/`oversubscription` of its hosts' rate. Host h of leaf l is h(l * hosts + h).
pub fn leaf_spine(
    leaves: usize,
    hosts: usize,
    spines: usize,
    bits: f64,
    oversubscription: f64,
) -> Topology {
    let mut t = Topology::default();
    (0..leaves).for_each(|leaf| t.box_(format!("leaf{leaf}")));
    (0..spines).for_each(|spine| t.box_(format!("spine{spine}")));
    for host in 0..leaves * hosts {
        t.host(format!("h{host}"));
        t.link(format!("h{host}"), format!("leaf{}", host / hosts), bits);
    }
    let up = bits * hosts as f64 / (spines as f64 * oversubscription);
    for leaf in 0..leaves {
        (0..spines).for_each(|spine| t.link(format!("leaf{leaf}"), format!("spine{spine}"), up));
    }
    t
}

/// A fat-tree of switches with `ports` (even) ports each, with only `pods` of its pods: ports^2 / 4
/// hosts in each, after Al-Fares et al. (SIGCOMM 2008). Core c is linked to switch c / (ports / 2)
/// of each pod. Pod p has leaves leaf(p * ports / 2 + i) and switches mid(p * ports / 2 + i).
pub fn fat_tree(ports: usize, pods: usize, bits: f64) -> Topology {
    let half = ports / 2;
    let mut t = Topology::default();
    for kind in ["leaf", "mid"] {
        (0..pods * half).for_each(|i| t.box_(format!("{kind}{i}")));
    }
    (0..half * half).for_each(|core| t.box_(format!("core{core}")));
    for host in 0..pods * half * half {
        t.host(format!("h{host}"));
        t.link(format!("h{host}"), format!("leaf{}", host / half), bits);
    }
    for pod in 0..pods {
        for (leaf, mid) in (0..half).flat_map(|leaf| (0..half).map(move |mid| (leaf, mid))) {
            t.link(format!("leaf{}", pod * half + leaf), format!("mid{}", pod * half + mid), bits);
        }
        (0..half * half).for_each(|core| {
            t.link(format!("mid{}", pod * half + core / half), format!("core{core}"), bits)
        });
    }
    t
}

/// Boxes in a circle, `hosts` below each.
pub fn ring(boxes: usize, hosts: usize, bits: f64) -> Topology {
    let mut t = leaf_spine(boxes, hosts, 0, bits, 1.0);
    // Two boxes have one link between them.
    let links = if boxes > 2 { boxes } else { boxes.saturating_sub(1) };
    (0..links).for_each(|b| t.link(format!("leaf{b}"), format!("leaf{}", (b + 1) % boxes), bits));
    t
}

fn gpus(count: usize) -> Topology {
    let mut t = Topology::default();
    (0..count).for_each(|gpu| t.host(format!("gpu{gpu}")));
    t.hosts.iter_mut().for_each(|host| host.relays = true);
    t
}

/// DGX-1 with P100: two meshes of four, and a link between GPUs at the same place in both.
pub fn dgx_1p() -> Topology {
    let mut t = gpus(8);
    let pairs = (0..4usize).flat_map(|a| (a + 1..4).map(move |b| (a, b)));
    let meshes = pairs.flat_map(|(a, b)| [(a, b), (a + 4, b + 4)]);
    for (a, b) in meshes.chain((0..4).map(|a| (a, a + 4))) {
        t.link(format!("gpu{a}"), format!("gpu{b}"), NVLINK_1);
    }
    t
}

/// DGX-1 with V100: the same cube mesh, where some pairs have two links.
pub fn dgx_1v() -> Topology {
    let mut t = dgx_1p();
    const DOUBLE: [(usize, usize); 8] =
        [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)];
    for link in &mut t.links {
        let double = DOUBLE
            .iter()
            .any(|(a, b)| link.from == format!("gpu{a}") && link.to == format!("gpu{b}"));
        link.bits = NVLINK_2 * if double { 2.0 } else { 1.0 };
    }
    t
}

/// DGX-2: 16 V100 around NVSwitches, which forward and do not add.
pub fn dgx_2() -> Topology {
    let mut t = gpus(16);
    t.box_("nvswitch");
    t.boxes[0].aggregation_rate = Some(0.0);
    (0..16).for_each(|gpu| t.link(format!("gpu{gpu}"), "nvswitch", 6.0 * NVLINK_2));
    t
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{Network, Resource};

    #[test]
    fn networks_have_the_size_that_they_are_known_by() {
        for (name, topology, sizes) in [
            ("rack", rack(4, 1e9), [4, 1, 4]),
            ("leaf-spine", leaf_spine(4, 8, 2, 1e9, 2.0), [32, 6, 40]),
            ("fat-tree of 4 ports", fat_tree(4, 4, 1e9), [16, 20, 48]),
            ("ring", ring(5, 2, 1e9), [10, 5, 15]),
            ("two boxes", ring(2, 1, 1e9), [2, 2, 3]),
            ("DGX-1P", dgx_1p(), [8, 0, 16]),
            ("DGX-2", dgx_2(), [16, 1, 16]),
        ] {
            assert_eq!(
                [topology.hosts.len(), topology.boxes.len(), topology.links.len()],
                sizes,
                "{name}"
            );
            Network::new(&topology).unwrap();
        }
    }

    #[test]
    fn uplinks_carry_their_share() {
        let network = Network::new(&leaf_spine(2, 8, 2, 8e9, 2.0)).unwrap();
        let edge =
            network.edge(network.node("leaf0").unwrap(), network.node("spine1").unwrap()).unwrap();
        assert_eq!(network.capacity(Resource::Edge(edge)), 2e9);
    }

    #[test]
    fn each_gpu_has_all_its_links() {
        for (topology, links, bits) in [(dgx_1p(), 4.0, NVLINK_1), (dgx_1v(), 6.0, NVLINK_2)] {
            for gpu in &topology.hosts {
                let own = topology.links.iter().filter(|l| l.from == gpu.name || l.to == gpu.name);
                assert_eq!(own.map(|l| l.bits).sum::<f64>(), links * bits, "{}", gpu.name);
            }
        }
    }
}
