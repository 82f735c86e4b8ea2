//! The byte counters of a host's link.

use anyhow::{Context, Result};
use netsum_demo::report::LinkBytes;
use netsum_lab::Host;

/// What the host has sent and received so far, as its kernel counts.
pub fn read(host: &Host) -> Result<LinkBytes> {
    // Not /sys, which shows the devices of the namespace in which it was mounted.
    let table = host.enter(|| std::fs::read_to_string("/proc/thread-self/net/dev"))?;
    parse(&table, Host::INTERFACE)
        .with_context(|| format!("counters of {} on host {}", Host::INTERFACE, host.number()))
}

/// What was counted between two readings.
pub fn since(before: LinkBytes, after: LinkBytes) -> LinkBytes {
    LinkBytes { sent: after.sent - before.sent, received: after.received - before.received }
}

fn parse(table: &str, interface: &str) -> Option<LinkBytes> {
    let line = table.lines().find_map(|l| l.trim_start().strip_prefix(interface)?.strip_prefix(':'))?;
    // Bytes, packets and six more received; then the same sent.
    let numbers: Vec<u64> = line.split_whitespace().map_while(|n| n.parse().ok()).collect();
    Some(LinkBytes { received: *numbers.first()?, sent: *numbers.get(8)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:       7       1    0    0    0     0          0         0        7       1    0    0    0     0       0          0
  eth0:    1234      12    0    1    0     0          0         0     5678      34    0    0    0     0       0          0
 eth00: 99 9 9 9 9 9 9 9 99 9 9 9 9 9 9 9
";

    #[test]
    fn counters_are_those_of_the_interface() {
        assert_eq!(parse(TABLE, "eth0"), Some(LinkBytes { sent: 5678, received: 1234 }));
        assert_eq!(parse(TABLE, "eth1"), None);
        assert_eq!(parse("eth0: 1 2 3", "eth0"), None);
    }
}
