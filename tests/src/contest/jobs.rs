//! Several jobs of netsum at the same time: their ranks share hosts, each with an address of its own there.

use anyhow::{Result, ensure};

use super::{Contestant, PATIENCE};
use crate::LabSpec;
use crate::cluster::{Cluster, JobSpec, RankSpec, program};
use crate::process::Running;

/// Starts jobs with a rank on each host, over links of this MTU; job `k` has the hosts' `k`-th addresses.
///
/// # Errors
/// If a job is refused, or its ranks end.
pub fn start(jobs: u32, job: &JobSpec, link_mtu: u32) -> Result<Contestant> {
    let spec = LabSpec { mtu: link_mtu, ips_per_host: jobs as usize, ..LabSpec::hosts(job.ranks as usize) };
    let cluster = Cluster::start(spec)?;
    let workers = cluster.workers().to_string();
    let mut ranks = Vec::new();
    for k in 0..jobs as usize {
        let job = JobSpec { name: format!("{}{k}", job.name), ..job.clone() };
        let token = cluster.create_job(&job)?;
        let peers: Vec<_> = cluster.lab().hosts().iter().map(|host| host.ip(k)).collect();
        for (rank, host) in cluster.lab().hosts().iter().enumerate() {
            let spec = RankSpec::new(&job, rank, &peers, Some((&workers, &token)));
            let mut command = host.command(program("contest-rank")?);
            command.arg(serde_json::to_string(&spec)?);
            ranks.push(Running::start(&format!("{}, rank {rank}", job.name), &mut command)?);
        }
    }
    let mut contestant = Contestant { name: "netsum", ranks, cluster };
    for rank in &mut contestant.ranks {
        let line = rank.line(PATIENCE)?;
        ensure!(line == "ready", "{}: {line}", contestant.name);
    }
    Ok(contestant)
}
