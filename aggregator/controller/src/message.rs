//! Converts the controller's state to the API's messages, and back.

use netsum_api::v1 as api;
use netsum_common::abi::Messages;
use netsum_common::defaults;
use netsum_common::float::LSB_DEFAULT;
use netsum_common::size::Size;
use netsum_core::diagnose::Finding;
use netsum_core::members::{self, Member, Members};
use netsum_core::plane::{FirstPacket, FlowSpec};
use netsum_core::{Job, JobSpec, Rank, Refusal, State, epoch_number, pool};
use tonic::{Response, Status};

/// What a gRPC method returns.
pub type RpcResult<T> = Result<Response<T>, Status>;

/// Converts a refusal to a gRPC status.
pub fn refused(refusal: Refusal) -> Status {
    let message = refusal.to_string();
    match refusal {
        Refusal::Invalid(_) => Status::invalid_argument(message),
        Refusal::NotFound(_) => Status::not_found(message),
        Refusal::Exists(_) => Status::already_exists(message),
        Refusal::Exhausted(_) => Status::resource_exhausted(message),
        Refusal::NotNow(_) => Status::failed_precondition(message),
        Refusal::Denied(_) => Status::unauthenticated(message),
        Refusal::Late(_) => Status::deadline_exceeded(message),
    }
}

/// Text form of a MAC address.
pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|b| format!("{b:02x}")).join(":")
}

/// Bytes in hexadecimal.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A MAC address from its text form.
pub fn mac_from_text(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        // `from_str_radix` alone would accept a sign.
        let digits =
            parts.next().filter(|p| p.len() == 2 && p.bytes().all(|b| b.is_ascii_hexdigit()))?;
        *byte = u8::from_str_radix(digits, 16).ok()?;
    }
    parts.next().is_none().then_some(mac)
}

pub fn state_message(state: &State) -> api::JobState {
    match state {
        State::Waiting => api::JobState::Waiting,
        State::Active => api::JobState::Active,
        State::Failed(_) => api::JobState::Failed,
    }
}

/// Why a job has ended; empty if it has not.
pub fn error_of(job: &Job) -> String {
    match &job.state {
        State::Failed(why) => why.clone(),
        _ => String::new(),
    }
}

/// A job as a message. `secret` says whether it has the token.
pub fn job_message(
    job: &Job,
    port_name: impl Fn(u32) -> String,
    heartbeat_ms: u32,
    secret: bool,
) -> api::Job {
    let flow = |f: &FlowSpec| api::Flow {
        ring: job.job_ring(f.ring).map_or(0, |ring| ring.0),
        rank: job.sender(f.member).0,
        port: port_name(f.ifindex),
        src: f.src.to_string(),
        dst: f.dst.to_string(),
        qpn: f.qpn.get(),
        psn: f.base_psn.get(),
        src_mac: f.src_mac.map(mac_text).unwrap_or_default(),
        seen: None,
    };
    let claim = |p: &FirstPacket| api::Flow {
        ring: p.header.ring,
        rank: p.header.rank,
        port: port_name(p.ifindex),
        src: p.src.to_string(),
        dst: p.dst.to_string(),
        qpn: p.qpn.get(),
        psn: p.psn.get(),
        src_mac: mac_text(p.src_mac),
        seen: None,
    };
    let spec = &job.spec;
    api::Job {
        state: state_message(&job.state).into(),
        error: error_of(job),
        memory: pool::job_memory(spec, job.slots),
        slots: job.slots,
        flows: job.flows.iter().map(flow).collect(),
        token: if secret { spec.token.reveal().to_owned() } else { String::new() },
        heartbeat_ms,
        epoch: epoch_number(job),
        ring_ids: job.rings.iter().map(|r| r.id.0).collect(),
        in_band_token: if secret && spec.in_band {
            hex(&spec.token.in_band().0)
        } else {
            String::new()
        },
        claims: job.claims().map(|(packet, _)| claim(packet)).collect(),
        unclaimed: job
            .unclaimed()
            .into_iter()
            .map(|(ring, rank)| api::RingPosition { ring: ring.0, rank: rank.0 })
            .collect(),
        refusals: job.refusals().map(str::to_owned).collect(),
        uplink: spec.members.uplink.as_ref().map(ToString::to_string).unwrap_or_default(),
        members: if spec.members.is_part() {
            texts(&spec.members.list(spec.ranks))
        } else {
            Vec::new()
        },
        name: spec.name.clone(),
        ranks: spec.ranks,
        min_ranks: spec.elastic.as_ref().map_or(0, |elastic| *elastic.start()),
        max_ranks: spec.elastic.as_ref().map_or(0, |elastic| *elastic.end()),
        mtu: job.mtu(),
        largest_mtu: spec.reserved_mtu(),
        message_size: spec.message_size,
        window: spec.window.0,
        rings: spec.rings,
        icrc: if spec.verify_icrc { "verify" } else { "ignore" }.into(),
        order: if job.is_in_order() { "in-order" } else { "relaxed" }.into(),
        in_band: spec.in_band,
        dtype: spec.float_lsb.map(|_| "f32".into()),
        lsb: spec.float_lsb,
        sealed: job.epoch.as_ref().is_some_and(|epoch| epoch.is_sealed()),
        // The tenant is shown only to administrators.
        ..api::Job::default()
    }
}

/// The causes of a job's stall as a message.
pub fn diagnosis_message(job: &Job, findings: Vec<Finding>) -> api::Diagnosis {
    let finding = |f: Finding| api::Finding {
        ring: f.ring.map(|ring| ring.0),
        rank: f.rank.map(|rank| rank.0),
        what: f.what,
        next: f.next,
        behind: f.behind.unwrap_or_default(),
        idle: f.is_idle,
    };
    api::Diagnosis {
        job: job.spec.name.clone(),
        state: state_message(&job.state).into(),
        ranks: job.spec.ranks,
        findings: findings.into_iter().map(finding).collect(),
        ..api::Diagnosis::default()
    }
}

/// The ranks whose connections belong to a job's members, in order.
pub fn senders(job: &Job) -> Vec<u32> {
    Rank::all(job.spec.member_count()).map(|member| job.sender(member).0).collect()
}

/// A new job's properties from a request; without a token there, a random one.
///
/// # Errors
/// If a keyword is unknown. The controller checks numbers.
pub fn job_spec(r: api::CreateJobRequest) -> Result<JobSpec, Status> {
    let choice = |option: &str, value: &str, yes: &str, no: &str| match value {
        v if v == yes => Ok(true),
        v if v == no => Ok(false),
        v => Err(Status::invalid_argument(format!("{option} {v}: {yes} or {no} is possible"))),
    };
    let message_size = u32::try_from(r.message_size).map_err(|_| {
        let size = Size(r.message_size);
        Status::invalid_argument(format!("--message-size {size}: less than 4 GiB is possible"))
    })?;
    let float_lsb = match (r.dtype.as_str(), r.lsb.as_str()) {
        ("" | "i32", "") => Ok(None),
        ("" | "i32", lsb) => Err(format!("--lsb {lsb}: only with --dtype f32")),
        ("f32", "") => Ok(Some(LSB_DEFAULT)),
        ("f32", lsb) => lsb.parse().map(Some).map_err(|_| format!("--lsb {lsb}: not a number")),
        (dtype, _) => Err(format!("--dtype {dtype}: i32 or f32 is possible")),
    };
    let float_lsb = float_lsb.map_err(Status::invalid_argument)?;
    Ok(JobSpec {
        float_lsb,
        verify_icrc: choice("--icrc", &r.icrc, "verify", "ignore")?,
        in_order: match r.order.as_str() {
            "auto" => None,
            order => Some(choice("--order", order, "in-order", "relaxed")?),
        },
        name: r.name,
        ranks: r.ranks,
        elastic: (r.min_ranks > 0).then_some(r.min_ranks..=r.ranks),
        mtu: r.mtu,
        largest_mtu: None,
        message_size,
        window: Messages(r.window),
        rings: r.rings,
        in_band: r.in_band,
        token: if r.token.is_empty() { token()? } else { r.token }.into(),
        tenant: if r.tenant.is_empty() { defaults::TENANT.to_owned() } else { r.tenant },
        members: members(&r.members, &r.groups, &r.uplink, &r.ring_order)?,
        host_ring_fallback: r.host_ring_fallback,
        is_group: false,
    })
}

fn texts(members: &[Member]) -> Vec<String> {
    members.iter().map(Member::to_string).collect()
}

fn members(ranks: &str, groups: &str, uplink: &str, order: &str) -> Result<Members, Status> {
    let parsed = |option: &str, text: &str| match text {
        "" => Ok(Vec::new()),
        text => members::groups(option, text).map_err(refused),
    };
    let ranks = match parsed("--members", ranks)?[..] {
        [] => None,
        [group] => Some(group),
        _ => {
            return Err(Status::invalid_argument(format!(
                "--members {ranks}: one range of ranks is possible"
            )));
        }
    };
    let uplink = if uplink.is_empty() { None } else { Some(uplink.parse().map_err(refused)?) };
    let order =
        order.split(',').filter(|_| !order.is_empty()).map(str::parse).collect::<Result<_, _>>();
    let order = order
        .map_err(|_| Status::invalid_argument("--ring-order: ranks like 0,2,1,3 are needed"))?;
    Ok(Members { groups: parsed("--groups", groups)?, ranks, uplink, order })
}

fn token() -> Result<String, Status> {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes).map_err(|e| Status::internal(format!("no random numbers: {e}")))?;
    Ok(bytes.map(|b| format!("{b:02x}")).concat())
}
