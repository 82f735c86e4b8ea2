//! A job whose rings have different parents.

use netsum_lab::cluster::{Cluster, JobSpec, one_on_each_host};
use netsum_lab::lab::BoxNode;
use netsum_lab::{LabSpec, netns};

/// Bytes that a leaf has sent through a port.
pub fn sent(leaf: &BoxNode, port: &str) -> u64 {
    let text =
        netns::output(leaf.command("ip").args(["-s", "-j", "link", "show", "dev", port])).unwrap();
    let links: serde_json::Value = serde_json::from_str(&text).unwrap();
    links[0]["stats64"]["tx"]["bytes"].as_u64().unwrap()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn each_parent_gets_the_bytes_of_its_rings() {
    let mut cluster = Cluster::start(LabSpec { racks: 2, spines: 2, ..LabSpec::hosts(4) }).unwrap();
    let second = cluster.lab().spec().spine(1);
    cluster.start_leaves().unwrap();
    let job = JobSpec { rings: 3, ..JobSpec::new("shared", 4) };
    let peers: Vec<_> = (0..4).map(|host| cluster.lab().host(host).ip(0).to_string()).collect();
    let peers = peers.join(",");
    let (leaf, parent) = (["--uplink", "uplink=2,uplink1=1"], ["--groups", "0-1,2-3"]);
    for (node, rings, members, ports, more) in [
        (Some(0), 3, [&["--members", "0-1"], &leaf[..]].concat(), "port0,port1", &[][..]),
        (Some(1), 3, [&["--members", "2-3"], &leaf[..]].concat(), "port2,port3", &[]),
        (None, 2, parent.to_vec(), "rack0,rack1", &["--rings", "0-1"]),
        (second, 1, parent.to_vec(), "rack0,rack1", &["--rings", "2"]),
    ] {
        let create = JobSpec { rings, ..job.clone() }.create_arguments();
        let create: Vec<&str> = create.iter().map(String::as_str).collect();
        cluster.netsum_on(node, &[&create[..], &members].concat()).unwrap();
        let flows = ["flow", "peers", "shared", "--peers", &peers, "--ports", ports];
        let printed = cluster.netsum_on(node, &[&flows[..], more].concat()).unwrap();
        assert!(printed.contains("active"), "{printed}");
    }
    let mut group = cluster.ranks_alone(&job, &one_on_each_host(4)).unwrap();
    let counted = || {
        [0, 1]
            .map(|rack| [0, 1].map(|spine| sent(cluster.lab().leaf(rack), &BoxNode::uplink(spine))))
    };
    let before = counted();
    for (seed, dtype) in [(1, "i32"), (2, "f32"), (3, "i32")] {
        let outcomes = group.all_reduce(dtype, 1_000_000, seed).unwrap();
        assert!(outcomes.iter().all(|o| (&*o.mode, o.wrong) == ("box", 0)), "{outcomes:?}");
    }
    let after = counted();
    for rack in [0, 1] {
        let [first, second] = [0, 1].map(|way| (after[rack][way] - before[rack][way]) as f64);
        println!(
            "rack {rack}: {first} bytes to the first parent, {second} to the second: {:.3}",
            first / second
        );
        // Acknowledgements of all rings go through the first uplink.
        assert!((1.95..2.2).contains(&(first / second)), "{first} {second}");
    }
}
