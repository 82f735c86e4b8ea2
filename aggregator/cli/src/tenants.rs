//! `netsum tenant show`.

use std::io::Write;

use netsum_api::v1 as api;
use netsum_common::size::Size;
use schemars::JsonSchema;
use serde::Serialize;

use super::failure::Result;
use super::format::Format;
use super::layout::{Entry, FAIR, PLAIN, plain, styled};
use super::print::name;

/// A tenant's limits and use.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Tenant {
    /// Its name.
    pub name: String,
    /// It is in the configuration; `default` always is.
    pub configured: bool,
    /// Jobs.
    pub jobs: Quota,
    /// Rings of all jobs.
    pub rings: Quota,
    /// Slots of all rings.
    pub slots: Quota,
    /// Bytes of all rings on the box.
    pub memory: Quota,
}

/// Use of one resource.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Quota {
    /// In use.
    pub used: u64,
    /// The limit; null if only the pool limits it.
    pub limit: Option<u64>,
}

impl From<api::Tenant> for Tenant {
    fn from(t: api::Tenant) -> Self {
        Self {
            name: t.name,
            configured: t.configured,
            jobs: Quota { used: t.jobs, limit: t.jobs_limit },
            rings: Quota { used: t.rings, limit: t.rings_limit },
            slots: Quota { used: t.slots, limit: t.slots_limit },
            memory: Quota { used: t.memory, limit: t.memory_limit },
        }
    }
}

pub fn tenants(out: &mut impl Write, format: Format, tenants: Vec<api::Tenant>) -> Result<()> {
    let tenants: Vec<Tenant> = tenants.into_iter().map(Tenant::from).collect();
    format.show(out, &tenants, &tenants, |t: &Tenant| {
        let mut entry = Entry::new(vec![
            name(&t.name),
            if t.configured { plain("configured") } else { styled("not configured", FAIR) },
        ]);
        let quota = |key: &str, quota: &Quota, text: fn(u64) -> String| {
            let limit = quota.limit.map_or_else(|| "no limit".into(), text);
            let full = quota.limit.is_some_and(|limit| quota.used >= limit);
            styled(format!("{key} {}/{limit}", text(quota.used)), if full { FAIR } else { PLAIN })
        };
        let number = |n: u64| n.to_string();
        entry.attributes(
            0,
            vec![
                quota("jobs", &t.jobs, number),
                quota("rings", &t.rings, number),
                quota("slots", &t.slots, number),
                quota("memory", &t.memory, |n| Size(n).to_string()),
            ],
        );
        entry
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_as_text() {
        let tenant = |name: &str, configured| api::Tenant {
            name: name.into(),
            configured,
            jobs_limit: configured.then_some(4),
            memory_limit: configured.then_some(64 << 20),
            jobs: 4,
            rings: 5,
            slots: 1280,
            memory: 1 << 20,
            ..api::Tenant::default()
        };
        let mut out = anstream::StripStream::new(Vec::new());
        tenants(&mut out, Format::Text, vec![tenant("vision", true), tenant("gone", false)])
            .unwrap();
        insta::assert_snapshot!(String::from_utf8(out.into_inner()).unwrap());
    }
}
