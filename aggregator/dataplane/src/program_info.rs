//! The kernel's information about the loaded programs. This takes no capability: descriptors are
//! open already, and information that needs a program's number is left out.

use std::os::fd::{AsFd as _, AsRawFd as _};

use anyhow::{Context, Result};
use netsum_common::abi::programs;

use super::bpf::BpfDataPlane;
use super::plane::{Attached, ProgramFacts};

pub(super) fn programs(plane: &BpfDataPlane) -> Result<Vec<ProgramFacts>> {
    let mut ports: Vec<u32> = plane.ports.keys().copied().collect();
    ports.sort_unstable();
    let guarded =
        ports.iter().filter(|port| plane.ports.get(port).is_some_and(|p| p.guard.is_some()));
    [
        (programs::INGRESS, ports.iter().copied().map(Attached::Port).collect()),
        (programs::AGGREGATE, plane.cpus.iter().copied().map(Attached::Cpu).collect()),
        (programs::AGGREGATE_INLINE, vec![Attached::Ingress]),
        (programs::EGRESS, vec![Attached::DeviceMap]),
        (programs::GUARD, guarded.copied().map(Attached::Port).collect()),
    ]
    .into_iter()
    .map(|(name, attached)| facts(plane, name, attached))
    .collect()
}

fn facts(
    plane: &BpfDataPlane,
    name: &'static str,
    attached: Vec<Attached>,
) -> Result<ProgramFacts> {
    let program = plane.ebpf.program(name).with_context(|| format!("no program `{name}`"))?;
    let info = program.info().with_context(|| format!("program `{name}`"))?;
    let fd = program.fd()?.as_fd().as_raw_fd();
    let text =
        std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).context("/proc/self/fdinfo")?;
    Ok(ProgramFacts {
        id: info.id(),
        name,
        tag: info.tag(),
        loaded_at: info.loaded_at(),
        xlated_bytes: info.size_translated().unwrap_or(0),
        jited_bytes: info.size_jitted(),
        memory: field(&text, "memlock"),
        verified_instructions: info.verified_instruction_count().unwrap_or(0),
        runs: (field(&text, "run_cnt"), field(&text, "run_time_ns")),
        attached,
    })
}

/// A number in the kernel's information about a descriptor (`bpf_prog_show_fdinfo` in
/// kernel/bpf/syscall.c); 0 if it is missing.
fn field(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
    value.and_then(|v| v.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "pos:\t0\nprog_id:\t7\nrun_time_ns:\t12\nrun_cnt:\t3\nmemlock:\t8192\n";
        assert_eq!(
            (field(text, "run_cnt"), field(text, "memlock"), field(text, "run")),
            (3, 8192, 0)
        );
    }
}
