//! Why a job is stalled. Pure: evidence in, findings out, each with what to do next.

mod explain;
mod lengths;
mod ring;

use std::net::IpAddr;
use std::time::Duration;

use netsum_common::counters::{Counter, Kind};

pub use self::explain::{RefusedPacket, explain};
use self::ring::of_ring;
use super::members::Member;
use super::missing_packets::bypass_sender;
use super::watch::RingView;
use super::{Job, JobRing, Rank, State};
use crate::plane::{FlowSpec, FlowStats, RingSpec};
use crate::port::Problem;

/// A port, as observed while the job is stalled.
#[derive(Clone, Debug, Default)]
pub struct PortEvidence {
    pub name: String,
    /// Whether it is up, with a carrier.
    pub up: bool,
    /// Packets of any kind that it received during the observation.
    pub received: Option<u64>,
}

/// Evidence about a member of a ring.
#[derive(Clone, Debug)]
pub struct MemberEvidence {
    pub flow: FlowSpec,
    /// The rank that owns the connection, by the job's numbers.
    pub sender: Rank,
    /// The member of the ring here that the flow belongs to.
    pub member: Member,
    /// The data plane's record of the flow.
    pub seen: FlowStats,
    /// How long ago its last packet arrived, if known.
    pub last: Option<Duration>,
    /// Packets that arrived during the observation.
    pub moved: u32,
    /// How long ago its last heartbeat arrived, for ranks that joined by themselves.
    pub heartbeat: Option<Duration>,
    pub port: PortEvidence,
}

impl MemberEvidence {
    /// The port towards the box that may know why the contribution is missing; only if this box
    /// sees no fault itself.
    fn behind_port(&self) -> Option<String> {
        let refused = |o: Counter| o.kind() == Kind::Drop && o != Counter::DuplicateRequest;
        let is_clean = self.port.up && !self.seen.last_verdict.is_some_and(refused);
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
    pub stalled: Option<Duration>,
    /// In the order of their connections.
    pub members: Vec<MemberEvidence>,
}

impl RingEvidence {
    /// The receiver of a member's packets, as text.
    fn receiver(&self, member: &MemberEvidence) -> String {
        let next = self.after(member.flow.member);
        if next.flow.group_mark != 0 {
            format!("{} behind another box", member.flow.dst)
        } else {
            format!("rank {}", next.sender)
        }
    }

    /// The member that `member` sends to.
    fn after(&self, member: Rank) -> &MemberEvidence {
        &self.members[member.next(self.members.len() as u32).0 as usize]
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
    /// Nothing is wrong.
    pub is_idle: bool,
}

impl Finding {
    fn of_job(what: impl Into<String>, next: impl Into<String>) -> Self {
        let (what, next) = (what.into(), next.into());
        Self { ring: None, rank: None, what, next, behind: None, is_idle: false }
    }
}

/// All findings, at least one. `wrong_tokens` counts first packets with a wrong token during the
/// observation. `obstacles` are between the job's ports.
pub fn diagnose(
    job: &Job,
    rings: &[RingEvidence],
    unknown_flows: &[UnknownFlow],
    wrong_tokens: u64,
    obstacles: &[Problem],
) -> Vec<Finding> {
    // Bypass connections are unregistered on purpose.
    let is_bypass = |s: &&UnknownFlow| bypass_sender(job, s.src, s.dst, s.qpn).is_some();
    let unknown_flows: Vec<_> = unknown_flows.iter().filter(|s| !is_bypass(s)).cloned().collect();
    let finding = |defect: &Problem| Finding::of_job(&*defect.found, &*defect.hint);
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
                format!("the job has failed: {why}"),
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
                "has reconnected (queue pair {:#x} of {}) and waits for the others to do so",
                claim.qpn.get(),
                claim.dst
            ),
            next: "reconnect all ranks, or find out why this one lost its connection".into(),
            behind: None,
            is_idle: false,
        });
    }
    if findings.is_empty() {
        let (what, next) = if job.is_summed_by_hosts() && !job.rings.is_empty() {
            (
                "the box makes only the hierarchical sums: in the job's own ring, neighbours are \
                 on one host",
                "nothing: its ranks sum over the hosts' ring",
            )
        } else if job.is_summed_by_hosts() {
            ("the group has no ring here", "nothing: its ranks sum over the hosts' ring")
        } else if rings.iter().all(|r| r.stalled.is_none()) {
            (IDLE, "look at the application: its ranks are between two collectives")
        } else {
            ("sums are in progress", "nothing")
        };
        findings.push(Finding { is_idle: true, ..Finding::of_job(what, next) });
    }
    findings
}

/// A job that lacks ranks or flows.
fn waiting(job: &Job) -> Vec<Finding> {
    let joined = job.joined();
    if !job.spec.members.is_part() && (!joined.is_empty() || job.flows.is_empty()) {
        return job
            .missing()
            .into_iter()
            .map(|rank| Finding {
                ring: None,
                rank: Some(rank),
                what: "has not joined".into(),
                next: "start it, or find in its log why it cannot reach the box; an application \
                     without netsum's library needs `netsum flow add` instead"
                    .into(),
                behind: None,
                is_idle: false,
            })
            .collect();
    }
    let mut findings = Vec::new();
    for (job_ring, ring) in job.numbered_rings() {
        for member in Rank::all(job.spec.member_count()) {
            if !job.flows.iter().any(|f| f.ring == ring.id && f.member == member) {
                let rank = job.sender(member);
                findings.push(Finding {
                    ring: Some(job_ring),
                    rank: Some(rank),
                    what: "has no flow".into(),
                    next: format!(
                        "netsum flow add {} --ring {job_ring} --rank {rank} ...",
                        job.spec.name
                    ),
                    behind: None,
                    is_idle: false,
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
            what: "has not shown up: no first packet of its connection has arrived".into(),
            next: "start it, or check that its messages begin with the job's header and cross \
                this box"
                .into(),
            behind: None,
            is_idle: false,
        })
        .collect();
    findings.extend(job.refusals().map(|why| {
        Finding::of_job(
            format!("a first packet was refused: {why}"),
            "fix the cause, and reconnect",
        )
    }));
    if wrong_tokens > 0 {
        findings.push(Finding::of_job(
            format!("{wrong_tokens} first packets with an unknown token arrived during the watch"),
            format!(
                "give all ranks the token that `netsum job show {} --show-token` prints",
                job.spec.name
            ),
        ));
    }
    findings.extend(unknown_flows.iter().map(|s| {
        Finding::of_job(
            format!(
                "{} sends to queue pair {:#x} of {}: {} packets arrived during the watch, and none \
                 is a first packet with the job's header",
                s.src, s.qpn, s.dst, s.packets
            ),
            "nothing, unless it is a rank: then its messages must begin with the header",
        )
    }));
    findings
}

/// A duration as text.
pub fn seconds(t: Duration) -> String {
    format!("{:.1} s", t.as_secs_f64())
}
