//! Builds a lab: namespaces, links and virtual machines.

use anyhow::{Context, Result};

use super::lines::{
    AGENT, BOX_AGENT, BRIDGE, address_lines, addresses, batch, box_addresses, bridge_line, host_ip,
    ip_batch, mac, new_tap, tap, towards_host, up, veth,
};
use super::spec::LabSpec;
use crate::netns::{self, Netns};
use crate::topology;
use crate::vm::parts::Kernel;
use crate::vm::{Vm, VmSpec};

/// Starts the virtual machines, and waits until all have booted.
pub(super) fn boot(spec: &LabSpec, prefix: &str) -> Result<Vec<Vm>> {
    let box_ = Netns::open(&format!("{prefix}-box"))?;
    let start = |(i, &kernel): (usize, &Kernel)| {
        let taps = if spec.has_wire() { "wire".to_owned() } else { spec.box_of(i) };
        let taps = Netns::open(&format!("{prefix}-{taps}"))?;
        Vm::start(&VmSpec {
            kernel,
            cpus: spec.vm_cpus,
            memory: spec.vm_memory,
            tap: (&taps, tap(spec, i)),
            cards: None,
            lab: &box_,
            mac: mac(i),
            mtu: spec.mtu,
            addresses: addresses(spec, i, false),
            disk: false,
            line: "",
        })
    };
    let mut vms = spec.vms.iter().enumerate().map(start).collect::<Result<Vec<_>>>()?;
    vms.iter_mut().try_for_each(Vm::wait)?;
    Ok(vms)
}

/// Starts the box's virtual machine, if it is one, and sets up its bridge, unless the owner does
/// that.
pub(super) fn boot_box(spec: &LabSpec, prefix: &str) -> Result<Option<Vm>> {
    let Some((kernel, card)) = spec.box_vm else { return Ok(None) };
    let box_ = Netns::open(&format!("{prefix}-box"))?;
    let mut vm = Vm::start(&VmSpec {
        kernel,
        cpus: spec.vm_cpus,
        memory: spec.vm_memory,
        tap: (&box_, AGENT.to_owned()),
        cards: Some((card, (0..spec.hosts).map(|i| format!("card{i}")).collect())),
        lab: &box_,
        mac: mac(0xfd),
        mtu: 1500,
        addresses: vec![(BOX_AGENT.into(), 16)],
        disk: spec.box_debian,
        line: &spec.box_line,
    })?;
    vm.wait()?;
    if spec.box_debian {
        return Ok(Some(vm));
    }
    let mut lines = bridge_line();
    for i in 0..spec.hosts {
        lines += &format!(
            "link set eth{} name port{i} mtu {}\nlink set port{i} master br0\n",
            i + 1,
            spec.mtu
        );
        lines += &up(&format!("port{i}"));
    }
    lines += &box_addresses(spec);
    if spec.box_line.contains("ipv6.disable=1") {
        lines = lines
            .lines()
            .filter(|l| !l.contains("addrgenmode"))
            .map(|l| format!("{l}\n"))
            .collect();
    }
    batch(&mut vm.command("/usr/bin/ip"), &lines)?;
    Ok(Some(vm))
}

/// Creates namespaces, links and addresses.
pub(super) fn build(spec: &LabSpec, prefix: &str) -> Result<()> {
    let hosts = 0..spec.hosts;
    let mtu = spec.mtu;
    let mut namespaces = format!("netns add {prefix}-box\n");
    if spec.has_wires() {
        namespaces += &format!("netns add {prefix}-wire\n");
    }
    for i in 0..spec.hosts + spec.routed {
        namespaces += &format!("netns add {prefix}-h{i}\n");
    }
    for number in spec.boxes() {
        namespaces += &format!("netns add {prefix}-{}\n", spec.node(Some(number)));
    }
    ip_batch(None, &namespaces)?;

    if spec.has_wire() {
        let mut wire = String::from("link set lo up\n");
        for i in hosts.clone() {
            wire += &towards_host(spec, prefix, i);
            let box_ = format!("{prefix}-{}", spec.box_of(i));
            wire += &veth(&format!("down{i}"), &format!("port{i}"), mtu, &box_);
            if spec.rate.is_none() {
                wire += &format!("link add cable{i} {BRIDGE}\n");
                wire +=
                    &format!("link set up{i} master cable{i}\nlink set down{i} master cable{i}\n");
                wire += &up(&format!("cable{i}"));
            }
            wire += &(up(&format!("up{i}")) + &up(&format!("down{i}")));
        }
        ip_batch(Some(&format!("{prefix}-wire")), &wire)?;
    }
    let mut box_ = String::from("link set lo up\n");
    if spec.box_vm.is_none() {
        box_ += &bridge_line();
    }
    for i in hosts.clone().filter(|_| spec.racks == 0) {
        if !spec.has_wire() {
            box_ += &towards_host(spec, prefix, i);
        }
        let mut bridge = "br0".to_owned();
        if let Some((_, card)) = spec.box_vm {
            bridge = format!("pair{i}");
            let queues = if card.queues() > 1 { " multi_queue" } else { "" };
            box_ += &format!(
                "link add {bridge} {BRIDGE}\n{}",
                new_tap(&format!("card{i}"), queues, spec.mtu)
            );
            box_ += &format!(
                "link set card{i} master {bridge}\n{}",
                up(&format!("card{i}")) + &up(&bridge)
            );
        }
        box_ += &format!("link set port{i} master {bridge}\n{}", up(&format!("port{i}")));
        if spec.box_vm.is_some() && i < spec.vms.len() {
            // The route to the agent in that host, which bypasses the box.
            let here = format!("10.0.254.{}", i + 1);
            box_ += &format!("address add {here}/32 dev {bridge}\n");
            box_ += &format!("route add {}/32 dev {bridge} src {here}\n", host_ip(false, i, 0));
        }
    }
    if spec.box_vm.is_some() {
        box_ += &(new_tap(AGENT, "", 1500) + &up(AGENT));
        box_ += &format!("address add 10.1.0.254/16 dev {AGENT}\n");
    } else {
        box_ += &box_addresses(spec);
    }
    ip_batch(Some(&format!("{prefix}-box")), &box_)?;
    topology::racks(spec, prefix)?;
    if spec.box_vm.is_some() {
        // Each bridge must answer for its own address only: the machine has all of these bridges.
        let file = "/proc/sys/net/ipv4/conf/all/arp_ignore";
        Netns::open(&format!("{prefix}-box"))?.enter(|| std::fs::write(file, "1").context(file))?;
    }

    for i in hosts {
        let (is_vm, host_node) = (i < spec.vms.len(), format!("h{i}"));
        if !is_vm {
            let host =
                String::from("link set lo up\n") + &up("eth0") + &address_lines(spec, i, false);
            ip_batch(Some(&format!("{prefix}-{host_node}")), &host)?;
        }
        // A veth's peer must poll (NAPI), or frames that XDP redirects to it vanish; GRO enables
        // polling.
        let (mut ends, box_) = (Vec::new(), spec.box_of(i));
        if spec.has_wire() || !is_vm {
            ends.push((&*box_, format!("port{i}")));
        }
        if !is_vm {
            ends.push((&host_node, "eth0".to_owned()));
        }
        if spec.has_wire() {
            ends.push(("wire", format!("down{i}")));
        }
        if spec.has_wire() && !is_vm {
            ends.push(("wire", format!("up{i}")));
        }
        for (node, interface) in ends {
            let mut ethtool = Netns::open(&format!("{prefix}-{node}"))?.command("ethtool");
            // Behind an interface with TCP segmentation offload, a veth hands packets to its CPU's
            // backlog and does not poll (`veth_skb_is_eligible_for_gro`). Then two CPUs can reorder
            // packets, which a real link never does.
            ethtool.args(["-K", &interface, "gro", "on", "tso", "off"]);
            if spec.faulty_links && interface == "eth0" {
                // A redirect loses the note that a checksum has still to be computed, and so it is
                // computed at once.
                ethtool.args(["tx", "off"]);
            }
            if !spec.tagged.is_empty() {
                // On a real link, tags are in the frames; a veth may keep them beside the frames,
                // where XDP programs do not see them.
                ethtool.args(["txvlan", "off"]);
            }
            netns::output(&mut ethtool)?;
        }
    }
    if let Some(rate) = spec.rate {
        topology::shape(spec, prefix, rate)?;
    }
    if spec.routes {
        topology::route_racks(spec, prefix)?;
    }
    if spec.routed > 0 { topology::route(spec, prefix) } else { Ok(()) }
}
