//! A host that belongs to no job and knows all about one: addresses, queue pairs and PSNs. The frames that it forges.

use std::collections::BTreeMap;
use std::time::Duration;

use netsum_common::wire::{self, Aeth, Bth, Nak, Opcode, Syndrome};

use crate::frames::{FrameSpec, lanes};
use crate::lab::Host;
use crate::tap::Tap;

/// What arrives at a host, by the number of the host that sends it and the queue pair that it is for: the last PSN.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Acknowledgements.
    pub acks: BTreeMap<(u8, u32), u32>,
    /// Data.
    pub data: BTreeMap<(u8, u32), u32>,
    /// Some frames of data, as they are.
    pub frames: Vec<Vec<u8>>,
}

impl Seen {
    /// Looks on until nothing has arrived for a while.
    pub fn watch(tap: &Tap) -> Self {
        let mut seen = Self::default();
        while let Ok(frame) = tap.receive(Duration::from_millis(300), |f| wire::parse(f).is_ok()) {
            let Ok(parsed) = wire::parse(frame.as_slice()) else { continue };
            let key = (parsed.src_ip[15] - 1, parsed.bth.qpn);
            if parsed.bth.opcode == Opcode::ACK {
                seen.acks.insert(key, parsed.bth.psn);
            } else if parsed.bth.opcode.is_rc_data() {
                seen.data.insert(key, parsed.bth.psn);
                if seen.frames.len() < 256 {
                    seen.frames.push(frame);
                }
            }
        }
        seen
    }

    /// Forged frames to host `to`, with the addresses of those who may send to it: data for every queue pair, and every
    /// kind of acknowledgement, with PSNs from far behind to far ahead.
    pub fn forgeries(&self, to: u8) -> Vec<FrameSpec> {
        let mut forged = Vec::new();
        let jumps = [0, 1, 7, 64, 1 << 20, 1 << 22, (1 << 24) - 1, (1 << 24) - 64];
        let psns = |psn: u32| jumps.map(|jump| (psn + jump) & 0xff_ffff);
        for (&(from, qpn), &psn) in &self.data {
            for psn in psns(psn) {
                let lanes = lanes(0xbad, 256);
                forged.push(FrameSpec { id: 0, ..FrameSpec::send(from + 1, to + 1, qpn, psn, lanes) });
            }
        }
        for (&(from, qpn), &psn) in &self.acks {
            for psn in psns(psn) {
                for syndrome in [
                    Syndrome::Ack(0x1f),
                    Syndrome::RnrNak(1),
                    Syndrome::Nak(Nak::SequenceError),
                    Syndrome::Nak(Nak::InvalidRequest),
                    Syndrome::Nak(Nak::RemoteOperation),
                ] {
                    // The extended header stands where the payload does.
                    let aeth = Aeth { syndrome, msn: psn }.encode().to_vec();
                    let mut spec = FrameSpec { id: 0, ..FrameSpec::send(from + 1, to + 1, qpn, psn, aeth) };
                    spec.bth = Bth::new(Opcode::ACK, qpn, psn);
                    forged.push(spec);
                }
            }
        }
        forged
    }
}

/// The same frame from the addresses of another host.
pub fn from_host(mut spec: FrameSpec, host: u8) -> FrameSpec {
    spec.macs.1[5] = host + 1;
    spec.src[3] = host + 1;
    spec
}

/// An ARP reply to everybody that `ip` is at the MAC address of `host` (RFC 826).
pub fn arp_claim(ip: [u8; 4], host: &Host) -> Vec<u8> {
    let mac = [2, 0, 0, 0, 0, host.number() as u8 + 1];
    let mut f = [[0xff; 6], mac].concat();
    f.extend([0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 2]);
    f.extend(mac);
    f.extend(ip);
    f.extend([0xff; 6]);
    f.extend(ip);
    f.resize(60, 0);
    f
}
