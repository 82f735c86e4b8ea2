//! The box's memory for a ring, as the kernel reports it for its maps.

use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, AsRawFd as _};

use anyhow::{Context, Result, ensure};
use aya::maps::{MapType, loaded_maps};
use netsum_common::abi::{self, Fragments, Messages};
use netsum_common::wire::{BTH_LEN, EthHdr, Ipv4Hdr, MAX_HEADERS, UdpHdr};
use netsum_dataplane::{BpfDataPlane, DataPlane as _};
use serde::Serialize;

use super::Settings;
use netsum_lab::programs::ring;

/// The job's window, in messages, and their length.
const WINDOW: Messages = Messages(8);
const MESSAGE: u32 = 65_536;
/// Headers of an untagged IPv4 SEND.
const SEND_V4: usize = EthHdr::LEN + Ipv4Hdr::LEN + UdpHdr::LEN + BTH_LEN;

/// The memory of a ring.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub ranks: u32,
    pub mtu: u32,
    /// Slots, for a window of 8 messages of 64 KiB.
    pub slots: u32,
    /// Bytes of its maps, as the kernel accounts them (`memlock`).
    pub bytes: u64,
    /// Bytes of payload and of one header for each rank, in every slot. A header may have up to 98
    /// bytes: VLAN tag, IPv6, RETH and immediate data.
    pub needed: u64,
    /// `bytes` divided by `needed`.
    pub ratio: f64,
    /// The same with headers of 54 bytes, for a ring that has only untagged IPv4 SENDs.
    pub ratio_ipv4_send: f64,
}

impl Row {
    fn new(ranks: u32, mtu: u32, slots: u32, bytes: u64) -> Self {
        let needed =
            |header: usize| u64::from(slots) * (u64::from(mtu) + u64::from(ranks) * header as u64);
        let ratio = |header| bytes as f64 / needed(header) as f64;
        Self {
            ranks,
            mtu,
            slots,
            bytes,
            needed: needed(MAX_HEADERS),
            ratio: ratio(MAX_HEADERS),
            ratio_ipv4_send: ratio(SEND_V4),
        }
    }
}

/// Makes rings and reads the size of their maps.
pub(super) fn measure(settings: &Settings) -> Result<Vec<Row>> {
    let mut plane = BpfDataPlane::load(&[0])?;
    let mut rows = Vec::new();
    for &ranks in &settings.ranks {
        for &mtu in &settings.mtus {
            let slots = WINDOW
                .of(Fragments(MESSAGE / mtu))
                .and_then(abi::ring_slots)
                .context("too many slots")?;
            let spec = ring(ranks, mtu, slots);
            let before: BTreeSet<u32> = maps()?.into_iter().map(|(id, _)| id).collect();
            plane.create_ring(&spec)?;
            let new: Vec<u64> = maps()?
                .into_iter()
                .filter(|(id, _)| !before.contains(id))
                .map(|(_, bytes)| bytes)
                .collect();
            plane.delete_ring(spec.id, &[], &[])?;
            // Slots, sums, headers, ports.
            ensure!(new.len() == 4, "{} maps were created instead of 4", new.len());
            rows.push(Row::new(ranks, mtu, slots, new.iter().sum()));
        }
    }
    Ok(rows)
}

/// All arrays and device maps of the machine, and their bytes.
fn maps() -> Result<Vec<(u32, u64)>> {
    let mut all = Vec::new();
    for info in loaded_maps() {
        // Skip maps that were removed meanwhile; they are not ours.
        let Ok(info) = info else { continue };
        if !matches!(info.map_type(), Ok(MapType::Array | MapType::DevMap)) {
            continue;
        }
        let Ok(fd) = info.fd() else { continue };
        let path = format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd());
        let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
        all.push((info.id(), memlock(&text).with_context(|| format!("no memlock in {path}"))?));
    }
    Ok(all)
}

/// Parses the kernel's report about a descriptor (`bpf_map_show_fdinfo` in kernel/bpf/syscall.c).
fn memlock(fdinfo: &str) -> Option<u64> {
    fdinfo.lines().find_map(|l| l.strip_prefix("memlock:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_compared_with_payload_and_headers() {
        assert_eq!(memlock("pos:\t0\nmemlock:\t8192\nmap_id:\t3\n"), Some(8192));
        let row = Row::new(4, 1024, 10, 10 * (1024 + 4 * 98) * 2);
        assert_eq!((row.ratio, row.needed), (2.0, 14_160));
        assert!(row.ratio_ipv4_send > 2.0);
    }

    #[test]
    fn headers_have_the_stated_length() {
        assert_eq!((MAX_HEADERS, SEND_V4), (98, 54));
    }
}
