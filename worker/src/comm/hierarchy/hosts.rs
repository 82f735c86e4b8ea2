//! Finds out which ranks share a host, and connects rings that have one rank of each host.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use netsum_collective::call::Collective;
use netsum_collective::error::Error;
use netsum_collective::numeric::collectives::{ByteBlocks, Route};
use netsum_collective::numeric::element::into_data;
use netsum_collective::report::Mode;

use super::super::config::{Bootstrap, CommConfig, Hierarchy, InterHostRing, Transport};
use super::super::progress::Driven;
use super::super::session::Session;
use super::areas::Areas;
use crate::local::memory;
use crate::local::place::{self, PLACE_BYTES, Place};
use crate::local::progress::{self, LocalRanks};

/// The hosts of a job, and what this rank shares with the others.
pub(super) struct Hosts {
    pub count: usize,
    /// Whether a rank asks for hierarchical sums of any length.
    pub wants_short: bool,
    pub local_ranks: LocalRanks,
    pub areas: Areas,
    /// The rings of this rank, with their numbers.
    pub rings: Vec<(usize, Driven)>,
}

/// The connections of all ranks.
struct Flat<'a> {
    driven: &'a Driven,
    rank: u32,
    ranks: u32,
}

impl Flat<'_> {
    /// Gathers bytes of all ranks.
    fn gather(&self, own: &[u8]) -> Result<Vec<u8>, Error> {
        let (rank, ranks, block) = (self.rank as usize, self.ranks as usize, own.len());
        let (input, output, route) = (own.to_vec(), vec![0; block * ranks], Route::AllGather);
        let data = ByteBlocks { input, output, route, block, rank, ranks };
        let collective = Collective::AllGather { block: block as u64 };
        let all = self.driven.call_async(collective, None, data, |owned| {
            into_data(owned).map(|ByteBlocks::<Vec<u8>, Vec<u8>> { output, .. }| output)
        })?;
        Ok(all.wait()?.0)
    }

    /// Whether all ranks have succeeded. A rank that has not says why.
    fn agreed<T>(&self, own: &Result<T, String>) -> Result<bool, Error> {
        if let Err(why) = own {
            log::warn!("rank {}: sums are not hierarchical: {why}", self.rank);
        }
        Ok(self.gather(&[own.is_ok().into()])?.iter().all(|ok| *ok != 0))
    }
}

impl Hosts {
    /// Connects the rings of this rank. `None` if sums stay flat.
    ///
    /// # Errors
    /// Of the connections of all ranks.
    pub fn connect(driven: &Driven, config: &CommConfig) -> Result<Option<Self>, Error> {
        let flat = Flat { driven, rank: config.rank, ranks: driven.session.lock().shape.ranks };
        let file = memory::create().map(File::from);
        let host = this_host(config);
        let place = Place {
            host: *host.as_ref().unwrap_or(&0),
            pid: std::process::id(),
            file: file.as_ref().map_or(0, |file| file.as_raw_fd() as u32),
            // AF_XDP has one user of an interface.
            is_willing: host.is_ok()
                && file.is_ok()
                && config.transport != Transport::Xdp
                && config.hierarchy != Hierarchy::Off,
            wants_short: config.hierarchy == Hierarchy::On,
        };
        let all = flat.gather(&place.encode())?;
        let places: Vec<Place> =
            all.as_chunks::<PLACE_BYTES>().0.iter().map(Place::decode).collect();
        let hosts = place::by_host(&places.iter().map(|p| p.host).collect::<Vec<_>>());
        if hosts.len() < 2 || hosts.len() == places.len() || !places.iter().all(|p| p.is_willing) {
            if config.hierarchy == Hierarchy::On {
                log::warn!(
                    "rank {}: sums are not hierarchical: that needs two hosts, two ranks in the \
                     same namespaces at one of them, and no rank with NETSUM_HIERARCHY=off or \
                     NETSUM_TRANSPORT=xdp",
                    flat.rank
                );
            }
            return Ok(None);
        }
        let rings = hosts.iter().map(Vec::len).max().unwrap_or(0);
        // The ranks may have reconnected while they gathered.
        let shape = driven.session.lock().shape;
        let areas = Areas::new(rings, &shape.layout);
        let local_ranks = local_ranks(flat.rank, &hosts, &places, &areas)
            .map_err(|e| format!("cannot share memory with the other ranks of this host: {e}"));
        let shared_memory = flat.agreed(&local_ranks)?;
        let (Ok(local_ranks), true) = (local_ranks, shared_memory) else { return Ok(None) };
        // Rings in their order at all ranks: no rank waits for another one in a later ring.
        let own = (0..rings).filter(|ring| ring % local_ranks.len() == local_ranks.own_place());
        let connected: Result<Vec<_>, String> = own
            .map(|ring| {
                let members: Vec<u32> = hosts.iter().map(|h| h[ring % h.len()]).collect();
                let config = ring_config(config, ring, &members, places.len());
                let joined =
                    Session::new(config).and_then(Driven::new).map_err(|e| e.to_string())?;
                let mode = |driven: &Driven| driven.session.lock().mode();
                if mode(&joined) == Mode::HostRing && mode(flat.driven) == Mode::Box {
                    return Err(format!("the box has no room for ring {ring} of the hosts"));
                }
                Ok((ring, joined))
            })
            .collect();
        let is_connected = flat.agreed(&connected)?;
        let (Ok(rings), true) = (connected, is_connected) else { return Ok(None) };
        let wants_short = places.iter().any(|p| p.wants_short);
        Ok(Some(Self { count: hosts.len(), wants_short, local_ranks, areas, rings }))
    }
}

fn local_ranks(
    rank: u32,
    hosts: &[Vec<u32>],
    places: &[Place],
    areas: &Areas,
) -> io::Result<LocalRanks> {
    let mine = hosts.iter().find(|ranks| ranks.contains(&rank)).ok_or(io::ErrorKind::NotFound)?;
    let own = mine.iter().position(|r| *r == rank).unwrap_or(0);
    let first = places[mine[0] as usize];
    let file = memory::open(first.pid, first.file)?;
    let memory = progress::map(&file, areas.bytes(mine.len()))?;
    let processes: Vec<u32> = mine.iter().map(|r| places[*r as usize].pid).collect();
    LocalRanks::new(memory, own, mine.clone(), &processes)
}

/// The configuration of a ring that has one rank of each host.
fn ring_config(config: &CommConfig, ring: usize, members: &[u32], summands: usize) -> CommConfig {
    let bootstrap = config.bootstrap.of_members(members);
    let rank = members.iter().position(|r| *r == config.rank).unwrap_or(0) as u32;
    // The controller has a group for each ring.
    let group = match (&config.bootstrap, &config.group) {
        (Bootstrap::Static { .. }, _) => None,
        (_, None) => Some(format!("h{ring}")),
        (_, Some(group)) => Some(format!("{group}.h{ring}")),
    };
    CommConfig {
        rank,
        ranks: members.len() as u32,
        bootstrap,
        group,
        hierarchy: Hierarchy::Off,
        inter_host_ring: Some(InterHostRing {
            number: ring as u32,
            ranks: members.to_vec(),
            summands: summands as u32,
        }),
        ..config.clone()
    }
}

fn this_host(_config: &CommConfig) -> io::Result<u64> {
    let host = place::host()?;
    // Unit tests have hosts on one machine.
    #[cfg(test)]
    let host = match _config.ip {
        std::net::IpAddr::V4(ip) => host ^ u64::from(ip.to_bits()),
        std::net::IpAddr::V6(_) => host,
    };
    Ok(host)
}
