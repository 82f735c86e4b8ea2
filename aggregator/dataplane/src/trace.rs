//! Traced packets, from the programs' ring buffer.

use anyhow::Result;
use aya::maps::{Array, MapData, PerCpuArray, RingBuf};
use netsum_common::abi::{TraceEvent, TraceFilter, features, maps};

use super::bpf::BpfDataPlane;
use super::plane::Traced;

/// Starts tracing, changes its filter, or stops it.
pub(super) fn switch(plane: &mut BpfDataPlane, filter: Option<&TraceFilter>) -> Result<()> {
    let Some(filter) = filter else { return plane.set_features(features::TRACE, false) };
    let features: Array<_, u32> = plane.array(maps::FEATURES)?;
    if features.get(&0, 0)? & features::TRACE == 0 {
        // Events of earlier traces, and of an earlier daemon.
        while plane.events.next().is_some() {}
    }
    plane.array(maps::TRACE_FILTER)?.set(0, *filter, 0)?;
    plane.set_features(features::TRACE, true)
}

pub(super) fn take(events: &mut RingBuf<MapData>, most: usize) -> Vec<Traced> {
    let mut packets = Vec::new();
    while packets.len() < most
        && let Some(item) = events.next()
    {
        packets.extend(traced(&item));
    }
    packets
}

/// Events lost for lack of room.
pub(super) fn lost(plane: &BpfDataPlane) -> Result<u64> {
    let lost: PerCpuArray<_, u64> = plane.map(maps::TRACE_LOST)?;
    Ok(lost.get(&0, 0)?.iter().sum())
}

/// Always `Some`: the programs write nothing shorter.
fn traced(item: &[u8]) -> Option<Traced> {
    let (head, frame) = item.split_first_chunk::<{ size_of::<TraceEvent>() }>()?;
    // SAFETY: an event is `repr(C)`, made of integers without padding; every bit pattern is valid.
    let event = unsafe { head.as_ptr().cast::<TraceEvent>().read_unaligned() };
    let frame = frame.get(..event.captured as usize)?.to_vec();
    Some(Traced { event, frame })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_ends_where_it_says() {
        let mut bytes = vec![0u8; size_of::<TraceEvent>() + 8];
        // The ring buffer returns whole words, and a frame's length need not be a multiple of
        // these.
        let captured = std::mem::offset_of!(TraceEvent, captured);
        bytes[captured..captured + 4].copy_from_slice(&5u32.to_ne_bytes());
        bytes[size_of::<TraceEvent>()..].copy_from_slice(&[1, 2, 3, 4, 5, 9, 9, 9]);
        assert_eq!(traced(&bytes).unwrap().frame, [1, 2, 3, 4, 5]);
        bytes[captured] = 9;
        assert_eq!(traced(&bytes), None);
        assert_eq!(traced(&bytes[..40]), None);
    }
}
