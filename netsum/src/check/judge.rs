//! Judges the facts about a machine. Pure.

use netsum_cli::check::{Finding, Level};
use netsum_core::port::{self, PortFacts};

/// The oldest supported kernel.
const KERNEL: (u32, u32) = (6, 1);
/// The first Linux with tcx, which the program `guard` uses.
const GUARDED: (u32, u32) = (6, 6);
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Major and minor version of the kernel.
    pub kernel: (u32, u32),
    /// Its release in full, such as 6.12.1.
    pub release: String,
    pub root: bool,
    /// Whether the kernel accepts netsum's programs and maps; `None` if not tried.
    pub programs: Option<Result<(), String>>,
    /// Whether programs are compiled to machine code; `None` if unknown.
    pub jit: Option<bool>,
    /// The place of pins, and whether it is in a bpffs; `None` if pins are disabled.
    pub bpffs: Option<(String, bool)>,
    /// Whether a daemon answers on the administration socket.
    pub daemon: bool,
    pub bridge: Option<BridgeFacts>,
    /// The ports, or the error that prevents finding them.
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
    /// Its frames pass iptables.
    pub call_iptables: bool,
}

fn finding(level: Level, subject: &str, found: impl Into<String>, hint: Option<&str>) -> Finding {
    Finding { level, subject: subject.into(), found: found.into(), hint: hint.map(str::to_owned) }
}

fn ok(subject: &str, found: impl Into<String>) -> Finding {
    finding(Level::Ok, subject, found, None)
}

fn warning(subject: &str, found: impl Into<String>, hint: &str) -> Finding {
    finding(Level::Warning, subject, found, Some(hint))
}

fn error(subject: &str, found: impl Into<String>, hint: &str) -> Finding {
    finding(Level::Error, subject, found, Some(hint))
}

/// Findings, good and bad.
pub fn judge(facts: &Facts) -> Vec<Finding> {
    let mut all = machine(facts);
    all.extend(facts.bridge.as_ref().map(bridge).unwrap_or_default());
    match &facts.ports {
        None => all.push(warning(
            "ports",
            "not checked",
            "name a configuration, --config FILE, or a bridge, --bridge NAME",
        )),
        Some(Err(why)) => {
            all.push(error("ports", why, "correct `bridge` or `ports` in the configuration"))
        }
        Some(Ok(ports)) => all.extend(ports.iter().flat_map(port)),
    }
    all
}

fn machine(facts: &Facts) -> Vec<Finding> {
    let mut all = Vec::new();
    all.push(if facts.kernel >= GUARDED {
        ok("kernel", &facts.release)
    } else if facts.kernel >= KERNEL {
        let found = format!(
            "{}: a port that loses its XDP program forwards contributions unsummed",
            facts.release
        );
        warning("kernel", found, "Linux 6.6 and newer guard ports against that")
    } else {
        let (major, minor) = KERNEL;
        warning(
            "kernel",
            &facts.release,
            &format!("netsum supports Linux {major}.{minor} and newer"),
        )
    });
    all.push(match &facts.programs {
        Some(Ok(())) => ok("programs", "the kernel accepts netsum's programs and maps"),
        Some(Err(why)) => error(
            "programs",
            why,
            "the kernel must be Linux 6.1 or newer, with CONFIG_BPF_SYSCALL and \
             CONFIG_DEBUG_INFO_BTF",
        ),
        None if facts.root => {
            warning("programs", "not tried", "stop the running daemon, and check again")
        }
        None => warning("programs", "not tried: this needs root", "run this as root"),
    });
    all.push(match facts.jit {
        Some(false) => error(
            "BPF compiler",
            "off: programs are interpreted, at a tenth of the speed",
            "sysctl net.core.bpf_jit_enable=1",
        ),
        Some(true) => ok("BPF compiler", "on"),
        None => {
            let hint = "run this as root; or check whether net.core.bpf_jit_enable is 1";
            warning("BPF compiler", "not determined", hint)
        }
    });
    match &facts.bpffs {
        Some((path, true)) => all.push(ok("bpffs", path)),
        Some((path, false)) => all.push(error(
            "bpffs",
            format!("{path} is not in a BPF file system"),
            "mount -t bpf bpf /sys/fs/bpf, or pin = \"none\" in [restart]: then nothing survives a \
             killed daemon",
        )),
        None => all.push(warning(
            "bpffs",
            "pin = \"none\"",
            "jobs end if the daemon is killed; name a folder in a bpffs in [restart]",
        )),
    }
    if facts.daemon {
        all.push(warning(
            "daemon",
            "already running",
            "no fault: stop it only to have `check` try the programs",
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
            "its frames pass iptables, including RoCE",
            "sysctl net.bridge.bridge-nf-call-iptables=0 net.bridge.bridge-nf-call-ip6tables=0",
        ));
    }
    if b.vlan_filtering {
        all.push(warning(
            &subject,
            "it filters VLANs; the programs on its ports sum a job's packets whatever their tags",
            "make all ports of a job members of its VLAN, and use no address in two VLANs",
        ));
    }
    if b.stp {
        all.push(warning(
            &subject,
            "it runs the spanning tree protocol: a port that comes up forwards nothing for 30 s",
            &format!("ip link set {} type bridge stp_state 0, if the network has no loop", b.name),
        ));
    }
    if all.is_empty() {
        all.push(ok(&subject, "up"));
    }
    all
}

fn port(p: &PortFacts) -> Vec<Finding> {
    let subject = format!("port {}", p.name);
    let defects = port::defects(p);
    if defects.is_empty() {
        let mut found = format!("up, MTU {}", p.mtu);
        if !p.driver.is_empty() {
            found += &format!(", {}", p.driver);
        }
        if p.queues > 0 {
            found += &format!(", {} receive queues", p.queues);
        }
        return vec![ok(&subject, found)];
    }
    let level = |is_fatal| if is_fatal { Level::Error } else { Level::Warning };
    defects
        .into_iter()
        .map(|d| finding(level(d.is_fatal), &subject, d.found, Some(&d.hint)))
        .collect()
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

    /// Findings after a change to the good machine, without the good ones.
    fn after(change: impl FnOnce(&mut Facts)) -> Vec<(Level, String)> {
        let mut facts = good();
        change(&mut facts);
        let bad = judge(&facts).into_iter().filter(|f| f.level > Level::Ok);
        bad.map(|f| (f.level, format!("{}: {} -> {}", f.subject, f.found, f.hint.unwrap())))
            .collect()
    }

    fn of_port(change: impl FnOnce(&mut PortFacts)) -> Vec<(Level, String)> {
        after(|f| {
            if let Some(Ok(ports)) = &mut f.ports {
                change(&mut ports[0]);
            }
        })
    }

    #[test]
    fn a_good_machine_needs_no_hint() {
        assert_eq!(after(|_| {}), []);
        assert_eq!(judge(&good()).len(), 6);
    }

    #[test]
    fn each_defect_comes_with_a_hint() {
        let one = |found: Vec<(Level, String)>, level: Level, expected: &str| {
            assert_eq!(found.len(), 1, "{expected}: {found:?}");
            assert!(found[0].0 == level && found[0].1.contains(expected), "{expected}: {found:?}");
        };
        use Level::{Error, Warning};
        one(after(|f| f.kernel = (5, 15)), Warning, "supports Linux 6.1");
        one(after(|f| f.kernel = (6, 1)), Warning, "Linux 6.6 and newer guard ports");
        one(after(|f| f.programs = Some(Err("no BTF".into()))), Error, "programs: no BTF");
        one(after(|f| (f.programs, f.root) = (None, false)), Warning, "run this as root");
        one(after(|f| f.jit = Some(false)), Error, "bpf_jit_enable=1");
        one(after(|f| f.bpffs = Some(("/x".into(), false))), Error, "mount -t bpf");
        one(after(|f| f.bpffs = None), Warning, "jobs end if the daemon is killed");
        one(after(|f| f.ports = None), Warning, "--bridge NAME");
        one(after(|f| f.ports = Some(Err("no such interface".into()))), Error, "no such interface");
        one(after(|f| f.bridge.as_mut().unwrap().up = false), Error, "ip link set br0 up");
        one(
            after(|f| f.bridge.as_mut().unwrap().call_iptables = true),
            Warning,
            "nf-call-iptables=0",
        );
        one(after(|f| f.bridge.as_mut().unwrap().stp = true), Warning, "stp_state 0");
        one(of_port(|p| p.up = false), Error, "ip link set eth1 up");
        one(of_port(|p| p.mtu = 1500), Warning, "path MTU 1408 at the most");
    }
}
