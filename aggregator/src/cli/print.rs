//! Tables and JSON. As in bpftool, an object has one line, and its attributes lines of their own, indented.

use std::io::Write;

use anyhow::Result;
use netsum_api::v1 as api;
use serde_json::{Value, json};

use crate::size::Size;

/// How to print.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// For people.
    Text,
    /// For programs.
    Json,
    /// For both.
    Pretty,
}

impl Format {
    /// From the options `-j` and `-p`.
    pub fn new(json: bool, pretty: bool) -> Self {
        match (json, pretty) {
            (_, true) => Self::Pretty,
            (true, false) => Self::Json,
            (false, false) => Self::Text,
        }
    }

    /// Prints JSON, if that is the format.
    pub(super) fn json(self, out: &mut impl Write, value: impl FnOnce() -> Value) -> Result<bool> {
        match self {
            Self::Text => return Ok(false),
            Self::Json => writeln!(out, "{}", value())?,
            Self::Pretty => writeln!(out, "{:#}", value())?,
        }
        Ok(true)
    }
}

fn state(job: &api::Job) -> &'static str {
    state_name(job.state())
}

pub(super) fn state_name(state: api::JobState) -> &'static str {
    match state {
        api::JobState::Active => "active",
        api::JobState::Failed => "failed",
        api::JobState::Waiting | api::JobState::Unspecified => "waiting",
    }
}

fn flow_json(f: &api::Flow) -> Value {
    json!({
        "ring": f.ring, "rank": f.rank, "port": f.port, "src": f.src, "src_mac": f.src_mac,
        "dst": f.dst, "qpn": f.qpn, "psn": f.psn,
    })
}

fn job_json(j: &api::Job) -> Value {
    let mut value = json!({
        "name": j.name, "state": state(j), "error": j.error, "ranks": j.ranks, "dtype": j.dtype, "mtu": j.mtu,
        "message_size": j.message_size, "window": j.window, "rings": j.rings, "icrc": j.icrc, "order": j.order,
        "slots": j.slots, "memory": j.memory, "epoch": j.epoch, "ring_ids": j.ring_ids,
        "flows": j.flows.iter().map(flow_json).collect::<Vec<_>>(),
    });
    if !j.token.is_empty() {
        value["token"] = j.token.clone().into();
    }
    if j.in_band {
        let place = |p: &api::Place| json!({ "ring": p.ring, "rank": p.rank });
        value["in_band"] = json!({
            "claims": j.claims.iter().map(flow_json).collect::<Vec<_>>(),
            "unclaimed": j.unclaimed.iter().map(place).collect::<Vec<_>>(),
            "refusals": j.refusals,
        });
        if !j.in_band_token.is_empty() {
            value["in_band"]["token"] = j.in_band_token.clone().into();
        }
    }
    value
}

fn summary(out: &mut impl Write, j: &api::Job) -> Result<()> {
    writeln!(
        out,
        "{}: {}  ranks {}  dtype {}  mtu {}  message {}  window {}  rings {}",
        j.name,
        state(j),
        j.ranks,
        j.dtype,
        j.mtu,
        j.message_size,
        j.window,
        j.rings
    )?;
    if !j.error.is_empty() {
        writeln!(out, "\terror: {}", j.error)?;
    }
    let wanted = j.ranks * j.rings;
    writeln!(
        out,
        "\ticrc {}  order {}  flows {}/{wanted}  epoch {}{}",
        j.icrc,
        j.order,
        j.flows.len(),
        j.epoch,
        if j.in_band { "  in band" } else { "" }
    )?;
    Ok(())
}

/// The memory of a job's rings, with the numbers that make it up.
fn memory(out: &mut impl Write, j: &api::Job) -> Result<()> {
    let header = size_of::<netsum_common::abi::SavedHeader>();
    let slot = size_of::<netsum_common::slot::Slot>();
    writeln!(
        out,
        "\tmemory {}: {} rings x {} slots x ({} payload + {} ranks x {header} header + {slot} state)",
        Size(j.memory),
        j.rings,
        j.slots,
        j.mtu,
        j.ranks
    )?;
    Ok(())
}

/// A job that has been created.
pub fn created(out: &mut impl Write, format: Format, job: &api::Job) -> Result<()> {
    if format.json(out, || job_json(job))? {
        return Ok(());
    }
    summary(out, job)?;
    memory(out, job)?;
    tokens(out, job)
}

/// The job's secrets, where they are given.
fn tokens(out: &mut impl Write, job: &api::Job) -> Result<()> {
    if !job.token.is_empty() {
        writeln!(out, "\ttoken {}", job.token)?;
    }
    if !job.in_band_token.is_empty() {
        writeln!(out, "\ttoken in band {}", job.in_band_token)?;
    }
    Ok(())
}

/// What has shown up in band.
fn in_band(out: &mut impl Write, job: &api::Job) -> Result<()> {
    for claim in &job.claims {
        writeln!(out, "\twaits in band: {}", flow_text(claim))?;
    }
    if !job.unclaimed.is_empty() {
        let missing: Vec<String> =
            job.unclaimed.iter().map(|p| format!("{} of ring {}", p.rank, p.ring)).collect();
        writeln!(out, "\tnot yet shown up in band: rank {}", missing.join(", "))?;
    }
    job.refusals.iter().try_for_each(|why| writeln!(out, "\trefused in band: {why}"))?;
    Ok(())
}

/// Jobs, two lines each.
pub fn jobs(out: &mut impl Write, format: Format, jobs: &[api::Job]) -> Result<()> {
    if format.json(out, || jobs.iter().map(job_json).collect())? {
        return Ok(());
    }
    jobs.iter().try_for_each(|j| summary(out, j))
}

/// A job with all that belongs to it.
pub fn job(out: &mut impl Write, format: Format, job: &api::Job) -> Result<()> {
    if format.json(out, || job_json(job))? {
        return Ok(());
    }
    summary(out, job)?;
    memory(out, job)?;
    tokens(out, job)?;
    in_band(out, job)?;
    job.flows.iter().try_for_each(|f| flow_line(out, f))
}

fn flow_line(out: &mut impl Write, f: &api::Flow) -> Result<()> {
    writeln!(out, "\t{}", flow_text(f))?;
    Ok(())
}

fn flow_text(f: &api::Flow) -> String {
    let mac = if f.src_mac.is_empty() { "not yet known" } else { &f.src_mac };
    format!(
        "ring {} rank {}: port {}  src {} ({mac})  dst {}  qpn {:#x}  psn {:#x}",
        f.ring, f.rank, f.port, f.src, f.dst, f.qpn, f.psn
    )
}

/// The job that a flow has been added to.
pub fn added(out: &mut impl Write, format: Format, job: &api::Job) -> Result<()> {
    if format.json(out, || job_json(job))? {
        return Ok(());
    }
    writeln!(out, "{}: {}  flows {}/{}", job.name, state(job), job.flows.len(), job.ranks * job.rings)?;
    Ok(())
}

/// A job's flows.
pub fn flows(out: &mut impl Write, format: Format, job: &api::Job) -> Result<()> {
    if format.json(out, || job.flows.iter().map(flow_json).collect())? {
        return Ok(());
    }
    job.flows.iter().try_for_each(|f| flow_line(out, f))
}

/// Ports.
pub fn ports(out: &mut impl Write, format: Format, ports: &[api::Port]) -> Result<()> {
    let value = |p: &api::Port| {
        json!({
            "name": p.name, "ifindex": p.ifindex, "mac": p.mac, "mtu": p.mtu, "up": p.up, "xdp": p.xdp,
            "flows": p.flows, "rx_bytes": p.rx_bytes, "rx_packets": p.rx_packets, "tx_bytes": p.tx_bytes,
            "tx_packets": p.tx_packets,
        })
    };
    if format.json(out, || ports.iter().map(value).collect())? {
        return Ok(());
    }
    for p in ports {
        let xdp = if p.xdp.is_empty() { "none" } else { &p.xdp };
        let up = if p.up { "up" } else { "down" };
        writeln!(
            out,
            "{}: {}  {up}  xdp {xdp}  mtu {}  mac {}  flows {}",
            p.ifindex, p.name, p.mtu, p.mac, p.flows
        )?;
        writeln!(
            out,
            "\trx {} packets {} bytes  tx {} packets {} bytes",
            p.rx_packets, p.rx_bytes, p.tx_packets, p.tx_bytes
        )?;
    }
    Ok(())
}

/// Slots of a job that are in use.
pub fn slots(out: &mut impl Write, format: Format, reply: &api::ShowSlotsReply) -> Result<()> {
    let ring = |r: &api::RingState| json!({ "ring": r.ring, "cpu": r.cpu, "slots": r.slots, "low": r.low, "expected": r.expected });
    let slot = |s: &api::Slot| {
        json!({
            "ring": s.ring, "slot": s.slot, "index": s.index, "len": s.len, "state": s.state,
            "contributors": s.contributors, "missing": s.missing,
        })
    };
    let value = || {
        json!({
            "rings": reply.rings.iter().map(ring).collect::<Vec<_>>(),
            "slots": reply.slots.iter().map(slot).collect::<Vec<_>>(),
        })
    };
    if format.json(out, value)? {
        return Ok(());
    }
    for r in &reply.rings {
        let of_ring = || reply.slots.iter().filter(|s| s.ring == r.ring);
        writeln!(
            out,
            "ring {}: cpu {}  slots {}  used {}  lowest unreleased index {}",
            r.ring,
            r.cpu,
            r.slots,
            of_ring().count(),
            r.low
        )?;
        writeln!(out, "\tnext index expected of each rank: {}", list(&r.expected))?;
        for s in of_ring() {
            write!(out, "\tslot {}: index {}  len {}  {}", s.slot, s.index, s.len, s.state)?;
            if !s.missing.is_empty() {
                write!(out, "  missing ranks {}", list(&s.missing))?;
            }
            writeln!(out)?;
        }
    }
    Ok(())
}

fn list(numbers: &[u32]) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

/// Counters, all of them.
pub fn stats(out: &mut impl Write, format: Format, counters: &[api::Counter]) -> Result<()> {
    let value =
        || counters.iter().map(|c| (c.name.clone(), json!(c.value))).collect::<serde_json::Map<_, _>>();
    if format.json(out, || Value::Object(value()))? {
        return Ok(());
    }
    let width = counters.iter().map(|c| c.name.len()).max().unwrap_or(0);
    for (kind, title) in [("work", "work"), ("pass", "passed on"), ("drop", "dropped")] {
        writeln!(out, "{title}")?;
        for c in counters.iter().filter(|c| c.kind == kind) {
            writeln!(out, "\t{:<width$}  {:>12}  {}", c.name, c.value, c.help)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(print: impl FnOnce(&mut Vec<u8>) -> Result<()>) -> String {
        let mut out = Vec::new();
        print(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn example() -> api::Job {
        api::Job {
            name: "train".into(),
            ranks: 2,
            dtype: "i32".into(),
            mtu: 1024,
            message_size: 65536,
            window: 2,
            rings: 1,
            icrc: "verify".into(),
            order: "in-order".into(),
            state: api::JobState::Active.into(),
            memory: 325632,
            slots: 256,
            flows: vec![api::Flow {
                ring: 0,
                rank: 1,
                port: "p1".into(),
                src: "10.0.0.2".into(),
                dst: "10.0.0.1".into(),
                qpn: 0x11,
                psn: 0xabc,
                src_mac: String::new(),
            }],
            token: "secret".into(),
            ..api::Job::default()
        }
    }

    #[test]
    fn a_job_as_text() {
        insta::assert_snapshot!(text(|o| job(o, Format::Text, &example())));
    }

    #[test]
    fn a_job_as_json() {
        insta::assert_snapshot!(text(|o| job(o, Format::Pretty, &example())));
    }

    #[test]
    fn slots_as_text() {
        let reply = api::ShowSlotsReply {
            rings: vec![api::RingState { ring: 0, cpu: 1, slots: 256, low: 7, expected: vec![9, 7] }],
            slots: vec![api::Slot {
                ring: 0,
                slot: 7,
                index: 7,
                len: 1024,
                state: "partial".into(),
                contributors: vec![0],
                missing: vec![1],
            }],
        };
        insta::assert_snapshot!(text(|o| slots(o, Format::Text, &reply)));
    }

    #[test]
    fn ports_as_text() {
        let port = api::Port {
            name: "p0".into(),
            ifindex: 3,
            mtu: 1500,
            up: true,
            xdp: "native".into(),
            ..Default::default()
        };
        insta::assert_snapshot!(text(|o| ports(o, Format::Text, &[port])));
    }

    #[test]
    fn one_line_of_json_is_one_line() {
        let line = text(|o| jobs(o, Format::Json, &[example()]));
        assert_eq!(line.lines().count(), 1);
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value[0]["flows"][0]["qpn"], 17);
    }
}
