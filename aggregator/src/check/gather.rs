//! The facts about this machine.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use futures::TryStreamExt as _;
use netsum_daemon::config::{Config, Ports};
use netsum_daemon::netlink::{Interface, Netlink};
use netsum_dataplane::{BpfDataPlane, DataPlane as _, LoadOptions, XdpMode};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use rtnetlink::packet_route::link::{BridgeStpState, InfoBridge, InfoData, LinkAttribute, LinkInfo};

use super::device;
use super::judge::{BridgeFacts, Facts, PortFacts};

/// Where pins go by default.
const PIN: &str = "/sys/fs/bpf/netsum";

/// Looks at this machine; at ports where they are named.
///
/// # Errors
/// If what every Linux has is not there.
pub async fn gather(config: Option<&Config>, ports: Option<&Ports>) -> Result<Facts> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").context("/proc/sys/kernel/osrelease")?;
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
        // The setting is there in the first network namespace alone; what becomes of a program is seen everywhere.
        jit: match &loaded {
            Some(Ok(jited)) => Some(*jited),
            _ => number("/proc/sys/net/core/bpf_jit_enable").map(|n| n > 0),
        },
        programs: loaded.map(|result| result.map(drop)),
        bpffs: pin.map(|pin| (pin.display().to_string(), is_bpffs(&pin))),
        memlock: fs::read_to_string("/proc/self/limits").ok().and_then(|limits| memlock(&limits)),
        daemon,
        release,
        ..Facts::default()
    };
    if let Some(wanted) = ports {
        let skb = config.is_some_and(|c| c.xdp == XdpMode::Skb);
        interfaces(wanted, skb, &mut facts).await?;
    }
    Ok(facts)
}

/// Whether the kernel takes the programs, and makes machine code of them; they are attached nowhere, and gone when this
/// returns.
fn load() -> Result<bool, String> {
    let options = LoadOptions { cpus: vec![0], cpu_queue: 64, inline: true };
    let jited = BpfDataPlane::load(&options)
        .and_then(|plane| Ok(plane.programs()?.iter().all(|program| program.jited_bytes > 0)));
    jited.map_err(|e| {
        let text = format!("{e:#}");
        // What follows is the verifier's log.
        text.lines().next().unwrap_or_default().to_owned()
    })
}

fn version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn number(path: &str) -> Option<u32> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The limit of locked memory in what the kernel says of a process; `None` without one.
fn memlock(limits: &str) -> Option<u64> {
    limits.lines().find_map(|l| l.strip_prefix("Max locked memory"))?.split_whitespace().next()?.parse().ok()
}

/// Whether a folder is in a BPF file system, or its nearest parent that exists.
fn is_bpffs(path: &Path) -> bool {
    let there = path.ancestors().find(|p| p.exists());
    there.and_then(|p| statfs(p).ok()).is_some_and(|s| s.filesystem_type() == BPF_FS_MAGIC)
}

async fn interfaces(wanted: &Ports, skb: bool, facts: &mut Facts) -> Result<()> {
    let netlink = Netlink::open()?;
    let interfaces = match netlink.resolve(wanted).await {
        Ok(interfaces) => interfaces,
        Err(e) => {
            facts.ports = Some(Err(format!("{e:#}")));
            return Ok(());
        }
    };
    let name = match wanted {
        Ports::Bridge(name) => Some(name.clone()),
        Ports::List(_) => {
            let index = interfaces.iter().find_map(|l| l.bridge);
            let all = netlink.interfaces().await?;
            all.into_iter().find(|l| Some(l.ifindex) == index).map(|l| l.name)
        }
    };
    if let Some(name) = name {
        facts.bridge = Some(bridge(&name).await?);
    }
    facts.ports = Some(Ok(interfaces.iter().map(|l| port(l, skb)).collect::<Result<_>>()?));
    Ok(())
}

async fn bridge(name: &str) -> Result<BridgeFacts> {
    let (connection, handle, _) = rtnetlink::new_connection().context("netlink")?;
    tokio::spawn(connection);
    let found: Vec<_> = handle.link().get().match_name(name.to_owned()).execute().try_collect().await?;
    let mut facts = BridgeFacts { name: name.to_owned(), ..BridgeFacts::default() };
    for message in &found {
        facts.up = message.header.flags.contains(rtnetlink::packet_route::link::LinkFlags::Up);
        for attribute in &message.attributes {
            let LinkAttribute::LinkInfo(infos) = attribute else { continue };
            for info in infos {
                let LinkInfo::Data(InfoData::Bridge(settings)) = info else { continue };
                for setting in settings {
                    match setting {
                        InfoBridge::VlanFiltering(on) => facts.vlan_filtering = *on,
                        InfoBridge::StpState(state) => facts.stp = *state != BridgeStpState::Disabled,
                        InfoBridge::NfCallIpTables(on) => facts.call_iptables |= *on,
                        _ => {}
                    }
                }
            }
        }
    }
    // For all bridges at once.
    facts.call_iptables |= number("/proc/sys/net/bridge/bridge-nf-call-iptables").is_some_and(|n| n > 0);
    Ok(facts)
}

fn port(interface: &Interface, skb: bool) -> Result<PortFacts> {
    let said = device::ethtool(&interface.name)?;
    Ok(PortFacts {
        name: interface.name.clone(),
        driver: said.driver.clone(),
        up: interface.up,
        mtu: interface.mtu,
        xdp: interface.xdp.is_some(),
        features: device::xdp_features(interface.ifindex)?,
        lro: said.lro,
        // Whether frames have their tags is decided at a veth's other end.
        rx_vlan: said.rx_vlan.filter(|_| said.driver != "veth"),
        queues: said.queues,
        interrupts: interrupts(&interface.name, &fs::read_to_string("/proc/interrupts").unwrap_or_default()),
        skb,
    })
}

/// The CPUs that serve an interface's interrupts. Drivers name those after the interface, most of them.
fn interrupts(name: &str, table: &str) -> Vec<String> {
    let of_port = |line: &str| {
        let last = line.split_whitespace().last()?;
        let named = last == name || last.split(['-', '@', ':']).any(|part| part == name);
        let number = line.split(':').next()?.trim();
        (named && number.bytes().all(|b| b.is_ascii_digit())).then(|| number.to_owned())
    };
    let cpus = |number: String| {
        let file = format!("/proc/irq/{number}/effective_affinity_list");
        Some(fs::read_to_string(file).ok()?.trim().to_owned())
    };
    table.lines().filter_map(of_port).filter_map(cpus).collect()
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
    fn the_limit_of_locked_memory_is_found_if_there_is_one() {
        let limits = "Limit  Soft  Hard  Units\nMax locked memory         8388608              8388608              bytes\n";
        assert_eq!(memlock(limits), Some(8 << 20));
        assert_eq!(memlock(&limits.replace("8388608", "unlimited")), None);
    }

    #[test]
    fn a_folder_that_is_not_there_yet_is_where_its_parent_is() {
        assert!(!is_bpffs(Path::new("/proc/self/no-such-folder/netsum")));
    }
}
