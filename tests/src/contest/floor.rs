//! The floor under all-reduces in the box: the same packets go over the same links, and nothing is summed, verified, copied or
//! acknowledged (`bench_floor.rs`). Ranks over UDP sockets that want sums in such packets take longer.
//!
//! Nothing is ever sent again: a host has no more packets in flight than a veth's queue takes, so none is lost; were one, its host
//! would say so, and the run fail. Hosts send to a multicast group that all of them belong to, so results need no destination of their own.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context, Result, bail};
use aya::Ebpf;
use aya::maps::{Array, DevMap};
use aya::programs::Xdp;
use aya::programs::xdp::XdpMode;
use netsum_common::floor::{FloorConfig, PROGRAM, maps};
use netsum_common::live;
use serde::{Deserialize, Serialize};

use crate::cluster::{Cluster, JobSpec, program};
use crate::dataplane_bench::OBJECT;
use crate::process::Running;
use crate::{Host, netns};

/// Packets that a veth with an XDP program has room for (`VETH_RING_SIZE` in drivers/net/veth.c), less some for other traffic.
const QUEUE: u32 = 256 - 32;

/// What `floor-rank` is started with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FloorRank {
    /// Its number.
    pub rank: u32,
    /// Ranks.
    pub ranks: u32,
    /// Its address.
    pub ip: Ipv4Addr,
    /// Payload of each packet in bytes.
    pub mtu: usize,
    /// Packets in flight.
    pub window: usize,
}

/// Puts the program on all ports of the box. They stay until what is returned is dropped.
pub(super) fn attach(cluster: &Cluster, checksums: bool) -> Result<Ebpf> {
    let lab = cluster.lab();
    let ports: Vec<u32> =
        (0..lab.hosts().len()).map(|i| lab.box_().ifindex(&lab.box_().port(i))).collect::<Result<_>>()?;
    if checksums {
        // They are in the packets from the start: a redirect forgets that they have still to be computed.
        for host in lab.hosts() {
            netns::output(host.command("ethtool").args(["-K", Host::INTERFACE, "tx", "off"]))?;
        }
    }
    let mut ebpf = Ebpf::load(OBJECT).context("the kernel does not take the maps of the floor's program")?;
    let IpAddr::V4(source) = lab.box_().ip() else { bail!("the box has no IPv4 address") };
    let config =
        FloorConfig { ranks: ports.len() as u32, checksums: checksums.into(), source: source.octets() };
    Array::try_from(ebpf.map_mut(maps::CONFIG).context(maps::CONFIG)?)?.set(0, config, 0)?;
    // Ports are found by number in the namespace of the thread that asks.
    lab.box_().enter(|| -> Result<()> {
        let mut clones = DevMap::try_from(ebpf.map_mut(live::maps::PORTS).context(live::maps::PORTS)?)?;
        for (rank, &port) in (0..).zip(&ports) {
            clones.set(rank, port, None, 0)?;
        }
        let program: &mut Xdp = ebpf.program_mut(PROGRAM).context(PROGRAM)?.try_into()?;
        program.load().context("the kernel does not take the floor's program")?;
        for &port in &ports {
            program.attach_to_if_index(port, XdpMode::Driver).with_context(|| format!("port {port}"))?;
        }
        Ok(())
    })?;
    Ok(ebpf)
}

/// Starts the ranks, one on each host, with a job's window and packets.
pub(super) fn ranks(cluster: &Cluster, job: &JobSpec) -> Result<Vec<Running>> {
    let window = (job.window * job.message_size.div_ceil(job.mtu)).min(QUEUE) as usize;
    let rank = |(rank, host): (u32, &Host)| {
        let IpAddr::V4(ip) = host.ip(0) else { bail!("{} has no IPv4 address", host.name()) };
        let spec = FloorRank { rank, ranks: job.ranks, ip, mtu: job.mtu as usize, window };
        let mut command = host.command(program("floor-rank")?);
        Running::start(&format!("the floor's rank {rank}"), command.arg(serde_json::to_string(&spec)?))
    };
    (0..).zip(cluster.lab().hosts()).map(rank).collect()
}
