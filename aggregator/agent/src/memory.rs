//! Memory that the machine has left for rings.

use std::fs;

use netsum_common::size::Size;
use netsum_core::Controller;

/// Memory that rings leave to everything else, including packets that wait for the rings' CPUs. The
/// kernel allocates maps down to its last page, and then kills some process, such as the daemon.
const RESERVE: u64 = 64 << 20;

/// Counted fields: free memory, and memory that the kernel frees when needed.
const FIELDS: [&str; 4] = ["MemFree", "Active(file)", "Inactive(file)", "SReclaimable"];

/// Bytes that rings may take in addition to what they have; `None` if the kernel does not report
/// it.
pub fn available() -> Option<u64> {
    // Under systemd (ProcSubset=pid) the daemon sees only processes in /proc, so the nodes in /sys
    // come first. A kernel without NUMA has no nodes.
    let nodes = fs::read_dir("/sys/devices/system/node").into_iter().flatten().flatten();
    let mut texts: Vec<_> =
        nodes.filter_map(|n| fs::read_to_string(n.path().join("meminfo")).ok()).collect();
    if texts.is_empty() {
        texts.push(fs::read_to_string("/proc/meminfo").ok()?);
    }
    Some(texts.iter().map(|text| usable(text)).sum::<u64>().saturating_sub(RESERVE))
}

/// The bytes of [`FIELDS`] in such a file.
fn usable(text: &str) -> u64 {
    let of_line = |line: &str| {
        let (name, value) = line.split_once(':')?;
        let wanted = FIELDS.contains(&name.split_whitespace().last()?);
        let kib: u64 = value.split_whitespace().next()?.parse().ok()?;
        wanted.then_some(kib << 10)
    };
    text.lines().filter_map(of_line).sum()
}

/// Updates the controller's available memory.
pub fn update(controller: &mut Controller) {
    controller.set_available(available().unwrap_or(u64::MAX));
}

/// The same, and logs if the machine has less memory than the configuration promises.
pub fn update_and_warn(controller: &mut Controller) {
    update(controller);
    let promised = controller.memory().saturating_sub(controller.memory_used());
    if let Some(available) = available().filter(|available| *available < promised) {
        log::warn!(
            "pool.memory: {} are unreserved, but the machine has only {} free for rings, after {} \
             in reserve; jobs that need more are refused",
            Size(promised),
            Size(available),
            Size(RESERVE)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_and_reclaimable_memory_counts() {
        let node = "Node 0 MemTotal:        1000 kB\nNode 0 MemFree:          100 kB\nNode 0 \
            Active(file):      20 kB\n\
                    Node 0 Inactive(file):     3 kB\nNode 0 Active(anon):    500 kB\nNode 0 \
                    SReclaimable:       4 kB\n";
        assert_eq!(usable(node), 127 << 10);
        assert_eq!(usable(&node.replace("Node 0 ", "")), 127 << 10);
        assert_eq!(usable("Node 0 HugePages_Free: 7\nnonsense\n"), 0);
        assert!(available().is_some());
    }
}
