//! Why a job is stalled. Pure: evidence in, findings out, each with what to do next.

mod lengths;

use std::net::IpAddr;
use std::time::Duration;

use netsum_common::counters::{Counter, Kind};
use netsum_common::serial;
use netsum_common::unmanaged::static_connection;

use super::members::Member;
use super::path::bypass_sender;
use super::watch::RingView;
use super::{Job, JobRing, Rank, State};
use crate::plane::{FlowSeen, FlowSpec, RingSpec};
use crate::port::Defect;

/// A port, as observed while the job is stalled.
#[derive(Clone, Debug, Default)]
pub struct PortEvidence {
    pub name: String,
    /// Whether it is up, with a carrier.
    pub up: bool,
    /// Packets of any kind that it received during the observation.
    pub received: Option<u64>,
}

/// Evidence about a rank in a ring.
#[derive(Clone, Debug)]
pub struct RankEvidence {
    pub flow: FlowSpec,
    /// The rank that owns the connection, by the job's numbers.
    pub sender: Rank,
    /// The member of the ring here that the flow belongs to.
    pub member: Member,
    /// The data plane's record of the flow.
    pub seen: FlowSeen,
    /// How long ago its last packet arrived, if known.
    pub last: Option<Duration>,
    /// Packets that arrived during the observation.
    pub moved: u32,
    /// How long ago its last heartbeat arrived, for ranks that joined by themselves.
    pub heartbeat: Option<Duration>,
    pub port: PortEvidence,
}

impl RankEvidence {
    /// The port towards the box that may know why the contribution is missing; only if this box
    /// sees no fault itself.
    fn asks_behind(&self) -> Option<String> {
        let refused = |o: Counter| o.kind() == Kind::Drop && o != Counter::Duplicate;
        let is_clean = self.port.up && !self.seen.last_outcome.is_some_and(refused);
        self.behind().filter(|_| is_clean).map(|_| self.port.name.clone())
    }

    /// The box that its packets come through, if any.
    fn behind(&self) -> Option<String> {
        let port = &self.port.name;
        match self.member {
            Member::Rank(_) => None,
            Member::Group(group) => Some(format!("the box behind {port} (ranks {group})")),
            Member::Up => Some(format!("the parent behind {port}")),
        }
    }
}

/// Hint for a job whose properties differ between boxes.
const COMPARE: &str = "compare `netsum job show` here and there: path MTU, message size and \
    window must be the same on all boxes";

/// Evidence about a ring.
#[derive(Clone, Debug)]
pub struct RingEvidence {
    pub ring: JobRing,
    /// The ring's properties.
    pub spec: RingSpec,
    /// The content of its maps.
    pub view: RingView,
    /// How long it has been stalled with something pending.
    pub waits: Option<Duration>,
    /// Its ranks, in order.
    pub ranks: Vec<RankEvidence>,
}

impl RingEvidence {
    /// The receiver of a rank's packets, as text.
    fn receiver(&self, rank: &RankEvidence) -> String {
        let next = self.after(rank.flow.rank);
        if next.flow.group_mark != 0 {
            format!("{} behind another box", rank.flow.dst)
        } else {
            format!("rank {}", next.sender)
        }
    }

    /// The member that `rank` sends to.
    fn after(&self, rank: Rank) -> &RankEvidence {
        &self.ranks[rank.next(self.ranks.len() as u32).0 as usize]
    }
}

/// An unknown flow: a connection with data that is not registered.
#[derive(Clone, Debug)]
pub struct UnknownFlow {
    pub src: IpAddr,
    pub dst: IpAddr,
    /// The destination's queue pair.
    pub qpn: u32,
    /// The port at which its packets arrive.
    pub ifindex: u32,
    /// Data packets during the observation.
    pub packets: u64,
}

/// A reason for the stall, or the statement that nothing is pending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The ring, if the finding concerns one.
    pub ring: Option<JobRing>,
    /// The rank, if the finding concerns one, by the job's numbers.
    pub rank: Option<Rank>,
    pub what: String,
    /// The next step for the administrator.
    pub next: String,
    /// The port towards another box that may know why.
    pub behind: Option<String>,
}

impl Finding {
    fn of_job(what: impl Into<String>, next: impl Into<String>) -> Self {
        Self { ring: None, rank: None, what: what.into(), next: next.into(), behind: None }
    }
}

/// All findings, at least one. `wrong_tokens` counts first packets with a wrong token during the
/// observation. `obstacles` are between the job's ports.
pub fn diagnose(
    job: &Job,
    rings: &[RingEvidence],
    unknown_flows: &[UnknownFlow],
    wrong_tokens: u64,
    obstacles: &[Defect],
) -> Vec<Finding> {
    // Bypass connections are unregistered on purpose.
    let is_bypass = |s: &&UnknownFlow| bypass_sender(job, s.src, s.dst, s.qpn).is_some();
    let unknown_flows: Vec<_> = unknown_flows.iter().filter(|s| !is_bypass(s)).cloned().collect();
    let finding = |defect: &Defect| Finding::of_job(&*defect.found, &*defect.mend);
    let of =
        |fatal: bool| obstacles.iter().filter(move |defect| defect.is_fatal == fatal).map(finding);
    let mut findings: Vec<Finding> = of(true).collect();
    let job_itself = of_job(job, rings, &unknown_flows, wrong_tokens);
    // An obstacle explains why nothing is pending.
    let is_news = |f: &Finding| findings.is_empty() || f.what != IDLE;
    let more: Vec<Finding> = job_itself.into_iter().filter(is_news).collect();
    findings.extend(more);
    findings.extend(of(false));
    findings
}

/// The finding for a ring without a fault.
const IDLE: &str = "nothing is pending: every sum that ranks have begun has been released";

fn of_job(
    job: &Job,
    rings: &[RingEvidence],
    unknown_flows: &[UnknownFlow],
    wrong_tokens: u64,
) -> Vec<Finding> {
    match &job.state {
        State::Failed(why) => {
            return vec![Finding::of_job(
                format!("the job has ended with an error: {why}"),
                "fix the cause and reconnect all ranks; `netsum job delete` frees its \
                 memory",
            )];
        }
        State::Waiting if job.spec.in_band => {
            return not_shown_up(job, unknown_flows, wrong_tokens);
        }
        State::Waiting => return waiting(job),
        State::Active => {}
    }
    let by_job = |f: Finding| Finding { rank: f.rank.map(|member| job.sender(member)), ..f };
    let mut findings: Vec<Finding> =
        rings.iter().flat_map(|r| of_ring(r, unknown_flows)).map(by_job).collect();
    if let Some((claim, _)) = job.claims().next() {
        findings.push(Finding {
            ring: Some(JobRing(claim.header.ring)),
            rank: Some(Rank(claim.header.rank)),
            what: format!(
                "has connected again (queue pair {:#x} of {}) and waits for all others to do so",
                claim.qpn.get(),
                claim.dst
            ),
            next: "connect all ranks again, or look why this one has lost its connection".into(),
            behind: None,
        });
    }
    if findings.is_empty() {
        let idle = rings.iter().all(|r| r.waits.is_none());
        findings.push(if idle {
            Finding::of_job(IDLE, "the ranks are between two collectives; look at the application")
        } else {
            Finding::of_job("sums are on their way", "nothing")
        });
    }
    findings
}

/// A job that lacks ranks or flows.
fn waiting(job: &Job) -> Vec<Finding> {
    let joined = job.joined();
    if !job.spec.members.is_part() && (!joined.is_empty() || job.flows.is_empty()) {
        let missing = Rank::all(job.spec.ranks).filter(|r| !joined.contains(r));
        return missing
            .map(|rank| Finding {
                ring: None,
                rank: Some(rank),
                what: "has not joined".into(),
                next: "start it, or look at its log for why it cannot reach the box; applications \
                     that are not netsum's need `netsum flow add` instead"
                    .into(),
                behind: None,
            })
            .collect();
    }
    let mut findings = Vec::new();
    for (job_ring, ring) in job.numbered_rings() {
        for rank in Rank::all(job.spec.member_count()) {
            if !job.flows.iter().any(|f| f.ring == ring.id && f.rank == rank) {
                findings.push(Finding {
                    ring: Some(job_ring),
                    rank: Some(job.sender(rank)),
                    what: "has no flow".into(),
                    next: format!(
                        "netsum flow add {} --ring {job_ring} --rank {} ...",
                        job.spec.name,
                        job.sender(rank)
                    ),
                    behind: None,
                });
            }
        }
    }
    findings
}

/// A job set up in band with missing connections.
fn not_shown_up(job: &Job, unknown_flows: &[UnknownFlow], wrong_tokens: u64) -> Vec<Finding> {
    let missing = job.unclaimed().into_iter();
    let mut findings: Vec<Finding> = missing
        .map(|(ring, rank)| Finding {
            ring: Some(ring),
            rank: Some(rank),
            what: "has not shown up: no first packet of its connection has come".into(),
            next: "start it, or look whether its messages begin with the job's header and pass \
                this box"
                .into(),
            behind: None,
        })
        .collect();
    findings.extend(job.refusals().map(|why| {
        Finding::of_job(
            format!("a first packet was refused: {why}"),
            "fix what it says, and reconnect",
        )
    }));
    if wrong_tokens > 0 {
        findings.push(Finding::of_job(
            format!(
                "{wrong_tokens} first packets with a token of no job came while it was watched"
            ),
            format!("compare with `netsum job show {} --show-token`", job.spec.name),
        ));
    }
    findings.extend(unknown_flows.iter().map(|s| {
        Finding::of_job(
            format!(
                "{} sends to queue pair {:#x} of {}, {} packets while it was watched: none of \
                 them a first packet with the job's header",
                s.src, s.qpn, s.dst, s.packets
            ),
            "if it is a rank, its messages must begin with the header; otherwise nothing",
        )
    }));
    findings
}

fn of_ring(ring: &RingEvidence, unknown_flows: &[UnknownFlow]) -> Vec<Finding> {
    let view = &ring.view;
    let here = |rank: Rank, (what, next): (String, String)| Finding {
        ring: Some(ring.ring),
        rank: Some(rank),
        what,
        next,
        behind: None,
    };
    let lacking = |r: &RankEvidence| Finding {
        behind: r.asks_behind(),
        ..here(r.flow.rank, missing_rank(ring, r, unknown_flows))
    };
    if let Some(rank) = view.state.stopped.checked_sub(1)
        && let Some(evidence) = ring.ranks.get(rank as usize)
    {
        return vec![here(Rank(rank), refused(ring, evidence, Counter::LayoutMismatch))];
    }
    if view.is_held() && ring.waits.is_some() {
        return vec![Finding {
            ring: Some(ring.ring),
            rank: None,
            what: format!(
                "index {} is complete and waits for a packet to go out with",
                view.state.low
            ),
            next: "nothing: the box sends it by itself".into(),
            behind: None,
        }];
    }
    // A rank that is refused because of its length may be right: the first contribution may have
    // the wrong one.
    let (mut findings, disagree) = lengths::compare(ring);
    // A rank whose packets were never accepted is at fault even if other ranks have not sent yet.
    let never = |r: &&RankEvidence| {
        !disagree.contains(&r.flow.rank)
            && !accepted(r, view)
            && (r.seen.packets > 0 || talks_elsewhere(r, unknown_flows))
    };
    findings.extend(ring.ranks.iter().filter(never).map(lacking));
    if ring.waits.is_some() {
        for rank in
            view.missing(&ring.spec.config).into_iter().filter(|rank| !disagree.contains(rank))
        {
            if findings.iter().all(|f| f.rank != Some(rank)) {
                findings.push(lacking(&ring.ranks[rank.0 as usize]));
            }
        }
    } else {
        findings.extend(
            ring.ranks
                .iter()
                .filter_map(|r| not_acknowledged(ring, r).map(|f| here(r.flow.rank, f))),
        );
    }
    findings
}

/// Whether the slot machine has accepted a contribution of the rank.
fn accepted(rank: &RankEvidence, view: &RingView) -> bool {
    view.state.expected[rank.flow.rank.0 as usize] != 0
        || view.front().is_some_and(|s| s.contributors & 1 << rank.flow.rank.0 != 0)
}

fn talks_elsewhere(rank: &RankEvidence, unknown_flows: &[UnknownFlow]) -> bool {
    rank.seen.packets == 0 && unknown_flow_of(rank, unknown_flows).is_some()
}

/// Data that the rank sends to its neighbour on a connection that is not registered.
fn unknown_flow_of<'a>(
    rank: &RankEvidence,
    unknown_flows: &'a [UnknownFlow],
) -> Option<&'a UnknownFlow> {
    let flow = &rank.flow;
    // On bypass connections netsum's own ranks tell each other that no box sums.
    let bypass =
        [rank.sender.0 + 1, 0].map(|receiver| static_connection(receiver, None).receive_qpn.get());
    let unknown_flows = || unknown_flows.iter().filter(|s| !bypass.contains(&s.qpn));
    unknown_flows().find(|s| s.src == flow.src && s.dst == flow.dst).or_else(|| {
        unknown_flows()
            .find(|s| s.src == flow.src || s.dst == flow.dst && s.ifindex == flow.ifindex)
    })
}

/// Why a contribution of this rank is missing.
fn missing_rank(
    ring: &RingEvidence,
    rank: &RankEvidence,
    unknown_flows: &[UnknownFlow],
) -> (String, String) {
    let (flow, seen, port) = (&rank.flow, &rank.seen, &rank.port);
    if !port.up {
        return (
            format!("is behind {}, which is down", port.name),
            format!("look at the cable and at `ip link show {}`", port.name),
        );
    }
    if seen.packets == 0 {
        let (what, mut next) = nothing_came(rank, unknown_flow_of(rank, unknown_flows));
        let neighbour = ring.after(flow.rank);
        if neighbour.flow.ifindex == flow.ifindex {
            next = format!(
                "{} is behind {}, too: what they send each other does not come by the box; number \
                 the ranks so that neighbours are behind different ports",
                ring.receiver(rank),
                port.name
            );
        }
        return (what, next);
    }
    let low = ring.view.state.low;
    let psn = flow.base_psn.plus(low).get();
    match seen.last_outcome {
        Some(outcome) if outcome.kind() == Kind::Drop && outcome != Counter::Duplicate => {
            refused(ring, rank, outcome)
        }
        Some(Counter::Stale) if rank.moved > 0 => refused(ring, rank, Counter::Stale),
        _ if rank.moved > 0 => (
            format!(
                "is slow or loses packets: {} packets came while it was watched, index {low} (PSN \
                 {psn:#x}) did not",
                rank.moved
            ),
            format!("look at losses between it and {}, and at its own statistics", port.name),
        ),
        _ => {
            let ago =
                rank.last.map_or("before netsum looked".into(), |t| format!("{} ago", seconds(t)));
            let alive = match rank.heartbeat {
                Some(t) => format!("; its process is alive ({} since its heartbeat)", seconds(t)),
                None => String::new(),
            };
            let quiet = match port.received {
                Some(0) => format!("; {} receives nothing at all", port.name),
                _ => String::new(),
            };
            (
                format!(
                    "has sent nothing since PSN {:#x}, {ago}; index {low} (PSN {psn:#x}) is \
                     missing{alive}{quiet}",
                    seen.last_psn
                ),
                rank.behind().map_or(
                    "look whether it is still computing, has stopped, or its packets get lost \
                     before the box"
                        .into(),
                    |behind| format!("ask `netsum diagnose` of {behind}"),
                ),
            )
        }
    }
}

fn nothing_came(rank: &RankEvidence, unknown_flow: Option<&UnknownFlow>) -> (String, String) {
    let (flow, port) = (&rank.flow, &rank.port);
    match unknown_flow {
        Some(s) if s.src == flow.src && s.dst == flow.dst => (
            format!(
                "sends to queue pair {:#x} of {}, and {:#x} is registered",
                s.qpn,
                s.dst,
                flow.qpn.get()
            ),
            "register the flow again with the receiver's queue pair number".into(),
        ),
        Some(s) => (
            format!(
                "sends from {} to {} (queue pair {:#x}), and a flow from {} to {} is registered",
                s.src, s.dst, s.qpn, flow.src, flow.dst
            ),
            "register the flow again with these addresses".into(),
        ),
        None => {
            let port_is = match port.received {
                Some(0) => format!("{} is up and receives nothing at all", port.name),
                Some(n) => format!(
                    "{} is up and received {n} packets of other kinds while it was watched",
                    port.name
                ),
                None => format!("{} is up", port.name),
            };
            (
                format!(
                    "has never sent a packet to queue pair {:#x} of {}; {port_is}",
                    flow.qpn.get(),
                    flow.dst
                ),
                rank.behind().map_or_else(
                    || {
                        format!(
                            "look whether it runs, whether its packets get to {} (tcpdump -i {} \
                             udp port 4791), and whether it is behind another port",
                            port.name, port.name
                        )
                    },
                    |behind| format!("ask `netsum diagnose` of {behind}"),
                ),
            )
        }
    }
}

/// Its packets arrive and are refused.
fn refused(ring: &RingEvidence, rank: &RankEvidence, outcome: Counter) -> (String, String) {
    let (flow, seen) = (&rank.flow, &rank.seen);
    let case = Case {
        port: &rank.port.name,
        src: flow.src,
        mtu: ring.spec.config.mtu,
        credit: ring.spec.config.credit,
        base_psn: flow.base_psn.get(),
        psn: seen.last_psn,
        low: ring.view.state.low,
        accepted: accepted(rank, &ring.view),
    };
    let (what, next) = jobs_differ(rank, outcome, &case).unwrap_or_else(|| explain(outcome, &case));
    let count = match seen.refused {
        0 => String::new(),
        n => format!("; {n} of {} were refused", seen.packets),
    };
    (format!("{what}{count}"), next)
}

/// The fault if another box accepts what this one refuses.
fn jobs_differ(rank: &RankEvidence, outcome: Counter, case: &Case<'_>) -> Option<(String, String)> {
    let (behind, &Case { mtu, credit, base_psn, psn, low, accepted, .. }) = (rank.behind()?, case);
    let what = match outcome {
        Counter::Oversized => {
            format!("{behind} sends fragments of more than {mtu} bytes, this job's path MTU")
        }
        Counter::ShortFragment => {
            format!("{behind} sends fragments of less than {mtu} bytes, this job's path MTU")
        }
        Counter::CreditViolation if accepted => format!(
            "{behind} has a larger window: it sends index {}, and {low} to {} are open here",
            serial::sub(psn, base_psn),
            serial::sub(serial::add(low, credit), 1)
        ),
        _ => return None,
    };
    Some((what, COMPARE.to_owned()))
}

/// A refused packet of a flow, and the properties that its flow was registered with.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    /// The flow's port.
    pub port: &'a str,
    /// The flow's sender.
    pub src: IpAddr,
    /// The ring's path MTU.
    pub mtu: u32,
    /// The ring's credit in fragments.
    pub credit: u32,
    /// PSN of the flow's fragment index 0.
    pub base_psn: u32,
    /// The packet's PSN.
    pub psn: u32,
    /// The ring's lowest index that has not been released.
    pub low: u32,
    /// A packet of the flow has been accepted before.
    pub accepted: bool,
}

/// Why packets are refused, and what to do; the text follows the name of a rank.
pub fn explain(outcome: Counter, case: &Case<'_>) -> (String, String) {
    let &Case { port, src, mtu, credit, base_psn, psn, low, accepted } = case;
    let index = serial::sub(psn, base_psn);
    match outcome {
        Counter::BadIcrc => (
            "its packets have a wrong ICRC".into(),
            "look for whatever changes packets between it and the box; `netsum job create --icrc \
             ignore` takes them as they are"
                .into(),
        ),
        Counter::WrongPort => (
            format!("its packets come in on another port than {port}"),
            "register the flow with the port that it is behind".into(),
        ),
        Counter::WrongSourceIp => (
            format!("packets for its connection come from another address than {src}"),
            "register the flow with its address; or somebody pretends to be this rank".into(),
        ),
        Counter::WrongSourceMac => (
            "packets for its connection come from another MAC address than its first did".into(),
            "register the flow again if the host or its router has changed; or somebody pretends \
             to be this rank"
                .into(),
        ),
        Counter::Oversized => (
            format!("its packets are larger than the job's path MTU of {mtu}"),
            format!("set its path MTU to {mtu}, or create the job with its own"),
        ),
        Counter::LayoutMismatch => (
            "has lost its place: it has sent a packet of another place in its message than the \
             other ranks have at that PSN, or an empty one, so its data is not what its PSNs say \
             and the ring has stopped"
                .into(),
            "reconnect all ranks after `netsum job restart`, with the same message size; where it \
             is Linux's Soft-RoCE (rdma_rxe), which does so when it sends again while \
             acknowledgements are on their way, give its queue pairs a longer timeout (17 is 0.5 s)"
                .into(),
        ),
        Counter::ShortFragment => (
            format!(
                "its packets are shorter than the job's path MTU of {mtu}, and not the last \
                of their messages"
            ),
            format!("set its path MTU to {mtu}, or create the job with its own"),
        ),
        Counter::LengthMismatch => (
            "its packets have another length than the other ranks' at the same index".into(),
            format!("give all ranks the same path MTU ({mtu}) and message size"),
        ),
        Counter::CreditViolation | Counter::Stale if !accepted => (
            format!(
                "its first packets have other PSNs (last {psn:#x}) than registered ({base_psn:#x} \
                 and on)"
            ),
            "`netsum job restart`, and register the flows again with the first PSNs of the \
             connections"
                .into(),
        ),
        Counter::CreditViolation => (
            format!(
                "sends beyond its credit: index {index}, and {low} to {} are open",
                serial::sub(serial::add(low, credit), 1)
            ),
            "let it wait for sums before it continues: at most --window messages at a time".into(),
        ),
        Counter::Stale => (
            format!("sends index {index} again, which all others are past, and not index {low}"),
            "its acknowledgements may get lost: look at the way from its next rank to it".into(),
        ),
        other => (
            format!("its packets are refused: {}", other.help().trim()),
            "fix its packets; `netsum stats` counts them by reason".into(),
        ),
    }
}

/// Nothing is pending, but a rank retransmits fragments whose sums have been released: results or
/// acknowledgements are lost.
fn not_acknowledged(ring: &RingEvidence, rank: &RankEvidence) -> Option<(String, String)> {
    let again = matches!(rank.seen.last_outcome, Some(Counter::Replays | Counter::Stale));
    if rank.moved == 0 || !again {
        return None;
    }
    let (next, receiver) = (ring.after(rank.flow.rank), ring.receiver(rank));
    Some((
        format!(
            "sends PSN {:#x} again and again, whose sum has been released: {receiver} behind {} \
             does not acknowledge it",
            rank.seen.last_psn, next.port.name
        ),
        format!(
            "look whether results get from {} to {receiver} and its acknowledgements back to {}; \
             if the application was started again with the queue pairs and PSNs that it had: \
             `netsum job restart` first, or it may get sums of its last run",
            next.port.name, rank.port.name
        ),
    ))
}

/// A duration as text.
pub fn seconds(t: Duration) -> String {
    format!("{:.1} s", t.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use netsum_common::abi::{RingConfig, RingNumber};
    use netsum_common::serial::{Psn, Qpn};
    use netsum_common::slot::{RingState, Slot};

    use super::*;
    use crate::members::Group;

    /// Two ranks of a ring whose lowest unreleased index is 8, and the PSN and outcome of their
    /// last packets.
    fn ring(last: [(u32, Counter); 2]) -> RingEvidence {
        let spec = RingSpec {
            id: RingNumber(1),
            cpu: 0,
            config: RingConfig {
                members: 2,
                slots: 16,
                credit: 8,
                mtu: 1024,
                ..RingConfig::default()
            },
        };
        let seen = last.map(|(last_psn, outcome)| FlowSeen {
            packets: 9,
            last_psn,
            last_outcome: Some(outcome),
            ..FlowSeen::default()
        });
        let ranks = seen.iter().zip(0..).map(|(&seen, rank)| RankEvidence {
            flow: FlowSpec {
                ring: RingNumber(1),
                rank: Rank(rank),
                base_psn: Psn::default(),
                ifindex: 3 + rank,
                src: [10, 0, 0, 1 + rank as u8].into(),
                dst: [10, 0, 0, 2 - rank as u8].into(),
                qpn: Qpn::new(17),
                src_mac: None,
                group_mark: 0,
            },
            sender: Rank(rank),
            member: Member::Rank(rank),
            seen,
            last: None,
            moved: 0,
            heartbeat: None,
            port: PortEvidence { name: format!("port{rank}"), up: true, received: None },
        });
        let mut state = RingState { low: 8, ..RingState::default() };
        state.expected[..2].fill(8);
        RingEvidence {
            ring: JobRing(0),
            view: RingView {
                state,
                slot: Slot::default(),
                ranks: seen.to_vec(),
                base_psns: vec![Psn::default(); 2],
            },
            waits: Some(Duration::from_secs(3)),
            ranks: ranks.collect(),
            spec,
        }
    }

    #[test]
    fn boxes_that_have_made_the_job_differently_are_both_named() {
        let mut said = String::new();
        for (outcome, psn) in [
            (Counter::Oversized, 8),
            (Counter::ShortFragment, 8),
            (Counter::CreditViolation, 20),
            (Counter::BadIcrc, 8),
        ] {
            let mut evidence = ring([(psn, outcome), (8, Counter::Fragments)]);
            evidence.ranks[0].member = Member::Group(Group { first: 0, last: 3 });
            evidence.view.slot =
                Slot { index: 8, flags: Slot::USED, contributors: 2, ..Slot::default() };
            for f in of_ring(&evidence, &[]) {
                let _ = writeln!(said, "{}: {}\n  {}", outcome.name(), f.what, f.next);
            }
        }
        // Sums that the parent refuses do not come down. Meanwhile, ranks that were started without
        // a daemon report on bypass connections that they lack sums.
        let mut evidence = ring([(7, Counter::Fragments), (8, Counter::Fragments)]);
        evidence.ranks[0].member = Member::Up;
        evidence.ranks[0].seen = FlowSeen::default();
        evidence.view.state.expected[0] = 0;
        evidence.view.slot =
            Slot { index: 8, flags: Slot::USED, contributors: 2, ..Slot::default() };
        let FlowSpec { src, dst, ifindex, .. } = evidence.ranks[0].flow;
        let bypass = UnknownFlow {
            src,
            dst,
            qpn: static_connection(1, None).receive_qpn.get(),
            ifindex,
            packets: 9,
        };
        for f in of_ring(&evidence, &[bypass]) {
            let _ = writeln!(said, "{}\n  {}", f.what, f.next);
        }
        insta::assert_snapshot!(said, @"
        oversized: the box behind port0 (ranks 0-3) sends fragments of more than 1024 bytes, this job's path MTU
          compare `netsum job show` here and there: path MTU, message size and window must be the same on all boxes
        short_fragment: the box behind port0 (ranks 0-3) sends fragments of less than 1024 bytes, this job's path MTU
          compare `netsum job show` here and there: path MTU, message size and window must be the same on all boxes
        credit_violation: the box behind port0 (ranks 0-3) has a larger window: it sends index 20, and 8 to 15 are open here
          compare `netsum job show` here and there: path MTU, message size and window must be the same on all boxes
        rx_icrc_encapsulated: its packets have a wrong ICRC
          look for whatever changes packets between it and the box; `netsum job create --icrc ignore` takes them as they are
        has never sent a packet to queue pair 0x11 of 10.0.0.2; port0 is up
          ask `netsum diagnose` of the parent behind port0
        ");
    }

    #[test]
    fn who_has_lost_its_place_is_named_and_nobody_else_is_missed() {
        // Rank 1 sends a message that no other rank has sent: all others appear to be late.
        let mut evidence = ring([(7, Counter::Replays), (9, Counter::Fragments)]);
        let findings = of_ring(&evidence, &[]);
        assert_eq!(
            findings.iter().map(|f| f.rank).collect::<Vec<_>>(),
            [Some(Rank(0)), Some(Rank(1))],
            "{findings:?}"
        );
        evidence.view.state.stopped = 2;
        let findings = of_ring(&evidence, &[]);
        assert_eq!(
            findings.iter().map(|f| f.rank).collect::<Vec<_>>(),
            [Some(Rank(1))],
            "{findings:?}"
        );
        assert!(findings[0].what.starts_with("has lost its place"), "{findings:?}");
        assert!(findings[0].next.contains("job restart"), "{findings:?}");
    }
}
