//! The daemons of all boxes: of one, or of the racks' and the spine's.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use netsum_lab::Lab;
use netsum_lab::lab::BoxNode;

use super::daemon::{Daemon, Job};
use super::link::addresses;

/// Daemons, and their job.
pub struct Boxes {
    /// Of the racks; the spine's or the only box's comes last.
    daemons: Vec<Daemon>,
    pub job: Job,
}

impl Boxes {
    /// Starts them, and creates the job. Where there are several, they are told of the ranks' connections, too.
    pub fn start(lab: &Lab, program: &Path, folder: &Path) -> Result<Self> {
        let (racks, ranks) = (lab.spec().racks, lab.hosts().len());
        let mut nodes = (0..racks).map(|rack| lab.leaf(rack)).chain([lab.box_()]);
        let daemons: Vec<Daemon> =
            nodes.by_ref().map(|node| Daemon::start(node, program, folder)).collect::<Result<_>>()?;
        let spine = daemons.last().context("a box")?;
        if racks == 0 {
            let job = spine.create_job(ranks, &[])?;
            return Ok(Self { daemons, job });
        }
        let (peers, mut groups, mut spine_ports) = (addresses(lab), Vec::new(), Vec::new());
        for (rack, daemon) in daemons[..racks].iter().enumerate() {
            let hosts: Vec<usize> = (0..ranks).filter(|&host| lab.spec().rack(host) == Some(rack)).collect();
            let group = format!("{}-{}", hosts[0], hosts[hosts.len() - 1]);
            let job = daemon.create_job(ranks, &["--members", &group, "--uplink", BoxNode::UPLINK])?;
            let ports = hosts.iter().map(|&host| lab.leaf(rack).port(host));
            daemon.register(&job, &peers, &ports.chain([BoxNode::UPLINK.to_owned()]).collect::<Vec<_>>())?;
            groups.push(group);
            spine_ports.push(lab.box_().rack_port(rack));
        }
        let job = spine.create_job(ranks, &["--groups", &groups.join(",")])?;
        spine.register(&job, &peers, &spine_ports)?;
        Ok(Self { daemons, job })
    }

    /// What the boxes next to the hosts have counted for the job.
    pub fn counters(&self) -> Result<BTreeMap<String, u64>> {
        let mut all = BTreeMap::new();
        let next_to_hosts = &self.daemons[..(self.daemons.len() - 1).max(1)];
        for daemon in next_to_hosts {
            for (name, count) in daemon.counters(&self.job)? {
                *all.entry(name).or_default() += count;
            }
        }
        Ok(all)
    }

    /// Deletes the job.
    pub fn forget(&self) -> Result<()> {
        self.daemons.iter().try_for_each(|daemon| daemon.delete_job(&self.job))
    }

    /// An error if one has ended.
    pub fn check(&mut self) -> Result<()> {
        self.daemons.iter_mut().try_for_each(Daemon::check)
    }

    /// What they have logged, to be appended to an error.
    pub fn said(&self) -> String {
        self.daemons.iter().map(Daemon::said).collect()
    }

    /// Tells them to end, and waits until they have.
    pub fn stop(self) -> Result<()> {
        self.daemons.into_iter().try_for_each(Daemon::stop)
    }
}
