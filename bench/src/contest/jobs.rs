//! Several simultaneous jobs of netsum. Their ranks share hosts; each has an address of its own
//! there.

use anyhow::Result;

use super::{Contestant, start};
use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec};

/// Starts jobs with a rank on each host, over links of this MTU; job `k` has the hosts' `k`-th
/// addresses.
///
/// # Errors
/// If a job is refused, or its ranks end.
pub fn start(jobs: u32, job: &JobSpec, link_mtu: u32) -> Result<Contestant> {
    let spec = LabSpec {
        mtu: link_mtu,
        ips_per_host: jobs as usize,
        ..LabSpec::hosts(job.ranks as usize)
    };
    let cluster = Cluster::start(spec)?;
    let mut ranks = Vec::new();
    for k in 0..jobs as usize {
        let job = JobSpec { name: format!("{}{k}", job.name), ..job.clone() };
        let token = cluster.create_job(&job)?;
        ranks.extend(start::netsum(&cluster, &job, k, Some(&token), true)?);
    }
    Contestant::ready("netsum", ranks, cluster)
}
