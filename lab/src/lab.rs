//! The lab: a box with a bridge, hosts on its ports.

use std::ffi::OsStr;
use std::net::{IpAddr, Ipv6Addr};
use std::ops::Deref;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail, ensure};

use crate::cleaner::{self, Cleaner};
use crate::faults::{FaultLink, Faults};
use crate::netns::Netns;
use crate::topology::{self, Rate, Vlan};
use crate::vm::Vm;
use build::{boot, boot_box, build};
pub use lines::{BOX_AGENT, host_ip};
use lines::{box_ip, host_ipv6, mac};
pub use spec::{LabSpec, MAX_HOSTS};

mod build;
pub(crate) mod lines;
pub(crate) mod spec;

/// The prefix of the lab that `cargo xtask lab up` leaves running.
pub const STANDING: &str = "netsum";

/// A box, hosts and all that runs in them. Everything is removed on drop, or when the process ends.
#[derive(Debug)]
pub struct Lab {
    spec: LabSpec,
    prefix: String,
    box_: BoxNode,
    boxes: Vec<BoxNode>,
    hosts: Vec<Host>,
    _vlan: Option<Vlan>,
    // The last field: the namespaces are removed after all that lives in them has been dropped.
    cleaner: Cleaner,
}

/// The namespace with the bridge, or with the links to a virtual machine that has the bridge.
#[derive(Debug)]
pub struct BoxNode {
    netns: Netns,
    vm: Option<Vm>,
    /// Its number; `None` for the first spine or the only box.
    number: Option<usize>,
    /// The fault-injecting links of its uplinks.
    faulty_links: Vec<FaultLink>,
}

/// A host: a namespace, or a virtual machine. The namespace of a virtual machine is empty, and its
/// commands run in the machine.
#[derive(Debug)]
pub struct Host {
    netns: Netns,
    number: usize,
    routed: bool,
    link: Option<FaultLink>,
    vm: Option<Vm>,
}

impl Deref for BoxNode {
    type Target = Netns;
    fn deref(&self) -> &Netns {
        &self.netns
    }
}

impl Deref for Host {
    type Target = Netns;
    fn deref(&self) -> &Netns {
        &self.netns
    }
}

impl BoxNode {
    pub const BRIDGE: &str = lines::BRIDGE_NAME;
    /// A leaf's port towards the first spine.
    pub const UPLINK: &str = lines::UPLINK;

    /// A leaf's port towards a spine.
    pub fn uplink(spine: usize) -> String {
        lines::uplink(spine)
    }

    /// The box's own address on the bridge.
    pub fn ip(&self) -> IpAddr {
        box_ip(self.number)
    }

    /// The box's own IPv6 address on the bridge.
    pub fn ipv6(&self) -> IpAddr {
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0xfe))
    }

    /// The box's virtual machine, if it is one.
    pub fn vm(&self) -> Option<&Vm> {
        self.vm.as_ref()
    }

    /// A command that runs on the box. It dies with the thread that starts it.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        match &self.vm {
            Some(vm) => vm.command(program),
            None => self.netns.command(program),
        }
    }

    /// The port that leads to host `i`.
    pub fn port(&self, i: usize) -> String {
        format!("port{i}")
    }

    /// A parent's port that leads to a rack, or to a box between leaves and spine.
    pub fn rack_port(&self, rack: usize) -> String {
        format!("rack{rack}")
    }

    /// Calls [`FaultLink::set`] for its uplink to the first spine.
    ///
    /// # Errors
    /// As there.
    pub fn set_faults(&self, up: Faults, down: Faults, seed: u32) -> Result<()> {
        self.fault_link(0)?.set(up, down, seed)
    }

    /// The fault-injecting link of its uplink to a spine.
    pub fn fault_link(&self, spine: usize) -> Result<&FaultLink> {
        self.faulty_links
            .get(spine)
            .context("this lab's uplinks have no faulty links: set `faulty_links` in its LabSpec")
    }
}

impl Host {
    /// The host's interface towards the box.
    pub const INTERFACE: &str = "eth0";

    /// The host's `k`-th IPv4 address.
    pub fn ip(&self, k: usize) -> IpAddr {
        host_ip(self.routed, self.number, k)
    }

    /// The host's `k`-th IPv6 address; only in a lab with IPv6.
    pub fn ipv6(&self, k: usize) -> IpAddr {
        host_ipv6(self.routed, self.number, k)
    }

    /// The MAC address of its interface.
    pub fn mac(&self) -> String {
        mac(self.number)
    }

    pub fn number(&self) -> usize {
        self.number
    }

    /// The host's virtual machine, if it is one.
    pub fn vm(&self) -> Option<&Vm> {
        self.vm.as_ref()
    }

    /// A command that runs on the host. It dies with the thread that starts it, and so it does not
    /// survive its test.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        match &self.vm {
            Some(vm) => vm.command(program),
            None => self.netns.command(program),
        }
    }

    /// Like [`Host::command`], but it may outlive the thread that starts it.
    pub fn free_command(&self, program: impl AsRef<OsStr>) -> Command {
        match &self.vm {
            Some(vm) => vm.free_command(program),
            None => self.netns.free_command(program),
        }
    }

    /// Injects faults into RoCEv2 packets from the host and to the host, chosen by `seed`.
    ///
    /// # Errors
    /// In a lab without fault-injecting links, or if a rate is not within 0 to 1.
    pub fn set_faults(&self, up: Faults, down: Faults, seed: u32) -> Result<()> {
        self.fault_link()?.set(up, down, seed)
    }

    /// The fault-injecting link between the host and its port.
    pub fn fault_link(&self) -> Result<&FaultLink> {
        self.link
            .as_ref()
            .context("this lab has no faulty links: set `faulty_links` in its LabSpec")
    }
}

impl Lab {
    /// Builds a lab. Needs root, `ip` and `ethtool`.
    ///
    /// # Errors
    /// If the spec is invalid or a command fails; nothing is left behind then.
    pub fn new(spec: LabSpec) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        ensure!(
            (1..=MAX_HOSTS).contains(&spec.hosts),
            "{} hosts: 1 to {MAX_HOSTS} are possible",
            spec.hosts
        );
        ensure!(
            (1..=255).contains(&spec.ips_per_host),
            "{} addresses: 1 to 255 are possible",
            spec.ips_per_host
        );
        ensure!(
            spec.vms.len() <= spec.hosts,
            "{} of {} hosts are to be VMs",
            spec.vms.len(),
            spec.hosts
        );
        ensure!((576..=65535).contains(&spec.mtu), "MTU {}: 576 to 65535 are possible", spec.mtu);
        ensure!(
            spec.racks <= spec.hosts && (spec.racks == 0 || spec.box_vm.is_none()),
            "{} racks for {} hosts: each needs a host, and a box of the plain kind",
            spec.racks,
            spec.hosts
        );
        ensure!(
            spec.pods <= spec.racks && (spec.pods == 0 || spec.uplink.is_none()),
            "{} boxes between {} racks and a spine: each needs a rack, and uplinks without a \
             bandwidth",
            spec.pods,
            spec.racks
        );
        ensure!(
            spec.spines == 1 || spec.spines > 1 && spec.racks > 0 && spec.pods == 0,
            "{} spines: one is there, and more need racks, without boxes between",
            spec.spines
        );
        ensure!(
            spec.tagged.iter().all(|&host| host < spec.hosts),
            "{:?}: no such host",
            spec.tagged
        );
        cleaner::clean_stale()?;
        let prefix = match &spec.name {
            Some(name) => name.clone(),
            None => format!("ns{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed)),
        };
        if cleaner::labs().contains(&prefix) {
            bail!("there is a lab `{prefix}` already");
        }
        let cleaner = Cleaner::start(&prefix)?;
        build(&spec, &prefix)?;
        let netns = |node: &str| Netns::open(&format!("{prefix}-{node}"));
        let (vm, faulty_links) = (boot_box(&spec, &prefix)?, Vec::new());
        let box_ = BoxNode { netns: netns("box")?, vm, number: None, faulty_links };
        let boxes = spec
            .boxes()
            .map(|number| {
                let uplinks = topology::uplinks(&spec).filter(|uplink| uplink.below == number);
                let faulty_links = uplinks.filter(|_| spec.has_faulty_uplinks());
                let faulty_links = faulty_links
                    .map(|uplink| FaultLink::new(&netns("wire")?, uplink.number(), false));
                let faulty_links = faulty_links.collect::<Result<_>>()?;
                let netns = netns(&spec.node(Some(number)))?;
                Ok(BoxNode { netns, vm: None, number: Some(number), faulty_links })
            })
            .collect::<Result<_>>()?;
        let vms = boot(&spec, &prefix)?;
        let hosts = vms
            .into_iter()
            .map(Some)
            .chain(std::iter::repeat_with(|| None))
            .take(spec.hosts + spec.routed)
            .enumerate()
            .map(|(i, vm)| {
                let routed = i >= spec.hosts;
                let link = if spec.faulty_links && !routed {
                    Some(FaultLink::new(&netns("wire")?, i, spec.rate.is_some())?)
                } else {
                    None
                };
                Ok(Host { netns: netns(&format!("h{i}"))?, number: i, routed, link, vm })
            })
            .collect::<Result<_>>()?;
        let _vlan = if spec.tagged.is_empty() { None } else { Some(Vlan::new(&spec, &prefix)?) };
        Ok(Self { spec, prefix, box_, boxes, hosts, _vlan, cleaner })
    }

    /// The spec from which it was built.
    pub fn spec(&self) -> &LabSpec {
        &self.spec
    }

    /// The prefix of its namespaces' names.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    pub fn box_(&self) -> &BoxNode {
        &self.box_
    }

    /// The box of a rack. Numbers beyond the racks are boxes between leaves and spine, and further
    /// spines.
    pub fn leaf(&self, rack: usize) -> &BoxNode {
        &self.boxes[rack]
    }

    /// A spine; the first is the box.
    pub fn spine(&self, number: usize) -> &BoxNode {
        self.spec.spine(number).map_or(&self.box_, |number| self.leaf(number))
    }

    /// The box whose port leads to a host.
    pub fn box_of(&self, host: usize) -> &BoxNode {
        self.spec.rack(host).map_or(&self.box_, |rack| self.leaf(rack))
    }

    /// Total bytes that leaves have sent to spines; 0 if uplinks have no bandwidth.
    ///
    /// # Errors
    /// If `tc` does not report them.
    pub fn sent_up(&self) -> Result<u64> {
        if self.spec.uplink.is_none() {
            return Ok(0);
        }
        let wire = Netns::open(&format!("{}-wire", self.prefix))?;
        topology::uplinks(&self.spec)
            .map(|uplink| topology::passed(&wire, &uplink.above_end()))
            .sum()
    }

    /// Changes the bandwidth of all links of a spine, which must have one.
    ///
    /// # Errors
    /// If `tc` fails.
    pub fn set_uplink_rate(&self, spine: usize, rate: Rate) -> Result<()> {
        let wire = Netns::open(&format!("{}-wire", self.prefix))?;
        let mut uplinks = topology::uplinks(&self.spec).filter(|uplink| uplink.spine == spine);
        uplinks.try_for_each(|uplink| uplink.set_rate(&wire, rate))
    }

    pub fn host(&self, i: usize) -> &Host {
        &self.hosts[i]
    }

    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Lets the lab survive this process; [`tear_down`] removes it.
    pub fn keep(mut self) {
        let machines = self.hosts.iter_mut().filter_map(|host| host.vm.as_mut());
        machines.chain(self.box_.vm.as_mut()).for_each(Vm::leave);
        self.cleaner.dismiss();
    }
}

/// Removes the lab with this prefix and all that runs in it. Returns whether it existed.
pub fn tear_down(prefix: &str) -> Result<bool> {
    let there = cleaner::labs().iter().any(|lab| lab == prefix);
    if there {
        cleaner::clean(prefix)?;
    }
    Ok(there)
}
