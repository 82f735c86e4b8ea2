//! Text and JSON of each object.

use std::io::Write;

use netsum_api::v1 as api;
use netsum_common::abi::{RingMemory, float_sum_bytes};
use netsum_common::size::Size;

use super::failure::Result;
use super::format::Format;
use super::layout::{BAD, Cell, Entry, FAIR, GOOD, NAME, PLAIN, attribute, plain, styled};
use super::timing::{self, Sums};
use super::view::{Flow, InBand, Job, State, Stats};

/// A job's state in its colour.
pub(super) fn state(state: State) -> Cell {
    let style = match state {
        State::Active => GOOD,
        State::Waiting => FAIR,
        State::Failed => BAD,
    };
    styled(state.name(), style)
}

/// An object's name at the start of its line.
pub(super) fn name(text: impl std::fmt::Display) -> Cell {
    styled(format!("{text}:"), NAME)
}

pub fn up(up: bool) -> Cell {
    if up { styled("up", GOOD) } else { styled("down", BAD) }
}

fn list(numbers: &[u32]) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

fn job_entry(j: &Job) -> Entry {
    let mut entry = Entry::new(vec![
        name(&j.name),
        state(j.state),
        match (j.min_ranks, j.max_ranks) {
            (Some(min), Some(max)) => attribute("ranks", format!("{} ({min} to {max})", j.ranks)),
            _ => attribute("ranks", j.ranks),
        },
        attribute("mtu", j.mtu),
        attribute("message", j.message_size),
        attribute("window", j.window),
        attribute("rings", j.rings),
    ]);
    if !j.error.is_empty() {
        entry.attributes(0, vec![styled(format!("error: {}", j.error), BAD)]);
    }
    let mut properties = vec![
        attribute("icrc", &j.icrc),
        attribute("order", &j.order),
        attribute("flows", format!("{}/{}", j.flows.len(), j.connections())),
        attribute("epoch", j.epoch),
        attribute("tenant", &j.tenant),
    ];
    if let (Some(dtype), Some(lsb)) = (&j.dtype, j.lsb) {
        properties.extend([attribute("dtype", dtype), attribute("lsb", format!("2^{lsb}"))]);
    }
    if j.in_band.is_some() {
        properties.push(plain("in band"));
    }
    if j.sealed {
        properties.push(plain("sealed"));
    }
    if !j.members.is_empty() {
        properties.push(attribute("members", j.members.join(",")));
    }
    if !j.uplink.is_empty() {
        properties.push(attribute("uplink", &j.uplink));
    }
    entry.attributes(1, properties);
    entry
}

/// The same with its memory, its token and its flows.
fn whole_job(j: &Job) -> Entry {
    let mut entry = job_entry(j);
    let sum_bytes = j.lsb.map_or(j.largest_mtu, |_| float_sum_bytes(j.largest_mtu));
    let members = j.connections() / j.rings.max(1);
    let of_ring = RingMemory { slots: j.slots, sum_bytes, members };
    let memory = format!("memory {}: {} rings x {of_ring}", Size(j.memory), j.rings);
    entry.attributes(2, vec![plain(memory)]);
    if let Some(token) = &j.token {
        entry.attributes(3, vec![attribute("token", token)]);
    }
    if let Some(band) = &j.in_band {
        in_band(&mut entry, band);
    }
    for f in &j.flows {
        entry.attributes(4, place_and_connection(f));
    }
    entry
}

/// Connections that have shown up in band, and missing ones.
fn in_band(entry: &mut Entry, band: &InBand) {
    if let Some(token) = &band.token {
        entry.attributes(3, vec![attribute("token in band", token)]);
    }
    for claim in &band.claims {
        let mut cells = vec![plain("waits in band:")];
        cells.extend(place_and_connection(claim));
        entry.attributes(5, cells);
    }
    if !band.unclaimed.is_empty() {
        let missing: Vec<String> =
            band.unclaimed.iter().map(|p| format!("{} of ring {}", p.rank, p.ring)).collect();
        entry.attributes(
            6,
            vec![plain(format!("not yet shown up in band: rank {}", missing.join(", ")))],
        );
    }
    for why in &band.refusals {
        entry.attributes(6, vec![styled(format!("refused in band: {why}"), FAIR)]);
    }
}

fn place_and_connection(f: &Flow) -> Vec<Cell> {
    let mut cells = vec![plain(format!("ring {} rank {}:", f.ring, f.rank))];
    cells.extend(connection(f));
    cells
}

fn connection(f: &Flow) -> Vec<Cell> {
    let mac = if f.src_mac.is_empty() { "not yet known" } else { &f.src_mac };
    vec![
        attribute("port", &f.port),
        attribute("src", format!("{} ({mac})", f.src)),
        attribute("dst", &f.dst),
        attribute("qpn", format!("{:#x}", f.qpn)),
        attribute("psn", format!("{:#x}", f.psn)),
    ]
}

/// A job with all that belongs to it.
pub fn job(out: &mut impl Write, format: Format, job: api::Job) -> Result<()> {
    let job = Job::from(job);
    format.show(out, &job, &[&job], |job| whole_job(job))
}

/// A summary of jobs.
pub fn jobs(out: &mut impl Write, format: Format, jobs: Vec<api::Job>) -> Result<()> {
    let jobs: Vec<Job> = jobs.into_iter().map(Job::from).collect();
    format.show(out, &jobs, &jobs, job_entry)
}

/// The job that a flow has been added to.
pub fn added(out: &mut impl Write, format: Format, job: api::Job) -> Result<()> {
    let job = Job::from(job);
    let flows = attribute("flows", format!("{}/{}", job.flows.len(), job.connections()));
    let cells = vec![name(&job.name), state(job.state), flows];
    format.show(out, &job, &[cells], |cells| Entry::new(cells.clone()))
}

pub fn flows(out: &mut impl Write, format: Format, jobs: Vec<api::Job>) -> Result<()> {
    let flows: Vec<Flow> = jobs.into_iter().flat_map(|j| Job::from(j).flows).collect();
    format.show(out, &flows, &flows, |f: &Flow| {
        let mut head = vec![name(format!("{} ring {} rank {}", f.job, f.ring, f.rank))];
        head.extend(connection(f));
        let mut entry = Entry::new(head);
        let mut seen = vec![
            attribute("packets", f.packets),
            styled(format!("refused {}", f.refused), if f.refused > 0 { FAIR } else { PLAIN }),
        ];
        if let (Some(psn), Some(outcome)) = (f.last_psn, &f.last_verdict) {
            seen.push(plain(format!("last psn {psn:#x} {outcome}")));
        }
        entry.attributes(0, seen);
        entry
    })
}

pub fn rings(out: &mut impl Write, format: Format, rings: Vec<api::Ring>) -> Result<()> {
    format.show(out, &rings, &rings, |r: &api::Ring| {
        let mut entry = Entry::new(vec![
            name(format!("{} ring {}", r.job, r.ring)),
            if r.active { styled("active", GOOD) } else { styled("inactive", FAIR) },
            attribute("id", r.id),
            attribute("cpu", r.cpu),
            attribute("ranks", r.ranks),
            attribute("mtu", r.mtu),
            attribute("memory", Size(r.memory)),
        ]);
        let stalled =
            r.stalled_ms.map_or_else(|| "nothing pending".into(), |ms| format!("stalled {ms} ms"));
        entry.attributes(
            0,
            vec![
                attribute("unreleased slots", format!("{}/{}", r.slots_used, r.slots)),
                attribute("lowest unreleased index", r.low),
                plain(stalled),
            ],
        );
        let used = format!("credit {}, used by rank: {}", r.credit, list(&r.credit_used));
        entry.attributes(1, vec![plain(used)]);
        entry
    })
}

pub fn ports(out: &mut impl Write, format: Format, ports: Vec<api::Port>) -> Result<()> {
    format.show(out, &ports, &ports, |p: &api::Port| {
        let xdp = match p.xdp.as_str() {
            "" => styled("xdp none", BAD),
            xdp => attribute("xdp", xdp),
        };
        let mut entry = Entry::new(vec![
            plain(format!("{}:", p.ifindex)),
            styled(&p.name, NAME),
            up(p.up),
            xdp,
            attribute("mtu", p.mtu),
            attribute("mac", &p.mac),
            attribute("flows", p.flows),
        ]);
        let traffic =
            |way: &str, packets, bytes| plain(format!("{way} {packets} packets {bytes} bytes"));
        entry.attributes(
            0,
            vec![traffic("rx", p.rx_packets, p.rx_bytes), traffic("tx", p.tx_packets, p.tx_bytes)],
        );
        entry
    })
}

/// Slots of a job that are in use.
pub fn slots(out: &mut impl Write, format: Format, all: api::ShowSlotsReply) -> Result<()> {
    format.show(out, &all, &all.rings, |r| {
        let of_ring = || all.slots.iter().filter(|s| s.ring == r.ring);
        let mut entry = Entry::new(vec![
            name(format!("ring {}", r.ring)),
            attribute("cpu", r.cpu),
            attribute("slots", r.slots),
            attribute("used", of_ring().count()),
            attribute("lowest unreleased index", r.low),
        ]);
        let whose = if (0..).zip(&r.ranks).all(|(member, rank)| member == *rank) {
            "each rank".into()
        } else {
            format!("ranks {}", list(&r.ranks))
        };
        entry.attributes(
            0,
            vec![plain(format!("next index expected of {whose}: {}", list(&r.expected)))],
        );
        for s in of_ring() {
            let style = match s.state.as_str() {
                "incomplete" => FAIR,
                "complete" => GOOD,
                _ => PLAIN,
            };
            let mut cells = vec![
                plain(format!("slot {}:", s.slot)),
                attribute("index", s.index),
                attribute("len", s.len),
                styled(&s.state, style),
            ];
            if !s.missing.is_empty() {
                cells.push(attribute("missing ranks", list(&s.missing)));
            }
            entry.attributes(1, cells);
        }
        entry
    })
}

pub fn programs(
    out: &mut impl Write,
    format: Format,
    programs: api::ListProgramsReply,
) -> Result<()> {
    format.show(out, &programs, &programs.programs, |p| {
        let loaded = std::time::UNIX_EPOCH + std::time::Duration::from_secs(p.loaded_at);
        let mut entry = Entry::new(vec![
            plain(format!("{}:", p.id)),
            plain(&p.kind),
            styled(&p.name, NAME),
            attribute("tag", &p.tag),
            attribute("abi", programs.abi),
            attribute("loaded", humantime::format_rfc3339_seconds(loaded)),
        ]);
        entry.attributes(
            0,
            vec![
                attribute("xlated", format!("{}B", p.xlated_bytes)),
                if p.jited_bytes == 0 {
                    styled("not jited", FAIR)
                } else {
                    attribute("jited", format!("{}B", p.jited_bytes))
                },
                attribute("memlock", format!("{}B", p.memory)),
                attribute("verified", format!("{} insns", p.verified_instructions)),
            ],
        );
        if let Some(rate) =
            programs.aggregation_rate.filter(|_| p.name == netsum_common::abi::programs::AGGREGATE)
        {
            entry.attributes(0, vec![attribute("aggregation rate", speed(rate as f64))]);
        }
        if p.runs > 0 {
            let mean = p.run_ns as f64 / p.runs as f64;
            let runs = format!("run_time_ns {}  run_cnt {}  {mean:.0} ns a run", p.run_ns, p.runs);
            entry.attributes(1, vec![plain(runs)]);
        }
        let attached = if p.attached.is_empty() { "nothing".into() } else { p.attached.join(", ") };
        entry.attributes(2, vec![attribute("attached to", attached)]);
        entry
    })
}

/// Counters, all of them, and the timed sums of one job.
pub fn stats(
    out: &mut impl Write,
    format: Format,
    reply: &api::StatsReply,
    job: bool,
) -> Result<()> {
    if format.json(out, &Stats::new(reply, job))? {
        return Ok(());
    }
    let all = &reply.counters;
    let width = all.iter().map(|c| c.name.len()).max().unwrap_or(0);
    for (kind, title, style) in
        [("work", "work", PLAIN), ("pass", "passed on", PLAIN), ("drop", "dropped", FAIR)]
    {
        writeln!(out, "{NAME}{title}{NAME:#}")?;
        for c in all.iter().filter(|c| c.kind == kind) {
            let style = if c.value > 0 { style } else { PLAIN };
            writeln!(out, "\t{:<width$}  {style}{:>12}{style:#}  {}", c.name, c.value, c.help)?;
        }
    }
    match reply.jobs.first().filter(|_| job) {
        Some(job) => timing::print(out, &Sums::new(job), reply.sampled),
        None => Ok(()),
    }
}

/// Bytes per second as text.
pub fn speed(rate: f64) -> String {
    if rate < 1e8 { format!("{:.1} MB/s", rate / 1e6) } else { format!("{:.2} GB/s", rate / 1e9) }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn text(print: impl FnOnce(&mut anstream::StripStream<Vec<u8>>) -> Result<()>) -> String {
        let mut out = anstream::StripStream::new(Vec::new());
        print(&mut out).unwrap();
        String::from_utf8(out.into_inner()).unwrap()
    }

    fn example() -> api::Job {
        api::Job {
            name: "train".into(),
            ranks: 2,
            mtu: 1024,
            largest_mtu: 1024,
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
                seen: Some(api::FlowStats {
                    packets: 7,
                    refused: 1,
                    last_psn: Some(0xabd),
                    last_verdict: "contributions".into(),
                }),
            }],
            token: "secret".into(),
            tenant: "default".into(),
            ..api::Job::default()
        }
    }

    #[test]
    fn a_job_as_text() {
        insta::assert_snapshot!(text(|o| job(o, Format::Text, example())));
    }

    #[test]
    fn a_job_as_json() {
        insta::assert_snapshot!(text(|o| job(o, Format::Pretty, example())));
    }

    fn waits_in_band() -> api::Job {
        let job = example();
        api::Job {
            state: api::JobState::Waiting.into(),
            claims: job.flows,
            flows: Vec::new(),
            in_band: true,
            in_band_token: "00112233445566778899aabbccddeeff".into(),
            unclaimed: vec![api::RingPosition { ring: 0, rank: 0 }],
            refusals: vec![
                "rank 1 of ring 0, 10.0.0.9 behind p3: 10.0.0.2 waits as this rank already".into(),
            ],
            ..example()
        }
    }

    #[test]
    fn a_job_that_waits_in_band_as_text() {
        insta::assert_snapshot!(text(|o| job(o, Format::Text, waits_in_band())));
    }

    #[test]
    fn a_job_that_waits_in_band_as_json() {
        insta::assert_snapshot!(text(|o| job(o, Format::Pretty, waits_in_band())));
    }

    #[test]
    fn jobs_as_text() {
        let failed = api::Job {
            name: "a-longer-name".into(),
            state: api::JobState::Failed.into(),
            error: "rank 1: no heartbeat for 10 s".into(),
            ranks: 64,
            ..example()
        };
        insta::assert_snapshot!(text(|o| jobs(o, Format::Text, vec![example(), failed])));
    }

    #[test]
    fn flows_as_text() {
        insta::assert_snapshot!(text(|o| flows(o, Format::Text, vec![example()])));
    }

    #[test]
    fn rings_as_text() {
        let ring = |ring: u32, stalled_ms: Option<u64>| api::Ring {
            job: "train".into(),
            ring,
            id: 9 + ring,
            cpu: ring,
            active: true,
            ranks: 2,
            mtu: 1024,
            memory: 325632,
            slots: 256,
            slots_used: 12 * ring,
            low: 77,
            credit: 128,
            credit_used: vec![12 * ring, 0],
            stalled_ms,
        };
        insta::assert_snapshot!(text(|o| rings(
            o,
            Format::Text,
            vec![ring(0, None), ring(1, Some(1500))]
        )));
    }

    #[test]
    fn slots_as_text() {
        let slot = |slot: u32, missing: &[u32]| api::Slot {
            ring: 0,
            slot,
            index: slot,
            len: 1024,
            state: if missing.is_empty() { "released" } else { "incomplete" }.into(),
            contributors: vec![0],
            missing: missing.to_vec(),
        };
        let reply = api::ShowSlotsReply {
            rings: vec![api::RingState {
                ring: 0,
                cpu: 1,
                slots: 256,
                low: 10,
                expected: vec![12, 10],
                ranks: vec![0, 1],
            }],
            slots: vec![slot(9, &[]), slot(10, &[1])],
        };
        insta::assert_snapshot!(text(|o| slots(o, Format::Text, reply)));
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
        insta::assert_snapshot!(text(|o| ports(o, Format::Text, vec![port])));
    }

    #[test]
    fn one_line_of_json_is_one_line() {
        let line = text(|o| jobs(o, Format::Json, vec![example()]));
        assert_eq!(line.lines().count(), 1);
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value[0]["flows"][0]["qpn"], 17);
    }

    #[test]
    fn colours_are_styles_around_the_same_text() {
        let mut out = Vec::new();
        jobs(&mut out, Format::Text, vec![example()]).unwrap();
        let coloured = String::from_utf8(out).unwrap();
        assert!(coloured.contains("\u{1b}["), "{coloured:?}");
        assert_eq!(
            anstream::adapter::strip_str(&coloured).to_string(),
            text(|o| jobs(o, Format::Text, vec![example()]))
        );
        let mut out = Vec::new();
        jobs(&mut out, Format::Pretty, vec![example()]).unwrap();
        assert!(!String::from_utf8(out).unwrap().contains('\u{1b}'), "JSON has no colours");
    }
}
