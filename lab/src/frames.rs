//! RoCEv2 frames for tests: built field by field, with the right ICRC unless a test changes it.

use netsum_common::icrc;
use netsum_common::wire::{self, Bth, Opcode, Reth};

/// A frame to be built.
#[derive(Clone, Debug)]
pub struct FrameSpec {
    /// Destination and source MAC address.
    pub macs: ([u8; 6], [u8; 6]),
    /// VLAN identifier of an 802.1Q tag.
    pub vlan: Option<u16>,
    /// Source address: four bytes for IPv4, sixteen for IPv6.
    pub src: Vec<u8>,
    /// Destination address, of the same family.
    pub dst: Vec<u8>,
    /// Type of service or traffic class.
    pub tos: u8,
    /// IPv4 identification.
    pub id: u16,
    pub udp_checksum: u16,
    /// Base transport header.
    pub bth: Bth,
    /// Extended header, if the opcode has one.
    pub reth: Reth,
    /// Immediate data, if the opcode has it.
    pub immediate: u32,
    pub payload: Vec<u8>,
}

impl FrameSpec {
    /// An IPv4 SEND ONLY from 10.0.0.`from` to 10.0.0.`to`.
    pub fn send(from: u8, to: u8, qpn: u32, psn: u32, payload: Vec<u8>) -> Self {
        Self {
            macs: ([2, 0, 0, 0, 0, to], [2, 0, 0, 0, 0, from]),
            vlan: None,
            src: vec![10, 0, 0, from],
            dst: vec![10, 0, 0, to],
            tos: 2,
            id: 0x1234,
            udp_checksum: 0,
            bth: Bth::new(Opcode::SEND_ONLY, qpn, psn),
            reth: Reth { address: 0x1122_3344_5566_7788, rkey: 0x99aa_bbcc, length: 4096 },
            immediate: 0xdead_beef,
            payload,
        }
    }

    /// The same over IPv6, from fd00::`from` to fd00::`to`.
    pub fn v6(mut self) -> Self {
        for ip in [&mut self.src, &mut self.dst] {
            let host = ip[3];
            *ip = vec![0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host];
        }
        self
    }

    pub fn ip_offset(&self) -> usize {
        wire::EthHdr::LEN + if self.vlan.is_some() { wire::VlanHdr::LEN } else { 0 }
    }

    pub fn payload_offset(&self) -> usize {
        let ip = if self.src.len() == 4 { wire::Ipv4Hdr::LEN } else { wire::Ipv6Hdr::LEN };
        self.ip_offset() + ip + wire::UdpHdr::LEN + wire::BTH_LEN + self.bth.opcode.extended_len()
    }

    pub fn build(&self) -> Vec<u8> {
        let mut transport = self.bth.encode().to_vec();
        if self.bth.opcode.has_reth() {
            transport.extend(self.reth.encode());
        }
        if self.bth.opcode.has_immediate() {
            transport.extend(self.immediate.to_be_bytes());
        }
        transport.extend(&self.payload);
        let udp_len = (wire::UdpHdr::LEN + transport.len() + wire::ICRC_LEN) as u16;

        let mut f = [self.macs.0, self.macs.1].concat();
        if let Some(vlan) = self.vlan {
            f.extend(wire::ETHERTYPE_VLAN.to_be_bytes());
            f.extend(vlan.to_be_bytes());
        }
        let ip = f.len() + 2;
        let l3 = if self.src.len() == 4 {
            f.extend(wire::ETHERTYPE_IPV4.to_be_bytes());
            f.extend([0x45, self.tos]);
            f.extend((wire::Ipv4Hdr::LEN as u16 + udp_len).to_be_bytes());
            f.extend(self.id.to_be_bytes());
            f.extend([0x40, 0, 64, wire::IPPROTO_UDP, 0, 0]);
            f.extend(&self.src);
            f.extend(&self.dst);
            let checksum = ipv4_checksum(&f[ip..]);
            f[ip + 10..ip + 12].copy_from_slice(&checksum.to_be_bytes());
            wire::L3::V4
        } else {
            f.extend(wire::ETHERTYPE_IPV6.to_be_bytes());
            f.extend([0x60 | self.tos >> 4, self.tos << 4, 0, 0]);
            f.extend(udp_len.to_be_bytes());
            f.extend([wire::IPPROTO_UDP, 64]);
            f.extend(&self.src);
            f.extend(&self.dst);
            wire::L3::V6
        };
        f.extend(49152u16.to_be_bytes());
        f.extend(wire::ROCE_PORT.to_be_bytes());
        f.extend(udp_len.to_be_bytes());
        f.extend(self.udp_checksum.to_be_bytes());
        f.extend(&transport);
        let icrc = icrc::of_frame(&f, l3, ip, f.len(), 0).expect("the frame holds its headers");
        f.extend(icrc.to_le_bytes());
        f
    }

    /// The frame as the box sends it: a UDP checksum, if present, is right.
    pub fn build_result(&self) -> Vec<u8> {
        let (mut frame, ip) = (self.build(), self.ip_offset());
        if self.udp_checksum != 0 {
            let l3 = if self.src.len() == 4 { wire::L3::V4 } else { wire::L3::V6 };
            let checksum = udp_checksum(&frame, l3, ip);
            frame[ip + l3.header_len() + 6..][..2].copy_from_slice(&checksum.to_be_bytes());
        }
        frame
    }
}

/// The UDP checksum of a frame, with the pseudo-header (RFC 768, RFC 8200, section 8.1).
pub fn udp_checksum(frame: &[u8], l3: wire::L3, ip: usize) -> u16 {
    let addresses = match l3 {
        wire::L3::V4 => 12..20,
        wire::L3::V6 => 8..40,
    };
    let udp = &frame[ip + l3.header_len()..];
    let len = [udp[4], udp[5]];
    let udp = &udp[..u16::from_be_bytes(len) as usize];
    let covered =
        [&frame[ip..][addresses], &[0, wire::IPPROTO_UDP], &len, &udp[..6], &udp[8..]].concat();
    match ipv4_checksum(&covered) {
        0 => 0xffff,
        sum => sum,
    }
}

/// Checksum of an IPv4 header whose checksum field is zero (RFC 791).
pub fn ipv4_checksum(header: &[u8]) -> u16 {
    let mut sum: u32 = header.chunks(2).map(|w| u16::from_be_bytes([w[0], w[1]]) as u32).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// A payload of `lanes` lanes that differ by rank and position.
pub fn lanes(rank: u32, lanes: usize) -> Vec<u8> {
    (0..lanes as u32)
        .flat_map(|i| (i.wrapping_mul(0x9e37_79b9) ^ rank.wrapping_mul(0x85eb_ca6b)).to_le_bytes())
        .collect()
}

/// Test data of floats: most of them between 2^-27 and 2^13. If `any`, one in 16 has any bits, so
/// that it may be infinite, NaN or out of range.
pub fn floats(rank: u32, count: usize, any: bool) -> Vec<u8> {
    let bits = lanes(rank, count);
    bits.as_chunks::<4>()
        .0
        .iter()
        .flat_map(|lane| {
            let bits = u32::from_le_bytes(*lane).wrapping_mul(0xc2b2_ae35).rotate_left(15);
            let usual = bits & 0x807f_ffff | (100 + bits.wrapping_mul(0x9e37_79b9) % 40) << 23;
            (if any && bits % 16 == 0 { bits.rotate_left(7) } else { usual }).to_le_bytes()
        })
        .collect()
}

/// Sum of payloads of f32, lane by lane, rounded as a box with this LSB does, in f64 and i128. Also
/// whether all lanes are finite.
pub fn float_sum(lsb: i32, ranks: u32, payloads: &[Vec<u8>]) -> (Vec<u8>, bool) {
    let unit = 2f64.powi(lsb);
    let limit = 2f64.powi(63) / f64::from(ranks.next_power_of_two());
    let mut all_finite = true;
    let lane = |i: usize| {
        let (mut finite, mut others) = (0i128, 0f32);
        for payload in payloads {
            let x = f32::from_le_bytes(payload.as_chunks().0[i]);
            let quotient = f64::from(x) / unit;
            if quotient.abs() < limit {
                finite += quotient.round() as i128;
            } else {
                // NaN if signs differ.
                others += x * f32::INFINITY;
                all_finite = false;
            }
        }
        let bits = match others {
            0.0 => ((finite as f32) as f64 * unit) as f32,
            _ if others.is_nan() => f32::from_bits(0x7fc0_0000),
            infinite => infinite,
        };
        bits.to_le_bytes()
    };
    let sum = (0..payloads[0].len() / 4).flat_map(lane).collect();
    (sum, all_finite)
}

/// Lane-by-lane sum of payloads, wrapping.
pub fn sum(payloads: &[Vec<u8>]) -> Vec<u8> {
    let mut total = vec![0u32; payloads[0].len() / 4];
    for p in payloads {
        for (t, x) in total.iter_mut().zip(p.as_chunks::<4>().0) {
            *t = t.wrapping_add(u32::from_le_bytes(*x));
        }
    }
    total.iter().flat_map(|t| t.to_le_bytes()).collect()
}
