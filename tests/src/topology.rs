//! What a lab may have beyond hosts on ports: VLANs, and hosts behind a router.

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::programs::{SchedClassifier, TcAttachType};

use crate::lab::{LabSpec, address_lines, ip_batch, mac, network, up, veth};
use crate::netns::Netns;

static OBJECT: &[u8] = aya::include_bytes_aligned!("../../objects/vlan.bpf.o");

/// What puts a lab into VLAN 5: hosts that send and take tagged frames alone, a box that is in the VLAN, and ports that translate for
/// the hosts that know of no tags.
#[derive(Debug)]
pub(crate) struct Vlan {
    /// Detaches its programs on drop.
    _ebpf: Ebpf,
}

impl Vlan {
    /// Attaches the programs.
    pub fn new(spec: &LabSpec, prefix: &str) -> Result<Self> {
        let mut ebpf = Ebpf::load(OBJECT).context("the kernel does not take the VLAN's programs")?;
        for name in ["tag", "untag"] {
            let program: &mut SchedClassifier = ebpf.program_mut(name).context(name)?.try_into()?;
            program.load().context(name)?;
        }
        let mut attach = |program: &str, node: &str, interface: &str, hook: TcAttachType| -> Result<()> {
            let program: &mut SchedClassifier =
                ebpf.program_mut(program).context("no such program")?.try_into()?;
            let netns = Netns::open(&format!("{prefix}-{node}"))?;
            netns
                .enter(|| program.attach(interface, hook))
                .with_context(|| format!("{interface} of {node}"))?;
            Ok(())
        };
        // What goes out of hosts and of the box itself is tagged; on a port that translates it is the other way round.
        for host in 0..spec.hosts {
            let (node, port) = (format!("h{host}"), format!("port{host}"));
            let tagged = spec.tagged.contains(&host);
            let (node, interface) = if tagged { (&*node, "eth0") } else { ("box", &*port) };
            let (out, into) = if tagged { ("tag", "untag") } else { ("untag", "tag") };
            attach(out, node, interface, TcAttachType::Egress)?;
            attach(into, node, interface, TcAttachType::Ingress)?;
        }
        attach("tag", "box", "br0", TcAttachType::Egress)?;
        attach("untag", "box", "br0", TcAttachType::Ingress)?;
        Ok(Self { _ebpf: ebpf })
    }
}

/// Makes host 0 a router with a network of its own, and puts hosts there.
pub(crate) fn route(spec: &LabSpec, prefix: &str) -> Result<()> {
    let inside = network(true);
    let node = |name: &str| format!("{prefix}-{name}");
    let mut router =
        String::from("link add lan type bridge stp_state 0 forward_delay 0 mcast_snooping 0\n") + &up("lan");
    router += &format!("address add 10.{inside}.0.254/16 dev lan\n");
    if spec.ipv6 {
        router += &format!("address add fd00:0:0:{inside:x}::fe/64 dev lan nodad\n");
    }
    for host in spec.hosts..spec.hosts + spec.routed {
        let there = format!("eth0 address {}", mac(host));
        router += &veth(&format!("in{host}"), &there, spec.mtu, &node(&format!("h{host}")));
        router += &format!("link set in{host} master lan\n{}", up(&format!("in{host}")));
    }
    ip_batch(Some(&node("h0")), &router)?;
    let forwarding = ["/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"];
    Netns::open(&node("h0"))?
        .enter(|| forwarding.iter().try_for_each(|file| std::fs::write(file, "1").context(*file)))?;

    for host in spec.hosts..spec.hosts + spec.routed {
        let mut lines = String::from("link set lo up\n") + &up("eth0") + &address_lines(spec, host, true);
        lines += &format!("route add default via 10.{inside}.0.254\n");
        if spec.ipv6 {
            lines += &format!("route add default via fd00:0:0:{inside:x}::fe\n");
        }
        ip_batch(Some(&node(&format!("h{host}"))), &lines)?;
    }
    let mut way = format!("route add 10.{inside}.0.0/16 via 10.0.0.1\n");
    if spec.ipv6 {
        way += &format!("route add fd00:0:0:{inside:x}::/64 via fd00::1\n");
    }
    let mut outside = (1..spec.hosts).map(|host| format!("h{host}")).chain(["box".to_owned()]);
    outside.try_for_each(|name| ip_batch(Some(&node(&name)), &way))
}
