//! Requests to the daemon, as arbitrary bytes and as sensible messages, through the controller to
//! the data plane's orders: memory, rings and flows must be accounted for after every request.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use arbitrary::{Result, Unstructured};
use netsum_api::v1 as api;
use netsum_common::abi::{FlowKey, MAX_RINGS, RingNumber};
use netsum_common::serial::{MASK, Psn, Qpn};
use netsum_common::wire::{InBandToken, JobHeader};
use netsum_controller::message::{job_spec, mac_from_text};
use netsum_core::groups::job_of;
use netsum_core::in_band::Outcome;
use netsum_core::membership::Join;
use netsum_core::plane::{FirstPacket, FlowSpec, RingSpec};
use netsum_core::pool::job_memory;
use netsum_core::{
    Action, Connection, Controller, JobRing, PortInfo, Rank, RankAddress, State, epoch_number,
};
use prost::Message;

/// Runs a sequence of requests.
pub fn run(input: &[u8]) {
    let _ = sequence(&mut Unstructured::new(input));
}

const MEMORY: u64 = 8 << 20;

/// The data plane's state by its orders.
#[derive(Default)]
struct PlaneState {
    rings: BTreeMap<RingNumber, RingSpec>,
    flows: Vec<(FlowKey, RingNumber)>,
    active: BTreeSet<RingNumber>,
    /// Tokens of jobs that are set up in band, by the number that stands for the job.
    in_band_tokens: BTreeMap<InBandToken, RingNumber>,
}

struct System {
    controller: Controller,
    plane_state: PlaneState,
    /// Ranks that wait for an answer to `join`.
    waiting: BTreeSet<u64>,
    waiters: u64,
    now: Instant,
}

/// A sensible message, or arbitrary bytes; encoded as it is received.
fn message<M: Message + Default>(u: &mut Unstructured, sensible: M) -> Result<Option<M>> {
    if u.ratio(1u8, 8u8)? {
        let len = u.int_in_range(0..=100usize)?.min(u.len());
        return Ok(M::decode(u.bytes(len)?).ok());
    }
    let mut bytes = sensible.encode_to_vec();
    if u.ratio(1u8, 8u8)? && !bytes.is_empty() {
        let at = u.choose_index(bytes.len())?;
        bytes[at] = u.arbitrary()?;
    }
    Ok(M::decode(&bytes[..]).ok())
}

fn name(u: &mut Unstructured) -> Result<String> {
    Ok((*u.choose(&["a", "a", "b", "a/g", "", "A b"])?).into())
}

fn token(u: &mut Unstructured) -> Result<String> {
    Ok((*u.choose(&["t", "t", "t", "t", "x", ""])?).into())
}

/// A number that is right, nearly right, or arbitrary.
fn number(u: &mut Unstructured, right: &[u32]) -> Result<u32> {
    match u.int_in_range(0..=15u8)? {
        0 => u.arbitrary(),
        1 => Ok(u.choose(right)?.wrapping_sub(1)),
        2 => Ok(u.choose(right)?.wrapping_mul(2)),
        _ => Ok(*u.choose(right)?),
    }
}

fn ip(u: &mut Unstructured, rank: u32) -> Result<String> {
    Ok(match u.int_in_range(0..=7u8)? {
        0 => format!("fd00::{rank:x}"),
        1 => "10.0.0.1".into(),
        2 => "here".into(),
        _ => format!("10.0.0.{}", rank & 0xff),
    })
}

impl System {
    fn new() -> Self {
        let mut controller = Controller::new(MEMORY, 2, Duration::from_secs(10));
        let port =
            |i: u32| PortInfo { name: format!("p{i}"), ifindex: 10 + i, mtu: 1500, router: None };
        controller.set_ports((0..3).map(port).collect());
        let waiting = BTreeSet::new();
        Self {
            controller,
            plane_state: PlaneState::default(),
            waiting,
            waiters: 0,
            now: Instant::now(),
        }
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        let plane_state = &mut self.plane_state;
        for action in actions {
            match action {
                Action::ResetCounters(ring) => assert!((1..MAX_RINGS).contains(&ring.0)),
                Action::CreateRing(ring) => {
                    assert!((1..MAX_RINGS).contains(&ring.id.0) && ring.cpu < 2);
                    assert!(
                        ring.config.slots.is_power_of_two()
                            && ring.config.slots / 2 >= ring.config.credit
                            && ring.config.credit > 0
                    );
                    let before = plane_state.rings.insert(ring.id, ring);
                    assert!(before.is_none(), "the ring exists already: {before:?}");
                }
                Action::AddFlow(flow) => {
                    let ring = &plane_state.rings[&flow.ring];
                    assert!(flow.member.0 < ring.config.members, "{flow:?}");
                    assert_eq!(flow.src.is_ipv4(), flow.dst.is_ipv4(), "{flow:?}");
                    let taken = plane_state.flows.iter().any(|(key, _)| *key == flow.key());
                    assert!(!taken, "two flows with one key: {flow:?}");
                    plane_state.flows.push((flow.key(), flow.ring));
                }
                Action::ActivateRing(ring, ports) => {
                    assert_eq!(plane_state.rings.get(&ring.id), Some(&ring));
                    assert_eq!(ports.len(), ring.config.members as usize);
                    let flows = plane_state.flows.iter().filter(|(_, r)| *r == ring.id).count();
                    assert_eq!(flows, ring.config.members as usize, "active without all flows");
                    plane_state.active.insert(ring.id);
                }
                Action::DeleteRing { ring, flows, .. } => {
                    assert!(plane_state.rings.remove(&ring).is_some());
                    plane_state.active.remove(&ring);
                    plane_state.flows.retain(|(key, _)| !flows.contains(key));
                    assert!(
                        plane_state.flows.iter().all(|(_, r)| *r != ring),
                        "a flow without a ring"
                    );
                }
                Action::ForgetEnded(gone) => {
                    let at_work = |key| plane_state.flows.iter().any(|(k, _)| k == key);
                    assert!(!gone.iter().any(at_work), "an active flow is forgotten");
                }
                Action::AddInBandToken(token, job) => {
                    assert!(plane_state.rings.contains_key(&job.job), "the job has no ring yet");
                    let before = plane_state.in_band_tokens.insert(token, job.job);
                    assert!(before.is_none(), "two jobs with one token");
                }
                Action::RemoveInBandToken(token) => {
                    assert!(plane_state.in_band_tokens.remove(&token).is_some())
                }
                Action::Reply { waiter, .. } => {
                    assert!(self.waiting.remove(&waiter), "answered twice")
                }
            }
        }
    }

    /// Checks that nothing is lost or counted twice.
    fn check(&self) {
        let jobs = || self.controller.jobs();
        let memory: u64 = jobs().map(|j| job_memory(&j.spec, j.slots)).sum();
        assert_eq!(self.controller.memory_used(), memory);
        assert!(memory <= MEMORY);
        let rings: BTreeMap<RingNumber, RingSpec> =
            jobs().flat_map(|j| &j.rings).map(|r| (r.id, r.clone())).collect();
        assert_eq!(rings, self.plane_state.rings);
        let mut flows: Vec<_> = jobs().flat_map(|j| &j.flows).map(|f| (f.key(), f.ring)).collect();
        let mut plane_flows = self.plane_state.flows.clone();
        let order = |(key, ring): &(FlowKey, RingNumber)| (key.dst_ip, key.qpn, *ring);
        flows.sort_by_key(order);
        plane_flows.sort_by_key(order);
        assert_eq!(flows, plane_flows);
        let active: BTreeSet<RingNumber> = jobs()
            .filter(|j| j.state == State::Active)
            .flat_map(|j| &j.rings)
            .map(|r| r.id)
            .collect();
        assert_eq!(active, self.plane_state.active);
        let in_band_tokens: BTreeMap<InBandToken, RingNumber> = jobs()
            .filter(|j| j.spec.in_band)
            .map(|j| (j.spec.token.in_band(), j.rings[0].id))
            .collect();
        assert_eq!(in_band_tokens, self.plane_state.in_band_tokens);
        for group in jobs().filter(|j| j.spec.is_group) {
            let job = job_of(&group.spec.name).map(|job| self.controller.job(job));
            assert!(job.is_some_and(|job| job.is_ok()), "{} without its job", group.spec.name);
        }
    }

    fn create(&mut self, u: &mut Unstructured) -> Result<()> {
        let sensible = api::CreateJobRequest {
            name: name(u)?,
            ranks: number(u, &[2, 3, 64])?,
            mtu: number(u, &[256, 1024])?,
            message_size: number(u, &[1024, 64, 65536])?.into(),
            window: number(u, &[1, 2, 16])?,
            rings: number(u, &[1, 1, 2, 8, 255])?,
            icrc: "verify".into(),
            order: "in-order".into(),
            token: if u.ratio(3u8, 4u8)? { "t" } else { "u" }.into(),
            in_band: u.ratio(1u8, 3u8)?,
            tenant: String::new(),
            members: (*u.choose(&["", "", "", "0-1", "1"])?).into(),
            groups: (*u.choose(&["", "", "", "2-3", "0-0,1-1"])?).into(),
            uplink: (*u.choose(&["", "", "p0"])?).into(),
            ring_order: String::new(),
            host_ring_fallback: u.ratio(1u8, 4u8)?,
            min_ranks: if u.ratio(1u8, 4u8)? { u.int_in_range(1..=4)? } else { 0 },
            dtype: (*u.choose(&["i32", "i32", "f32", "bf16"])?).into(),
            lsb: (*u.choose(&["", "", "-40", "60", "-121", "x"])?).into(),
        };
        let Some(r) = message(u, sensible)? else { return Ok(()) };
        // The daemon would make a random one, and a run would not be reproducible.
        let token = if r.token.is_empty() { "v".into() } else { r.token };
        let Ok(spec) = job_spec(api::CreateJobRequest { token, ..r }) else { return Ok(()) };
        let answer = self.controller.create_job(spec);
        self.answered(answer);
        Ok(())
    }

    fn answered(&mut self, answer: std::result::Result<Vec<Action>, netsum_core::Refusal>) -> bool {
        match answer {
            Ok(actions) => {
                self.carry_out(actions);
                true
            }
            Err(refusal) => {
                assert!(!refusal.to_string().is_empty());
                false
            }
        }
    }

    fn add_flow(&mut self, u: &mut Unstructured) -> Result<()> {
        let rank = number(u, &[0, 1, 2])?;
        let sensible = api::AddFlowRequest {
            job: name(u)?,
            flow: Some(api::Flow {
                ring: number(u, &[0, 0, 1])?,
                rank,
                port: String::new(),
                src: ip(u, rank)?,
                dst: ip(u, rank.wrapping_add(1))?,
                qpn: number(u, &[16, 17, 18, 0xff_ffff])?,
                psn: number(u, &[0, 5])?,
                src_mac: String::new(),
                seen: None,
            }),
        };
        let Some(r) = message(u, sensible)? else { return Ok(()) };
        let Some(f) = r.flow else { return Ok(()) };
        let (Ok(src), Ok(dst)) = (f.src.parse::<IpAddr>(), f.dst.parse()) else { return Ok(()) };
        let src_mac = mac_from_text(&f.src_mac);
        // The daemon refuses numbers of more than 24 bits.
        let (Some(qpn), 0..=MASK) = (Qpn::checked(f.qpn), f.psn) else { return Ok(()) };
        let (ring, rank, base_psn) = (RingNumber::NONE, Rank(f.rank), Psn::new(f.psn));
        let flow = FlowSpec {
            ring,
            member: rank,
            base_psn,
            ifindex: 10,
            src,
            dst,
            qpn,
            src_mac,
            group_mark: 0,
        };
        let answer = self.controller.add_flow(&r.job, JobRing(f.ring), flow);
        self.answered(answer);
        Ok(())
    }

    fn join(&mut self, u: &mut Unstructured) -> Result<()> {
        let job = name(u)?;
        let spec = self.controller.job(&job).ok();
        let (ranks, rings) = spec.map_or((2, 1), |j| (j.spec.ranks, j.rings.len()));
        let rank = match u.ratio(1u8, 16u8)? {
            true => u.arbitrary()?,
            false => u.int_in_range(0..=ranks.min(3))?,
        };
        let rings = if u.ratio(1u8, 16u8)? { u.int_in_range(0..=3)? } else { rings };
        let base =
            16 * u.int_in_range(0..=3u32)? + if u.ratio(3u8, 4u8)? { 64 * (rank % 4) } else { 0 };
        let c = |n: u32| api::Connection {
            receive_qpn: base + 2 * n,
            send_qpn: base + 2 * n + 1,
            first_psn: n,
        };
        let sensible = api::JoinRequest {
            job,
            token: token(u)?,
            address: Some(api::RankAddress {
                rank,
                ip: ip(u, rank)?,
                mac: "02:00:00:00:00:01".into(),
                rings: (0..rings as u32).map(|r| c(r + 1)).collect(),
                bypass: Some(c(0)),
                any_ip_id: false,
                selective: true,
                largest_mtu: 0,
                next_port: 4791,
                previous_port: 4791,
            }),
            epoch: u.int_in_range(0..=3)?,
            timeout_ms: u.arbitrary::<u16>()? as u32,
            ranks: u.int_in_range(0..=4)?,
            ..Default::default()
        };
        let Some(r) = message(u, sensible)? else { return Ok(()) };
        let Some(a) = r.address else { return Ok(()) };
        let (Ok(ip), Some(mac), Some(bypass)) = (a.ip.parse(), mac_from_text(&a.mac), a.bypass)
        else {
            return Ok(());
        };
        let c = |c: api::Connection| Connection {
            receive_qpn: c.receive_qpn,
            send_qpn: c.send_qpn,
            first_psn: c.first_psn,
        };
        self.waiters += 1;
        let join = Join {
            job: r.job,
            token: r.token.into(),
            address: RankAddress {
                rank: Rank(a.rank),
                ip,
                mac,
                rings: a.rings.into_iter().map(c).collect(),
                bypass: c(bypass),
                any_ip_id: a.any_ip_id,
                selective: a.selective,
                largest_mtu: a.largest_mtu,
                ports: [a.next_port, a.previous_port],
            },
            ifindex: 10,
            mac,
            ranks: r.ranks,
            epoch: r.epoch,
            deadline: self.now + Duration::from_millis(r.timeout_ms.into()),
            waiter: self.waiters,
        };
        self.waiting.insert(self.waiters);
        let answer = self.controller.join(join, self.now);
        if !self.answered(answer) {
            // The refusal is the answer.
            assert!(self.waiting.remove(&self.waiters));
        }
        Ok(())
    }

    fn open_group(&mut self, u: &mut Unstructured) -> Result<()> {
        let known = self.controller.jobs().find(|j| !j.spec.is_group).map(|j| j.spec.name.clone());
        let sensible = api::OpenGroupRequest {
            job: known.map_or_else(|| name(u), Ok)?,
            token: token(u)?,
            group: (*u.choose(&["g", "g", "h", ""])?).into(),
            ranks: number(u, &[2, 3])?,
        };
        let Some(r) = message(u, sensible)? else { return Ok(()) };
        let api::OpenGroupRequest { job, token, group, ranks } = r;
        let answer = self.controller.open_group(&job, &token, &group, ranks, self.now);
        let opened = answer.as_ref().ok().filter(|open| !open.actions.is_empty());
        let opened = opened.map(|open| open.name.clone());
        self.answered(answer.map(|open| open.actions));
        // The daemon's data plane may fail to create the rings.
        if let Some(name) = opened
            && u.ratio(1u8, 8u8)?
        {
            let actions = self.controller.remove_rings(&name);
            self.carry_out(actions);
        }
        if u.ratio(1u8, 2u8)? {
            let name = format!("{job}/{group}");
            self.join_group(&name, &token);
            if u.ratio(1u8, 2u8)? {
                self.leave_group(&name, &token);
            }
        }
        Ok(())
    }

    /// All ranks of a group join it, as those that open one do.
    fn join_group(&mut self, name: &str, token: &str) {
        let Ok(group) = self.controller.job(name) else { return };
        let (ranks, rings) = (group.spec.ranks, group.rings.len().max(1) as u32);
        for rank in 0..ranks {
            let c = |n: u32| Connection {
                receive_qpn: 0x1000 * (rank + 1) + 2 * n,
                send_qpn: 0x1000 * (rank + 1) + 2 * n + 1,
                first_psn: n,
            };
            let mac = [2, 0, 0, 0, 0, 1];
            self.waiters += 1;
            self.waiting.insert(self.waiters);
            let join = Join {
                job: name.to_owned(),
                token: token.into(),
                address: RankAddress {
                    rank: Rank(rank),
                    ip: [10, 0, 0, rank as u8].into(),
                    mac,
                    rings: (1..=rings).map(c).collect(),
                    bypass: c(0),
                    any_ip_id: false,
                    selective: true,
                    largest_mtu: 0,
                    ports: [4791; 2],
                },
                ifindex: 10,
                mac,
                ranks: 0,
                epoch: 0,
                deadline: self.now + Duration::from_secs(60),
                waiter: self.waiters,
            };
            let answer = self.controller.join(join, self.now);
            if !self.answered(answer) {
                assert!(self.waiting.remove(&self.waiters));
            }
        }
    }

    fn leave_group(&mut self, name: &str, token: &str) {
        let Ok(group) = self.controller.job(name) else { return };
        let epoch = epoch_number(group);
        for rank in Rank::all(group.spec.ranks) {
            let answer = self.controller.leave(name, token, rank, epoch);
            self.answered(answer);
        }
    }

    /// The data plane has noted a first packet, which any holder of the token can send.
    fn first_packet(&mut self, u: &mut Unstructured) -> Result<()> {
        let jobs: Vec<_> = self
            .controller
            .jobs()
            .filter(|j| j.spec.in_band)
            .map(|j| (j.rings[0].id, j.spec.clone()))
            .collect();
        let Some((job, spec)) = jobs.get(u.int_in_range(0..=2usize)?) else { return Ok(()) };
        let right = u.ratio(7u8, 8u8)?;
        let rank = if right { u.int_in_range(0..=spec.ranks.min(3) - 1)? } else { u.arbitrary()? };
        let Ok(src) = ip(u, rank)?.parse() else { return Ok(()) };
        let Ok(dst) = ip(u, (rank.wrapping_add(1)) % spec.ranks.max(1))?.parse() else {
            return Ok(());
        };
        let header = JobHeader {
            dtype: number(u, &[1])?,
            token: spec.token.in_band(),
            ring: number(u, &[0, 0, 1])?,
            rank,
            ranks: if right { spec.ranks } else { number(u, &[2, 3])? },
            message: if right { 0 } else { u.arbitrary()? },
            fragments: 1,
            index: if right { 0 } else { u.arbitrary()? },
        };
        let packet = FirstPacket {
            job: *job,
            header,
            ifindex: 10 + u.int_in_range(0..=1u32)? * (rank & 1),
            src,
            src_mac: [2, 0, 0, 0, 0, rank as u8],
            dst,
            // As the data plane parses them.
            qpn: Qpn::new(number(u, &[16, 17, 18])? & MASK),
            psn: Psn::new(number(u, &[0, 5])?),
            len: number(u, &[256, spec.mtu])?,
            only: !u.ratio(1u8, 8u8)?,
        };
        if let Some(answer) =
            self.controller.first_packets(*job, &[packet], u.arbitrary()?, self.now)
        {
            assert!(answer.outcomes != [Outcome::Known] || answer.actions.is_empty());
            self.carry_out(answer.actions);
        }
        Ok(())
    }

    /// A group, if there is one; otherwise a job.
    fn member_of(&self, u: &mut Unstructured) -> Result<String> {
        match self.controller.jobs().find(|j| j.spec.is_group) {
            Some(group) if u.ratio(1u8, 2u8)? => Ok(group.spec.name.clone()),
            _ => name(u),
        }
    }

    fn member(&mut self, u: &mut Unstructured) -> Result<()> {
        let (rank, epoch) = (number(u, &[0, 1, 2])?, u.int_in_range(0..=3)?);
        let (job, token) = (self.member_of(u)?, token(u)?);
        let answer = match u.int_in_range(0..=4u8)? {
            0 | 1 => {
                let Some(r) = message(u, api::LeaveRequest { job, token, rank, epoch })? else {
                    return Ok(());
                };
                self.controller.leave(&r.job, &r.token, Rank(r.rank), r.epoch)
            }
            2 => {
                let sensible = api::AbortRequest { job, token, rank, reason: "why".into(), epoch };
                let Some(r) = message(u, sensible)? else { return Ok(()) };
                self.controller.abort(&r.job, &r.token, Rank(r.rank), r.epoch, &r.reason)
            }
            _ => {
                let sensible = api::HeartbeatRequest {
                    job,
                    token,
                    rank,
                    epoch,
                    on_host_ring: epoch == 1,
                    acknowledged_path_test: epoch,
                    sealed: false,
                    underflows: 0,
                };
                let Some(r) = message(u, sensible)? else { return Ok(()) };
                let rank = Rank(r.rank);
                let answer = self.controller.heartbeat(
                    &r.job,
                    &r.token,
                    rank,
                    r.epoch,
                    r.on_host_ring,
                    self.now,
                );
                answer.map(|_| Vec::new())
            }
        };
        self.answered(answer);
        Ok(())
    }
}

fn sequence(u: &mut Unstructured) -> Result<()> {
    let mut s = System::new();
    while !u.is_empty() {
        match u.int_in_range(0..=14u8)? {
            12..=14 => s.first_packet(u)?,
            0..=1 => s.create(u)?,
            2..=3 => s.add_flow(u)?,
            4..=6 => s.join(u)?,
            7 => s.open_group(u)?,
            8 => s.member(u)?,
            9 => {
                let name = name(u)?;
                let Some(r) =
                    message(u, api::DeleteJobRequest { name, forget_connections: false })?
                else {
                    continue;
                };
                let answer = s.controller.delete_job(&r.name);
                s.answered(answer);
            }
            10 if u.ratio(1u8, 4u8)? => {
                let name = name(u)?;
                let Some(r) = message(u, api::RestartJobRequest { name })? else { continue };
                let answer = s.controller.restart_job(&r.name);
                s.answered(answer);
            }
            10 if u.ratio(1u8, 4u8)? => {
                let name = name(u)?;
                let Some(r) = message(u, api::ReconnectJobRequest { name })? else { continue };
                let answer = s.controller.reconnect_job(&r.name).map(|()| Vec::new());
                s.answered(answer);
            }
            10 => {
                s.now += Duration::from_millis(u.arbitrary::<u16>()?.into());
                let actions = s.controller.tick(s.now);
                s.carry_out(actions);
            }
            _ => {
                let actions = s.controller.execution_failed(&name(u)?, "no");
                s.carry_out(actions);
            }
        }
        s.check();
    }
    // Everything is returned, and every rank gets an answer.
    let names: Vec<String> =
        s.controller.jobs().filter(|j| !j.spec.is_group).map(|j| j.spec.name.clone()).collect();
    for name in names {
        let answer = s.controller.delete_job(&name);
        assert!(s.answered(answer));
        s.check();
    }
    assert_eq!(s.controller.jobs().count(), 0, "groups end with their jobs");
    assert!(s.waiting.is_empty(), "{} ranks never get an answer", s.waiting.len());
    assert_eq!(
        (s.controller.memory_used(), s.plane_state.rings.len(), s.plane_state.flows.len()),
        (0, 0, 0)
    );
    assert!(s.plane_state.in_band_tokens.is_empty());
    Ok(())
}
