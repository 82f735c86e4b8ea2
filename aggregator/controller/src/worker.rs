//! The workers' service: requests of ranks, with their job's token.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use netsum_api::v1 as api;
use netsum_api::v1::worker_server::Worker;
use netsum_api::{PROTOCOL, RELEASE};
use netsum_core::membership::{Join, RankReport};
use netsum_core::{
    Action, Connection, Controller, Job, Rank, RankAddress, Refusal, epoch_number, groups,
};
use tonic::{Request, Response, Status};

use super::backend::{Backend, RankLocation};
use super::executor::Executor;
use super::limiter::{Peer, RankEpoch};
use super::message::{
    RpcResult, error_of, job_message, mac_from_text, mac_text, refused, state_message,
};
use super::state::{Inner, Shared};

/// Longest time that a rank may wait for others.
const MAX_JOIN: Duration = Duration::from_secs(3600);

/// Longest name of a job or group, and longest token that is checked, in bytes.
const MAX_NAME: usize = 64 + 1 + 64;
const MAX_TOKEN: usize = 1024;
/// Characters of a rank's abort reason that are passed to the others.
const MAX_REASON: usize = 300;

/// Answers workers.
#[derive(Clone)]
pub struct WorkerService<B> {
    backend: B,
}

impl<B: Backend> WorkerService<B> {
    pub fn new(backend: B) -> Self {
        Self { backend }
    }

    fn shared(&self) -> &Shared<B::Executor> {
        self.backend.shared()
    }

    /// Checks a request's token.
    async fn authorise(&self, peer: Option<Peer>, job: &str, token: &str) -> Result<(), Status> {
        if job.len() > MAX_NAME || token.len() > MAX_TOKEN {
            return Err(Status::unauthenticated("no such job, or the token is wrong"));
        }
        // A group that has ended does not make its job's token wrong.
        let check = || match self.shared().lock().controller.job_for(job, token) {
            Ok(_) | Err(Refusal::NotFound(_)) => Ok(()),
            Err(why) => Err(refused(why)),
        };
        match peer {
            // A group has its job's token.
            Some(peer) => peer.authorise(groups::job_of(job).unwrap_or(job), check).await,
            None => check(),
        }
    }

    fn job(&self, name: &str, token: &str) -> Result<api::Job, Status> {
        let inner = self.shared().lock();
        let job = inner.controller.job_for(name, token).map_err(refused)?;
        let heartbeat = self.shared().heartbeat.as_millis() as u32;
        let message = rank_message(job, heartbeat);
        // The next ranks may get another path MTU than those at work.
        Ok(api::Job { mtu: job.spec.mtu, ..message })
    }

    fn open_group(&self, r: &api::OpenGroupRequest) -> Result<String, Status> {
        let mut guard = self.shared().lock();
        let inner = &mut *guard;
        let Inner { controller, executor, .. } = inner;
        let spec = controller.job_for(&r.job, &r.token).map_err(refused)?.spec.clone();
        executor.admit(controller, &spec).map_err(refused)?;
        let now = Instant::now();
        let open =
            controller.open_group(&r.job, &r.token, &r.group, r.ranks, now).map_err(refused)?;
        let (name, mut why) = (open.name, open.without_rings.map(|why| why.to_string()));
        if !open.actions.is_empty()
            && let Err(error) = inner.carry_out(None, open.actions)
        {
            let actions = inner.controller.remove_rings(&name);
            inner.carry_out(None, actions)?;
            why = Some(error.message().to_owned());
        }
        if let Some(why) = why {
            warn_without_rings(&name, &why);
        }
        Ok(name)
    }

    /// Records why a rank was refused, for the ranks that wait for it.
    fn record(&self, job: &str, rank: u32, refusal: Status) -> Status {
        self.shared().lock().controller.note_refused(
            job,
            Rank(rank),
            &printable(refusal.message()),
        );
        refusal
    }

    /// Adds the address of a rank's connection to a refusal of its address. The two may well
    /// differ, with several addresses on one host or a box reached over another network, but a rank
    /// with a wrong address mostly has the right one there.
    async fn misplaced(&self, refusal: Status, from: Option<IpAddr>, ip: &str) -> Status {
        let Some(from) = from.filter(|from| from.to_string() != ip) else { return refusal };
        let port = self.backend.port_seen(from).await;
        let by = port.map(|port| format!(" by port {port}")).unwrap_or_default();
        let text = format!(
            "{}; its connection comes from {from}{by}: set NETSUM_IP to its address behind one of \
             the box's ports",
            refusal.message()
        );
        Status::new(refusal.code(), text)
    }
}

/// A job as a message for its ranks. Without rings in the box, they have the connections of one.
fn rank_message(job: &Job, heartbeat_ms: u32) -> api::Job {
    let message = job_message(job, |ifindex| ifindex.to_string(), heartbeat_ms, false);
    api::Job { rings: message.rings.max(1), ..message }
}

fn connection(c: Option<api::Connection>, what: &str) -> Result<Connection, Status> {
    let c = c.ok_or_else(|| Status::invalid_argument(format!("{what}: missing")))?;
    Ok(Connection { receive_qpn: c.receive_qpn, send_qpn: c.send_qpn, first_psn: c.first_psn })
}

fn connection_message(c: &Connection) -> api::Connection {
    api::Connection { receive_qpn: c.receive_qpn, send_qpn: c.send_qpn, first_psn: c.first_psn }
}

/// Refuses a rank with another version of the protocol.
fn check_protocol(rank: u32, protocol: u32, release: &str) -> Result<(), Status> {
    if protocol == PROTOCOL {
        return Ok(());
    }
    let theirs = printable(release);
    Err(Status::failed_precondition(format!(
        "rank {rank} runs netsum {theirs} (protocol {protocol}) and the box netsum {RELEASE} \
         (protocol {PROTOCOL}): install the same release on both"
    )))
}

/// Why a box cannot sum for ranks.
const NEIGHBOURS: &str = "so many ranks have one address that neighbours in the ring are on one \
    host, and a box does not see what they send to each other";

fn warn_without_rings(job: &str, why: &str) {
    log::warn!(NETSUM_JOB = job; "job {job}: its ranks sum over the hosts' ring: {why}");
}

/// Warns if neighbours in the ring may send each other packets that bypass the box.
fn warn_of_neighbours(controller: &Controller, job: &str) {
    let Ok(known) = controller.job(job) else { return };
    if let Some((flow, next)) = known.neighbours_behind_one_port() {
        let port = controller.port_name(flow.ifindex);
        log::warn!(
            NETSUM_JOB = job, NETSUM_PORT = port;
            "job {job}: ranks {} and {} are neighbours behind port {port}: their traffic to each \
             other may not reach the box",
            known.sender(flow.member), known.sender(next.member)
        );
    }
}

/// A warning for a rank whose packets arrive with a MAC address other than its own.
fn behind_router(address: &RankAddress, mac: [u8; 6]) -> Option<String> {
    (mac != address.mac).then(|| {
        format!(
            "the box knows {} only by the router {}: it cannot tell this rank from other hosts \
             behind that router, which can forge its packets",
            address.ip,
            mac_text(mac)
        )
    })
}

/// Why a rank is refused if its connection has its router's own address.
fn translated(address: &RankAddress, router: IpAddr) -> String {
    let RankAddress { rank, ip, .. } = address;
    format!(
        "rank {rank}: its address is {ip}, and its connection comes from {router}, the router \
         towards it: addresses are translated (NAT, masquerade) there, and RoCE does not work \
         through that. Exempt packets between {ip} and the box's network from it; or, if the rank \
         runs on the router itself, set NETSUM_IP={router}"
    )
}

/// A rank's request that waits for other ranks. If the request is cancelled, because the rank's
/// process has ended, its place becomes free.
struct Waits<E: Executor> {
    shared: Shared<E>,
    job: String,
    rank: Rank,
    waiter: u64,
    is_over: bool,
}

impl<E: Executor> Drop for Waits<E> {
    fn drop(&mut self) {
        if !self.is_over {
            let mut inner = self.shared.lock();
            inner.waiters.take(self.waiter);
            inner.controller.withdraw(&self.job, self.rank, self.waiter);
        }
    }
}

/// A request's sender, and its content.
fn parts<T>(request: Request<T>) -> (Option<Peer>, T) {
    (request.extensions().get().cloned(), request.into_inner())
}

/// A rank's text, made safe for other users' terminals and logs.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_REASON).collect()
}

#[tonic::async_trait]
impl<B: Backend> Worker for WorkerService<B> {
    async fn describe(&self, request: Request<api::DescribeRequest>) -> RpcResult<api::Job> {
        let (peer, r) = parts(request);
        self.authorise(peer, &r.job, &r.token).await?;
        self.job(&r.job, &r.token).map(Response::new)
    }

    async fn join(&self, request: Request<api::JoinRequest>) -> RpcResult<api::JoinReply> {
        let (peer, r) = parts(request);
        let from = peer.as_ref().map(Peer::ip);
        self.authorise(peer, &r.job, &r.token).await?;
        let a = r.address.ok_or_else(|| Status::invalid_argument("address: missing"))?;
        let rank = a.rank;
        let record = |refusal| self.record(&r.job, rank, refusal);
        check_protocol(rank, r.protocol, &r.release).map_err(record)?;
        let invalid = |what: &str, value: &str, expected: &str| {
            Status::invalid_argument(format!("rank {rank}: {what} `{value}`: {expected}"))
        };
        let address = RankAddress {
            rank: Rank(rank),
            ip: a
                .ip
                .parse()
                .map(|ip: IpAddr| ip.to_canonical())
                .map_err(|_| invalid("ip", &a.ip, "must be an IPv4 or IPv6 address"))?,
            mac: match mac_from_text(&a.mac) {
                Some(mac) => mac,
                None if a.mac.is_empty() => {
                    let no_mac = format!(
                        "rank {rank}: the interface with {} there has no MAC address",
                        a.ip
                    );
                    return Err(record(
                        self.misplaced(Status::failed_precondition(no_mac), from, &a.ip).await,
                    ));
                }
                None => return Err(invalid("mac", &a.mac, "six bytes in hex are needed")),
            },
            rings: a
                .rings
                .into_iter()
                .map(|c| connection(Some(c), "rings"))
                .collect::<Result<_, _>>()?,
            bypass: connection(a.bypass, "bypass")?,
            any_ip_id: a.any_ip_id,
            selective: a.selective,
            largest_mtu: a.largest_mtu,
            ports: [a.next_port, a.previous_port],
        };
        let wait = Duration::from_millis(r.timeout_ms.into()).min(MAX_JOIN);
        let deadline = Instant::now() + wait;
        let RankLocation { ifindex, mac, router } =
            match self.backend.find(rank, &address, wait).await {
                Ok(place) => place,
                Err(status) => return Err(record(self.misplaced(status, from, &a.ip).await)),
            };
        if let Some(router) = router.filter(|by| mac != address.mac && from == Some(*by)) {
            return Err(record(Status::failed_precondition(translated(&address, router))));
        }
        let mut warnings: Vec<String> = behind_router(&address, mac).into_iter().collect();
        let (mut waiting, receiver) = {
            let mut inner = self.shared().lock();
            let (waiter, receiver) = inner.waiters.add();
            let now = Instant::now();
            let before = inner.controller.job(&r.job).ok();
            let (had_rings, last_epoch) =
                before.map_or((false, 0), |job| (!job.rings.is_empty(), job.last_epoch));
            let (job, token) = (r.job.clone(), r.token.as_str().into());
            let (ranks, epoch) = (r.ranks, r.epoch);
            let join = Join { job, token, address, ifindex, mac, ranks, epoch, deadline, waiter };
            let actions = match inner.controller.join(join, now) {
                Ok(actions) => actions,
                Err(refusal) => {
                    inner.waiters.take(waiter);
                    drop(inner);
                    return Err(record(refused(refusal)));
                }
            };
            let begins = actions.iter().any(|a| matches!(a, Action::ActivateRing(..)));
            let now_without = |job: &Job| job.is_summed_by_hosts() && job.last_epoch != last_epoch;
            if had_rings && inner.controller.job(&r.job).is_ok_and(now_without) {
                warn_without_rings(&r.job, NEIGHBOURS);
            }
            // If a rank only waits, nothing has to be written.
            if !actions.is_empty() {
                inner.carry_out(Some(&r.job), actions)?;
            }
            if begins {
                warn_of_neighbours(&inner.controller, &r.job);
            }
            let (shared, job) = (self.shared().clone(), r.job.clone());
            (Waits { shared, job, rank: Rank(rank), waiter, is_over: false }, receiver)
        };
        let answer = receiver.await;
        waiting.is_over = true;
        let epoch = answer
            .map_err(|_| Status::unavailable("the controller is stopping"))?
            .map_err(refused)?;
        let inner = self.shared().lock();
        let job = inner.controller.job_for(&r.job, &r.token).map_err(refused)?;
        let Some(current) = job.epoch.as_ref().filter(|e| e.number == epoch) else {
            return Err(Status::failed_precondition(format!(
                "job `{}` has ended before it began",
                r.job
            )));
        };
        let in_ring = current.ring.iter().map(|rank| &current.ranks[rank.0 as usize]);
        let ranks = in_ring.map(|a| api::RankAddress {
            rank: a.rank.0,
            ip: a.ip.to_string(),
            mac: mac_text(a.mac),
            rings: a.rings.iter().map(connection_message).collect(),
            bypass: Some(connection_message(&a.bypass)),
            any_ip_id: a.any_ip_id,
            selective: a.selective,
            largest_mtu: a.largest_mtu,
            next_port: a.ports[0],
            previous_port: a.ports[1],
        });
        let (may_fall_back, is_summed_by_hosts) =
            (job.spec.host_ring_fallback, job.is_summed_by_hosts());
        let (ranks, on_host_ring) =
            (ranks.collect(), current.on_host_ring && (may_fall_back || is_summed_by_hosts));
        if is_summed_by_hosts && !job.spec.is_group && rank == 0 {
            warnings.push(format!(
                "the hosts' ring makes sums that are not hierarchical: {NEIGHBOURS}"
            ));
        }
        let heartbeat = self.shared().heartbeat.as_millis() as u32;
        let job = Some(rank_message(job, heartbeat));
        Ok(Response::new(api::JoinReply { job, ranks, on_host_ring, warnings }))
    }

    async fn heartbeat(
        &self,
        request: Request<api::HeartbeatRequest>,
    ) -> RpcResult<api::HeartbeatReply> {
        let (peer, r) = parts(request);
        self.authorise(peer.clone(), &r.job, &r.token).await?;
        if let Some(peer) = peer {
            peer.record_heartbeat(RankEpoch { job: r.job.clone(), rank: r.rank, epoch: r.epoch });
        }
        let mut guard = self.shared().lock();
        let inner = &mut *guard;
        let now = Instant::now();
        let rank = Rank(r.rank);
        let job = match inner.controller.heartbeat(
            &r.job,
            &r.token,
            rank,
            r.epoch,
            r.on_host_ring,
            now,
        ) {
            // After a boot, groups are not there until their ranks reconnect, as with jobs.
            Err(Refusal::NotFound(_)) => {
                let state = api::JobState::Waiting.into();
                let program_generation = inner.executor.program_generation(&r.job);
                let reply = api::HeartbeatReply { state, program_generation, ..Default::default() };
                return Ok(Response::new(reply));
            }
            job => job.map_err(refused)?,
        };
        let has_rings = !job.rings.is_empty() && !job.is_summed_by_hosts();
        let (state, error) = (state_message(&job.state).into(), error_of(job));
        let epoch = epoch_number(job);
        let path_test = job.epoch.as_ref().map_or(0, |epoch| epoch.path_test);
        let reconnect = job.epoch.as_ref().is_some_and(|epoch| epoch.reconnect);
        // A rank that lives soon sends a heartbeat over another connection. It notices that the old
        // one was reset when it uses it, and a lost SYN takes a second.
        let after = (self.shared().heartbeat * 5 / 2).max(Duration::from_secs(3));
        let ended = job.epoch.iter().flat_map(|epoch| epoch.ended(now, after));
        let ended_ranks = ended.map(|rank| rank.0).collect();
        inner.controller.path_test_acknowledged(
            &r.job,
            Rank(r.rank),
            r.epoch,
            r.acknowledged_path_test,
        );
        let report = RankReport { is_sealed: r.sealed, underflows: r.underflows };
        inner.controller.set_report(&r.job, Rank(r.rank), r.epoch, report);
        let program_generation =
            if has_rings { inner.executor.program_generation(&r.job) } else { 0 };
        Ok(Response::new(api::HeartbeatReply {
            state,
            error,
            epoch,
            reconnect,
            program_generation,
            path_test,
            ended_ranks,
        }))
    }

    async fn leave(&self, request: Request<api::LeaveRequest>) -> RpcResult<api::LeaveReply> {
        let (peer, r) = parts(request);
        self.authorise(peer, &r.job, &r.token).await?;
        let mut inner = self.shared().lock();
        let actions =
            inner.controller.leave(&r.job, &r.token, Rank(r.rank), r.epoch).map_err(refused)?;
        inner.carry_out(Some(&r.job), actions)?;
        Ok(Response::new(api::LeaveReply {}))
    }

    async fn abort(&self, request: Request<api::AbortRequest>) -> RpcResult<api::AbortReply> {
        let (peer, r) = parts(request);
        self.authorise(peer, &r.job, &r.token).await?;
        let mut inner = self.shared().lock();
        let ports = inner.controller.job(&r.job).map(Job::flow_ports).unwrap_or_default();
        let actions = inner
            .controller
            .abort(&r.job, &r.token, Rank(r.rank), r.epoch, &printable(&r.reason))
            .map_err(refused)?;
        if !actions.is_empty() {
            self.backend.job_aborted(r.job.clone(), ports);
        }
        // Its groups end, too.
        inner.carry_out(None, actions)?;
        Ok(Response::new(api::AbortReply {}))
    }

    async fn explain_missing_packets(
        &self,
        request: Request<api::ExplainMissingPacketsRequest>,
    ) -> RpcResult<api::ExplainMissingPacketsReply> {
        let (peer, r) = parts(request);
        self.authorise(peer, &r.job, &r.token).await?;
        self.backend.explain_missing_packets(r).await.map(Response::new)
    }

    async fn open_group(&self, request: Request<api::OpenGroupRequest>) -> RpcResult<api::Job> {
        let (peer, r) = parts(request);
        self.authorise(peer, &r.job, &r.token).await?;
        let name = WorkerService::open_group(self, &r)?;
        self.job(&name, &r.token).map(Response::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_is_known_by_its_router_alone_is_warned() {
        let c = || Connection { receive_qpn: 1, send_qpn: 2, first_psn: 3 };
        let address = RankAddress {
            rank: Rank(0),
            ip: [10, 0, 0, 1].into(),
            mac: [2, 0, 0, 0, 0, 1],
            rings: vec![c()],
            bypass: c(),
            any_ip_id: false,
            selective: true,
            largest_mtu: 0,
            ports: [0; 2],
        };
        assert_eq!(behind_router(&address, address.mac), None);
        let warning = behind_router(&address, [2, 0, 0, 0, 0, 9]).unwrap();
        assert!(
            warning.starts_with("the box knows 10.0.0.1 only by the router 02:00:00:00:00:09"),
            "{warning}"
        );
        let why = translated(&address, [10, 0, 0, 9].into());
        let expected = "rank 0: its address is 10.0.0.1, and its connection comes from 10.0.0.9";
        assert!(why.starts_with(expected), "{why}");
    }
}
