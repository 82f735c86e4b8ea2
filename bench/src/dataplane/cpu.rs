//! CPU time of threads, including kernel threads.

use std::time::Duration;

use anyhow::{Context, Result};
use nix::time::{ClockId, clock_gettime};

/// CPU time of the calling thread, to the nanosecond.
pub fn of_this_thread() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).context("the thread's clock")?.into())
}

/// CPU time of another thread (`/proc/PID/schedstat`, Documentation/scheduler/sched-stats.rst).
/// While it runs, the value is that of the last tick, so it should be asleep. It includes soft
/// interrupts that the thread runs at the end of its own work.
pub fn of_thread(pid: &str) -> Result<Duration> {
    let path = format!("/proc/{pid}/schedstat");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    parse(&text).with_context(|| format!("{path}: `{text}`"))
}

fn parse(schedstat: &str) -> Option<Duration> {
    Some(Duration::from_nanos(schedstat.split_whitespace().next()?.parse().ok()?))
}

/// Kernel threads that serve a CPU of a CPU map: the map's own (kernel/bpf/cpumap.c,
/// `__cpu_map_entry_alloc`), and the one that handles soft interrupts under load.
///
/// # Errors
/// If one of them does not exist.
pub fn of_ring(cpu: u32, map: u32) -> Result<Vec<String>> {
    let names = [format!("cpumap/{cpu}/map:{map}"), format!("ksoftirqd/{cpu}")];
    let thread = |name: String| {
        // Of two threads with the same name, the older belongs to a replaced program and is about
        // to end; the newer one comes later in the list.
        let pid = threads(|comm| comm == name)?.pop();
        pid.with_context(|| format!("no thread `{name}` of the kernel"))
    };
    names.into_iter().map(thread).collect()
}

/// Process IDs of the threads with such a name, kernel threads included.
///
/// # Errors
/// Without `/proc`.
pub fn threads(is_wanted: impl Fn(&str) -> bool) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").context("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().filter(|n| n.bytes().all(|b| b.is_ascii_digit())) else {
            continue;
        };
        // Skip threads that have ended meanwhile.
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        if comm.is_ok_and(|comm| is_wanted(comm.trim())) {
            found.push(pid.to_owned());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_figure_is_the_time() {
        assert_eq!(parse("1500 22 3\n"), Some(Duration::from_nanos(1500)));
        assert_eq!(parse(""), None);
        assert!(of_this_thread().unwrap() > Duration::ZERO);
    }
}
