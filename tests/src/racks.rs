//! The data planes of leaves and a spine without daemons, with flows as [`Bootstrap::Static`] numbers them.
//!
//! [`Bootstrap::Static`]: netsum_worker::Bootstrap::Static

use anyhow::{Context, Result};
use netsum_common::abi::{self, Fragments, Messages, RingConfig, RingNumber, ring_flags};
use netsum_common::counters::Counter;
use netsum_core::Rank;
use netsum_core::plane::{FlowSpec, RingSpec};
use netsum_dataplane::{BpfDataPlane, DataPlane, LoadOptions, XdpMode, count};
use netsum_worker::comm::config::static_connection;

use crate::Lab;
use crate::cluster::JobSpec;
use crate::lab::BoxNode;

/// The programs on all boxes of a lab with racks: one job, a rank on each host.
pub struct Racks<'a> {
    lab: &'a Lab,
    /// The leaves, and last the spine.
    planes: Vec<BpfDataPlane>,
}

/// A member of a box's ring: the rank whose connection it is, and the port that this comes in by.
struct Member {
    rank: u32,
    port: String,
    by_box: bool,
}

impl<'a> Racks<'a> {
    /// Loads and attaches the programs everywhere, and makes the job's rings.
    ///
    /// # Errors
    /// If the kernel refuses any of it.
    pub fn new(lab: &'a Lab, job: &JobSpec, relaxed: bool) -> Result<Self> {
        let racks = lab.spec().racks;
        let mut racks = Self { lab, planes: Vec::with_capacity(racks + 1) };
        for number in 0..=lab.spec().racks {
            let (node, members, has_parent) = racks.members(number);
            let plane = node.enter(|| load(node, &members))?;
            racks.planes.push(plane);
            racks.add(number, job, &members, relaxed, has_parent)?;
        }
        Ok(racks)
    }

    fn ranks_of(&self, rack: usize) -> std::ops::Range<u32> {
        let spec = self.lab.spec();
        let mut ranks = (0..spec.hosts).filter(|&host| spec.rack(host) == rack).map(|host| host as u32);
        let first = ranks.next().unwrap_or_default();
        first..first + 1 + ranks.count() as u32
    }

    /// A box with the members of its ring, in order; whether the last is the way up.
    fn members(&self, number: usize) -> (&'a BoxNode, Vec<Member>, bool) {
        let (racks, ranks) = (self.lab.spec().racks, self.lab.spec().hosts as u32);
        if number == racks {
            let group = |rack| Member {
                rank: self.ranks_of(rack).end - 1,
                port: self.lab.box_().rack_port(rack),
                by_box: true,
            };
            return (self.lab.box_(), (0..racks).map(group).collect(), false);
        }
        let (leaf, group) = (self.lab.leaf(number), self.ranks_of(number));
        let rank = |rank: u32| Member { rank, port: leaf.port(rank as usize), by_box: false };
        let before = (group.start + ranks - 1) % ranks;
        let up = Member { rank: before, port: BoxNode::UPLINK.to_owned(), by_box: true };
        (leaf, group.map(rank).chain([up]).collect(), true)
    }

    fn add(
        &mut self,
        number: usize,
        job: &JobSpec,
        members: &[Member],
        relaxed: bool,
        has_parent: bool,
    ) -> Result<()> {
        let fragments = Fragments(job.message_size.div_ceil(job.mtu));
        let credit = Messages(job.window).of(fragments).context("too many fragments")?;
        let flags = [
            (relaxed, ring_flags::RELAXED),
            (has_parent, ring_flags::UPLINK),
            (!has_parent, ring_flags::GROUPS),
        ];
        let config = RingConfig {
            flags: flags.into_iter().filter(|(is, _)| *is).map(|(_, flag)| flag).sum(),
            ranks: members.len() as u32,
            slots: abi::ring_slots(credit).context("too many slots")?,
            credit: credit.0,
            mtu: job.mtu,
            cpu: 0,
        };
        let ring = RingSpec { id: RingNumber(1), cpu: number as u32 % 2, config };
        let (node, ..) = self.members(number);
        let ip = |rank: u32| self.lab.host(rank as usize).ip(0);
        let ports = members.iter().map(|member| node.ifindex(&member.port)).collect::<Result<Vec<_>>>()?;
        let flows = members.iter().zip(&ports).enumerate().map(|(number, (member, &ifindex))| {
            let next = (member.rank + 1) % job.ranks;
            FlowSpec {
                ring: ring.id,
                rank: Rank(number as u32),
                base_psn: static_connection(member.rank, Some(0)).first_psn,
                ifindex,
                src: ip(member.rank),
                dst: ip(next),
                qpn: static_connection(next, Some(0)).receive_qpn,
                src_mac: None,
                by_box: member.by_box,
            }
        });
        let plane = &mut self.planes[number];
        node.enter(|| -> Result<()> {
            plane.create_ring(&ring)?;
            flows.into_iter().try_for_each(|flow| plane.add_flow(&flow))?;
            plane.activate_ring(&ring, &ports)
        })
    }

    /// A counter of a leaf.
    ///
    /// # Errors
    /// If the maps cannot be read.
    pub fn count(&self, rack: usize, counter: Counter) -> Result<u64> {
        count_on(&self.planes[rack], counter)
    }

    /// A counter of the spine.
    ///
    /// # Errors
    /// As above.
    pub fn count_on_spine(&self, counter: Counter) -> Result<u64> {
        count_on(&self.planes[self.lab.spec().racks], counter)
    }

    /// Everything that was counted, for messages.
    pub fn counted(&self) -> String {
        let all = |plane: &BpfDataPlane| -> Vec<String> {
            let counts = Counter::ALL.iter().map(|&c| (c, count_on(plane, c).unwrap_or_default()));
            counts.filter(|(_, n)| *n > 0).map(|(c, n)| format!("{} {n}", c.name())).collect()
        };
        self.planes.iter().map(|plane| all(plane).join(", ") + "\n").collect()
    }
}

fn load(node: &BoxNode, members: &[Member]) -> Result<BpfDataPlane> {
    let mut plane = BpfDataPlane::load(&LoadOptions { cpus: vec![0, 1], cpu_queue: 4096, inline: true })?;
    for member in members {
        plane.attach(node.ifindex(&member.port)?, XdpMode::Native)?;
    }
    Ok(plane)
}

fn count_on(plane: &BpfDataPlane, counter: Counter) -> Result<u64> {
    (0..=1).map(|ring| Ok(count(&plane.counters(RingNumber(ring))?, counter))).sum()
}
