//! The cost of an all-reduce besides time.

use anyhow::{Context, Result, ensure};

use netsum_lab::Host;
use netsum_lab::cluster::Cluster;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike as _;

/// Readings, or their differences.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Seconds in which one of the machine's CPUs was not idle, interrupts included (proc(5),
    /// `/proc/stat`). Its resolution is 10 ms, and other processes of the machine are included.
    pub cpu_seconds: f64,
    /// Bytes that rank 0's host sent, with all headers; a packet that the link's driver cuts has
    /// its headers once.
    pub sent: u64,
    /// Bytes that rank 0's host received.
    pub received: u64,
    /// Bytes that the racks' boxes sent up, with all headers.
    pub up: u64,
}

impl Cost {
    /// Reads the counters.
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

    /// The difference to an earlier reading.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            cpu_seconds: self.cpu_seconds - earlier.cpu_seconds,
            sent: self.sent - earlier.sent,
            received: self.received - earlier.received,
            up: self.up - earlier.up,
        }
    }

    /// Checks that the link carried at least this many bytes of vectors out and in. A smaller
    /// number means that data bypassed the link, as hosts share a kernel and its memory.
    ///
    /// # Errors
    /// If one direction carried less.
    pub fn carried(&self, [out, into]: [u64; 2]) -> Result<()> {
        let (sent, received) = (self.sent, self.received);
        ensure!(
            sent >= out && received >= into,
            "rank 0's link carried only {sent} bytes out and {received} in, for {out} and \
             {into} of vectors"
        );
        Ok(())
    }
}

/// The busy time of each CPU of the machine, in seconds.
///
/// # Errors
/// Without `/proc/stat`.
pub fn busy_now() -> Result<Vec<f64>> {
    Ok(busy(&std::fs::read_to_string("/proc/stat").context("/proc/stat")?))
}

/// CPU seconds of this process, user and system (getrusage(2)).
///
/// # Errors
/// If the kernel does not report them.
pub fn own_cpu() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    Ok((usage.user_time() + usage.system_time()).num_microseconds() as f64 / 1e6)
}

/// Seconds that each CPU was busy: user, nice, system, irq and softirq.
fn busy(stat: &str) -> Vec<f64> {
    let of = |line: &str| {
        let ticks: Vec<u64> =
            line.split_whitespace().skip(1).map_while(|w| w.parse().ok()).collect();
        // USER_HZ is 100 in everything that Linux shows to programs.
        [0, 1, 2, 5, 6].iter().map(|&i| ticks.get(i).copied().unwrap_or(0)).sum::<u64>() as f64
            / 100.0
    };
    // The first line is the sum of all CPUs.
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
    fn busy_time_excludes_idle_and_iowait() {
        let stat = "cpu 1 2 3\ncpu0  100 10 50 4000 300 5 35 0 0 0\ncpu1 1 2 3\nintr 5 6 7";
        assert_eq!(busy(stat), [2.0, 0.06]);
        assert_eq!(busy(""), [0.0; 0]);
    }

    #[test]
    fn data_that_bypasses_the_link_is_detected() {
        let cost = Cost { sent: 1000, received: 1200, ..Cost::default() };
        cost.carried([1000, 1200]).unwrap();
        let error = cost.carried([1001, 5]).unwrap_err().to_string();
        assert_eq!(
            error,
            "rank 0's link carried only 1000 bytes out and 1200 in, for 1001 and 5 of vectors"
        );
        Cost { sent: 1200, received: 1000, ..cost }.carried([5, 1001]).unwrap_err();
    }

    #[test]
    fn an_interface_is_found_among_others() {
        let dev = "Inter-|   Receive\n face |bytes\n    lo: 1 2 3 4 5 6 7 8 9 10\n  eth0: 11 2 3 \
                   4 5 6 7 8 19 10\n";
        assert_eq!(bytes(dev, "eth0"), Some((19, 11)));
        assert_eq!(bytes(dev, "eth"), None);
    }
}
