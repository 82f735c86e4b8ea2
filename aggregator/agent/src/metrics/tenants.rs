//! Metrics of tenants. Tenants are those that are configured or have jobs: their number is bounded.

use netsum_core::tenant::{Amount, Limits, TenantView};
use prometheus_client::registry::Unit;

use super::family::{Family, Value, counter, gauge, info, label};

/// The amount that a tenant uses.
type Used = fn(Amount) -> u64;
/// Its limit; `None` if only the pool limits it.
type Limit = fn(&Limits) -> Option<u64>;

/// Metrics of all tenants.
pub(super) fn families(tenants: &[TenantView]) -> Vec<Family> {
    let labels = |t: &TenantView| vec![label("tenant", &t.name)];
    let described = |t: &TenantView| {
        let mut labels = labels(t);
        labels.push(label("configured", t.limits.is_some()));
        labels
    };
    let quota = |used: (&'static str, &'static str),
                 limit: (&'static str, &'static str),
                 unit: Option<Unit>,
                 u: Used,
                 l: Limit| {
        let limits =
            tenants.iter().filter_map(|t| Some((labels(t), Value::Gauge(l(t.limits.as_ref()?)?))));
        let used_by = tenants.iter().map(|t| (labels(t), Value::Gauge(u(t.used))));
        [
            gauge(used.0, unit.clone(), used.1, used_by.collect()),
            gauge(limit.0, unit, limit.1, limits.collect()),
        ]
    };
    let mut all = vec![info(
        "tenant",
        "tenants that are configured or have jobs",
        tenants.iter().map(described).collect(),
    )];
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
    let admitted = tenants.iter().map(|t| (labels(t), Value::Count(t.admitted))).collect();
    all.push(counter("tenant_admitted_jobs", None, "jobs of a tenant that were created", admitted));
    all
}
