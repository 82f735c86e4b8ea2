//! What a lab consists of.

use netsum_core::rate::Rate;

use crate::vm::Card;
use crate::vm::parts::Kernel;

/// Most hosts in a lab.
pub const MAX_HOSTS: usize = 64;

#[derive(Clone, Debug)]
pub struct LabSpec {
    /// Hosts, 1 to 64.
    pub hosts: usize,
    /// MTU of every link in bytes. It must exceed a path MTU of 2048 by about 100.
    pub mtu: u32,
    /// Give every host IPv6 addresses as well.
    pub ipv6: bool,
    /// Addresses on each host; each can belong to a rank.
    pub ips_per_host: usize,
    /// Put a link that can inject faults (a [`FaultLink`]) between each host and its port. With a
    /// rate it can only lose and mark packets, but those of all protocols. Without a rate uplinks
    /// have such links, too.
    pub faulty_links: bool,
    /// Bandwidth of every host's link, each way; see [`shape`](crate::topology::shape). If `None`,
    /// links are as fast as the machine.
    pub rate: Option<Rate>,
    /// With a rate: hosts send over AF_XDP, which bypasses their interfaces' queues.
    pub xdp: bool,
    /// Hosts whose frames carry the tag of VLAN 5. The whole lab is in that VLAN then: the ports of
    /// other hosts translate.
    pub tagged: Vec<usize>,
    /// Number of racks; 0 for none. The hosts are spread over as many leaf boxes, in order, and the
    /// box is the spine between these.
    pub racks: usize,
    /// With racks: boxes between leaves and spine, over which the racks are spread, in order.
    pub pods: usize,
    /// With racks and no boxes between leaves and spine: boxes route between racks. Ports towards
    /// other boxes are not in a bridge.
    pub routes: bool,
    /// With racks: number of spines, each with a link to every leaf. The box is the first. Leaves
    /// forward no traffic to the others, except what netsum sends there.
    pub spines: usize,
    /// With racks: bandwidth of each leaf's link to a spine, each way. If `None`, these links are
    /// as fast as the machine.
    pub uplink: Option<Rate>,
    /// Hosts in a network of their own behind host 0, their router. They are numbered after all
    /// others.
    pub routed: usize,
    /// The first hosts are virtual machines with these kernels; the others are namespaces.
    pub vms: Vec<Kernel>,
    /// The box is a virtual machine with this kernel, and its ports are such cards.
    pub box_vm: Option<(Kernel, Card)>,
    /// The box's virtual machine is a Debian with systemd and without a bridge: its ports are
    /// `eth1` and so on.
    pub box_debian: bool,
    /// CPUs of each virtual machine.
    pub vm_cpus: u32,
    /// Memory of each virtual machine in MiB; if `None`, an amount that depends on its CPUs.
    pub vm_memory: Option<u32>,
    /// Further kernel command line of a box that is a virtual machine.
    pub box_line: String,
    /// Prefix of the namespaces' names; `ns<pid>-<n>` if `None`.
    pub name: Option<String>,
}

impl Default for LabSpec {
    fn default() -> Self {
        Self {
            hosts: 2,
            mtu: 1500,
            ipv6: false,
            ips_per_host: 1,
            faulty_links: false,
            rate: None,
            xdp: false,
            tagged: Vec::new(),
            racks: 0,
            pods: 0,
            routes: false,
            spines: 1,
            uplink: None,
            routed: 0,
            vms: Vec::new(),
            box_vm: None,
            box_debian: false,
            vm_cpus: 1,
            vm_memory: None,
            box_line: String::new(),
            name: None,
        }
    }
}

impl LabSpec {
    /// `hosts` hosts, and the defaults.
    pub fn hosts(hosts: usize) -> Self {
        Self { hosts, ..Self::default() }
    }

    /// `hosts` hosts that are virtual machines, and the defaults.
    pub fn vms(hosts: usize, kernel: Kernel) -> Self {
        Self { hosts, vms: vec![kernel; hosts], ..Self::default() }
    }

    /// The rack of a host, in a lab with racks.
    pub fn rack(&self, host: usize) -> Option<usize> {
        (self.racks > 0).then(|| host * self.racks / self.hosts)
    }

    /// Numbers of the boxes with a parent: the leaves, then those between leaves and spine.
    pub fn below(&self) -> std::ops::Range<usize> {
        0..self.racks + self.pods
    }

    /// The number of such a box's parent; `None` if that is the spine.
    pub fn parent(&self, below: usize) -> Option<usize> {
        (below < self.racks && self.pods > 0).then(|| self.racks + below * self.pods / self.racks)
    }

    /// Numbers of all boxes but the first spine: those with a parent, then further spines.
    pub fn boxes(&self) -> std::ops::Range<usize> {
        0..self.below().end + self.spines - 1
    }

    /// The number of a spine among these; `None` for the first.
    pub fn spine(&self, number: usize) -> Option<usize> {
        (number > 0).then(|| self.below().end + number - 1)
    }

    /// The name of a box; `None` is the first spine.
    pub fn box_name(&self, number: Option<usize>) -> String {
        match number.map(|number| number.checked_sub(self.below().end).ok_or(number)) {
            None => "spine0".to_owned(),
            Some(Ok(spine)) => format!("spine{}", spine + 1),
            Some(Err(leaf)) => format!("leaf{leaf}"),
        }
    }

    /// Whether uplinks can inject faults.
    pub(crate) fn has_faulty_uplinks(&self) -> bool {
        self.faulty_links && self.rate.is_none() && self.uplink.is_none()
    }

    /// The namespace of the box whose port leads to a host.
    pub(crate) fn box_of(&self, host: usize) -> String {
        self.node(self.rack(host))
    }

    /// The namespace of a box.
    pub(crate) fn node(&self, number: Option<usize>) -> String {
        number.map_or("box".to_owned(), |_| self.box_name(number))
    }

    /// Whether a host's link passes through the namespace `wire`.
    pub(crate) fn has_wire(&self) -> bool {
        self.faulty_links || self.rate.is_some()
    }

    /// Whether the lab has the namespace `wire`.
    pub(crate) fn has_wires(&self) -> bool {
        self.has_wire() || self.uplink.is_some()
    }
}
