//! A packet for a complete sum that is held back because no packet carries it.
//!
//! In an in-order ring a sum that is complete before an earlier one waits until some rank sends its
//! fragment again. A sender with selective retransmission has no reason to. Therefore the daemon
//! sends the fragment once more in the rank's place, with the rank's saved headers. The slot
//! machine sees a duplicate, and releases the sum on it.

use anyhow::{Context as _, Result};
use aya::programs::{TestRun as _, TestRunAttrs, TestRunOptions};
use netsum_common::abi::{MAX_MTU, SavedHeader, programs, ring_flags};
use netsum_common::icrc;
use netsum_common::wire::{ICRC_LEN, JobHeader, L3, Opcode, UdpHdr};
use netsum_core::plane::{FlowSpec, RingSpec};

use super::bpf::BpfDataPlane;

/// The fragment with these saved headers, a payload of `len` zeros, which is not added, and the
/// right ICRC. `None` if no headers were saved. An `index` is given if the job is set up in band:
/// then messages begin with a header.
pub fn duplicate(saved: &SavedHeader, len: usize, index: Option<u32>) -> Option<Vec<u8>> {
    let header: Vec<u8> = saved.words.iter().flat_map(|w| w.to_ne_bytes()).collect();
    let mut frame = header.get(..saved.len as usize).filter(|h| !h.is_empty())?.to_vec();
    let payload_at = frame.len();
    frame.resize(payload_at + len, 0);
    let l3 = if saved.v6 == 1 { L3::V6 } else { L3::V4 };
    let opcode = Opcode(*frame.get(saved.ip as usize + l3.header_len() + UdpHdr::LEN)?);
    if let Some(index) = index
        && opcode.is_first()
    {
        let payload = frame.get_mut(payload_at..)?.first_chunk_mut()?;
        *payload = JobHeader { index, ..JobHeader::EMPTY }.encode();
    }
    let sum = icrc::of_frame(&frame, l3, saved.ip as usize, payload_at, len)?;
    frame.extend_from_slice(&sum.to_le_bytes());
    debug_assert_eq!(frame.len(), payload_at + len + ICRC_LEN);
    Some(frame)
}

/// `struct xdp_md` for a test run of a frame that arrived at an interface's first queue
/// (`include/uapi/linux/bpf.h`).
pub fn context(frame_len: usize, ifindex: u32) -> Vec<u8> {
    let (data, data_end, data_meta, queue, egress) = (0, frame_len as u32, 0, 0, 0);
    [data, data_end, data_meta, ifindex, queue, egress]
        .iter()
        .flat_map(|w: &u32| w.to_ne_bytes())
        .collect()
}

impl BpfDataPlane {
    pub(super) fn send_duplicate(
        &mut self,
        ring: &RingSpec,
        slot: u32,
        flow: &FlowSpec,
    ) -> Result<()> {
        let read = || -> Result<(SavedHeader, u32, u32)> {
            let held = self.maps_of(ring.id)?.slots.get(&slot, 0)?;
            Ok((
                self.maps_of(ring.id)?
                    .headers
                    .get(&(slot * ring.config.members + flow.member.0), 0)?,
                held.index,
                held.len.into(),
            ))
        };
        let (saved, index, len) = read()?;
        // The ring's CPU may have been writing them, and mixed headers of two packets would make a
        // packet that stops the ring.
        if read()? != (saved, index, len) {
            return Ok(());
        }
        let index = (ring.config.flags & ring_flags::IN_BAND != 0).then_some(index);
        let frame = duplicate(&saved, (len as usize).min(MAX_MTU), index)
            .context("no headers are saved")?;
        // One slave of a bond that is up suffices; the kernel refuses others.
        let mut sent = Ok(());
        for ifindex in self.receivers(flow.ifindex) {
            let context = context(frame.len(), ifindex);
            // A live frame: the kernel carries out the program's decision, and the ring's CPU
            // receives the frame like any other.
            let run = self.program(programs::INGRESS)?.test_run(TestRunOptions {
                data_in: Some(&frame),
                ctx_in: Some(&context),
                attrs: TestRunAttrs::new().xdp_live_frames(1),
                ..TestRunOptions::new()
            });
            match run {
                Ok(_) => return Ok(()),
                Err(error) => sent = Err(error.into()),
            }
        }
        sent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_saved_headers_there_is_no_packet() {
        let words = [0; 13];
        let saved = SavedHeader { words, len: 0, ip: 0, v6: 0, reserved: [0; 5] };
        assert_eq!(duplicate(&saved, 64, None), None);
    }

    /// Headers of a packet over IPv4; all zeros except the opcode.
    fn saved(opcode: Opcode) -> SavedHeader {
        let mut bytes = [0u8; 13 * 8];
        bytes[14 + 20 + UdpHdr::LEN] = opcode.0;
        let mut words = [0; 13];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        SavedHeader { words, len: 54, ip: 14, v6: 0, reserved: [0; 5] }
    }

    #[test]
    fn only_first_packets_in_band_carry_their_index() {
        let payload =
            |opcode, index| duplicate(&saved(opcode), 64, index).unwrap()[54..118].to_vec();
        let header = JobHeader { index: 77, ..JobHeader::EMPTY }.encode();
        for first in [Opcode::SEND_FIRST, Opcode::SEND_ONLY] {
            assert_eq!(payload(first, Some(77)), [header.as_slice(), &[0; 16]].concat());
            assert_eq!(payload(first, None), [0; 64]);
        }
        assert_eq!(payload(Opcode::SEND_MIDDLE, Some(77)), [0; 64]);
        assert_eq!(
            duplicate(&saved(Opcode::SEND_FIRST), 44, Some(77)),
            None,
            "no room for a header"
        );
    }
}
