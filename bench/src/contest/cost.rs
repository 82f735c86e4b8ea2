//! What an all-reduce costs beside time.

use anyhow::{Context, Result, ensure};

use netsum_lab::Host;
use netsum_lab::cluster::Cluster;

/// Readings, or their differences.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Seconds in which a processor of the machine was not idle, interrupts included (proc(5),
    /// `/proc/stat`). It counts in hundredths, and what else runs on the machine as well.
    pub cpu_seconds: f64,
    /// Bytes from rank 0's host into its link, with all headers; packets that are cut by the link's
    /// driver have those once.
    pub sent: u64,
    /// Bytes that came from there.
    pub received: u64,
    /// Bytes that racks' boxes sent up, with all headers.
    pub up: u64,
}

impl Cost {
    /// What the counters say now.
    pub fn now(cluster: &Cluster) -> Result<Self> {
        let host = cluster.lab().host(0);
        let links = host.enter(|| std::fs::read_to_string("/proc/thread-self/net/dev"))?;
        let (sent, received) =
            bytes(&links, Host::INTERFACE).context("no interface in /proc/net/dev")?;
        Ok(Self {
            cpu_seconds: busy_now()?.iter().sum(),
            sent,
            received,
            up: cluster.lab().sent_up()?,
        })
    }

    /// What has been added since an earlier reading.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            cpu_seconds: self.cpu_seconds - earlier.cpu_seconds,
            sent: self.sent - earlier.sent,
            received: self.received - earlier.received,
            up: self.up - earlier.up,
        }
    }

    /// Refuses who has not moved so many bytes of vectors both ways. Every all-reduce has to, so
    /// the rest went past the link: hosts share a kernel, and with it memory.
    ///
    /// # Errors
    /// If one way has carried less.
    pub fn carried(&self, vectors: u64) -> Result<()> {
        let (sent, received) = (self.sent, self.received);
        ensure!(
            sent.min(received) >= vectors,
            "rank 0's link has carried {sent} bytes out and {received} in, vectors have {vectors}"
        );
        Ok(())
    }
}

/// Seconds that each processor of the machine has been busy.
///
/// # Errors
/// Without `/proc/stat`.
pub fn busy_now() -> Result<Vec<f64>> {
    Ok(busy(&std::fs::read_to_string("/proc/stat").context("/proc/stat")?))
}

/// Seconds that each processor was busy: user, nice, system, irq and softirq.
fn busy(stat: &str) -> Vec<f64> {
    let of = |line: &str| {
        let ticks: Vec<u64> =
            line.split_whitespace().skip(1).map_while(|w| w.parse().ok()).collect();
        // USER_HZ is 100 wherever Linux shows it to programs.
        [0, 1, 2, 5, 6].iter().map(|&i| ticks.get(i).copied().unwrap_or(0)).sum::<u64>() as f64
            / 100.0
    };
    // The first line is of all together.
    stat.lines().skip(1).take_while(|line| line.starts_with("cpu")).map(of).collect()
}

/// Bytes sent and received by an interface.
fn bytes(dev: &str, interface: &str) -> Option<(u64, u64)> {
    let counters = dev.lines().find_map(|l| l.trim().strip_prefix(interface)?.strip_prefix(':'))?;
    let counters: Vec<u64> = counters.split_whitespace().map_while(|w| w.parse().ok()).collect();
    Some((*counters.get(8)?, *counters.first()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_is_what_is_neither_idle_nor_waiting() {
        let stat = "cpu 1 2 3\ncpu0  100 10 50 4000 300 5 35 0 0 0\ncpu1 1 2 3\nintr 5 6 7";
        assert_eq!(busy(stat), [2.0, 0.06]);
        assert_eq!(busy(""), [0.0; 0]);
    }

    #[test]
    fn who_goes_past_the_link_is_refused() {
        let cost = Cost { sent: 1000, received: 1200, ..Cost::default() };
        cost.carried(1000).unwrap();
        let error = cost.carried(1001).unwrap_err().to_string();
        assert_eq!(
            error,
            "rank 0's link has carried 1000 bytes out and 1200 in, vectors have 1001"
        );
        Cost { sent: 1200, received: 1000, ..cost }.carried(1001).unwrap_err();
    }

    #[test]
    fn an_interface_is_found_among_others() {
        let dev = "Inter-|   Receive\n face |bytes\n    lo: 1 2 3 4 5 6 7 8 9 10\n  eth0: 11 2 3 4 5 6 7 8 19 10\n";
        assert_eq!(bytes(dev, "eth0"), Some((19, 11)));
        assert_eq!(bytes(dev, "eth"), None);
    }
}
