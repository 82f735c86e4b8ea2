//! The building blocks of metrics.

use netsum_common::timing::Histogram;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

/// A job's label is `job_name`, because Prometheus itself sets `job` on everything it scrapes.
pub(super) type Labels = Vec<(&'static str, String)>;

/// A value of a sample.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Count(u64),
    Gauge(u64),
    /// In seconds, or a fraction.
    Real(f64),
    Durations(Box<Histogram>),
    Info,
}

/// Samples under one name.
#[derive(Clone, Debug)]
pub(super) struct Family {
    pub name: &'static str,
    pub help: &'static str,
    pub unit: Option<Unit>,
    pub kind: MetricType,
    pub samples: Vec<(Labels, Value)>,
}

pub(super) fn label(name: &'static str, value: impl ToString) -> (&'static str, String) {
    (name, value.to_string())
}

pub(super) fn gauge(
    name: &'static str,
    unit: Option<Unit>,
    help: &'static str,
    samples: Vec<(Labels, Value)>,
) -> Family {
    Family { name, help, unit, kind: MetricType::Gauge, samples }
}

pub(super) fn counter(
    name: &'static str,
    unit: Option<Unit>,
    help: &'static str,
    samples: Vec<(Labels, Value)>,
) -> Family {
    Family { name, help, unit, kind: MetricType::Counter, samples }
}

pub(super) fn info(name: &'static str, help: &'static str, labels: Vec<Labels>) -> Family {
    let samples = labels.into_iter().map(|l| (l, Value::Info)).collect();
    Family { name, help, unit: None, kind: MetricType::Info, samples }
}
