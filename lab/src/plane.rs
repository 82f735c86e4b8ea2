//! A data plane without a daemon: the test itself loads it, with flows numbered as for
//! [`Bootstrap::Static`].
//!
//! [`Bootstrap::Static`]: netsum_worker::Bootstrap::Static

use anyhow::{Context, Result};
use netsum_common::abi::{self, Fragments, Messages, RingConfig, RingNumber};
use netsum_common::counters::Counter;
use netsum_common::unmanaged::static_connection;
use netsum_core::Rank;
use netsum_core::plane::{FlowSpec, RingSpec};
use netsum_dataplane::{BpfDataPlane, DataPlane, count};

use crate::Lab;
use crate::cluster::{JobSpec, RankHost};

/// The programs on all ports of a lab's box.
pub struct Plane<'a> {
    lab: &'a Lab,
    plane: BpfDataPlane,
    rings: u32,
}

impl<'a> Plane<'a> {
    /// Loads the programs; [`Plane::attach`] starts them.
    pub fn load(lab: &'a Lab) -> Result<Self> {
        let plane = BpfDataPlane::load(&[0, 1])?;
        Ok(Self { lab, plane, rings: 0 })
    }

    fn port(&self, host: usize) -> Result<u32> {
        self.lab.box_().ifindex(&self.lab.box_().port(host))
    }

    /// Attaches the programs to all ports.
    pub fn attach(&mut self) -> Result<()> {
        for host in 0..self.lab.hosts().len() {
            let port = self.port(host)?;
            self.lab.box_().enter(|| self.plane.attach(port))?;
        }
        Ok(())
    }

    /// Detaches the programs: the box is then a plain bridge.
    pub fn detach(&mut self) -> Result<()> {
        for host in 0..self.lab.hosts().len() {
            let port = self.port(host)?;
            self.plane.detach(port)?;
        }
        Ok(())
    }

    /// Makes a job's rings and registers its flows.
    pub fn add(&mut self, job: &JobSpec, places: &[RankHost]) -> Result<()> {
        let fragments = Fragments(job.message_size.div_ceil(job.mtu));
        let credit = Messages(job.window).of(fragments).context("too many fragments")?;
        for ring_of_job in 0..job.rings {
            self.rings += 1;
            let config = RingConfig {
                members: job.ranks,
                slots: abi::ring_slots(credit).context("too many slots")?,
                credit: credit.0,
                mtu: job.mtu,
                ..RingConfig::default()
            };
            let ring = RingSpec { id: RingNumber(self.rings), cpu: self.rings % 2, config };
            let ports =
                places.iter().map(|place| self.port(place.0)).collect::<Result<Vec<_>>>()?;
            let ip = |rank: u32| {
                let (host, k) = places[rank as usize];
                self.lab.host(host).ip(k)
            };
            let mut flows = Vec::new();
            for rank in 0..job.ranks {
                let next = (rank + 1) % job.ranks;
                flows.push(FlowSpec {
                    ring: ring.id,
                    member: Rank(rank),
                    base_psn: static_connection(rank, Some(ring_of_job)).first_psn,
                    ifindex: ports[rank as usize],
                    src: ip(rank),
                    dst: ip(next),
                    qpn: static_connection(next, Some(ring_of_job)).receive_qpn,
                    src_mac: None,
                    group_mark: 0,
                });
            }
            // Interface indices are only valid in the box's namespace.
            let plane = &mut self.plane;
            self.lab.box_().enter(|| -> Result<()> {
                plane.create_ring(&ring)?;
                flows.iter().try_for_each(|flow| plane.add_flow(flow))?;
                plane.activate_ring(&ring, &ports)
            })?;
        }
        Ok(())
    }

    /// A counter, summed over all rings and the packets of no ring.
    pub fn count(&self, counter: Counter) -> Result<u64> {
        (0..=self.rings)
            .map(RingNumber)
            .map(|ring| Ok(count(&self.plane.counters(ring)?, counter)))
            .sum()
    }
}
