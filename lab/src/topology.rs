//! Optional parts of a lab: links with a bandwidth, racks, VLANs, and hosts behind a router.

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::programs::{SchedClassifier, TcAttachType};
pub use netsum_core::rate::Rate;

use crate::lab::lines::{
    self, BRIDGE, address_lines, box_ip, bridge_line, host_ip, host_ipv6, ip_batch, mac, network,
    towards_host, up, veth,
};
use crate::lab::spec::{LabSpec, MAX_HOSTS};
use crate::netns::{self, Netns};

static OBJECT: &[u8] = aya::include_bytes_aligned!("../../objects/vlan.bpf.o");

/// Limits the bandwidth of every host's link, each way.
///
/// The link then consists of two veth pairs in the namespace `wire`, where all packets from one are
/// sent into the other. Each direction passes a token bucket (tc-htb(8)).
///
/// Towards a host, the bucket is in the namespace `wire`, like a switch's queue: packets that the
/// box sends by XDP would bypass a queue of the box's port, and a host's AF_XDP socket takes
/// packets before they reach a queue at the receiver. From a host, it is at the host's interface,
/// like a network card's queue, and holds sockets back. AF_XDP bypasses that queue
/// (`LabSpec::xdp`), and a virtual machine's queue is out of reach; their buckets are in the
/// namespace `wire` as well. These queues lose nothing.
///
/// HTB sets its timer once for each packet. TBF sets it whenever a packet arrives, which took a
/// sixth of all CPU time on a virtual machine.
///
/// A full bucket passes 16 KiB at once, or as much as the link carries in a millisecond. With a
/// smaller bucket, late timers on a busy machine would reduce the bandwidth. Unsegmented packets
/// from TCP are at most that long.
pub(crate) fn shape(spec: &LabSpec, prefix: &str, rate: Rate) -> Result<()> {
    let wire = Netns::open(&format!("{prefix}-wire"))?;
    for i in 0..spec.hosts {
        let (up, down) = (format!("up{i}"), format!("down{i}"));
        queue(&wire, &up, rate)?;
        if i < spec.vms.len() {
            queue(&wire, &down, rate)?;
        } else {
            let host = Netns::open(&format!("{prefix}-h{i}"))?;
            segments(&host, "eth0", rate)?;
            if spec.xdp { queue(&wire, &down, rate)? } else { queue(&host, "eth0", rate)? }
        }
        connect(&wire, [&up, &down], rate)?;
    }
    Ok(())
}

/// The same between a leaf and a spine. Boxes send by XDP, and so both queues are in the namespace
/// `wire`.
fn shape_uplink(uplink: &Uplink, spec: &LabSpec, prefix: &str, rate: Rate) -> Result<()> {
    let wire = Netns::open(&format!("{prefix}-wire"))?;
    let (ends, there) = ([uplink.below_end(), uplink.above_end()], uplink.above(spec));
    let rack = format!("rack{}", uplink.below);
    let lines = veth(&ends[1], &rack, spec.mtu, &format!("{prefix}-{there}"));
    ip_batch(Some(wire.name()), &(lines + &up(&ends[0]) + &up(&ends[1])))?;
    for end in &ends {
        polls(&wire, end)?;
        queue(&wire, end, rate)?;
    }
    connect(&wire, [&ends[0], &ends[1]], rate)
}

/// Bytes that have left an interface's queue.
pub(crate) fn passed(netns: &Netns, interface: &str) -> Result<u64> {
    let words = ["-s", "-j", "qdisc", "show", "dev", interface, "root"];
    let text = netns::output(netns.command("tc").args(words))?;
    let queues: serde_json::Value = serde_json::from_str(&text).with_context(|| text.clone())?;
    queues[0]["bytes"].as_u64().with_context(|| format!("no bytes in {text}"))
}

fn run(netns: &Netns, program: &str, line: &str) -> Result<()> {
    netns::output(netns.command(program).args(line.split(' '))).map(drop)
}

/// Bytes that a link passes at once.
fn burst(rate: Rate) -> u64 {
    (rate.0 / 8 / 1000).max(16 << 10)
}

fn bucket(rate: Rate) -> String {
    let burst = burst(rate);
    format!("rate {rate} burst {burst} cburst {burst} quantum 60000")
}

fn queue(netns: &Netns, interface: &str, rate: Rate) -> Result<()> {
    let bucket = bucket(rate);
    run(netns, "tc", &format!("qdisc add dev {interface} root handle 1: htb default 1"))?;
    run(netns, "tc", &format!("class add dev {interface} parent 1: classid 1:1 htb {bucket}"))?;
    run(netns, "tc", &format!("qdisc add dev {interface} parent 1:1 bfifo limit 64mb"))
}

/// Limits the size of unsegmented packets. The bucket also counts the headers of all their
/// segments, which are less than a tenth of it.
fn segments(netns: &Netns, interface: &str, rate: Rate) -> Result<()> {
    let segment = (burst(rate) * 9 / 10).min(65536);
    run(netns, "ip", &format!("link set {interface} gso_max_size {segment} gro_max_size {segment}"))
}

/// Sends all packets that arrive by one interface out by the other, both ways.
fn connect(wire: &Netns, [a, b]: [&str; 2], rate: Rate) -> Result<()> {
    for (from, to) in [(a, b), (b, a)] {
        segments(wire, from, rate)?;
        run(wire, "tc", &format!("qdisc add dev {from} ingress"))?;
        let redirect = format!("action mirred egress redirect dev {to}");
        run(
            wire,
            "tc",
            &format!("filter add dev {from} ingress protocol all u32 match u32 0 0 {redirect}"),
        )?;
    }
    Ok(())
}

/// Makes a veth poll; see `build`.
fn polls(netns: &Netns, interface: &str) -> Result<()> {
    // Tags are in the frames, as on a real link.
    run(netns, "ethtool", &format!("-K {interface} gro on tso off txvlan off"))
}

/// Puts a lab into VLAN 5: hosts that send and accept only tagged frames, a box in the VLAN, and
/// ports that translate for hosts without tags.
#[derive(Debug)]
pub(crate) struct Vlan {
    /// Detaches its programs on drop.
    _ebpf: Ebpf,
}

impl Vlan {
    /// Attaches the programs.
    pub fn new(spec: &LabSpec, prefix: &str) -> Result<Self> {
        let mut ebpf =
            Ebpf::load(OBJECT).context("the kernel does not take the VLAN's programs")?;
        for name in ["tag", "untag"] {
            let program: &mut SchedClassifier = ebpf.program_mut(name).context(name)?.try_into()?;
            program.load().context(name)?;
        }
        let mut attach =
            |program: &str, node: &str, interface: &str, hook: TcAttachType| -> Result<()> {
                let program: &mut SchedClassifier =
                    ebpf.program_mut(program).context("no such program")?.try_into()?;
                let netns = Netns::open(&format!("{prefix}-{node}"))?;
                netns
                    .enter(|| program.attach(interface, hook))
                    .with_context(|| format!("{interface} of {node}"))?;
                Ok(())
            };
        // Frames that hosts and boxes send are tagged on the way out; a translating port does the
        // reverse. Links between boxes are trunks.
        for host in 0..spec.hosts {
            let (node, port) = (format!("h{host}"), format!("port{host}"));
            let tagged = spec.tagged.contains(&host);
            let box_ = spec.box_of(host);
            let (node, interface) = if tagged { (&*node, "eth0") } else { (&*box_, &*port) };
            let (out, into) = if tagged { ("tag", "untag") } else { ("untag", "tag") };
            attach(out, node, interface, TcAttachType::Egress)?;
            attach(into, node, interface, TcAttachType::Ingress)?;
        }
        // A box that is a virtual machine has VLAN interfaces of its own.
        if spec.box_vm.is_none() {
            for node in spec.boxes().map(Some).chain([None]).map(|number| spec.node(number)) {
                attach("tag", &node, "br0", TcAttachType::Egress)?;
                attach("untag", &node, "br0", TcAttachType::Ingress)?;
            }
        }
        Ok(Self { _ebpf: ebpf })
    }
}

/// A box's link to a spine, or to its parent.
pub(crate) struct Uplink {
    pub below: usize,
    pub spine: usize,
    /// Number among all uplinks.
    number: usize,
}

impl Uplink {
    /// The number of its fault-injecting link.
    pub fn number(&self) -> usize {
        MAX_HOSTS + self.number
    }

    /// The end at the leaf of an uplink with a bandwidth.
    fn below_end(&self) -> String {
        format!("below{}", self.number)
    }

    /// The end at the spine.
    pub fn above_end(&self) -> String {
        format!("above{}", self.number)
    }

    pub fn set_rate(&self, wire: &Netns, rate: Rate) -> Result<()> {
        let class = format!("parent 1: classid 1:1 htb {}", bucket(rate));
        let mut ends = [self.below_end(), self.above_end()].into_iter();
        ends.try_for_each(|end| run(wire, "tc", &format!("class change dev {end} {class}")))
    }

    /// The namespace of its upper end.
    fn above(&self, spec: &LabSpec) -> String {
        spec.node(spec.parent(self.below).or(spec.spine(self.spine)))
    }
}

/// All uplinks; those to the first spine come first.
pub(crate) fn uplinks(spec: &LabSpec) -> impl Iterator<Item = Uplink> {
    let all = (0..spec.spines).flat_map(|spine| spec.below().map(move |below| (spine, below)));
    all.enumerate().map(|(number, (spine, below))| Uplink { below, spine, number })
}

/// Makes all boxes but the first spine, each a bridge, with its hosts' ports if it is a leaf; and
/// the links between them.
pub(crate) fn racks(spec: &LabSpec, prefix: &str) -> Result<()> {
    let node = |name: &str| Netns::open(&format!("{prefix}-{name}"));
    for number in spec.boxes() {
        let mut lines = String::from("link set lo up\n") + &bridge_line() + &up("br0");
        lines += &format!("link set br0 address 02:00:00:00:01:{number:02x}\n");
        lines += &format!("address add {}/16 dev br0\n", box_ip(Some(number)));
        for host in (0..spec.hosts).filter(|&host| spec.rack(host) == Some(number)) {
            if !spec.has_wire() {
                lines += &towards_host(spec, prefix, host);
            }
            lines += &format!("link set port{host} master br0\n{}", up(&format!("port{host}")));
        }
        ip_batch(Some(node(&spec.node(Some(number)))?.name()), &lines)?;
    }
    for uplink in uplinks(spec) {
        let (below, above) = (node(&spec.node(Some(uplink.below)))?, node(&uplink.above(spec))?);
        let (port, rack) = (lines::uplink(uplink.spine), format!("rack{}", uplink.below));
        let (there, end) = match spec.uplink {
            Some(_) => (format!("{prefix}-wire"), uplink.below_end()),
            None if spec.has_faulty_uplinks() => {
                (format!("{prefix}-wire"), format!("up{}", uplink.number()))
            }
            None => (above.name().to_owned(), rack.clone()),
        };
        let mut lines = veth(&port, &end, spec.mtu, &there);
        lines += &format!("link set {port} master br0\n{}", up(&port));
        if uplink.spine > 0 {
            // Two paths between leaves form a loop.
            lines += &format!(
                "link set {port} type bridge_slave learning off flood off mcast_flood off \
                 bcast_flood off\n"
            );
        }
        ip_batch(Some(below.name()), &lines)?;
        polls(&below, &port)?;
        match spec.uplink {
            Some(rate) => shape_uplink(&uplink, spec, prefix, rate)?,
            None if spec.has_faulty_uplinks() => {
                lay_faulty_link(uplink.number(), spec, prefix, above.name(), &rack)?
            }
            None => {}
        }
        ip_batch(Some(above.name()), &format!("link set {rack} master br0\n{}", up(&rack)))?;
        polls(&above, &rack)?;
    }
    Ok(())
}

/// Makes a fault-injecting link between the end `up`, which leads to a box, and a port of that
/// box's parent.
fn lay_faulty_link(
    number: usize,
    spec: &LabSpec,
    prefix: &str,
    parent: &str,
    port: &str,
) -> Result<()> {
    let wire = Netns::open(&format!("{prefix}-wire"))?;
    let ends = [format!("up{number}"), format!("down{number}")];
    let mut lines = veth(&ends[1], port, spec.mtu, parent);
    let link = format!("cable{number}");
    // The link forwards LLDP.
    lines += &format!("link add {link} {BRIDGE} group_fwd_mask 0x4000\n");
    for end in &ends {
        lines += &format!("link set {end} master {link}\n{}", up(end));
    }
    ip_batch(Some(wire.name()), &(lines + &up(&link)))?;
    ends.iter().try_for_each(|end| polls(&wire, end))
}

/// Makes boxes route between racks, over any spine. All addresses stay in one network: hosts have
/// routes to single addresses in other racks.
pub(crate) fn route_racks(spec: &LabSpec, prefix: &str) -> Result<()> {
    let node = |name: &str| format!("{prefix}-{name}");
    let (racks, spines) = (0..spec.racks, 0..spec.spines);
    let hosts_of = |rack: usize| (0..spec.hosts).filter(move |&host| spec.rack(host) == Some(rack));
    for spine in spines.clone() {
        let mut lines = String::new();
        for rack in racks.clone() {
            let port = format!("rack{rack}");
            let [below, above] = link_ips(spine, rack);
            lines += &format!("link set {port} nomaster\naddress add {above}/24 dev {port}\n");
            let mut down = vec![box_ip(Some(rack))];
            down.extend(hosts_of(rack).map(|host| host_ip(false, host, 0)));
            down.iter().for_each(|ip| lines += &format!("route add {ip}/32 via {below}\n"));
            if spec.ipv6 {
                let [below, above] = link_ips_v6(spine, rack);
                lines += &format!("address add {above}/112 dev {port} nodad\n");
                lines += &link_local_address(&port, "fe");
                for host in hosts_of(rack) {
                    lines += &format!("route add {}/128 via {below}\n", host_ipv6(false, host, 0));
                }
            }
        }
        let spine = node(&spec.node(spec.spine(spine)));
        forward(&spine)?;
        ip_batch(Some(&spine), &lines)?;
    }
    for rack in racks.clone() {
        let [mut leaf, mut host_lines, mut by, mut by_v6] = <[String; 4]>::default();
        for spine in spines.clone() {
            let uplink = lines::uplink(spine);
            let [below, above] = link_ips(spine, rack);
            leaf += &format!("link set {uplink} nomaster\naddress add {below}/24 dev {uplink}\n");
            by += &format!(" nexthop via {above}");
            if spec.ipv6 {
                let [below, above] = link_ips_v6(spine, rack);
                leaf += &format!("address add {below}/112 dev {uplink} nodad\n");
                leaf += &link_local_address(&uplink, "1");
                by_v6 += &format!(" nexthop via {above}");
            }
        }
        let others = racks.clone().filter(|&other| other != rack);
        let elsewhere = others.flat_map(|other| {
            hosts_of(other).map(|host| host_ip(false, host, 0)).chain([box_ip(Some(other))])
        });
        for ip in elsewhere.chain([box_ip(None)]) {
            leaf += &format!("route add {ip}/32{by}\n");
            host_lines += &format!("route add {ip}/32 via {}\n", box_ip(Some(rack)));
        }
        if spec.ipv6 {
            let own = format!("fd00::fd:{}", rack + 1);
            leaf += &format!("address add {own}/64 dev br0 nodad\n");
            leaf += &link_local_address("br0", "fe");
            for host in (0..spec.hosts).filter(|&host| spec.rack(host) != Some(rack)) {
                let ip = host_ipv6(false, host, 0);
                leaf += &format!("route add {ip}/128{by_v6}\n");
                host_lines += &format!("route add {ip}/128 via {own}\n");
            }
        }
        forward(&node(&spec.box_name(Some(rack))))?;
        ip_batch(Some(&node(&spec.box_name(Some(rack)))), &leaf)?;
        hosts_of(rack)
            .try_for_each(|host| ip_batch(Some(&node(&format!("h{host}"))), &host_lines))?;
    }
    Ok(())
}

/// A router sends neighbour solicitations from its link-local address.
fn link_local_address(interface: &str, end: &str) -> String {
    format!("address add fe80::{end}/64 dev {interface} nodad\n")
}

/// Addresses of the lower and upper end of a routed link between leaf and spine.
fn link_ips(spine: usize, rack: usize) -> [String; 2] {
    ["1", "254"].map(|end| format!("10.{}.{rack}.{end}", 253 - spine))
}

fn link_ips_v6(spine: usize, rack: usize) -> [String; 2] {
    ["1", "fe"].map(|end| format!("fd01::{spine}:{rack}:{end}"))
}

/// Makes a namespace a router.
fn forward(netns: &str) -> Result<()> {
    let files = ["/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"];
    Netns::open(netns)?
        .enter(|| files.iter().try_for_each(|file| std::fs::write(file, "1").context(*file)))
}

/// Makes host 0 a router with a network of its own, and puts hosts there.
pub(crate) fn route(spec: &LabSpec, prefix: &str) -> Result<()> {
    let inside = network(true);
    let node = |name: &str| format!("{prefix}-{name}");
    let mut router =
        String::from("link add lan type bridge stp_state 0 forward_delay 0 mcast_snooping 0\n")
            + &up("lan");
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
    forward(&node("h0"))?;

    for host in spec.hosts..spec.hosts + spec.routed {
        let mut lines =
            String::from("link set lo up\n") + &up("eth0") + &address_lines(spec, host, true);
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
