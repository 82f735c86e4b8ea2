//! Gathers the facts about this machine.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use netsum_agent::config::{Config, Ports};
use netsum_agent::device;
use netsum_agent::netlink::Netlink;
use netsum_dataplane::{BpfDataPlane, DataPlane as _, online_cpus};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

use super::judge::{BridgeFacts, Facts};

/// Default place of pins.
const PIN: &str = "/sys/fs/bpf/netsum";

/// Inspects this machine, and its ports if they are named.
///
/// # Errors
/// If a file is missing that every Linux has.
pub async fn gather(config: Option<&Config>, ports: Option<&Ports>) -> Result<Facts> {
    let release =
        fs::read_to_string("/proc/sys/kernel/osrelease").context("/proc/sys/kernel/osrelease")?;
    let release = release.trim().to_owned();
    let root = nix::unistd::geteuid().is_root();
    let pin = match config {
        Some(config) => config.pin.clone(),
        None => Some(PIN.into()),
    };
    let admin = config.map_or(Path::new(netsum_api::DEFAULT_SOCKET), |c| &c.admin);
    let daemon = std::os::unix::net::UnixStream::connect(admin).is_ok();
    let loaded = (root && !daemon).then(load);
    let mut facts = Facts {
        kernel: version(&release),
        root,
        // Only the first network namespace has the setting; the result of loading is visible
        // everywhere.
        jit: match &loaded {
            Some(Ok(jited)) => Some(*jited),
            _ => number("/proc/sys/net/core/bpf_jit_enable").map(|n| n > 0),
        },
        programs: loaded.map(|result| result.map(drop)),
        bpffs: pin.map(|pin| (pin.display().to_string(), is_bpffs(&pin))),
        daemon,
        release,
        ..Facts::default()
    };
    if let Some(wanted) = ports {
        let cpus = config.map(|c| c.cpus.clone()).filter(|cpus| !cpus.is_empty());
        let cpus = cpus.map_or_else(online_cpus, Ok)?;
        interfaces(wanted, &cpus, &mut facts).await?;
    }
    Ok(facts)
}

/// Whether the kernel accepts the programs, and compiles them; they are not attached, and are
/// unloaded when this returns.
fn load() -> Result<bool, String> {
    let jited = BpfDataPlane::load(&[0])
        .and_then(|plane| Ok(plane.programs()?.iter().all(|program| program.jited_bytes > 0)));
    jited.map_err(|e| without_log(&format!("{e:#}")))
}

/// An error of loading, with only the reason from the verifier's log, which is its last line except
/// for some figures.
fn without_log(error: &str) -> String {
    let Some((what, log)) = error.split_once(". Verifier output: ") else {
        return error.to_owned();
    };
    let figures = ["verification time", "stack depth", "processed ", ": "];
    let why = log.lines().rev().find(|line| !figures.iter().any(|f| line.starts_with(f)));
    format!("{what}: {}", why.unwrap_or_default())
}

fn version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn number(path: &str) -> Option<u32> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Whether a path, or its nearest existing parent, is in a BPF file system.
fn is_bpffs(path: &Path) -> bool {
    let there = path.ancestors().find(|p| p.exists());
    there.and_then(|p| statfs(p).ok()).is_some_and(|s| s.filesystem_type() == BPF_FS_MAGIC)
}

async fn interfaces(wanted: &Ports, cpus: &[u32], facts: &mut Facts) -> Result<()> {
    let netlink = Netlink::open()?;
    let interfaces = match netlink.choose(wanted).await {
        Ok((_, interfaces)) => interfaces,
        Err(e) => {
            facts.ports = Some(Err(format!("{e:#}")));
            return Ok(());
        }
    };
    let bridge = interfaces.iter().find_map(|l| l.bridge);
    let all = netlink.interfaces().await?;
    facts.bridge = all.iter().find(|l| Some(l.ifindex) == bridge).map(|l| BridgeFacts {
        name: l.name.clone(),
        up: l.enabled,
        vlan_filtering: l.settings.vlan_filtering,
        stp: l.settings.stp,
        // The setting may also apply to all bridges.
        call_iptables: l.settings.call_iptables
            || number("/proc/sys/net/bridge/bridge-nf-call-iptables").is_some_and(|n| n > 0),
    });
    facts.ports =
        Some(Ok(interfaces.iter().map(|l| device::facts(l, cpus)).collect::<Result<_>>()?));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_compared_by_number() {
        assert_eq!(version("6.12.1-cloud-amd64"), (6, 12));
        assert_eq!((version("6.1"), version("nonsense")), ((6, 1), (0, 0)));
    }

    #[test]
    fn the_reason_is_extracted_from_the_verifiers_log() {
        let error = "the BPF_PROG_LOAD syscall returned Permission denied (os error 13). Verifier \
            output: 0: R1=ctx(off=0)\n\
                     invalid access to map value\nR3 min value is outside\nverification time \
                     66402 usec\n\
                     stack depth 0+72\nprocessed 4016 insns\n: Permission denied (os error 13)";
        assert_eq!(
            without_log(error),
            "the BPF_PROG_LOAD syscall returned Permission denied (os error 13): R3 min value is \
             outside"
        );
        assert_eq!(without_log("no such file"), "no such file");
    }

    #[test]
    fn a_folder_that_is_not_there_yet_is_where_its_parent_is() {
        assert!(!is_bpffs(Path::new("/proc/self/no-such-folder/netsum")));
    }
}
