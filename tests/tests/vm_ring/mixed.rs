//! The library's own endpoint together with kernels' hosts: in one ring through the box, as sender
//! and receiver; and connected to them without the box, with every operation that it supports.

use netsum_lab::cluster::Cluster;
use netsum_lab::verbs_ring::{self, Operation, VerbsRingSpec};

use super::{deadline_of, undisturbed, with_loss};

/// Virtual machines, one with each kernel, and hosts that are namespaces.
const VMS: [usize; 2] = [0, 1];
const NAMESPACES: [usize; 2] = [4, 5];

/// Rings in which each kind of host sends to each.
pub fn rings(cluster: &Cluster) {
    let [a, b] = VMS;
    let [c, d] = NAMESPACES;
    for (hosts, mtu, operation) in
        [(vec![a, c, b, d], 1024, Operation::Send), (vec![a, b, c, d], 2048, Operation::Write)]
    {
        let spec = VerbsRingSpec { hosts, ..VerbsRingSpec::new(4, mtu, operation, 5) };
        undisturbed(cluster, &spec);
        let (_, lost) = with_loss(cluster, &spec);
        println!(
            "mixed ring of hosts {:?}, {mtu}, {operation:?}: every sum is right, also with {lost} \
             packets lost",
            spec.hosts
        );
    }
}

/// A kernel's host and the library's endpoint send to each other without the box: each size, path
/// MTU and operation, in both directions at the same time.
pub fn pairs(cluster: &Cluster) {
    use Operation::{PlainWrite, Send, SendImmediate, Write};
    for (vm, mtu) in VMS.into_iter().cycle().zip([256, 1024, 2048]) {
        for operation in [Send, SendImmediate, Write, PlainWrite] {
            // Empty, less than a word, one packet minus one byte, exactly one, one packet plus one
            // byte, and many.
            let sizes = vec![0, 1, 6, mtu - 1, mtu, mtu + 1, 3 * mtu, 40_000];
            let hosts = vec![vm, NAMESPACES[0]];
            let messages = sizes.len() as u32;
            let spec = VerbsRingSpec {
                hosts,
                sizes,
                summed: false,
                ..VerbsRingSpec::new(2, mtu, operation, messages)
            };
            undisturbed(cluster, &spec);
            if mtu == 1024 {
                // Enough packets to lose some.
                let (reports, lost) =
                    with_loss(cluster, &VerbsRingSpec { messages: 4 * messages, ..spec });
                let again: Vec<_> =
                    reports.iter().map(|report| report.retransmitted.unwrap_or_default()).collect();
                println!(
                    "{operation:?} between a kernel and the endpoint: {lost} packets lost, sent \
                     again: {again:?}"
                );
            }
        }
    }
    // The endpoint refuses unsupported operations: a kernel that requests one gets an error, and
    // does not retry forever.
    let hosts = vec![VMS[0], NAMESPACES[0]];
    let spec =
        VerbsRingSpec { hosts, summed: false, ..VerbsRingSpec::new(2, 1024, Operation::Read, 1) };
    let error = format!("{:#}", verbs_ring::run(cluster, &spec, deadline_of(&spec)).unwrap_err());
    assert!(error.contains("rank 0: sending 0: remote invalid request error"), "{error}");
}
