//! Loads the programs, and starts the CPUs that serve rings.

use std::collections::{HashMap, HashSet};

use anyhow::{Context as _, Result, bail};
use aya::maps::{ProgramArray, RingBuf};
use aya::{Ebpf, EbpfLoader};
use aya_log::EbpfLogger;
use netsum_common::abi::{MAX_CPUS, features, maps, programs};

use super::bpf::{BpfDataPlane, Threads, guard, ignore_missing, program};
use super::pins::Pins;

/// Variants of `aggregate` and `egress` that can be test-run.
pub(super) const PROBE_AGGREGATE: &str = "probe_aggregate";
pub(super) const PROBE_EGRESS: &str = "probe_egress";

/// The BPF object as built by `cargo xtask build-ebpf`.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!("../../../objects/netsum.bpf.o");

impl BpfDataPlane {
    /// Loads the programs and starts the CPUs that serve rings. Needs CAP_BPF and CAP_NET_ADMIN.
    pub fn load(cpus: &[u32]) -> Result<Self> {
        Self::load_object(OBJECT, cpus)
    }

    /// [`load`](Self::load), with maps and attachments that outlive this process; existing pins are
    /// reused.
    pub fn load_pinned(cpus: &[u32], pins: Pins) -> Result<Self> {
        Self::load_all(OBJECT, cpus, Some(pins))
    }

    /// [`load`](Self::load) with another object that has the same maps and programs.
    pub fn load_object(object: &[u8], cpus: &[u32]) -> Result<Self> {
        Self::load_all(object, cpus, None)
    }

    fn load_all(object: &[u8], cpus: &[u32], pins: Option<Pins>) -> Result<Self> {
        if cpus.is_empty() {
            bail!("no CPU is given to serve rings");
        }
        let mut ebpf = open(object, pins.as_ref())?;
        load(
            &mut ebpf,
            &[programs::INGRESS, programs::AGGREGATE, programs::AGGREGATE_INLINE, programs::EGRESS],
        )?;
        guard(&mut ebpf)?.load().with_context(|| {
            format!("the kernel does not take the program `{}`", programs::GUARD)
        })?;
        let mut plane = Self::of(ebpf, cpus, pins, programs::AGGREGATE)?;
        for &cpu in cpus {
            if cpu >= MAX_CPUS {
                bail!("CPU {cpu} is out of range: at most {}", MAX_CPUS - 1);
            }
            plane.start_thread(cpu)?;
        }
        plane.set_inline(!is_realtime())?;
        // Observers of an earlier daemon ended when it was killed.
        plane.set_features(features::UNKNOWN_FLOWS | features::TRACE, false)?;
        Ok(plane)
    }

    /// Loads the test-run variants of the programs, without threads that serve CPUs.
    pub(super) fn load_for_test_runs() -> Result<Self> {
        let mut ebpf = open(OBJECT, None)?;
        load(&mut ebpf, &[programs::EGRESS, PROBE_AGGREGATE, PROBE_EGRESS])?;
        Self::of(ebpf, &[0], None, PROBE_AGGREGATE)
    }

    /// Wraps loaded programs; threads will run `aggregate`.
    fn of(mut ebpf: Ebpf, cpus: &[u32], pins: Option<Pins>, aggregate: &str) -> Result<Self> {
        let logger = if level() > 0 { EbpfLogger::init(&mut ebpf).ok() } else { None };
        let egress = program(&mut ebpf, programs::EGRESS)?.fd()?.try_clone()?;
        let aggregate = program(&mut ebpf, aggregate)?.fd()?.try_clone()?;
        let events =
            RingBuf::try_from(ebpf.take_map(maps::TRACE_EVENTS).context(maps::TRACE_EVENTS)?)?;
        Ok(Self {
            ebpf,
            logger,
            egress,
            cpus: cpus.to_vec(),
            threads: Threads { configured: cpus.to_vec(), aggregate },
            ports: HashMap::new(),
            pins,
            ended: HashSet::new(),
            reserved: HashMap::new(),
            slaves: HashMap::new(),
            rings: HashMap::new(),
            events,
        })
    }

    /// Sets whether contributions that arrive on their ring's CPU are summed there at once.
    pub fn set_inline(&mut self, wanted: bool) -> Result<()> {
        let program = program(&mut self.ebpf, programs::AGGREGATE_INLINE)?.fd()?.try_clone()?;
        let map = self.ebpf.map_mut(maps::TAIL_CALLS).context(maps::TAIL_CALLS)?;
        let mut array = ProgramArray::try_from(map)?;
        if wanted { Ok(array.set(0, &program, 0)?) } else { ignore_missing(array.clear_index(&0)) }
    }
}

/// On PREEMPT_RT, softirqs of one CPU may run at the same time (Linux 6.18, without
/// `PREEMPT_RT_NEEDS_BH_LOCK`): then a ring's slots would have two writers.
fn is_realtime() -> bool {
    // A unit with `ProcSubset=pid` has no /proc/sys. An unknown kernel counts as one.
    let kernel = nix::sys::utsname::uname();
    kernel.map_or(true, |kernel| kernel.version().to_string_lossy().contains("PREEMPT_RT"))
}

/// 0 silences the programs; otherwise `log` and aya-log use the same numbers, from 1 for error to 5
/// for trace.
fn level() -> u8 {
    log::max_level() as usize as u8
}

/// Creates the maps, or reuses pinned ones.
fn open(object: &[u8], pins: Option<&Pins>) -> Result<Ebpf> {
    let level = level();
    let mut loader = EbpfLoader::new();
    loader.override_global(aya_log::LEVEL, &level, false);
    if let Some(pins) = pins {
        pins.make()?;
        for name in maps::ALL {
            loader.map_pin_path(name, pins.map(name));
        }
    }
    loader.load(object).context("the kernel does not take the maps of the XDP programs")
}

fn load(ebpf: &mut Ebpf, names: &[&str]) -> Result<()> {
    names.iter().try_for_each(|name| {
        let loaded = program(ebpf, name)?.load();
        loaded.with_context(|| format!("the kernel does not take the XDP program `{name}`"))
    })
}
