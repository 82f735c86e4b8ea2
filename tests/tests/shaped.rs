//! Hosts behind slow links that lose nothing: nothing is sent again, however long the queues in front of them.

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, Group, JobSpec, one_on_each_host};

const KIB: u32 = 1 << 10;
const MIB: usize = 1 << 20;

fn lab(hosts: u32, rate: &str) -> Cluster {
    let rate = Some(rate.to_owned());
    Cluster::start(LabSpec { mtu: 2300, rate, ..LabSpec::hosts(hosts as usize) }).unwrap()
}

/// All-reduces of so many bytes each; packets that were sent again.
fn sent_again(group: &mut Group, mode: &str, sizes: &[usize], what: &str) -> u64 {
    group.start_together();
    let (mut again, mut micros) = (0, 0);
    for (seed, bytes) in sizes.iter().enumerate() {
        let outcomes = group
            .all_reduce("f32", bytes / 4, seed as u64)
            .unwrap_or_else(|e| panic!("{what}: {e:#}\n{}", group.log()));
        assert!(outcomes.iter().all(|o| o.mode == mode && o.wrong == 0), "{what}: {outcomes:?}");
        again += outcomes.iter().map(|o| o.retransmissions).sum::<u64>();
        micros += outcomes.iter().map(|o| o.micros).max().unwrap_or(0);
    }
    println!("{what}: {again} sent again, {} ms", micros / 1000);
    again
}

/// Sums by the box, with a job for each window, in messages of 64 KiB.
fn by_the_box(hosts: u32, rate: &str, windows: &[u32], sizes: &[usize]) {
    let cluster = lab(hosts, rate);
    for &window in windows {
        let name = format!("window-{window}");
        let job = JobSpec { message_size: 64 * KIB, window, ..JobSpec::new(&name, hosts) };
        let token = cluster.create_job(&job).unwrap();
        let mut group = cluster.ranks(&job, &token, &one_on_each_host(hosts)).unwrap();
        let what = format!("{rate}, {hosts} hosts, window {window}");
        assert_eq!(sent_again(&mut group, "box", sizes, &what), 0, "{what}");
        drop(group);
        cluster.netsum(&["job", "delete", &name]).unwrap();
    }
}

/// Sums by the ranks' own ring, which know of no box.
fn by_the_ring(hosts: u32, rate: &str, window: u32, sizes: &[usize]) {
    let cluster = lab(hosts, rate);
    let job = JobSpec { message_size: 64 * KIB, window, ..JobSpec::new("ring", hosts) };
    let mut group = cluster.ranks_alone(&job, &one_on_each_host(hosts)).unwrap();
    let what = format!("{rate}, {hosts} hosts, own ring, window {window}");
    // Until it falls back, all is sent to be summed by a box.
    group.all_reduce("i32", 1000, 1).unwrap();
    assert_eq!(sent_again(&mut group, "ring", sizes, &what), 0, "{what}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn four_hosts_at_100_megabits_send_nothing_again() {
    by_the_box(4, "100mbit", &[1, 8, 32], &[4 * MIB, 4 * MIB, 400, 4 * MIB]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn eight_hosts_at_100_megabits_send_nothing_again() {
    by_the_box(8, "100mbit", &[1, 8, 32], &[4 * MIB, 400, 4 * MIB]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn small_vectors_at_10_megabits_are_not_sent_again() {
    by_the_box(4, "10mbit", &[1, 8], &[4, 400, 4000, 40_000, 400, 200_000, 4]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn four_hosts_at_a_gigabit_send_nothing_again() {
    by_the_box(4, "1gbit", &[8], &[16 * MIB, 400, 16 * MIB]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_hosts_own_ring_at_100_megabits_sends_nothing_again() {
    by_the_ring(4, "100mbit", 2, &[4 * MIB, 400, 4 * MIB]);
}
