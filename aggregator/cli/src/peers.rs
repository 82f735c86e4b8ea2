//! `netsum flow peers`: the flows of netsum's own ranks that join without a daemon.

use std::net::IpAddr;

use netsum_api::v1 as api;
use netsum_common::unmanaged::static_connection;
use netsum_core::JobRing;
use netsum_core::members::RankRange;
use netsum_core::uplinks::Uplinks;

/// The flows of a job through this box, in all its rings. `peers` are the ranks' addresses, `ports`
/// those of the job's members, and `rings` the ranks' rings that the job has here.
///
/// # Errors
/// If something does not fit the job.
pub fn flows(
    job: &api::Job,
    peers: &[IpAddr],
    ports: &[String],
    rings: Option<RankRange>,
) -> Result<Vec<api::Flow>, String> {
    if peers.len() != job.ranks as usize {
        return Err(format!(
            "--peers: {} addresses; job {} has {} ranks",
            peers.len(),
            job.name,
            job.ranks
        ));
    }
    if let Some(rings) = rings.filter(|r| r.last - r.first + 1 != job.rings) {
        let has = job.rings;
        return Err(format!(
            "--rings {rings}: {} rings; job {} has {has}",
            rings.last - rings.first + 1,
            job.name
        ));
    }
    let first = rings.map_or(0, |rings| rings.first);
    let senders = senders(job.ranks, &job.members);
    let uplinks: Option<Uplinks> = job.uplink.parse().ok().filter(|_| !job.uplink.is_empty());
    if ports.len() != senders.len() && !(uplinks.is_some() && ports.len() + 1 == senders.len()) {
        let members =
            if job.members.is_empty() { "all ranks".to_owned() } else { job.members.join(", ") };
        return Err(format!(
            "--ports: {} ports; job {} has {} members: {members}",
            ports.len(),
            job.name,
            senders.len()
        ));
    }
    let of_ring = |ring: u32| {
        let up = uplinks.as_ref().map(|uplinks| uplinks.of(JobRing(ring)));
        let ports = ports.iter().map(String::as_str).chain(up);
        senders.iter().zip(ports).map(move |(&rank, port)| {
            let (next, of_ranks) = ((rank + 1) % job.ranks, Some(first + ring));
            api::Flow {
                ring,
                rank,
                port: port.to_owned(),
                src: peers[rank as usize].to_string(),
                dst: peers[next as usize].to_string(),
                qpn: static_connection(next, of_ranks).receive_qpn.get(),
                psn: static_connection(rank, of_ranks).first_psn.get(),
                ..api::Flow::default()
            }
        })
    };
    Ok((0..job.rings).flat_map(of_ring).collect())
}

/// Whether a job has a flow already.
pub fn is_there(job: &api::Job, flow: &api::Flow) -> bool {
    let key = |f: &api::Flow| {
        (f.ring, f.rank, f.port.clone(), f.src.clone(), f.dst.clone(), f.qpn, f.psn)
    };
    job.flows.iter().any(|had| key(had) == key(flow))
}

/// For each member, the rank that owns its connection: the last of a group, and for the uplink the
/// one before the first.
pub fn senders(ranks: u32, members: &[String]) -> Vec<u32> {
    let span = |member: &String| {
        let (first, last) = member.split_once('-').unwrap_or((member, member));
        Some((first.parse::<u32>().ok()?, last.parse::<u32>().ok()?))
    };
    let spans: Vec<Option<(u32, u32)>> = match members {
        [] => (0..ranks).map(|rank| Some((rank, rank))).collect(),
        members => members.iter().map(span).collect(),
    };
    let first = spans.first().copied().flatten().map_or(0, |(first, _)| first);
    let before = (first + ranks.max(1) - 1) % ranks.max(1);
    spans.into_iter().map(|span| span.map_or(before, |(_, last)| last)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(members: &[&str]) -> api::Job {
        let members = members.iter().map(|&m| m.to_owned()).collect();
        api::Job { name: "train".into(), ranks: 8, rings: 2, members, ..api::Job::default() }
    }

    fn peers() -> Vec<IpAddr> {
        (1..=8).map(|n| IpAddr::from([10, 0, 0, n])).collect()
    }

    fn ports(n: usize) -> Vec<String> {
        (0..n).map(|n| format!("swp{n}")).collect()
    }

    #[test]
    fn a_leaf_has_the_flows_of_its_ranks_and_the_one_that_comes_down() {
        let flows = flows(&job(&["4", "5", "6", "7", "up"]), &peers(), &ports(5), None).unwrap();
        assert_eq!(flows.len(), 10);
        let of = |ring| {
            flows.iter().filter(|f| f.ring == ring).map(|f| (f.rank, &*f.port)).collect::<Vec<_>>()
        };
        assert_eq!(of(1), [(4, "swp0"), (5, "swp1"), (6, "swp2"), (7, "swp3"), (3, "swp4")]);
        let last = &flows[3];
        assert_eq!((&*last.src, &*last.dst), ("10.0.0.8", "10.0.0.1"));
        assert_eq!((last.qpn, last.psn), (0x10_0002, 0xff_ffd8 - 64 - 7));
    }

    #[test]
    fn a_parent_registers_group_flows_and_a_single_box_all() {
        let of = |members: &[&str], n| -> Vec<u32> {
            let flows = flows(&job(members), &peers(), &ports(n), None).unwrap();
            flows.iter().filter(|f| f.ring == 0).map(|f| f.rank).collect()
        };
        assert_eq!(of(&["0-3", "4", "5-7"], 3), [3, 4, 7]);
        assert_eq!(of(&["0-1", "2-3", "up"], 3), [1, 3, 7]);
        assert_eq!(of(&[], 8), [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn of_several_parents_each_ring_has_its_own() {
        let leaf = api::Job {
            rings: 3,
            uplink: "swp9=2,swp10=1".into(),
            ..job(&["0", "1", "2", "3", "up"])
        };
        let below = flows(&leaf, &peers(), &ports(4), None).unwrap();
        let up: Vec<_> = below.iter().filter(|f| f.rank == 7).collect();
        assert_eq!(up.iter().map(|f| &*f.port).collect::<Vec<_>>(), ["swp9", "swp9", "swp10"]);
        // The second parent has the ranks' third ring, as its first.
        let parent = api::Job { rings: 1, ..job(&["0-3", "4-7"]) };
        let above =
            flows(&parent, &peers(), &ports(2), Some(RankRange { first: 2, last: 2 })).unwrap();
        assert_eq!((above[1].ring, above[1].qpn, above[1].psn), (0, up[2].qpn, up[2].psn));
    }

    #[test]
    fn peers_that_do_not_fit_the_job_are_refused_with_its_numbers() {
        let error = flows(&job(&["0-3", "4-7"]), &peers()[..7], &ports(2), None).unwrap_err();
        assert_eq!(error, "--peers: 7 addresses; job train has 8 ranks");
        let error = flows(&job(&["0-3", "4-7"]), &peers(), &ports(3), None).unwrap_err();
        assert_eq!(error, "--ports: 3 ports; job train has 2 members: 0-3, 4-7");
        let three = Some(RankRange { first: 0, last: 2 });
        let error = flows(&job(&["0-3", "4-7"]), &peers(), &ports(2), three).unwrap_err();
        assert_eq!(error, "--rings 0-2: 3 rings; job train has 2");
    }
}
