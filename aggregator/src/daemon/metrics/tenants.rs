//! Metrics of tenants and of the queue. Tenants are those of the configuration, so their number is bounded.

use prometheus_client::registry::Unit;

use super::families::{Family, Labels, Value, counter, gauge, info, label};
use super::gather::TenantSnapshot;
use crate::core::tenant::{Amount, Limits};

/// What a tenant has of something.
type Used = fn(Amount) -> u64;
/// What it may have; `None` where the pool alone is the limit.
type Limit = fn(&Limits) -> Option<u64>;

/// How all of them stand.
pub(super) fn families(tenants: &[TenantSnapshot]) -> Vec<Family> {
    let labels = |t: &TenantSnapshot| vec![label("tenant", &t.view.name)];
    let each = |value: fn(&TenantSnapshot) -> Value| -> Vec<(Labels, Value)> {
        tenants.iter().map(|t| (labels(t), value(t))).collect()
    };
    let described = |t: &TenantSnapshot| {
        let priority = t.view.limits.as_ref().map_or(0, |l| l.priority);
        let mut labels = labels(t);
        labels.extend([label("configured", t.view.limits.is_some()), label("priority", priority)]);
        labels
    };
    let quota = |used: (&'static str, &'static str),
                 limit: (&'static str, &'static str),
                 unit: Option<Unit>,
                 u: Used,
                 l: Limit| {
        let limits =
            tenants.iter().filter_map(|t| Some((labels(t), Value::Gauge(l(t.view.limits.as_ref()?)?))));
        let used_by = tenants.iter().map(|t| (labels(t), Value::Gauge(u(t.view.used))));
        [
            gauge(used.0, unit.clone(), used.1, used_by.collect()),
            gauge(limit.0, unit, limit.1, limits.collect()),
        ]
    };
    let mut all = vec![info("tenant", "who has jobs, or may have", tenants.iter().map(described).collect())];
    all.extend(quota(
        ("tenant_jobs", "jobs that a tenant has"),
        ("tenant_jobs_limit", "jobs that a tenant may have"),
        None,
        |used| used.jobs,
        |limits| limits.jobs,
    ));
    all.extend(quota(
        ("tenant_rings", "rings of a tenant's jobs"),
        ("tenant_rings_limit", "rings that a tenant may have"),
        None,
        |used| used.rings,
        |limits| limits.rings,
    ));
    all.extend(quota(
        ("tenant_slots", "slots of a tenant's rings"),
        ("tenant_slots_limit", "slots that a tenant may have"),
        None,
        |used| used.slots,
        |limits| limits.slots,
    ));
    all.extend(quota(
        ("tenant_memory", "memory of a tenant's rings"),
        ("tenant_memory_limit", "memory that a tenant may have"),
        Some(Unit::Bytes),
        |used| used.memory,
        |limits| limits.memory,
    ));
    all.extend([
        gauge(
            "tenant_share_ratio",
            None,
            "how much of what it may have a tenant has, of the resource of which that is the most",
            each(|t| Value::Real(t.view.share)),
        ),
        gauge(
            "tenant_waiting_jobs",
            None,
            "jobs of a tenant that wait for their turn",
            each(|t| Value::Gauge(t.view.waiting.into())),
        ),
        gauge(
            "tenant_longest_wait",
            Some(Unit::Seconds),
            "for how long the job has waited that has waited for longest; 0 where none waits",
            each(|t| Value::Real(t.longest_wait.as_secs_f64())),
        ),
        counter(
            "tenant_admitted_jobs",
            None,
            "jobs of a tenant that were created, at once or after they had waited",
            each(|t| Value::Count(t.view.admitted)),
        ),
    ]);
    all
}
