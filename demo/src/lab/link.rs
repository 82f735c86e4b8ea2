//! Addresses of hosts, and the byte counters of links.

use anyhow::{Context, Result};
use netsum_demo::report::LinkBytes;
use netsum_lab::netns::Netns;
use netsum_lab::{Host, Lab};

/// The bytes that the host has sent and received, by its kernel's counters.
pub fn read(host: &Host) -> Result<LinkBytes> {
    of(host, Host::INTERFACE)
}

/// The addresses of all ranks, in rank order.
pub fn addresses(lab: &Lab) -> String {
    lab.hosts().iter().map(|host| host.ip(0).to_string()).collect::<Vec<_>>().join(",")
}

/// The bytes that a rack's box has sent to all spines and received from them.
pub fn read_uplinks(lab: &Lab, rack: usize) -> Result<LinkBytes> {
    let mut all = LinkBytes::default();
    for spine in (0..lab.spec().spines).map(|spine| lab.spine(spine)) {
        let there = of(spine, &spine.rack_port(rack))?;
        all = LinkBytes { sent: all.sent + there.received, received: all.received + there.sent };
    }
    Ok(all)
}

fn of(netns: &Netns, interface: &str) -> Result<LinkBytes> {
    // Not /sys, which shows the devices of the namespace in which it was mounted.
    let table = netns.enter(|| std::fs::read_to_string("/proc/thread-self/net/dev"))?;
    parse(&table, interface).with_context(|| format!("counters of {interface} in {}", netns.name()))
}

/// The differences of two readings of each link.
pub fn since(before: &[LinkBytes], after: &[LinkBytes]) -> Vec<LinkBytes> {
    let one = |(before, after): (&LinkBytes, &LinkBytes)| LinkBytes {
        sent: after.sent - before.sent,
        received: after.received - before.received,
    };
    before.iter().zip(after).map(one).collect()
}

fn parse(table: &str, interface: &str) -> Option<LinkBytes> {
    let line =
        table.lines().find_map(|l| l.trim_start().strip_prefix(interface)?.strip_prefix(':'))?;
    // Bytes, packets and six more columns for received data; then the same for sent data.
    let numbers: Vec<u64> = line.split_whitespace().map_while(|n| n.parse().ok()).collect();
    Some(LinkBytes { received: *numbers.first()?, sent: *numbers.get(8)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo \
 colls carrier compressed
    lo:       7       1    0    0    0     0          0         0        7       1    0    0    0     0       0          0
  eth0:    1234      12    0    1    0     0          0         0     5678      34    0    0    0     0       0          0
 eth00: 99 9 9 9 9 9 9 9 99 9 9 9 9 9 9 9
";

    #[test]
    fn the_counters_of_the_named_interface_are_read() {
        assert_eq!(parse(TABLE, "eth0"), Some(LinkBytes { sent: 5678, received: 1234 }));
        assert_eq!(parse(TABLE, "eth1"), None);
        assert_eq!(parse("eth0: 1 2 3", "eth0"), None);
    }
}
