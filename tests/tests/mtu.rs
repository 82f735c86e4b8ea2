//! Path MTUs that do not fit are refused with the reason, before any rank waits for a sum.

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec, one_on_each_host};
use netsum_lab::netns::{Netns, output};
use netsum_lab::udp_ring::Load;

fn set_mtu(netns: &Netns, interface: &str, mtu: u32) {
    let mut ip = netns.command("ip");
    output(ip.args(["link", "set", interface, "mtu", &mtu.to_string()])).unwrap();
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn path_mtus_that_the_box_or_a_port_cannot_carry_are_refused_at_once() {
    let cluster = Cluster::start(LabSpec { mtu: 2300, ..LabSpec::hosts(3) }).unwrap();
    let lab = cluster.lab();
    let create =
        |mtu: u32| cluster.create_job(&JobSpec { mtu, ..JobSpec::new(&format!("mtu-{mtu}"), 3) });
    let refused = |result: anyhow::Result<String>, parts: &[&str]| {
        let error = format!("{:#}", result.expect_err("not refused"));
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    refused(create(4096), &["--mtu 4096", "one page", "3328 is the largest"]);
    refused(create(1500), &["--mtu 1500", "a multiple of 64, 256 to 3328"]);
    create(2048).unwrap();
    set_mtu(lab.box_(), "port1", 1107);
    // Ports are checked when a job is created, not only when the daemon starts.
    refused(
        create(1024),
        &["--mtu 1024", "port port1 has an MTU of 1107", "at least 1108 is needed"],
    );
    create(512).unwrap();

    let load = Load::new(3);
    let add = |rank: u32| {
        let ip = |rank: u32| lab.host(rank as usize % 3).ip(0);
        let flow = load.flow(0, rank, 0, ip(rank), ip(rank + 1));
        cluster.add_flow("mtu-2048", &flow, &lab.box_().port(rank as usize))
    };
    add(0).unwrap();
    refused(add(1), &["--rank 1", "port port1 has an MTU of 1107", "at least 2132 is needed"]);
    set_mtu(lab.box_(), "port1", 2132);
    add(1).unwrap();
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_port_or_interface_with_a_small_mtu_is_named_at_join() {
    for (at_the_host, expected) in [
        (false, &["rank 1: port port1 has an MTU of 1000", "at least 1108 is needed"][..]),
        (
            true,
            &["mtu 1024: interface eth0, which has 10.0.0.2, has an MTU of 1000", "at least 1068"],
        ),
    ] {
        let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
        let job = JobSpec::new("small", 2);
        let token = cluster.create_job(&job).unwrap();
        let port = cluster.lab().box_().port(1);
        if at_the_host {
            set_mtu(cluster.lab().host(1), "eth0", 1000);
        } else {
            set_mtu(cluster.lab().box_(), &port, 1000);
        }
        let mut impatient = job.clone();
        impatient.connect_timeout = std::time::Duration::from_secs(2);
        let error =
            format!("{:#}", cluster.ranks(&impatient, &token, &one_on_each_host(2)).unwrap_err());
        assert!(expected.iter().all(|part| error.contains(part)), "{error}");
        // The other rank is told which one is missing.
        assert!(error.contains("missing: 1"), "{error}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_port_with_packets_beyond_a_page_is_refused() {
    let error = Cluster::start(LabSpec { mtu: 9000, ..LabSpec::hosts(2) }).unwrap_err().to_string();
    assert!(
        error.contains("port port0: cannot attach") && error.contains("has an MTU of 9000"),
        "{error}"
    );
}

/// The bridge drops packets that its port cannot carry and tells no host, like many a hop whose
/// ICMP is filtered.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_path_that_swallows_large_packets_is_named_when_the_ranks_connect() {
    let cluster = Cluster::without_daemon(LabSpec::hosts(3)).unwrap();
    set_mtu(cluster.lab().box_(), &cluster.lab().box_().port(1), 900);
    let timeout = std::time::Duration::from_secs(2);
    let job = JobSpec { timeout, ..JobSpec::new("narrow", 3) };
    let error = format!("{:#}", cluster.ranks_alone(&job, &one_on_each_host(3)).unwrap_err());
    let words = [
        "rank 0 (10.0.0.1) did not answer within 2s",
        "path MTU, 1024 bytes",
        "small ones",
        "--mtu",
    ];
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
    let small = JobSpec { mtu: 512, ..job };
    cluster.ranks_alone(&small, &one_on_each_host(3)).unwrap();
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn socket_ranks_use_the_largest_path_mtu_that_fits() {
    let cluster = Cluster::start(LabSpec::hosts(3)).unwrap();
    let job = JobSpec { mtu: 0, xdp: vec![0], ..JobSpec::new("fits", 3) };
    let token = cluster.create_job(&job).unwrap();
    let used = || cluster.netsum_json(&["job", "show", "fits"]).unwrap()["mtu"].clone();
    let fragments = || cluster.counter(Some("fits"), "released").unwrap();
    assert_eq!(used(), 1024, "nobody knows the ranks yet");
    for (at_a_host, mtu) in [(1500, 1408), (1300, 1216), (1500, 1408)] {
        set_mtu(cluster.lab().host(1), "eth0", at_a_host);
        let mut group = cluster.ranks(&job, &token, &one_on_each_host(3)).unwrap();
        assert_eq!(used(), mtu);
        let before = fragments();
        let outcomes = group.all_reduce("i32", 500_001, 7).unwrap();
        assert!(
            outcomes.iter().all(|o| (&*o.mode, o.wrong, o.fallbacks) == ("box", 0, 0)),
            "{outcomes:?}\n{}",
            cluster.daemon_log()
        );
        // Messages are 16 KiB with 76 bytes of check lanes, the last one is shorter.
        let messages = (500_001 * 4_u64).div_ceil(16384 - 76);
        let per_message = 16384_u64.div_ceil(mtu);
        let sums = fragments() - before;
        assert!((messages - 1..=messages).contains(&(sums / per_message)), "{sums}");
        group.end();
    }
}
