//! The daemon's capabilities: only those that it needs after its start.
//!
//! | capability | what for |
//! | --- | --- |
//! | CAP_BPF | the maps of a new job, among them arrays of maps |
//! | CAP_NET_ADMIN | their device maps, which lead to the ports |
//!
//! Linux also requires CAP_PERFMON to load the programs, because they do arithmetic on packet
//! pointers, but not later.

use anyhow::{Context, Result};
use caps::{CapSet, Capability, CapsHashSet};

/// The capabilities kept after the start.
pub const KEPT: [Capability; 2] = [Capability::CAP_BPF, Capability::CAP_NET_ADMIN];

/// Drops every other capability for good, and with no_new_privs the ability to gain any by running
/// a program. Capabilities belong to threads, so this must be called while only one thread exists.
/// Threads started later inherit its capabilities.
pub fn drop_capabilities() -> Result<()> {
    let kept: CapsHashSet = KEPT.into_iter().collect();
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP)? {
        for capability in caps::read(None, CapSet::Bounding)?.difference(&kept) {
            caps::drop(None, CapSet::Bounding, *capability)
                .context("capabilities (bounding set)")?;
        }
    }
    caps::clear(None, CapSet::Ambient).context("capabilities (ambient set)")?;
    caps::clear(None, CapSet::Inheritable).context("capabilities (inheritable set)")?;
    let there: CapsHashSet =
        caps::read(None, CapSet::Permitted)?.intersection(&kept).copied().collect();
    caps::set(None, CapSet::Effective, &there).context("capabilities (effective set)")?;
    caps::set(None, CapSet::Permitted, &there).context("capabilities (permitted set)")?;
    nix::sys::prctl::set_no_new_privs().context("no_new_privs")?;
    let mut names: Vec<String> = there.iter().map(ToString::to_string).collect();
    names.sort();
    log::info!("capabilities: {}", names.join(", "));
    Ok(())
}
