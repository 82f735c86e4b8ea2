//! A lab whose boxes have daemons, the manager of several boxes, and their job.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use netsum_demo::{LAYOUT, PATH_MTU};
use netsum_lab::cluster::{Cluster, JobSpec};
use netsum_lab::manager::Manager;
use netsum_lab::{Lab, LabSpec};
use netsum_worker::TAG_BYTES;

use super::failure::Victim;

const NAME: &str = "digits";
const SEALED: &str = "digits-sealed";

/// The data of a job that its ranks need.
#[derive(Clone, Debug)]
pub struct Job {
    pub name: &'static str,
    /// The token with which its ranks authenticate.
    pub token: String,
    /// The address at which its ranks join.
    pub controller: String,
}

/// The whole setup, with one box or several.
pub struct Boxes {
    // Dropped first: it runs in the lab.
    manager: Option<Manager>,
    cluster: Cluster,
    pub job: Job,
}

impl Boxes {
    /// Builds the lab, starts the daemons, and creates the job; with several boxes, at their
    /// manager.
    pub fn start(spec: LabSpec) -> Result<Self> {
        let mut cluster = Cluster::start(spec)?;
        let manager = if cluster.lab().spec().racks == 0 {
            None
        } else {
            cluster.start_leaves()?;
            Some(cluster.start_manager()?)
        };
        let job = create(&cluster, manager.as_ref(), NAME, LAYOUT.message_size)?;
        Ok(Self { manager, cluster, job })
    }

    /// Creates a job for sealed sums. Its messages have room for a tag beside the same floats: so
    /// its sums have the same bits.
    pub fn create_sealed(&self) -> Result<Job> {
        let message_size = LAYOUT.message_size + TAG_BYTES as u32;
        create(&self.cluster, self.manager.as_ref(), SEALED, message_size)
    }

    pub fn lab(&self) -> &Lab {
        self.cluster.lab()
    }

    /// The job's counters of the boxes next to the hosts.
    pub fn counters(&self) -> Result<BTreeMap<String, u64>> {
        let mut all = BTreeMap::new();
        let racks = self.lab().spec().racks;
        for number in if racks == 0 { vec![None] } else { (0..racks).map(Some).collect() } {
            let json = self.cluster.netsum_on(number, &["-j", "stats", NAME])?;
            let counted = parse_counters(&json).with_context(|| {
                format!(
                    "cannot parse the output of netsum \
                     stats: `{json}`"
                )
            })?;
            counted.into_iter().for_each(|(name, count)| *all.entry(name).or_default() += count);
        }
        Ok(all)
    }

    /// Deletes a job.
    pub fn forget(&self, job: &Job) -> Result<()> {
        let delete = ["job", "delete", job.name];
        match &self.manager {
            Some(manager) => manager.netsum(&self.cluster, &delete).map(drop),
            None => self.cluster.netsum(&delete).map(drop),
        }
    }

    pub fn fail(&mut self, victim: &Victim) -> Result<()> {
        match *victim {
            Victim::Manager => self.manager.take().map_or(Ok(()), Manager::kill),
            Victim::Box(number) => self.cluster.kill_box(number),
            Victim::Link { rack, spine } => self.set_link(rack, spine, false),
        }
    }

    pub fn recover(&mut self, victim: &Victim) -> Result<()> {
        match *victim {
            Victim::Manager => self.manager = Some(self.cluster.start_manager()?),
            Victim::Box(number) => self.cluster.start_box(number)?,
            Victim::Link { rack, spine } => self.set_link(rack, spine, true)?,
        }
        Ok(())
    }

    fn set_link(&self, rack: usize, spine: usize, up: bool) -> Result<()> {
        let above = self.lab().spine(spine);
        above.set_link(&above.rack_port(rack), up)
    }

    /// The logs, to be appended to an error.
    pub fn logs(&self) -> String {
        let manager = self.manager.as_ref().map(Manager::log).unwrap_or_default();
        format!("\nlog of the box:\n{}{manager}", self.cluster.daemon_log())
    }
}

/// Creates a job; with several boxes, at their manager.
fn create(
    cluster: &Cluster,
    manager: Option<&Manager>,
    name: &'static str,
    message_size: u32,
) -> Result<Job> {
    let spec = cluster.lab().spec();
    let job = JobSpec {
        mtu: PATH_MTU,
        message_size,
        window: LAYOUT.window,
        // One ring for each spine, to use all of them.
        rings: spec.spines as u32,
        ..JobSpec::new(name, spec.hosts as u32)
    };
    let (token, controller) = match manager {
        Some(manager) => (manager.create(cluster, &job)?, cluster.manager()),
        None => (cluster.create_job(&job)?, cluster.workers()),
    };
    Ok(Job { name, token, controller: controller.to_string() })
}

/// The counters in the output of `netsum stats JOB -j`, without the timing.
fn parse_counters(stats: &str) -> Result<BTreeMap<String, u64>> {
    let all: BTreeMap<String, serde_json::Value> = serde_json::from_str(stats)?;
    Ok(all.into_iter().filter_map(|(name, value)| Some((name, value.as_u64()?))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_next_to_the_timing() {
        let json = r#"{"completed":18040,"steered":3,"timing":{"sampled":64,"ranks":[]}}"#;
        let counters = parse_counters(json).unwrap();
        assert_eq!(
            counters,
            BTreeMap::from([("completed".to_owned(), 18040), ("steered".to_owned(), 3)])
        );
        assert!(parse_counters("error: no job").is_err());
    }
}
