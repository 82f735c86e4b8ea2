//! Contributions that are summed inline, together with others that go through the CPU map: no
//! packet overtakes another.

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec, one_on_each_host};

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn flows_stay_in_order_while_ranks_wander_between_cpus() {
    const RANKS: u32 = 4;
    let cluster = Cluster::start(LabSpec::hosts(RANKS as usize)).unwrap();
    // The ring has one CPU. There are more ranks than CPUs, so each rank is on this CPU at one time
    // and on another one later.
    let job = JobSpec::new("wander", RANKS);
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(RANKS)).unwrap();
    for seed in 0..8 {
        let outcomes = group.all_reduce("i32", 400_000, seed).unwrap();
        assert!(outcomes.iter().all(|o| o.mode == "box"), "{outcomes:?}");
    }
    let counter = |name| cluster.counter(Some("wander"), name).unwrap();
    let (inline, steered) = (counter("inline"), counter("steered"));
    assert!(inline > 100 && steered > 100, "{inline} inline, {steered} steered");
    // This lab loses no packets, so a gap would mean packets out of order.
    assert_eq!(counter("out_of_sequence"), 0, "{inline} inline, {steered} steered");
}
