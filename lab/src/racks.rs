//! The data planes of leaves and a spine without daemons, with flows numbered as for
//! [`Bootstrap::Static`].
//!
//! [`Bootstrap::Static`]: netsum_worker::Bootstrap::Static

use std::ops::Range;

use anyhow::{Context, Result};
use netsum_common::abi::{self, Fragments, Messages, RingConfig, RingNumber, ring_flags};
use netsum_common::counters::Counter;
use netsum_common::unmanaged::static_connection;
use netsum_common::wire::{TOTAL, group_mark};
use netsum_core::Rank;
use netsum_core::plane::{FlowSpec, RingSpec};
use netsum_dataplane::{BpfDataPlane, DataPlane, count};

use crate::Lab;
use crate::cluster::JobSpec;
use crate::lab::BoxNode;
use crate::netns::Netns;

/// The programs on all boxes of a lab with racks: one job, a rank on each host.
pub struct Racks {
    /// The leaves, the boxes between leaves and spine, and last the spine.
    boxes: Vec<Loaded>,
}

/// The programs of a box.
struct Loaded {
    plane: BpfDataPlane,
    ports: Vec<u32>,
    netns: Netns,
}

/// A member of a box's ring: the rank that owns the connection, and the port where it arrives.
struct Member {
    rank: u32,
    port: String,
    /// See [`FlowSpec::mark`].
    group_mark: u8,
}

impl Racks {
    /// Loads and attaches the programs on all boxes, and creates the job's rings.
    ///
    /// # Errors
    /// If the kernel refuses any of it.
    pub fn new(lab: &Lab, job: &JobSpec, relaxed: bool) -> Result<Self> {
        Self::with(lab, job, relaxed, false)
    }

    /// The same, with IPv6 addresses if `v6`.
    ///
    /// # Errors
    /// As there.
    pub fn with(lab: &Lab, job: &JobSpec, relaxed: bool, v6: bool) -> Result<Self> {
        let spine = lab.spec().below().end;
        let boxes = (0..=spine).map(|number| {
            let (node, members) = members(lab, number);
            let ports = members
                .iter()
                .map(|member| node.ifindex(&member.port))
                .collect::<Result<Vec<_>>>()?;
            let netns = Netns::open(node.name())?;
            let mut plane = node.enter(|| BpfDataPlane::load(&[0, 1]))?;
            for ring in 0..job.rings {
                let ring = ring_spec(lab, job, number, &members, relaxed, ring)?;
                let flows = flows(lab, job, &ring, &members, &ports, v6);
                // Interface indices are only valid in the box's namespace.
                node.enter(|| -> Result<()> {
                    plane.create_ring(&ring)?;
                    flows.iter().try_for_each(|flow| plane.add_flow(flow))?;
                    plane.activate_ring(&ring, &ports)
                })?;
            }
            Ok(Loaded { plane, ports, netns })
        });
        let mut racks = Self { boxes: boxes.collect::<Result<_>>()? };
        (0..=spine).try_for_each(|number| racks.attach(number))?;
        Ok(racks)
    }

    /// The spine's number, the last one.
    pub fn spine(&self) -> usize {
        self.boxes.len() - 1
    }

    /// Attaches a box's programs.
    ///
    /// # Errors
    /// If the kernel refuses them.
    pub fn attach(&mut self, number: usize) -> Result<()> {
        let Loaded { plane, ports, netns } = &mut self.boxes[number];
        netns.enter(|| ports.iter().try_for_each(|&port| plane.attach(port)))
    }

    /// Detaches a box's programs, which makes it a plain bridge.
    ///
    /// # Errors
    /// If they are not attached.
    pub fn detach(&mut self, number: usize) -> Result<()> {
        let Loaded { plane, ports, .. } = &mut self.boxes[number];
        ports.iter().try_for_each(|&port| plane.detach(port))
    }

    /// A counter of a box.
    ///
    /// # Errors
    /// If the maps cannot be read.
    pub fn count(&self, number: usize, counter: Counter) -> Result<u64> {
        let plane = &self.boxes[number].plane;
        (0..=MOST_RINGS).map(|ring| Ok(count(&plane.counters(RingNumber(ring))?, counter))).sum()
    }

    /// Packets that any box has refused because some box does not sum.
    ///
    /// # Errors
    /// As [`Racks::count`].
    pub fn refused(&self) -> Result<u64> {
        (0..self.boxes.len()).map(|number| self.count(number, Counter::UnexpectedTotal)).sum()
    }

    /// All counters, for messages.
    pub fn counted(&self) -> String {
        let all = |number| -> Vec<String> {
            let counts =
                Counter::ALL.iter().map(|&c| (c, self.count(number, c).unwrap_or_default()));
            counts.filter(|(_, n)| *n > 0).map(|(c, n)| format!("{} {n}", c.name())).collect()
        };
        (0..self.boxes.len()).map(|number| all(number).join(", ") + "\n").collect()
    }
}

/// Number of a job's rings whose counters are read.
const MOST_RINGS: u32 = 4;

/// The children of a box.
fn children(lab: &Lab, number: usize) -> Vec<usize> {
    let spec = lab.spec();
    spec.below().filter(|&below| spec.parent(below).unwrap_or(spec.below().end) == number).collect()
}

/// The ranks below a box.
fn ranks_of(lab: &Lab, number: usize) -> Range<u32> {
    let spec = lab.spec();
    if let (Some(&first), Some(&last)) =
        (children(lab, number).first(), children(lab, number).last())
    {
        return ranks_of(lab, first).start..ranks_of(lab, last).end;
    }
    let mut ranks =
        (0..spec.hosts).filter(|&host| spec.rack(host) == Some(number)).map(|host| host as u32);
    let first = ranks.next().unwrap_or_default();
    first..first + 1 + ranks.count() as u32
}

/// A box with the members of its ring, in order. In a box with a parent, the last one is the
/// uplink.
fn members(lab: &Lab, number: usize) -> (&BoxNode, Vec<Member>) {
    let (spine, ranks) = (lab.spec().below().end, lab.spec().hosts as u32);
    let node = if number == spine { lab.box_() } else { lab.leaf(number) };
    let group = |below: &usize| {
        let group = ranks_of(lab, *below);
        Member {
            rank: group.end - 1,
            port: node.rack_port(*below),
            group_mark: group_mark(group.len() as u32),
        }
    };
    let mut members: Vec<_> = children(lab, number).iter().map(group).collect();
    let below = ranks_of(lab, number);
    if members.is_empty() {
        let rank = |rank: u32| Member { rank, port: node.port(rank as usize), group_mark: 0 };
        members = below.clone().map(rank).collect();
    }
    if number != spine {
        let before = (below.start + ranks - 1) % ranks;
        members.push(Member { rank: before, port: BoxNode::UPLINK.to_owned(), group_mark: TOTAL });
    }
    (node, members)
}

fn ring_spec(
    lab: &Lab,
    job: &JobSpec,
    number: usize,
    members: &[Member],
    relaxed: bool,
    ring: u32,
) -> Result<RingSpec> {
    let fragments = Fragments(job.message_size.div_ceil(job.mtu));
    let credit = Messages(job.window).of(fragments).context("too many fragments")?;
    let has_parent = number != lab.spec().below().end;
    let has_groups = !children(lab, number).is_empty();
    let flags = [
        (relaxed, ring_flags::RELAXED),
        (has_parent, ring_flags::UPLINK),
        (has_groups, ring_flags::GROUPS),
        (
            has_parent,
            u32::from(group_mark(ranks_of(lab, number).len() as u32))
                << ring_flags::GROUP_MARK_SHIFT,
        ),
    ];
    let config = RingConfig {
        flags: flags.into_iter().filter(|(is, _)| *is).map(|(_, flag)| flag).sum(),
        members: members.len() as u32,
        slots: abi::ring_slots(credit).context("too many slots")?,
        credit: credit.0,
        mtu: job.mtu,
        ..RingConfig::default()
    };
    Ok(RingSpec { id: RingNumber(1 + ring), cpu: (number as u32 + ring) % 2, config })
}

fn flows(
    lab: &Lab,
    job: &JobSpec,
    ring: &RingSpec,
    members: &[Member],
    ports: &[u32],
    v6: bool,
) -> Vec<FlowSpec> {
    let of_job = Some(ring.id.0 - 1);
    let ip = |rank: u32| {
        let host = lab.host(rank as usize);
        if v6 { host.ipv6(0) } else { host.ip(0) }
    };
    let flow = |(number, (member, &ifindex)): (usize, (&Member, &u32))| {
        let next = (member.rank + 1) % job.ranks;
        FlowSpec {
            ring: ring.id,
            member: Rank(number as u32),
            base_psn: static_connection(member.rank, of_job).first_psn,
            ifindex,
            src: ip(member.rank),
            dst: ip(next),
            qpn: static_connection(next, of_job).receive_qpn,
            src_mac: None,
            group_mark: member.group_mark,
        }
    };
    members.iter().zip(ports).enumerate().map(flow).collect()
}
