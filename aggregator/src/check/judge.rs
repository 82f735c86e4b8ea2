//! What follows from the facts about a machine. Pure.

use netsum_cli::check::{Finding, Level};
use netsum_core::HEADROOM;

/// The least kernel that netsum is meant for.
pub const KERNEL: (u32, u32) = (6, 1);
/// The largest path MTU.
const MAX_MTU: u32 = 2048;
/// The least one.
const MIN_MTU: u32 = 256;

/// Bits of `enum netdev_xdp_act` (include/uapi/linux/netdev.h, Linux 6.3).
pub mod xdp_features {
    /// Programs run in the driver.
    pub const BASIC: u64 = 1;
    /// They may redirect.
    pub const REDIRECT: u64 = 2;
    /// Frames may be redirected to it.
    pub const NDO_XMIT: u64 = 4;
}

#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Version and release of the kernel, and its name in full.
    pub kernel: (u32, u32),
    /// The same in full.
    pub release: String,
    pub root: bool,
    /// Whether the kernel takes netsum's programs and maps; `None` where that was not tried.
    pub programs: Option<Result<(), String>>,
    /// Whether programs become machine code; `None` where that could not be found out.
    pub jit: Option<bool>,
    /// Where pins go, and whether that is in a bpffs; `None` where there are to be none.
    pub bpffs: Option<(String, bool)>,
    /// Limit of locked memory in bytes; `None` without one.
    pub memlock: Option<u64>,
    /// Whether the administration socket's daemon runs already.
    pub daemon: bool,
    pub bridge: Option<BridgeFacts>,
    /// The ports, or why there are none.
    pub ports: Option<Result<Vec<PortFacts>, String>>,
}

#[derive(Clone, Debug, Default)]
pub struct BridgeFacts {
    pub name: String,
    pub up: bool,
    /// It filters VLANs.
    pub vlan_filtering: bool,
    /// It runs the spanning tree protocol.
    pub stp: bool,
    /// Its frames go through iptables.
    pub call_iptables: bool,
}

#[derive(Clone, Debug, Default)]
pub struct PortFacts {
    pub name: String,
    /// Its driver; empty where it does not say.
    pub driver: String,
    /// It is up and has a carrier.
    pub up: bool,
    pub mtu: u32,
    /// An XDP program is attached.
    pub xdp: bool,
    /// [`xdp_features`]; `None` before Linux 6.3.
    pub features: Option<u64>,
    /// The driver joins packets that it receives (large receive offload); `None` where it does not say.
    pub lro: Option<bool>,
    /// The driver takes VLAN tags off frames that it receives; `None` where it does not say.
    pub rx_vlan: Option<bool>,
    /// Receive queues in use; 0 where the driver does not say.
    pub queues: u32,
    /// The CPUs that serve its interrupts, by interrupt.
    pub interrupts: Vec<String>,
    /// The configuration wants `xdp = "skb"`.
    pub skb: bool,
}

fn finding(level: Level, subject: &str, found: impl Into<String>, mend: Option<&str>) -> Finding {
    Finding { level, subject: subject.into(), found: found.into(), mend: mend.map(str::to_owned) }
}

fn ok(subject: &str, found: impl Into<String>) -> Finding {
    finding(Level::Ok, subject, found, None)
}

fn warning(subject: &str, found: impl Into<String>, mend: &str) -> Finding {
    finding(Level::Warning, subject, found, Some(mend))
}

fn error(subject: &str, found: impl Into<String>, mend: &str) -> Finding {
    finding(Level::Error, subject, found, Some(mend))
}

/// What is right and what is not.
pub fn judge(facts: &Facts) -> Vec<Finding> {
    let mut all = machine(facts);
    all.extend(facts.bridge.as_ref().map(bridge).unwrap_or_default());
    match &facts.ports {
        None => all.push(warning(
            "ports",
            "not looked at",
            "name a configuration, --config FILE, or a bridge, --bridge NAME",
        )),
        Some(Err(why)) => all.push(error("ports", why, "correct `bridge` or `ports` in the configuration")),
        Some(Ok(ports)) => all.extend(ports.iter().flat_map(port)),
    }
    all
}

fn machine(facts: &Facts) -> Vec<Finding> {
    let mut all = Vec::new();
    all.push(if facts.kernel >= KERNEL {
        ok("kernel", &facts.release)
    } else {
        let (major, minor) = KERNEL;
        warning("kernel", &facts.release, &format!("netsum is meant for Linux {major}.{minor} and newer"))
    });
    all.push(match &facts.programs {
        Some(Ok(())) => ok("programs", "the kernel takes netsum's programs and maps"),
        Some(Err(why)) => error(
            "programs",
            why,
            "the kernel needs CONFIG_BPF_SYSCALL, CONFIG_DEBUG_INFO_BTF and what README.md lists",
        ),
        None if facts.root => warning("programs", "not tried", "stop the daemon that runs, and look again"),
        None => warning("programs", "not tried: that takes root", "run this as root"),
    });
    all.push(match facts.jit {
        Some(false) => error(
            "BPF compiler",
            "off: programs are interpreted, at a tenth of the speed",
            "sysctl net.core.bpf_jit_enable=1",
        ),
        Some(true) => ok("BPF compiler", "on"),
        None => {
            let mend = "run this as root; or look whether net.core.bpf_jit_enable is 1";
            warning("BPF compiler", "not found out", mend)
        }
    });
    match &facts.bpffs {
        Some((path, true)) => all.push(ok("bpffs", path)),
        Some((path, false)) => all.push(error(
            "bpffs",
            format!("{path} is in no BPF file system"),
            "mount -t bpf bpf /sys/fs/bpf, or pin = \"none\" in [restart]: then nothing outlives a daemon that is killed",
        )),
        None => all.push(warning(
            "bpffs",
            "pin = \"none\"",
            "jobs end with a daemon that is killed; name a folder in a bpffs in [restart]",
        )),
    }
    // Since Linux 5.11 maps count for the control group.
    if let Some(limit) = facts.memlock.filter(|_| facts.kernel < (5, 11)) {
        all.push(error(
            "memory lock",
            format!("limited to {limit} bytes"),
            "LimitMEMLOCK=infinity in the unit",
        ));
    }
    if facts.daemon {
        all.push(warning(
            "daemon",
            "one runs already",
            "its programs are on its ports; that is as it should be",
        ));
    }
    all
}

fn bridge(b: &BridgeFacts) -> Vec<Finding> {
    let subject = format!("bridge {}", b.name);
    let mut all = Vec::new();
    if !b.up {
        all.push(error(&subject, "down", &format!("ip link set {} up", b.name)));
    }
    if b.call_iptables {
        all.push(warning(
            &subject,
            "its frames go through iptables, RoCE among them",
            "sysctl net.bridge.bridge-nf-call-iptables=0 net.bridge.bridge-nf-call-ip6tables=0",
        ));
    }
    if b.vlan_filtering {
        all.push(warning(
            &subject,
            "it filters VLANs; the programs on its ports sum a job's packets whatever their tags",
            "let all ports of a job be members of its VLAN, tagged or not, and no address be in two VLANs",
        ));
    }
    if b.stp {
        all.push(warning(
            &subject,
            "it runs the spanning tree protocol: a port that comes up passes nothing for 30 s",
            &format!("ip link set {} type bridge stp_state 0, if there is no loop", b.name),
        ));
    }
    if all.is_empty() {
        all.push(ok(&subject, "up"));
    }
    all
}

fn port(p: &PortFacts) -> Vec<Finding> {
    let subject = format!("port {}", p.name);
    let mut all = Vec::new();
    if !p.up {
        all.push(error(
            &subject,
            "down, or without a carrier",
            &format!("ip link set {} up; look at the cable", p.name),
        ));
    }
    if p.mtu < MIN_MTU + HEADROOM {
        let mend = format!("ip link set {} mtu {}", p.name, MAX_MTU + HEADROOM);
        all.push(error(&subject, format!("MTU {}: too small for any job", p.mtu), &mend));
    } else if p.mtu < MAX_MTU + HEADROOM {
        let fits = netsum_common::abi::MTUS.iter().filter(|&m| m + HEADROOM <= p.mtu).max();
        let found = format!("MTU {}: path MTU {} at the most", p.mtu, fits.copied().unwrap_or(MIN_MTU));
        let mend = format!(
            "ip link set {} mtu {} for path MTU {MAX_MTU}, at the hosts too",
            p.name,
            MAX_MTU + HEADROOM
        );
        all.push(warning(&subject, found, &mend));
    }
    all.extend(xdp(p, &subject));
    if p.lro == Some(true) {
        let mend = format!("ethtool -K {} lro off", p.name);
        all.push(error(&subject, "large receive offload joins packets before XDP sees them", &mend));
    }
    if p.rx_vlan == Some(true) {
        let mend = format!("ethtool -K {} rxvlan off, if its hosts are in VLANs", p.name);
        all.push(warning(&subject, "VLAN tags are taken off before XDP sees them", &mend));
    }
    let cpus: std::collections::BTreeSet<&String> = p.interrupts.iter().collect();
    if p.interrupts.len() > 1 && cpus.len() == 1 {
        let found = format!("{} interrupts, all served by CPU {}", p.interrupts.len(), p.interrupts[0]);
        all.push(warning(&subject, found, "spread them: irqbalance, or /proc/irq/*/smp_affinity_list"));
    }
    if all.is_empty() {
        let mut found = format!("up, MTU {}", p.mtu);
        if !p.driver.is_empty() {
            found += &format!(", {}", p.driver);
        }
        if p.queues > 0 {
            found += &format!(", {} receive queues", p.queues);
        }
        all.push(ok(&subject, found));
    }
    all
}

fn xdp(p: &PortFacts, subject: &str) -> Option<Finding> {
    use xdp_features::{BASIC, NDO_XMIT, REDIRECT};
    if p.skb {
        return Some(warning(
            subject,
            "xdp = \"skb\": programs run in the generic stack, slowly",
            "xdp = \"native\", where the driver can",
        ));
    }
    let has = |bit: u64| p.features.is_none_or(|f| f & bit != 0);
    if p.features.is_none() {
        return Some(warning(
            subject,
            format!("this kernel does not say whether {} has native XDP", p.driver_or("the driver")),
            "start the daemon and see; xdp = \"skb\" works with every driver, slowly",
        ));
    }
    if !has(BASIC) || !has(REDIRECT) {
        return Some(error(
            subject,
            format!("{} has no native XDP with redirects", p.driver_or("the driver")),
            "xdp = \"skb\" in the configuration works with every driver, slowly",
        ));
    }
    if !has(NDO_XMIT) && !p.xdp {
        let mend = match p.driver.as_str() {
            "veth" => format!("ethtool -K PEER gro on, PEER being the other end of {}", p.name),
            _ => "some drivers take redirected frames only with a program of their own attached: start the daemon and look again".into(),
        };
        let level = if p.driver == "veth" { Level::Error } else { Level::Warning };
        return Some(finding(level, subject, "it takes no frames that XDP redirects to it", Some(&mend)));
    }
    None
}

impl PortFacts {
    fn driver_or<'a>(&'a self, other: &'a str) -> &'a str {
        if self.driver.is_empty() { other } else { &self.driver }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Facts {
        let port = PortFacts {
            name: "eth1".into(),
            driver: "mlx5_core".into(),
            up: true,
            mtu: 4200,
            features: Some(0x7f),
            lro: Some(false),
            queues: 8,
            interrupts: vec!["0".into(), "1".into()],
            ..PortFacts::default()
        };
        Facts {
            kernel: (6, 12),
            release: "6.12.1".into(),
            root: true,
            programs: Some(Ok(())),
            jit: Some(true),
            bpffs: Some(("/sys/fs/bpf/netsum".into(), true)),
            bridge: Some(BridgeFacts { name: "br0".into(), up: true, ..BridgeFacts::default() }),
            ports: Some(Ok(vec![port])),
            ..Facts::default()
        }
    }

    /// What a change to the good machine brings, but what is all right.
    fn after(change: impl FnOnce(&mut Facts)) -> Vec<(Level, String)> {
        let mut facts = good();
        change(&mut facts);
        let bad = judge(&facts).into_iter().filter(|f| f.level > Level::Ok);
        bad.map(|f| (f.level, format!("{}: {} -> {}", f.subject, f.found, f.mend.unwrap()))).collect()
    }

    fn of_port(change: impl FnOnce(&mut PortFacts)) -> Vec<(Level, String)> {
        after(|f| {
            if let Some(Ok(ports)) = &mut f.ports {
                change(&mut ports[0]);
            }
        })
    }

    #[test]
    fn a_good_machine_has_nothing_to_mend() {
        assert_eq!(after(|_| {}), []);
        assert_eq!(judge(&good()).len(), 6);
    }

    #[test]
    fn each_defect_is_named_with_what_mends_it() {
        let one = |found: Vec<(Level, String)>, level: Level, expected: &str| {
            assert_eq!(found.len(), 1, "{expected}: {found:?}");
            assert!(found[0].0 == level && found[0].1.contains(expected), "{expected}: {found:?}");
        };
        use Level::{Error, Warning};
        one(after(|f| f.kernel = (5, 15)), Warning, "meant for Linux 6.1");
        one(after(|f| f.programs = Some(Err("no BTF".into()))), Error, "programs: no BTF");
        one(after(|f| (f.programs, f.root) = (None, false)), Warning, "run this as root");
        one(after(|f| f.jit = Some(false)), Error, "bpf_jit_enable=1");
        one(after(|f| f.bpffs = Some(("/x".into(), false))), Error, "mount -t bpf");
        one(after(|f| f.bpffs = None), Warning, "jobs end with a daemon that is killed");
        one(after(|f| f.ports = None), Warning, "--bridge NAME");
        one(after(|f| f.ports = Some(Err("no such interface".into()))), Error, "no such interface");
        one(after(|f| f.bridge.as_mut().unwrap().up = false), Error, "ip link set br0 up");
        one(after(|f| f.bridge.as_mut().unwrap().call_iptables = true), Warning, "nf-call-iptables=0");
        one(after(|f| f.bridge.as_mut().unwrap().stp = true), Warning, "stp_state 0");
        one(of_port(|p| p.up = false), Error, "ip link set eth1 up");
        one(of_port(|p| p.mtu = 1500), Warning, "path MTU 1024 at the most");
        one(of_port(|p| p.mtu = 300), Error, "too small for any job");
        one(of_port(|p| p.lro = Some(true)), Error, "ethtool -K eth1 lro off");
        one(of_port(|p| p.rx_vlan = Some(true)), Warning, "ethtool -K eth1 rxvlan off");
        one(of_port(|p| p.features = Some(0)), Error, "mlx5_core has no native XDP");
        one(of_port(|p| p.features = None), Warning, "does not say whether mlx5_core has native XDP");
        one(of_port(|p| p.features = Some(3)), Warning, "redirects to it");
        one(of_port(|p| (p.features, p.driver) = (Some(3), "veth".into())), Error, "gro on");
        one(of_port(|p| p.interrupts[1] = "0".into()), Warning, "all served by CPU 0");
        one(of_port(|p| p.skb = true), Warning, "slowly");
    }
}
