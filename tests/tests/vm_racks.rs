//! Stock kernels' Soft-RoCE behind two leaves and a spine, which are configured by hand.

use std::time::Duration;

use netsum_lab::LabSpec;
use netsum_lab::cluster::Cluster;
use netsum_lab::faults::Faults;
use netsum_lab::verbs_ring::{self, Operation, VerbsRingSpec};
use netsum_lab::vm::parts::Kernel;

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn six_stock_hosts_in_two_racks_get_every_sum() {
    let vms: Vec<Kernel> = Kernel::ALL.into_iter().cycle().take(6).collect();
    let spec = LabSpec { racks: 2, vms, mtu: 2300, faulty_links: true, ..LabSpec::hosts(6) };
    let mut cluster = Cluster::start(spec).unwrap();
    cluster.start_leaves().unwrap();
    for (mtu, operation, loss) in [
        (1024, Operation::Send, 0.0),
        (2048, Operation::Send, 0.01),
        (1024, Operation::Write, 0.01),
    ] {
        for host in cluster.lab().hosts() {
            host.set_faults(Faults::loss(loss), Faults::loss(loss), 7 + host.number() as u32)
                .unwrap();
        }
        let timeout = if loss > 0.0 { 17 } else { 20 };
        let spec = VerbsRingSpec { timeout, ..VerbsRingSpec::new(6, mtu, operation, 6) };
        let reports = verbs_ring::run(&cluster, &spec, Duration::from_secs(120))
            .unwrap_or_else(|e| panic!("{spec:?}: {e:#}"));
        for (rank, report) in reports.iter().enumerate() {
            assert_eq!(
                (report.messages, report.wrong),
                (6, 0),
                "rank {rank}, {spec:?}: {report:?}"
            );
            let boxes = || [None, Some(0), Some(1)].map(|box_| cluster.netsum_on(box_, &["stats"]));
            let is_right = loss > 0.0 || report.retransmitted == Some(0);
            assert!(is_right, "rank {rank}: {reports:?}\n{:?}", boxes());
        }
        verbs_ring::forget(&cluster).unwrap();
    }
}
