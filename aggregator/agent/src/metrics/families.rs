//! Metrics by name: base units, `_total` for counters, `_info` for descriptions. Labels hold no
//! slot, PSN or host address, so jobs, rings and ranks bound the number of series.

use std::fmt;

use netsum_common::abi;
use netsum_common::counters::{Counter, Kind};
use netsum_common::timing::{BUCKETS, Histogram, RankTiming, SAMPLED};
use netsum_core::State;
use netsum_dataplane::count;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use super::family::{Family, Labels, Value, counter, gauge, info, label};
use super::gather::{JobSnapshot, Snapshot};
use super::tenants;

/// The text of a scrape, in the OpenMetrics format.
///
/// # Errors
/// None are known.
pub fn text(snapshot: Snapshot) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("netsum");
    registry.register_collector(Box::new(snapshot));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        // Families without samples are left out.
        for family in families(self).into_iter().filter(|f| !f.samples.is_empty()) {
            let Family { name, help, unit, kind, samples } = family;
            let mut metric = encoder.encode_descriptor(name, help, unit.as_ref(), kind)?;
            for (mut labels, value) in samples {
                labels.iter_mut().for_each(|(_, value)| *value = escaped(value));
                match value {
                    Value::Info => metric.encode_info(&labels)?,
                    value if labels.is_empty() => encode(&mut metric, value)?,
                    value => encode(&mut metric.encode_family(&labels)?, value)?,
                }
            }
        }
        Ok(())
    }
}

fn encode(metric: &mut MetricEncoder<'_>, value: Value) -> fmt::Result {
    match value {
        Value::Count(n) => metric.encode_counter::<NoLabelSet, u64, u64>(&n, None),
        Value::Gauge(n) => metric.encode_gauge(&(n as f64)),
        Value::Real(x) => metric.encode_gauge(&x),
        Value::Durations(h) => metric.encode_histogram::<NoLabelSet>(
            h.sum_ns as f64 / 1e9,
            h.count(),
            &buckets(&h),
            None,
        ),
        Value::Info => Ok(()),
    }
}

/// Bounds in seconds, and the number of durations between each bound and the one before; the last
/// bucket is unbounded.
fn buckets(h: &Histogram) -> Vec<(f64, u64)> {
    let bound =
        |b: usize| if b + 1 == BUCKETS { f64::MAX } else { Histogram::bound(b) as f64 / 1e9 };
    h.counts.iter().enumerate().map(|(b, &n)| (bound(b), n)).collect()
}

/// Escapes a label's value for OpenMetrics, which the encoder does not do. An interface's name may
/// contain quotes.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn families(s: &Snapshot) -> Vec<Family> {
    let version = vec![label("version", env!("CARGO_PKG_VERSION")), label("abi", abi::VERSION)];
    let mut all = vec![
        info("build", "the daemon's version, and that of the layout of its maps", vec![version]),
        gauge(
            "pool_memory",
            Some(Unit::Bytes),
            "memory for the rings of all jobs",
            vec![(Vec::new(), Value::Gauge(s.memory.0))],
        ),
        gauge(
            "pool_memory_used",
            Some(Unit::Bytes),
            "memory that the jobs have reserved",
            vec![(Vec::new(), Value::Gauge(s.memory.1))],
        ),
    ];
    let refused = s
        .refused_jobs
        .by_reason()
        .map(|(reason, n)| (vec![label("reason", reason)], Value::Count(n)));
    all.push(counter(
        "refused_jobs",
        None,
        "jobs that were not created, by reason",
        refused.collect(),
    ));
    all.extend(tenants::families(&s.tenants));
    all.extend(of_jobs(&s.jobs));
    all.extend(of_timings(&s.jobs));
    all.extend(of_counters(s));
    all.extend(of_rings(&s.jobs));
    all.extend(of_ports(s));
    all
}

fn of_jobs(jobs: &[JobSnapshot]) -> Vec<Family> {
    let job = |j: &JobSnapshot| vec![label("job_name", &j.name)];
    let described = |j: &JobSnapshot| {
        vec![
            label("job_name", &j.name),
            label("tenant", &j.tenant),
            label("ranks", j.ranks),
            label("mtu", j.mtu),
            label("rings", j.rings.len()),
        ]
    };
    let state = |j: &JobSnapshot| {
        let is = [
            ("waiting", j.state == State::Waiting),
            ("active", j.state == State::Active),
            ("failed", matches!(j.state, State::Failed(_))),
        ];
        let job = j.name.clone();
        is.map(|(state, is)| {
            (vec![label("job_name", &job), label("state", state)], Value::Gauge(is.into()))
        })
    };
    let heartbeats = |j: &JobSnapshot| {
        let of_rank = |&(rank, ago): &(u32, std::time::Duration)| {
            (vec![label("job_name", &j.name), label("rank", rank)], Value::Real(ago.as_secs_f64()))
        };
        j.heartbeat_ages.iter().map(of_rank).collect::<Vec<_>>()
    };
    vec![
        info("job", "properties of a job", jobs.iter().map(described).collect()),
        gauge(
            "job_state",
            None,
            "1 for the state that a job is in",
            jobs.iter().flat_map(state).collect(),
        ),
        gauge(
            "job_on_host_ring",
            None,
            "1 while a job's ranks sum over the hosts' ring",
            jobs.iter().map(|j| (job(j), Value::Gauge(j.on_host_ring.0.into()))).collect(),
        ),
        counter(
            "job_fallbacks",
            None,
            "fallbacks from the box to the hosts' ring",
            jobs.iter().map(|j| (job(j), Value::Count(j.on_host_ring.1))).collect(),
        ),
        counter(
            "job_underflows",
            None,
            "nonzero floats of a job's ranks that became 0; 0 if they report to a fabric's manager",
            jobs.iter().map(|j| (job(j), Value::Count(j.underflows))).collect(),
        ),
        gauge(
            "job_sealed",
            None,
            "1 while a job's ranks seal their sums; 0 if they report to a fabric's manager",
            jobs.iter().map(|j| (job(j), Value::Gauge(j.is_sealed.into()))).collect(),
        ),
        gauge(
            "job_memory",
            Some(Unit::Bytes),
            "memory of a job's rings",
            jobs.iter().map(|j| (job(j), Value::Gauge(j.memory))).collect(),
        ),
        gauge(
            "rank_heartbeat_age",
            Some(Unit::Seconds),
            "time since a rank's last heartbeat",
            jobs.iter().flat_map(heartbeats).collect(),
        ),
    ]
}

const _: () = assert!(SAMPLED == 64, "the help texts say so");

/// Timings cover one fragment index in 64: rates and quantiles are as good as those of all.
fn of_timings(jobs: &[JobSnapshot]) -> Vec<Family> {
    let completion = |j: &JobSnapshot| {
        (vec![label("job_name", &j.name)], Value::Durations(Box::new(j.timings.completion)))
    };
    let last = jobs.iter().flat_map(|j| {
        let of_rank = |(rank, r): (&u32, &RankTiming)| {
            (vec![label("job_name", &j.name), label("rank", rank)], Value::Count(r.last))
        };
        j.senders.iter().zip(&j.timings.ranks).map(of_rank).collect::<Vec<_>>()
    });
    vec![
        Family {
            // The unit is only in the name, because some parsers reject units on histograms.
            name: "slot_completion_seconds",
            help: "time from a slot's first contribution to its last, of one fragment index in 64",
            unit: None,
            kind: MetricType::Histogram,
            samples: jobs.iter().map(completion).collect(),
        },
        counter(
            "rank_straggled",
            None,
            "how often a rank was the last to contribute to a slot, of one fragment index in 64",
            last.collect(),
        ),
    ]
}

fn of_counters(s: &Snapshot) -> Vec<Family> {
    // Counters without a job have an empty label, which Prometheus treats as absent.
    let by_job = || {
        let jobs = s.jobs.iter().map(|j| (j.name.as_str(), &j.counters));
        jobs.chain([("", &s.no_job)])
    };
    let of = |c: Counter| by_job().map(move |(job, values)| (job, Value::Count(count(values, c))));
    let by_reason = |kind: Kind| {
        Counter::ALL
            .iter()
            .filter(|c| c.kind() == kind)
            .flat_map(|&c| {
                of(c).map(move |(job, value)| {
                    (vec![label("job_name", job), label("reason", c.name())], value)
                })
            })
            .collect()
    };
    let work = |&c: &Counter| {
        // Work is counted only for jobs.
        let jobs = of(c).filter(|(job, _)| !job.is_empty());
        let samples = jobs.map(|(job, value)| (vec![label("job_name", job)], value)).collect();
        counter(c.name(), None, c.help().trim(), samples)
    };
    let bytes = |c: Counter| {
        let of_job = |j: &JobSnapshot| (count(&j.counters, c) as f64 * j.fragment_bytes) as u64;
        s.jobs.iter().map(|j| (vec![label("job_name", &j.name)], Value::Count(of_job(j)))).collect()
    };
    let mut all: Vec<Family> =
        Counter::ALL.iter().filter(|c| c.kind() == Kind::Work).map(work).collect();
    all.extend([
        counter("dropped_packets", None, "packets dropped, by reason", by_reason(Kind::Drop)),
        counter(
            "passed_packets",
            None,
            "packets passed on to the bridge, by reason",
            by_reason(Kind::Pass),
        ),
        counter(
            "payload_received",
            Some(Unit::Bytes),
            "payload of contributions; each fragment taken for one of a full message",
            bytes(Counter::Contributions),
        ),
        counter(
            "payload_sent",
            Some(Unit::Bytes),
            "payload of results, replays among them; each fragment taken for one of a full message",
            bytes(Counter::Results),
        ),
    ]);
    all
}

fn of_rings(jobs: &[JobSnapshot]) -> Vec<Family> {
    let rings = || {
        let of_job = |j: &'_ JobSnapshot| {
            let job = j.name.clone();
            j.rings
                .iter()
                .enumerate()
                .map(move |(number, (config, load))| {
                    let labels = vec![label("job_name", &job), label("ring", number)];
                    (labels, *config, load.clone())
                })
                .collect::<Vec<_>>()
        };
        jobs.iter().flat_map(of_job)
    };
    let cpu = |(mut labels, config, _): (Labels, netsum_common::abi::RingConfig, _)| {
        labels.push(label("cpu", config.cpu));
        labels
    };
    let mut credit_used = Vec::new();
    for job in jobs {
        for (ring, (_, load)) in job.rings.iter().enumerate() {
            for (rank, &used) in job.senders.iter().zip(&load.credit_used) {
                let labels =
                    vec![label("job_name", &job.name), label("ring", ring), label("rank", rank)];
                credit_used.push((labels, Value::Gauge(used.into())));
            }
        }
    }
    let seconds = |t: Option<std::time::Duration>| Value::Real(t.unwrap_or_default().as_secs_f64());
    vec![
        info("ring", "the CPU that serves a ring", rings().map(cpu).collect()),
        gauge(
            "ring_slots",
            None,
            "slots of a ring",
            rings()
                .map(|(labels, config, _)| (labels, Value::Gauge(config.slots.into())))
                .collect(),
        ),
        gauge(
            "ring_slots_used",
            None,
            "slots with a sum that has not been released",
            rings()
                .map(|(labels, _, load)| (labels, Value::Gauge(load.slots_used.into())))
                .collect(),
        ),
        gauge(
            "ring_credit_fragments",
            None,
            "fragments that a rank may send beyond what has been released",
            rings()
                .map(|(labels, config, _)| (labels, Value::Gauge(config.credit.into())))
                .collect(),
        ),
        gauge(
            "rank_credit_used_fragments",
            None,
            "fragments that a rank has sent beyond what has been released; the rank that others \
             wait for has the least",
            credit_used,
        ),
        gauge(
            "ring_stalled",
            Some(Unit::Seconds),
            "time that a ring with pending sums has been stalled",
            rings().map(|(labels, _, load)| (labels, seconds(load.stalled))).collect(),
        ),
    ]
}

fn of_ports(s: &Snapshot) -> Vec<Family> {
    let port = |name: &str| vec![label("port", name)];
    let described = s.ports.iter().map(|p| {
        let mut labels = port(&p.name);
        labels.extend([
            label("ifindex", p.ifindex),
            label("mac", &p.mac),
            label("xdp", p.xdp.unwrap_or("none")),
        ]);
        labels
    });
    let counted =
        |i: usize| s.ports.iter().map(|p| (port(&p.name), Value::Count(p.counters[i]))).collect();
    let is = |value: fn(&crate::netlink::Interface) -> u64| {
        s.ports.iter().map(|p| (port(&p.name), Value::Gauge(value(p)))).collect()
    };
    vec![
        info(
            "port",
            "an interface towards hosts, and how its program is attached",
            described.collect(),
        ),
        gauge("port_up", None, "1 if a port is up and has a carrier", is(|p| p.up.into())),
        gauge("port_mtu", Some(Unit::Bytes), "a port's MTU", is(|p| p.mtu.into())),
        counter(
            "port_receive",
            Some(Unit::Bytes),
            "bytes received on a port, of all traffic",
            counted(0),
        ),
        counter(
            "port_receive_packets",
            None,
            "packets received on a port, of all traffic",
            counted(1),
        ),
        counter(
            "port_transmit",
            Some(Unit::Bytes),
            "bytes sent on a port, of all traffic",
            counted(2),
        ),
        counter(
            "port_transmit_packets",
            None,
            "packets sent on a port, of all traffic",
            counted(3),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    // The only crate that knows the format's rules for names, units, types and buckets. It is under
    // the LGPL-3.0, and used only in tests, so nothing that is shipped contains it. nom-openmetrics
    // (MIT) and prometheus-parse (Apache-2.0) only split lines.
    use openmetrics_parser::openmetrics::parse_openmetrics;

    use super::*;
    use crate::load::{RingLoad, Timings};
    use crate::netlink::Interface;
    use netsum_common::abi::RingConfig;
    use netsum_controller::state::RefusedJobs;
    use netsum_core::tenant::TenantView;
    use netsum_core::tenant::{Amount, Limits};
    use tonic::Code;

    fn snapshot() -> Snapshot {
        let ring = RingConfig {
            members: 2,
            slots: 256,
            credit: 128,
            mtu: 1024,
            cpu: 5,
            ..RingConfig::default()
        };
        let load = RingLoad {
            low: 7,
            slots_used: 2,
            credit_used: vec![2, 0],
            stalled: Some(Duration::from_millis(1500)),
        };
        let mut timings = Timings::of_ranks(2);
        [40, 1_000, 70_000, u64::MAX >> 20].into_iter().for_each(|ns| timings.completion.add(ns));
        timings.ranks[1].last = 4;
        let job = JobSnapshot {
            name: "train".into(),
            tenant: "vision".into(),
            ranks: 2,
            senders: vec![0, 1],
            mtu: 1024,
            state: State::Active,
            on_host_ring: (true, 3),
            is_sealed: false,
            underflows: 7,
            memory: 1 << 20,
            counters: (0..Counter::ALL.len() as u64).collect(),
            fragment_bytes: 1024.0,
            rings: vec![(ring, load)],
            timings,
            heartbeat_ages: vec![(0, Duration::from_millis(250))],
        };
        let port = Interface {
            ifindex: 3,
            name: "odd\"\\name".into(),
            mac: "02:00:00:00:00:01".into(),
            mtu: 1500,
            up: true,
            xdp: Some("native"),
            counters: [1, 2, 3, 4],
            ..Interface::default()
        };
        let no_job = vec![1; Counter::ALL.len()];
        let tenant = |name: &str, limits| {
            let used = Amount { jobs: 1, rings: 1, slots: 256, memory: 1 << 20 };
            TenantView { name: name.into(), limits, used, admitted: 7 }
        };
        let some = Limits { jobs: Some(2), memory: Some(2 << 20), ..Limits::default() };
        let tenants = vec![tenant("vision", Some(some)), tenant("gone", None)];
        let mut refused_jobs = RefusedJobs::default();
        [Code::ResourceExhausted, Code::Internal]
            .into_iter()
            .for_each(|code| refused_jobs.count(code));
        let memory = (256 << 20, 1 << 20);
        Snapshot { memory, no_job, tenants, refused_jobs, jobs: vec![job], ports: vec![port] }
    }

    #[test]
    fn a_scrape_as_text() {
        insta::assert_snapshot!(
            text(snapshot()).unwrap().replace(env!("CARGO_PKG_VERSION"), "VERSION")
        );
    }

    #[test]
    fn a_scrape_is_open_metrics_whatever_ports_are_called() {
        for snapshot in [snapshot(), Snapshot::default()] {
            let text = text(snapshot).unwrap();
            parse_openmetrics(&text).unwrap_or_else(|e| panic!("{e:?}\n{text}"));
        }
        // The parser detects missing escapes.
        let broken = text(snapshot()).unwrap().replace("odd\\\"", "odd\"");
        assert!(parse_openmetrics(&broken).is_err());
    }
}
