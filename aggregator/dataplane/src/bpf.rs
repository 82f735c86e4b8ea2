//! The loaded programs and their maps, used by all other modules of this crate.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use anyhow::{Context as _, Result, bail};
use aya::Ebpf;
use aya::maps::{Array, ArrayOfMaps, DevMap, Map, MapData, MapError, RingBuf};
use aya::programs::links::PinnedLink;
use aya::programs::tc::SchedClassifierLinkId;
use aya::programs::xdp::XdpLinkId;
use aya::programs::{ProgramFd, SchedClassifier, Xdp};
use aya_log::EbpfLogger;
use aya_obj::generated::{bpf_attr__bindgen_ty_3, bpf_cmd};
use netsum_common::abi::{
    Address, FlowKey, RingConfig, RingNumber, SavedHeader, maps, programs, ring_flags,
};
use netsum_common::slot::Slot;

use super::pins::Pins;

/// `BPF_MAP_TYPE_ARRAY` and `BPF_MAP_TYPE_DEVMAP` (`include/uapi/linux/bpf.h`).
pub(super) const ARRAY: u32 = 2;
pub(super) const DEVMAP: u32 = 14;

/// Forwards the programs' log to `log`.
pub type Logger = EbpfLogger<&'static dyn log::Log>;

/// How a program is attached to a port.
pub(super) enum Attachment<Id> {
    /// As long as this process lives.
    Owned(Id),
    /// As long as its file in bpffs exists.
    Pinned(PinnedLink),
}

/// A port's programs.
pub(super) struct Port {
    /// `None` if it could not be attached again.
    pub ingress: Option<Attachment<XdpLinkId>>,
    /// This kind of attachment exists since Linux 6.6.
    pub guard: Option<Attachment<SchedClassifierLinkId>>,
}

/// The loaded programs. Dropping it detaches and frees everything that is not pinned.
pub struct BpfDataPlane {
    pub(super) ebpf: Ebpf,
    pub(super) logger: Option<Logger>,
    pub(super) egress: ProgramFd,
    pub(super) cpus: Vec<u32>,
    /// By interface number.
    pub(super) ports: HashMap<u32, Port>,
    pub(super) pins: Option<Pins>,
    /// Ended flows, whose data is dropped.
    pub(super) ended: HashSet<FlowKey>,
    /// Addresses with a fixed place that does not depend on flows; flows that have them are not
    /// counted.
    pub(super) reserved: HashMap<Address, u32>,
    /// Slaves of bonds, each with its bond.
    pub(super) slaves: HashMap<u32, u32>,
    pub(super) threads: Threads,
    pub(super) rings: HashMap<RingNumber, RingMaps>,
    pub(super) events: RingBuf<MapData>,
}

/// A ring's inner maps that user space reads and writes. Opening them again by number, from their
/// outer maps, takes CAP_SYS_ADMIN (`bpf_map_get_fd_by_id` in kernel/bpf/syscall.c), which the
/// daemon has only at its start.
pub(super) struct RingMaps {
    /// Index of its CPU in [`BpfDataPlane::cpus`].
    pub cpu: u32,
    /// Number of its packets that had arrived at another CPU, when last read.
    pub wrong_cpu: u64,
    pub slots: Array<MapData, Slot>,
    pub headers: Array<MapData, SavedHeader>,
    pub ports: DevMap<MapData>,
}

/// Settings for the threads of the CPU map.
pub(super) struct Threads {
    /// The CPUs that should serve rings; [`BpfDataPlane::cpus`] has those that serve in their
    /// places.
    pub configured: Vec<u32>,
    pub aggregate: ProgramFd,
}

impl BpfDataPlane {
    /// The programs' log; to be flushed when its file descriptor is readable.
    pub fn take_logger(&mut self) -> Option<Logger> {
        self.logger.take()
    }

    /// A loaded program, for test runs.
    pub fn program(&mut self, name: &str) -> Result<&mut Xdp> {
        program(&mut self.ebpf, name)
    }

    /// `guard`, for test runs.
    pub fn guard_program(&mut self) -> Result<&mut SchedClassifier> {
        guard(&mut self.ebpf)
    }

    /// A map of the object; for benchmarks, whose object has more maps.
    ///
    /// # Errors
    /// If there is no map with this name.
    pub fn map_mut(&mut self, name: &str) -> Result<&mut Map> {
        self.ebpf.map_mut(name).with_context(|| format!("the BPF object has no map `{name}`"))
    }

    /// A map, for reading.
    pub(super) fn map<'a, M: TryFrom<&'a Map, Error = MapError>>(
        &'a self,
        name: &str,
    ) -> Result<M> {
        Ok(M::try_from(self.ebpf.map(name).with_context(|| name.to_owned())?)?)
    }

    pub(super) fn array<V: aya::Pod>(&mut self, name: &str) -> Result<Array<&mut MapData, V>> {
        Ok(Array::try_from(self.ebpf.map_mut(name).with_context(|| name.to_owned())?)?)
    }

    pub(super) fn hash<K: aya::Pod, V: aya::Pod>(
        &mut self,
        name: &str,
    ) -> Result<aya::maps::HashMap<&mut MapData, K, V>> {
        Ok(aya::maps::HashMap::try_from(self.ebpf.map_mut(name).with_context(|| name.to_owned())?)?)
    }

    /// Stores inner maps in an outer one with a single call: the kernel waits for all CPUs after
    /// each call, which takes tens of milliseconds (kernel/bpf/syscall.c,
    /// `maybe_wait_bpf_programs`; before Linux 6.8 after each element). Needs Linux 5.19.
    pub(super) fn put_all(&mut self, outer: &str, inner: &[(RingNumber, OwnedFd)]) -> Result<()> {
        let map = self.ebpf.map_mut(outer).with_context(|| outer.to_owned())?;
        let Map::ArrayOfMaps(map) = map else { bail!("{outer} is not an array of maps") };
        let (keys, values): (Vec<u32>, Vec<i32>) =
            inner.iter().map(|(ring, fd)| (ring.0, fd.as_raw_fd())).unzip();
        let mut batch = bpf_attr__bindgen_ty_3 {
            in_batch: 0,
            out_batch: 0,
            keys: keys.as_ptr() as u64,
            values: values.as_ptr() as u64,
            count: keys.len() as u32,
            map_fd: map.fd().as_fd().as_raw_fd() as u32,
            elem_flags: 0,
            flags: 0,
        };
        let command = bpf_cmd::BPF_MAP_UPDATE_BATCH;
        // SAFETY: aya has no such call. `keys` and `values` hold `count` entries of the map's
        // sizes, 4 bytes each, and live until it returns. It writes only `batch.count`.
        let done = unsafe {
            libc::syscall(libc::SYS_bpf, command as i32, &raw mut batch, size_of_val(&batch))
        };
        if done == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error()).with_context(|| outer.to_owned())
        }
    }

    pub(super) fn ring_config(&mut self, ring: RingNumber) -> Result<RingConfig> {
        Ok(self.array(maps::RINGS)?.get(&ring.0, 0)?)
    }

    pub(super) fn set_active(&mut self, ring: RingNumber, active: bool) -> Result<()> {
        let mut config = self.ring_config(ring)?;
        config.flags =
            config.flags & !ring_flags::ACTIVE | if active { ring_flags::ACTIVE } else { 0 };
        Ok(self.array(maps::RINGS)?.set(ring.0, config, 0)?)
    }

    /// Returns when all programs that may have seen the maps' earlier content have ended. Storing
    /// an inner map waits for that (kernel/bpf/syscall.c, `maybe_wait_bpf_programs`); ring 0 is not
    /// used.
    pub(super) fn wait_for_programs(&mut self) -> Result<()> {
        let ports = DevMap::try_from(Map::from_map_data(create(DEVMAP, 8, 1, 0)?)?)?;
        let map = self.ebpf.map_mut(maps::RING_PORTS).context(maps::RING_PORTS)?;
        let mut outer: ArrayOfMaps<_, DevMap<MapData>> = ArrayOfMaps::try_from(map)?;
        Ok(outer.set(RingNumber::NONE.0, &ports, 0)?)
    }

    pub(super) fn maps_of(&self, ring: RingNumber) -> Result<&RingMaps> {
        self.rings.get(&ring).context("the ring has not been created")
    }

    pub(super) fn inner<V: aya::maps::FromMapData + aya::maps::InnerMap>(
        &self,
        outer: &str,
        ring: RingNumber,
    ) -> Result<V> {
        let outer_map: ArrayOfMaps<_, V> = self.map(outer)?;
        outer_map.get(&ring.0, 0).with_context(|| format!("{outer}[{ring}]"))
    }

    /// Sets or clears bits of FEATURES: the optional work of the programs.
    pub(super) fn set_features(&mut self, bits: u32, on: bool) -> Result<()> {
        let mut features: Array<_, u32> = self.array(maps::FEATURES)?;
        let before = features.get(&0, 0)?;
        Ok(features.set(0, if on { before | bits } else { before & !bits }, 0)?)
    }
}

/// A map whose kind has numbers as keys.
pub(super) fn create(kind: u32, value: u32, len: u32, flags: u32) -> Result<MapData> {
    Ok(MapData::create(aya_obj::Map::new_from_params(kind, 4, value, len, flags), "inner", None)?)
}

pub(super) fn program<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut Xdp> {
    Ok(ebpf
        .program_mut(name)
        .with_context(|| format!("the BPF object has no program `{name}`"))?
        .try_into()?)
}

pub(super) fn guard(ebpf: &mut Ebpf) -> Result<&mut SchedClassifier> {
    let program = ebpf.program_mut(programs::GUARD).with_context(|| programs::GUARD.to_owned())?;
    Ok(program.try_into()?)
}

/// `None` if the key is missing.
pub(super) fn found<T>(result: Result<T, MapError>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) => ignore_missing(Err(error)).map(|()| None),
    }
}

pub(super) fn ignore_missing(result: Result<(), MapError>) -> Result<()> {
    match result {
        Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(e)) if e.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => Ok(other?),
    }
}
