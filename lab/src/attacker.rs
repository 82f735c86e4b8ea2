//! Forges frames as a host that belongs to no job but knows the addresses, queue pairs and PSNs of
//! one.

use std::collections::BTreeMap;
use std::time::Duration;

use netsum_common::wire::{self, Aeth, Bth, Nak, Opcode, Syndrome};

use crate::frames::{FrameSpec, lanes};
use crate::lab::Host;
use crate::tap::Tap;

/// The last PSNs that arrived at a host, by the sending host's number and the destination queue
/// pair.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub acks: BTreeMap<(u8, u32), u32>,
    pub data: BTreeMap<(u8, u32), u32>,
    /// Some data frames, unchanged.
    pub frames: Vec<Vec<u8>>,
}

impl Seen {
    /// Records frames until none has arrived for a while.
    pub fn watch(tap: &Tap) -> Self {
        let mut seen = Self::default();
        // The first frame may be long in coming.
        let mut patience = Duration::from_secs(30);
        while let Ok(frame) = tap.receive(patience, |f| wire::parse(f).is_ok()) {
            patience = Duration::from_millis(300);
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

    /// Forged frames to host `to`, with the addresses of its peers as source: data for every queue
    /// pair, and every kind of acknowledgement, with PSNs from far behind to far ahead.
    pub fn forgeries(&self, to: u8) -> Vec<FrameSpec> {
        let mut forged = Vec::new();
        let jumps = [0, 1, 7, 64, 1 << 20, 1 << 22, (1 << 24) - 1, (1 << 24) - 64];
        let psns = |psn: u32| jumps.map(|jump| (psn + jump) & 0xff_ffff);
        for (&(from, qpn), &psn) in &self.data {
            for psn in psns(psn) {
                let lanes = lanes(0xbad, 256);
                forged.push(FrameSpec {
                    id: 0,
                    ..FrameSpec::send(from + 1, to + 1, qpn, psn, lanes)
                });
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
                    // The extended header takes the payload's place.
                    let aeth = Aeth { syndrome, msn: psn }.encode().to_vec();
                    let mut spec =
                        FrameSpec { id: 0, ..FrameSpec::send(from + 1, to + 1, qpn, psn, aeth) };
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

/// A broadcast ARP reply that claims `ip` for the MAC address of `host` (RFC 826).
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

/// VLAN tags of a frame, outermost first: EtherType and tag control information.
pub type Tags = &'static [(u16, u16)];

/// Ways to tag a frame, and whether a Linux host without VLANs accepts the frame: Linux ignores
/// tags of VLAN 0 (`__netif_receive_skb_core` in net/core/dev.c).
pub const TAGS: [(Tags, bool); 14] = [
    (&[], true),
    (&[(0x8100, 0)], true),
    (&[(0x8100, 0x6000)], true),
    (&[(0x88a8, 0)], true),
    (&[(0x9100, 0)], false),
    (&[(0x8100, 5)], false),
    (&[(0x88a8, 5)], false),
    (&[(0x8100, 0), (0x8100, 0)], true),
    (&[(0x88a8, 0), (0x8100, 0)], true),
    (&[(0x88a8, 0), (0x88a8, 0)], true),
    (&[(0x88a8, 5), (0x8100, 0)], false),
    (&[(0x8100, 0), (0x8100, 0), (0x8100, 0)], true),
    (&[(0x88a8, 0), (0x8100, 0), (0x8100, 5)], false),
    (&[(0x88a8, 0), (0x8100, 0), (0x88a8, 0), (0x8100, 0), (0x8100, 0)], true),
];

/// Inserts tags into an untagged frame.
pub fn tagged(frame: &[u8], tags: Tags) -> Vec<u8> {
    let tags =
        tags.iter().flat_map(|(kind, vlan)| [kind.to_be_bytes(), vlan.to_be_bytes()].concat());
    let mut f = frame.to_vec();
    f.splice(12..12, tags);
    f
}

/// Converts an untagged frame to IEEE 802.2 form (RFC 1042): length, LLC, SNAP, and then the type.
pub fn snap(frame: &[u8]) -> Vec<u8> {
    let mut f = frame.to_vec();
    f.splice(12..12, [0, 0, 0xaa, 0xaa, 3, 0, 0, 0]);
    let len = (f.len() - 14) as u16;
    f[12..14].copy_from_slice(&len.to_be_bytes());
    f
}

/// Inserts extension headers with these numbers into an untagged IPv6 frame: hop-by-hop options 0,
/// routing 43 with no segments left, fragment 44 of an unfragmented packet, destination options 60.
pub fn extended(frame: &[u8], extensions: &[u8]) -> Vec<u8> {
    let (mut f, mut next) = (frame.to_vec(), frame[20]);
    for &number in extensions.iter().rev() {
        let header = match number {
            43 => [next, 0, 253, 0, 0, 0, 0, 0],
            44 => [next, 0, 0, 0, 0, 0, 0, 7],
            // Padding (RFC 8200, 4.2).
            _ => [next, 0, 1, 4, 0, 0, 0, 0],
        };
        f.splice(54..54, header);
        next = number;
    }
    f[20] = next;
    let len = (f.len() - 54) as u16;
    f[18..20].copy_from_slice(&len.to_be_bytes());
    f
}

/// Splits an untagged frame into two IP fragments. The first has `first` bytes behind the IP
/// header, a multiple of 8. Over IPv6, the headers in `extensions` precede the fragment header;
/// with `hidden`, a header of destination options follows it.
pub fn fragments(frame: &[u8], first: usize, extensions: &[u8], hidden: bool) -> [Vec<u8>; 2] {
    let part = |offset: usize, more: bool| {
        if frame[12] == 8 {
            let end = if more { 34 + first } else { frame.len() };
            let mut f = [&frame[..34], &frame[34 + offset..end]].concat();
            let len = (f.len() - 14) as u16;
            f[16..18].copy_from_slice(&len.to_be_bytes());
            f[20..22].copy_from_slice(&((more as u16) << 13 | (offset / 8) as u16).to_be_bytes());
            f[24..26].fill(0);
            let sum = crate::frames::ipv4_checksum(&f[14..34]);
            f[24..26].copy_from_slice(&sum.to_be_bytes());
            return f;
        }
        let inner = if hidden { extended(frame, &[60]) } else { frame.to_vec() };
        let end = if more { 54 + first } else { inner.len() };
        let mut f = [&inner[..54], &inner[54 + offset..end]].concat();
        f = extended(&f, &[extensions, &[44]].concat());
        let at = 54 + 8 * extensions.len();
        f[at + 2..at + 4].copy_from_slice(&((offset as u16) | more as u16).to_be_bytes());
        f
    };
    [part(0, true), part(first, false)]
}

/// A neighbour advertisement from `host` to host number `to`, which claims the address of host
/// number `target` for the MAC address of `host` (RFC 4861, 4.4).
pub fn advertisement(target: u8, to: u8, host: u8) -> Vec<u8> {
    let mut icmp = vec![136, 0, 0, 0, 0x20, 0, 0, 0];
    icmp.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, target + 1]);
    icmp.extend([2, 1, 2, 0, 0, 0, 0, host + 1]);
    let mut f = FrameSpec::send(host + 1, to + 1, 0, 0, Vec::new()).v6().build();
    f.truncate(54);
    f[18..22].copy_from_slice(&[0, icmp.len() as u8, 58, 255]);
    f.extend(icmp);
    with_checksum(f, 2)
}

/// Computes the checksum of the payload of an untagged IPv6 frame without extension headers, and
/// writes it at an offset behind the IP header.
pub fn with_checksum(mut frame: Vec<u8>, at: usize) -> Vec<u8> {
    frame[54 + at..56 + at].fill(0);
    let len = (frame.len() - 54) as u16;
    let mut covered = [&frame[22..54], &len.to_be_bytes(), &[0, frame[20]], &frame[54..]].concat();
    covered.resize(covered.len().next_multiple_of(2), 0);
    let sum = crate::frames::ipv4_checksum(&covered);
    frame[54 + at..56 + at].copy_from_slice(&sum.to_be_bytes());
    frame
}
