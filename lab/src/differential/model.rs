//! A model of the XDP programs over slices: written from `netsum_common` and ARCHITECTURE.md,
//! without any code of the programs. It adds sums lane by lane, computes every ICRC over the whole
//! packet, and treats headers as bytes.

use std::collections::{BTreeMap, HashMap};

use netsum_common::abi::{
    FlowKey, InBandJob, MAX_MTU, ReleaseTag, RingConfig, RingNumber, ring_flags,
};
use netsum_common::counters::Counter;
use netsum_common::serial::{Psn, Qpn};
use netsum_common::slot::{
    Fragment, GAP_PSN_AHEAD, Output, Payload, RingState, STALE_PSN_BEHIND, Slot,
};
use netsum_common::wire::in_band::{HeaderKind, JOB_HEADER_LEN, beginning};
use netsum_common::wire::{
    self, BTH_LEN, Frame, ICRC_LEN, InBandToken, JobHeader, L3, Reject, UdpHdr,
};
use netsum_common::{icrc, serial, timing};
use netsum_core::Rank;
use netsum_core::plane::{FirstPacket, FlowSpec, FlowStats, RingSpec, mapped};

use super::generate::BOND;
use super::{Verdict, rules};
use crate::frames::{self, float_sum, udp_checksum};

/// A flow, and what the box has seen of it.
#[derive(Clone, Debug)]
struct Flow {
    spec: FlowSpec,
    seen: FlowStats,
    /// PSN behind the last contribution that its ring's CPU has accepted.
    next: Option<u32>,
}

/// The headers that a slot has saved for a rank: the bytes before the payload, and the offset of
/// the IP header.
#[derive(Clone, Debug, Default)]
struct Saved {
    bytes: Vec<u8>,
    ip: usize,
    v6: bool,
}

#[derive(Clone, Debug)]
pub struct Ring {
    config: RingConfig,
    /// The box's expected ring state.
    pub state: RingState,
    /// The box's expected slots.
    pub slots: Vec<Slot>,
    /// Expected numbers of timed contributions, and of those that were the last, for each rank.
    pub timed: Vec<(u64, u64)>,
    /// The contributions to each slot's sum.
    terms: Vec<Vec<Vec<u8>>>,
    saved: Vec<Saved>,
    /// The rank that gets the next clone: all ranks are behind one port.
    cursor: u32,
}

/// The box.
#[derive(Clone, Debug, Default)]
pub struct Model {
    rings: BTreeMap<RingNumber, Ring>,
    flows: Vec<(FlowKey, Flow)>,
    /// Jobs that are set up in band.
    in_band_tokens: Vec<(InBandToken, InBandJob)>,
    /// First packets that the box should have recorded, by job, ring and rank: all packets arrive
    /// by one port.
    pub claims: BTreeMap<(RingNumber, u32, u32), FirstPacket>,
    /// Waiting connections, by source, destination and queue pair, with the job.
    waiting: HashMap<([u8; 16], [u8; 16], u32), RingNumber>,
    counters: HashMap<(RingNumber, Counter), u64>,
    /// The ring for which the present packet was counted, and its counters as bits.
    counted: (RingNumber, u64),
}

/// A packet's class; the box decides what to do with data.
enum Class {
    Data(Frame, usize),
    Verdict(Verdict),
}

/// A first packet, with a header, of a connection that is not registered.
enum Look {
    /// Cannot be used.
    Count(Counter),
    Job(InBandJob, Frame, usize),
}

impl Model {
    /// Starts to accept first packets of a job.
    pub fn add_in_band_token(&mut self, token: InBandToken, job: InBandJob) {
        self.in_band_tokens.push((token, job));
    }

    /// Creates or resets a ring; `start` is its first index.
    pub fn add_ring(&mut self, spec: &RingSpec, active: bool, start: u32) {
        let mut config = RingConfig { cpu: spec.cpu, ..spec.config };
        if active {
            config.flags |= ring_flags::ACTIVE;
        }
        let slots = config.slots as usize;
        let mut state = RingState { low: start, ..RingState::default() };
        state.expected.fill(start);
        let ring = Ring {
            config,
            state,
            slots: vec![Slot::default(); slots],
            timed: vec![(0, 0); config.members as usize],
            terms: vec![Vec::new(); slots],
            saved: vec![Saved::default(); slots * config.members as usize],
            cursor: 0,
        };
        self.rings.insert(spec.id, ring);
        self.flows.retain(|(_, flow)| flow.spec.ring != spec.id);
    }

    pub fn add_flow(&mut self, spec: &FlowSpec) {
        let seen = FlowStats { mac: spec.src_mac, ..FlowStats::default() };
        self.flows.push((spec.key(), Flow { spec: spec.clone(), seen, next: None }));
    }

    pub fn ring(&self, id: RingNumber) -> &Ring {
        &self.rings[&id]
    }

    /// The expected statistics of a flow.
    pub fn flow_stats(&self, key: &FlowKey) -> Option<FlowStats> {
        self.flows.iter().find(|(k, _)| k == key).map(|(_, flow)| flow.seen)
    }

    pub fn counter(&self, ring: RingNumber, counter: Counter) -> u64 {
        self.counters.get(&(ring, counter)).copied().unwrap_or(0)
    }

    fn count(&mut self, ring: RingNumber, counter: Counter) {
        *self.counters.entry((ring, counter)).or_default() += 1;
        self.counted = (ring, self.counted.1 | counter.bit());
    }

    /// Returns for which ring the last program has counted and by which counters, and resets them.
    pub fn take_counted(&mut self) -> (RingNumber, u64) {
        std::mem::take(&mut self.counted)
    }

    /// The counter of a packet with tags other than a single 802.1Q tag, unless it carries a rank's
    /// address.
    fn tagged(&self, packet: &[u8]) -> Option<Counter> {
        let tags = tags(packet);
        let ip = wire::EthHdr::LEN + tags.len() * wire::VlanHdr::LEN;
        match tags[..] {
            [] | [wire::ETHERTYPE_VLAN] => return None,
            [_, _, _] => return Some(Counter::UnparsedHeaders),
            _ => {}
        }
        let header = packet.get(ip..).unwrap_or_default();
        let (next, to, udp) = match (u16_at(packet, ip - 2), header) {
            (wire::ETHERTYPE_IPV4, [h, ..]) if header.len() >= wire::Ipv4Hdr::LEN => {
                let to: [u8; 4] = header[16..20].try_into().expect("four bytes");
                let later = u16_at(header, 6) & 0x1fff != 0;
                let next = if later { 0xff } else { header[9] };
                (next, mapped(to.into()), usize::from(h & 15) * 4)
            }
            (wire::ETHERTYPE_IPV6, _) if header.len() >= wire::Ipv6Hdr::LEN => {
                let to: [u8; 16] = header[24..40].try_into().expect("sixteen bytes");
                if let 0 | 43 | 44 | 60 = header[6] {
                    return Some(Counter::UnparsedHeaders);
                }
                (header[6], to, wire::Ipv6Hdr::LEN)
            }
            _ => return Some(Counter::NotRoce),
        };
        let roce = next == wire::IPPROTO_UDP && header.get(udp + 2..udp + 4) == Some(&[0x12, 0xb7]);
        let to_rank = self.flows.iter().any(|(_, flow)| mapped(flow.spec.src) == to);
        Some(if roce && to_rank { Counter::VlanTags } else { Counter::NotRoce })
    }

    fn classify(&mut self, packet: &[u8]) -> Class {
        if let Some(counter) = self.tagged(packet) {
            // Behind three tags, the programs look for a rank's address first.
            let hidden = tags(packet).len() == 3;
            let forged = !hidden && self.has_foreign_address(&claimed_addresses(packet));
            let counter = if forged { Counter::Spoofed } else { counter };
            self.count(RingNumber::NONE, counter);
            let pass = counter == Counter::NotRoce;
            return Class::Verdict(if pass { Verdict::Pass } else { Verdict::Drop });
        }
        let (frame, rejected) = match wire::parse(packet) {
            Ok(frame) => (frame, None),
            Err((Reject::Ipv6Extensions, Some(frame))) => {
                let to_rank =
                    self.flows.iter().any(|(_, flow)| mapped(flow.spec.src) == frame.dst_ip);
                let (verdict, counter) = match to_rank {
                    true => (Verdict::Drop, Counter::Ipv6Extensions),
                    false => (Verdict::Pass, Counter::NotRoce),
                };
                self.count(RingNumber::NONE, counter);
                return Class::Verdict(verdict);
            }
            Err((Reject::TruncatedHeaders, None)) if is_extended(packet) => {
                self.count(RingNumber::NONE, Counter::NotRoce);
                return Class::Verdict(Verdict::Pass);
            }
            Err((reject, Some(frame))) => (frame, Some(reject)),
            Err((Reject::TruncatedHeaders, None)) => {
                self.count(RingNumber::NONE, Counter::TruncatedHeaders);
                return Class::Verdict(Verdict::Pass);
            }
            Err((Reject::Hidden, None))
                if !self.flows.is_empty() || !self.in_band_tokens.is_empty() =>
            {
                self.count(RingNumber::NONE, Counter::UnparsedHeaders);
                return Class::Verdict(Verdict::Drop);
            }
            Err((Reject::Hidden, None)) => {
                self.count(RingNumber::NONE, Counter::NotRoce);
                return Class::Verdict(Verdict::Pass);
            }
            Err((reject, None)) => {
                assert_eq!(
                    reject,
                    Reject::NotRoce,
                    "the parser gives no other reason without a frame"
                );
                self.count(RingNumber::NONE, Counter::NotRoce);
                return Class::Verdict(Verdict::Pass);
            }
        };
        let key = FlowKey { dst_ip: frame.dst_ip, qpn: frame.bth.qpn };
        let Some(flow) = self.flows.iter().position(|(k, _)| *k == key) else {
            self.count(RingNumber::NONE, Counter::NoFlow);
            return Class::Verdict(Verdict::Pass);
        };
        let ring = self.flows[flow].1.spec.ring;
        let (verdict, counter) = match rejected {
            Some(reject) => (Verdict::Drop, reject.counter()),
            None if frame.bth.opcode.is_rc_data() => return Class::Data(frame, flow),
            None if frame.bth.opcode.is_other_data() => (Verdict::Drop, Counter::OtherData),
            None if frame.bth.opcode.is_known() => (Verdict::Pass, Counter::NotData),
            None => (Verdict::Pass, Counter::ReservedOpcode),
        };
        self.count(ring, counter);
        Class::Verdict(verdict)
    }

    /// Examines the first packet, with a header, of an unknown flow.
    fn look(&self, packet: &[u8]) -> Option<Look> {
        let frame = wire::parse(packet).ok()?;
        let key = FlowKey { dst_ip: frame.dst_ip, qpn: frame.bth.qpn };
        let opcode = frame.bth.opcode;
        let unknown_flow =
            self.flows.iter().all(|(k, _)| *k != key) && opcode.is_rc_data() && opcode.is_first();
        if !unknown_flow || self.in_band_tokens.is_empty() {
            return None;
        }
        let len = frame.data_len(packet.len()).ok()?;
        let payload = &packet[frame.payload()..][..len];
        let header = payload.first_chunk::<JOB_HEADER_LEN>()?;
        match beginning(*payload.first_chunk()?) {
            HeaderKind::Other => None,
            HeaderKind::Version(_) => Some(Look::Count(Counter::InBandVersion)),
            HeaderKind::Header => Some(match self.job_of(header) {
                Some(job) => Look::Job(job, frame, len),
                None => Look::Count(Counter::InBandWrongToken),
            }),
        }
    }

    /// The job for which the connection of an unknown flow's packet waits.
    fn waits_for(&self, packet: &[u8]) -> Option<RingNumber> {
        // Connections behind other tags or extension headers never wait.
        let (Ok(frame) | Err((Reject::IpOptions | Reject::IpFragment, Some(frame)))) =
            wire::parse(packet)
        else {
            return None;
        };
        let key = FlowKey { dst_ip: frame.dst_ip, qpn: frame.bth.qpn };
        let opcode = frame.bth.opcode;
        let unknown_flow = self.flows.iter().all(|(k, _)| *k != key)
            && (opcode.is_rc_data() || opcode.is_other_data());
        let connection = (frame.src_ip, frame.dst_ip, frame.bth.qpn);
        self.waiting
            .get(&connection)
            .copied()
            .filter(|_| unknown_flow && !self.in_band_tokens.is_empty())
    }

    fn job_of(&self, header: &[u8; JOB_HEADER_LEN]) -> Option<InBandJob> {
        let token = JobHeader::decode(header)?.token;
        self.in_band_tokens.iter().find(|(of, _)| *of == token).map(|(_, job)| *job)
    }

    fn note(&mut self, job: &InBandJob, packet: &[u8], frame: &Frame, len: usize) {
        let header = packet[frame.payload()..]
            .first_chunk()
            .and_then(JobHeader::decode)
            .expect("it was looked at");
        let ip = |ip: [u8; 16]| std::net::IpAddr::from(std::net::Ipv6Addr::from(ip)).to_canonical();
        let first = FirstPacket {
            job: job.job,
            header,
            ifindex: BOND,
            src: ip(frame.src_ip),
            src_mac: frame.src_mac,
            dst: ip(frame.dst_ip),
            qpn: Qpn::new(frame.bth.qpn),
            psn: Psn::new(frame.bth.psn),
            len: len as u32,
            only: frame.bth.opcode.is_last(),
        };
        let key = (job.job, header.ring.min(job.rings), header.rank.min(job.ranks));
        if header.message == 0 || !self.claims.contains_key(&key) {
            self.claims.insert(key, first);
        }
    }

    /// A packet arrives by a port, on the rings' CPU or another. Returns `None` if it is summed
    /// inline: then [`Model::aggregate`] decides.
    pub fn ingress(&mut self, packet: &mut [u8], on_rings_cpu: bool) -> Option<Verdict> {
        let look = self.look(packet).filter(|_| !self.is_spoofed(packet));
        if let Some(Look::Job(job, frame, _)) = look {
            self.waiting.insert((frame.src_ip, frame.dst_ip, frame.bth.qpn), job.job);
            self.count(job.job, Counter::Steered);
            return Some(Verdict::Redirect);
        }
        if let Some(job) = self.waits_for(packet).filter(|_| !self.is_spoofed(packet)) {
            self.count(job, Counter::InBandWaits);
            return Some(Verdict::Drop);
        }
        if let Some(Look::Count(counter)) = look {
            self.count(RingNumber::NONE, counter);
            return Some(Verdict::Pass);
        }
        let before = self.counters.clone();
        match self.classify(packet) {
            Class::Verdict(Verdict::Pass) if self.is_spoofed(packet) => {
                // Counts it for the ring that it would otherwise have been counted for.
                let ring = self.counted_since(&before);
                self.counters = before;
                self.counted = (RingNumber::NONE, 0);
                self.count(ring, Counter::Spoofed);
                Some(Verdict::Drop)
            }
            Class::Verdict(verdict) => Some(verdict),
            Class::Data(frame, flow) => {
                let spec = &self.flows[flow].1.spec;
                let (id, ring) = (spec.ring, &self.rings[&spec.ring]);
                let (low, index) =
                    (ring.state.low, serial::sub(frame.bth.psn, spec.base_psn.get()));
                // No index is before the first one.
                let behind = if index < low { serial::diff(low, index) } else { 0 };
                let sender = self.check_sender(&frame, flow);
                let flags = ring.config.flags;
                let active = flags & ring_flags::ACTIVE != 0 && flags & ring_flags::IN_BAND == 0;
                let (verdict, counter) = match sender {
                    Err(counter) => (Verdict::Drop, counter),
                    Ok(()) if active && behind > ring.config.slots as i32 => {
                        match frame.data_len(packet.len()) {
                            Ok(len) if len <= MAX_MTU => {
                                shift_psn(packet, &frame, len, serial::sub(0, STALE_PSN_BEHIND));
                                (Verdict::Pass, Counter::Stale)
                            }
                            Ok(_) => (Verdict::Drop, Counter::Oversized),
                            Err(reject) => (Verdict::Drop, reject.counter()),
                        }
                    }
                    Ok(()) if on_rings_cpu && self.flows[flow].1.next == Some(frame.bth.psn) => {
                        self.count(id, Counter::Inline);
                        return None;
                    }
                    Ok(()) => (Verdict::Redirect, Counter::Steered),
                };
                let seen = &mut self.flows[flow].1.seen;
                seen.refused += u32::from(verdict == Verdict::Drop);
                if verdict != Verdict::Redirect {
                    seen.packets += 1;
                    (seen.last_psn, seen.last_verdict) = (frame.bth.psn, Some(counter));
                }
                self.count(id, counter);
                Some(verdict)
            }
        }
    }

    /// The ring for which a packet has been counted.
    fn counted_since(&self, before: &HashMap<(RingNumber, Counter), u64>) -> RingNumber {
        let counted = |(key, n): (&(RingNumber, Counter), &u64)| {
            (before.get(key) != Some(n)).then_some(key.0)
        };
        self.counters.iter().find_map(counted).expect("every packet is counted")
    }

    /// Whether the packet carries the address of a rank behind another port.
    fn is_spoofed(&self, packet: &[u8]) -> bool {
        self.has_foreign_address(&claimed_addresses(packet)) || self.has_foreign_mac(packet)
    }

    fn has_foreign_address(&self, addresses: &[[u8; 16]]) -> bool {
        let mut away =
            self.flows.iter().map(|(_, flow)| &flow.spec).filter(|spec| spec.ifindex != BOND);
        away.any(|spec| addresses.contains(&mapped(spec.src)))
    }

    fn has_foreign_mac(&self, packet: &[u8]) -> bool {
        let mut away =
            self.flows.iter().map(|(_, flow)| &flow.spec).filter(|spec| spec.ifindex != BOND);
        away.any(|spec| spec.src_mac.is_some_and(|mac| packet[6..12] == mac))
    }

    /// A packet arrives at its ring's CPU.
    pub fn aggregate(&mut self, packet: &mut [u8]) -> Verdict {
        if let Some(Look::Job(job, frame, len)) = self.look(packet) {
            let counter = if len > MAX_MTU {
                Counter::Oversized
            } else if job.flags & ring_flags::ICRC_IGNORE == 0 && !is_intact(packet, &frame, len) {
                self.waiting.remove(&(frame.src_ip, frame.dst_ip, frame.bth.qpn));
                Counter::BadIcrc
            } else {
                self.note(&job, packet, &frame, len);
                Counter::InBandFirst
            };
            self.count(job.job, counter);
            return Verdict::Drop;
        }
        let before = self.counters.clone();
        let (frame, flow) = match self.classify(packet) {
            Class::Verdict(Verdict::Pass) => {
                // It was steered when its flow was registered.
                let ring = self.counted_since(&before);
                self.counters = before;
                self.counted = (RingNumber::NONE, 0);
                self.count(ring, Counter::JobEnded);
                return Verdict::Drop;
            }
            Class::Verdict(verdict) => return verdict,
            Class::Data(frame, flow) => (frame, flow),
        };
        let ring = self.flows[flow].1.spec.ring;
        let seen = &mut self.flows[flow].1.seen;
        (seen.packets, seen.last_psn) = (seen.packets + 1, frame.bth.psn);
        match self.check(packet, &frame, flow) {
            Ok(len) => self.contribution(packet, &frame, flow, len),
            Err(counter) => {
                self.count(ring, counter);
                let seen = &mut self.flows[flow].1.seen;
                (seen.refused, seen.last_verdict) = (seen.refused + 1, Some(counter));
                Verdict::Drop
            }
        }
    }

    fn check_sender(&self, frame: &Frame, flow: usize) -> Result<(), Counter> {
        let flow = &self.flows[flow].1;
        if flow.spec.ifindex != BOND {
            return Err(Counter::WrongPort);
        }
        if frame.src_ip != mapped(flow.spec.src) {
            return Err(Counter::WrongSourceIp);
        }
        if flow.seen.mac.is_some_and(|mac| mac != frame.src_mac) {
            return Err(Counter::WrongSourceMac);
        }
        Ok(())
    }

    fn check(&mut self, packet: &[u8], frame: &Frame, at: usize) -> Result<usize, Counter> {
        let config = self.rings[&self.flows[at].1.spec.ring].config;
        if config.flags & ring_flags::ACTIVE == 0 {
            return Err(Counter::InactiveRing);
        }
        self.check_sender(frame, at)?;
        let flow = &self.flows[at].1;
        let len = match frame.data_len(packet.len()) {
            Ok(len) => len,
            Err(reject) => {
                let op = frame.bth.opcode;
                let empty = op.is_first()
                    && op.is_last()
                    && frame.bth_offset() + frame.udp_payload == frame.payload() + ICRC_LEN;
                if empty {
                    let FlowSpec { ring, member: rank, .. } = flow.spec;
                    self.rings.get_mut(&ring).expect("a flow's ring").state.stopped = rank.0 + 1;
                    return Err(Counter::LayoutMismatch);
                }
                return Err(reject.counter());
            }
        };
        if len > config.mtu as usize || len > MAX_MTU {
            return Err(Counter::Oversized);
        }
        if len < config.mtu as usize && !frame.bth.opcode.is_last() {
            return Err(Counter::ShortFragment);
        }
        if config.flags & ring_flags::ICRC_IGNORE == 0 && !is_intact(packet, frame, len) {
            return Err(Counter::BadIcrc);
        }
        if config.flags & ring_flags::IN_BAND != 0 && frame.bth.opcode.is_first() {
            let index = serial::sub(frame.bth.psn, flow.spec.base_psn.get());
            let payload = &packet[frame.payload()..][..len];
            let header = payload.first_chunk().filter(|h| {
                beginning(*h.first_chunk().expect("eight bytes")) == HeaderKind::Header
            });
            let says = header.and_then(JobHeader::decode).map(|h| h.index);
            if says != Some(index) {
                let Some(job) = header.and_then(|h| self.job_of(h)) else {
                    return Err(Counter::InBandHeader);
                };
                self.note(&job, packet, frame, len);
                return Err(Counter::InBandFirst);
            }
        }
        let flow = &mut self.flows[at].1;
        // No host has the all-zero address, which stands for an unknown one.
        flow.seen.mac = (frame.src_mac != [0; 6]).then_some(frame.src_mac);
        Ok(len)
    }

    fn contribution(
        &mut self,
        packet: &mut [u8],
        frame: &Frame,
        flow: usize,
        len: usize,
    ) -> Verdict {
        let FlowSpec { ring: id, member: Rank(rank), base_psn, .. } = self.flows[flow].1.spec;
        let index = serial::sub(frame.bth.psn, base_psn.get());
        let ring = self.rings.get_mut(&id).expect("a flow's ring");
        let config = ring.config;
        let s = (index % config.slots) as usize;
        let op = frame.bth.opcode;
        let first = if op.is_first() { Slot::FIRST } else { 0 };
        let bounds = first | if op.is_last() { Slot::LAST } else { 0 };
        let fragment =
            Fragment { rank, index, len: len as u32, ce: frame.ce, total: false, bounds };
        let verdict = rules::decide(&config, &mut ring.state, &mut ring.slots, fragment);
        let flow = &mut self.flows[flow].1;
        if verdict.counter != Counter::CreditViolation {
            flow.next = Some(serial::add(frame.bth.psn, 1));
        }
        let seen = &mut flow.seen;
        seen.last_verdict = Some(verdict.counter);
        if verdict.counter == Counter::LengthMismatch {
            seen.mismatch = Some((frame.bth.psn, len as u32));
        }
        let mut counters = vec![verdict.counter];
        counters.extend(verdict.gap.then_some(Counter::OutOfSequence));
        counters.extend(frame.ce.then_some(Counter::EcnMarked));

        let at = frame.payload();
        if verdict.save_header {
            ring.saved[s * config.members as usize + rank as usize] =
                Saved { bytes: packet[..at].to_vec(), ip: frame.ip, v6: frame.l3 == L3::V6 };
            if frame.ip == wire::EthHdr::LEN + wire::VlanHdr::LEN {
                ring.slots[s].flags |= Slot::TAGGED;
            }
        }
        if matches!(verdict.payload, Payload::Copy | Payload::Add)
            && (index + index / timing::SAMPLED).is_multiple_of(timing::SAMPLED)
        {
            ring.timed[rank as usize].0 += 1;
            ring.timed[rank as usize].1 += u64::from(verdict.completed);
        }
        match verdict.payload {
            Payload::Leave => {}
            Payload::Copy => ring.terms[s] = vec![packet[at..at + len].to_vec()],
            Payload::Add => ring.terms[s].push(packet[at..at + len].to_vec()),
        }
        let sum = &if ring.terms[s].is_empty() {
            Vec::new()
        } else if config.flags & ring_flags::FLOAT != 0 {
            let (sum, all_finite) = float_sum(config.lsb, config.members, &ring.terms[s]);
            ring.slots[s].flags |= if all_finite { 0 } else { Slot::NOT_FINITE };
            sum
        } else {
            frames::sum(&ring.terms[s])
        };
        if verdict.completed {
            ring.slots[s].crc = icrc::update(0, sum);
            let has_checksum = u16_at(packet, frame.udp() + 6) != 0;
            ring.slots[s].checksum = if has_checksum { ones_complement(sum).to_be() } else { 0 };
            counters.push(Counter::Completed);
            if verdict.output != Output::Release {
                counters.push(Counter::HeldBack);
            }
        }
        let out = match verdict.output {
            Output::Drop => Verdict::Drop,
            Output::Stale => {
                shift_psn(packet, frame, len, serial::sub(0, STALE_PSN_BEHIND));
                Verdict::Pass
            }
            Output::Gap => {
                counters.push(Counter::GapForwarded);
                shift_psn(packet, frame, len, GAP_PSN_AHEAD);
                if verdict.completed {
                    packet[at..at + len].copy_from_slice(sum);
                    let icrc = right_icrc(packet, frame.l3, frame.ip, at + len);
                    packet[at + len..][..4].copy_from_slice(&icrc.to_le_bytes());
                }
                Verdict::Pass
            }
            Output::Up => unreachable!("rings here have no parent"),
            Output::Release | Output::Replay => {
                packet[at..at + len].copy_from_slice(sum);
                let to = match verdict.output {
                    Output::Release => {
                        counters.push(Counter::Released);
                        ReleaseTag::ALL
                    }
                    _ => ((rank + 1) % config.members) as u16,
                };
                packet[..4].copy_from_slice(&id.0.to_ne_bytes());
                packet[4..8].copy_from_slice(&index.to_ne_bytes());
                packet[8..10].copy_from_slice(&to.to_ne_bytes());
                packet[10..12].copy_from_slice(&(at as u16).to_ne_bytes());
                Verdict::Redirect
            }
        };
        counters.into_iter().for_each(|c| self.count(id, c));
        out
    }

    /// Sends a clone of a released packet by the port; returns the frame on the wire.
    pub fn egress(&mut self, packet: &[u8]) -> (Verdict, Vec<u8>) {
        let tag = crate::programs::tag(packet);
        match self.result(packet, tag) {
            Some(frame) => {
                self.count(RingNumber(tag.ring), Counter::Results);
                (Verdict::Pass, frame)
            }
            None => {
                self.count(RingNumber::NONE, Counter::EgressNoRoute);
                (Verdict::Drop, Vec::new())
            }
        }
    }

    fn result(&mut self, packet: &[u8], tag: ReleaseTag) -> Option<Vec<u8>> {
        let ring = self.rings.get_mut(&RingNumber(tag.ring))?;
        let ranks = ring.config.members;
        let to = if tag.rank == ReleaseTag::ALL {
            let next = ring.cursor;
            ring.cursor = (next + 1) % ranks;
            next
        } else {
            tag.rank as u32
        };
        let s = (tag.index % ring.config.slots) as usize;
        if ring.slots[s].index != tag.index || !ring.slots[s].is(Slot::RELEASED) {
            return None; // The slot has moved on meanwhile.
        }
        let saved = &ring.saved[s * ranks as usize + ((to + ranks - 1) % ranks) as usize];
        let mut frame = [&saved.bytes, &packet[tag.payload as usize..]].concat();
        let (l3, ip) = (if saved.v6 { L3::V6 } else { L3::V4 }, saved.ip);
        let ce = ring.slots[s].is(Slot::CE);
        match l3 {
            L3::V4 => {
                let was_right = ones_complement(&frame[ip..ip + 20]) == 0xffff;
                let old = [u16_at(&frame, ip), u16_at(&frame, ip + 4)];
                frame[ip + 4..ip + 6].fill(0);
                if ce && frame[ip + 1] & 3 != 0 {
                    frame[ip + 1] |= 3;
                }
                // RFC 1624, eqn. 3.
                let mut sum = !u16_at(&frame, ip + 10) as u64 + u16_at(&frame, ip) as u64;
                sum += old.iter().map(|word| !word as u64).sum::<u64>();
                while sum > 0xffff {
                    sum = (sum & 0xffff) + (sum >> 16);
                }
                frame[ip + 10..ip + 12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
                assert_eq!(was_right, ones_complement(&frame[ip..ip + 20]) == 0xffff);
            }
            L3::V6 => {
                if ce && frame[ip + 1] & 0x30 != 0 {
                    frame[ip + 1] |= 0x30;
                }
            }
        }
        if ring.config.flags & ring_flags::RELAXED != 0 {
            // FECN and BECN stay as the sender set them.
            let told = &mut frame[ip + l3.header_len() + 8 + 4];
            *told = *told & 0xc0 | ring.slots[s].receiver_marks((to + ranks - 1) % ranks);
        }
        let checksum_at = ip + l3.header_len() + 6;
        let with_checksum = ring.slots[s].checksum != 0 && u16_at(&frame, checksum_at) != 0;
        no_udp_checksum(&mut frame, ip + l3.header_len());
        let icrc_at = saved.bytes.len() + ring.slots[s].len as usize;
        let icrc = right_icrc(&frame, l3, ip, icrc_at);
        frame[icrc_at..][..ICRC_LEN].copy_from_slice(&icrc.to_le_bytes());
        if with_checksum {
            let checksum = udp_checksum(&frame, l3, ip);
            frame[checksum_at..][..2].copy_from_slice(&checksum.to_be_bytes());
        }
        // The VLAN is that of the receiver's own packets; the priority is the sender's.
        let own = &ring.saved[s * ranks as usize + to as usize];
        let tag =
            |bytes: &[u8]| (u16_at(bytes, 12) == wire::ETHERTYPE_VLAN).then(|| u16_at(bytes, 14));
        match (tag(&saved.bytes), tag(&own.bytes)) {
            (None, None) => {}
            (Some(sent), Some(own)) => {
                frame[14..16].copy_from_slice(&(sent & 0xf000 | own & 0x0fff).to_be_bytes());
            }
            (Some(_), None) => drop(frame.drain(12..16)),
            (None, Some(own)) => {
                let tag = [wire::ETHERTYPE_VLAN.to_be_bytes(), own.to_be_bytes()].concat();
                frame.splice(12..12, tag);
            }
        }
        Some(frame)
    }
}

/// The types of a frame's tags, at most three.
fn tags(packet: &[u8]) -> Vec<u16> {
    let mut tags = Vec::new();
    let mut at = wire::EthHdr::LEN - 2;
    while tags.len() < 3
        && packet.len() >= at + 2
        && let kind @ (0x8100 | 0x88a8 | 0x9100) = u16_at(packet, at)
    {
        tags.push(kind);
        at += wire::VlanHdr::LEN;
    }
    tags
}

/// The IP addresses that a frame claims for its sender.
fn claimed_addresses(packet: &[u8]) -> Vec<[u8; 16]> {
    let mut ip = wire::EthHdr::LEN;
    let is_tag = |at: usize| {
        matches!(packet.get(at..at + 2), Some([0x81, 0x00] | [0x88, 0xa8] | [0x91, 0x00]))
    };
    while is_tag(ip - 2) && ip < wire::EthHdr::LEN + 2 * wire::VlanHdr::LEN {
        ip += wire::VlanHdr::LEN;
    }
    let v4 = |at: usize| Some(mapped(<[u8; 4]>::try_from(packet.get(at..at + 4)?).ok()?.into()));
    let v6 = |at: usize| <[u8; 16]>::try_from(packet.get(at..at + 16)?).ok();
    let whole = |len: usize| packet.get(ip..ip + len).is_some();
    let claimed = match packet.get(ip - 2..ip) {
        Some([0x08, 0x06]) => v4(ip + 14),
        Some([0x08, 0x00]) if whole(wire::Ipv4Hdr::LEN) => v4(ip + 12),
        Some([0x86, 0xdd]) if whole(wire::Ipv6Hdr::LEN) => {
            let target = advertised(packet, ip).and_then(|at| v6(at + 8));
            // The source address also counts behind extension headers.
            let source =
                v6(ip + 8).filter(|_| target.is_none() || packet[ip + 6] != wire::IPPROTO_ICMPV6);
            return source.into_iter().chain(target).collect();
        }
        _ => None,
    };
    claimed.into_iter().collect()
}

/// Whether the frame is IPv6 with extension headers.
fn is_extended(packet: &[u8]) -> bool {
    let ip = wire::EthHdr::LEN + tags(packet).len() * wire::VlanHdr::LEN;
    u16_at(packet, ip - 2) == wire::ETHERTYPE_IPV6 && matches!(packet[ip + 6], 0 | 43 | 44 | 60)
}

/// Offset of a neighbour advertisement, behind at most six extension headers.
fn advertised(packet: &[u8], ip: usize) -> Option<usize> {
    let end = ip + wire::Ipv6Hdr::LEN + u16_at(packet, ip + 4) as usize;
    let (mut next, mut at) = (packet[ip + 6], ip + wire::Ipv6Hdr::LEN);
    for _ in 0..6 {
        let len = match next {
            0 | 43 | 60 => (usize::from(*packet.get(at + 1)?) + 1) * 8,
            44 => 8,
            _ => break,
        };
        let header = packet.get(at..at + 8).filter(|_| at + 8 <= end)?;
        if next == 44 && u16_at(header, 2) >= 8 {
            return None;
        }
        (next, at) = (header[0], at + len);
    }
    (next == wire::IPPROTO_ICMPV6 && packet.get(at) == Some(&wire::NEIGHBOUR_ADVERTISEMENT))
        .then_some(at)
}

/// Whether a packet with a payload of `len` bytes has the right ICRC.
fn is_intact(packet: &[u8], frame: &Frame, len: usize) -> bool {
    let end = frame.payload() + len;
    let sent = packet[end..][..ICRC_LEN].try_into().expect("four bytes");
    u32::from_le_bytes(sent) == right_icrc(packet, frame.l3, frame.ip, end)
}

/// The correct ICRC for offset `end` of a frame.
fn right_icrc(packet: &[u8], l3: L3, ip: usize, end: usize) -> u32 {
    let bth_end = ip + l3.header_len() + UdpHdr::LEN + BTH_LEN;
    icrc::of_frame(packet, l3, ip, bth_end, end - bth_end).expect("the frame holds its headers")
}

/// Passes a packet with another PSN. An ICRC error is preserved.
fn shift_psn(packet: &mut [u8], frame: &Frame, len: usize, by: u32) {
    let icrc_at = frame.payload() + len;
    let old = right_icrc(packet, frame.l3, frame.ip, icrc_at);
    let psn = serial::add(frame.bth.psn, by).to_be_bytes();
    packet[frame.bth_offset() + 9..][..3].copy_from_slice(&psn[1..]);
    no_udp_checksum(packet, frame.udp());
    let sent = u32::from_le_bytes(packet[icrc_at..][..4].try_into().expect("four bytes"));
    let icrc = sent ^ old ^ right_icrc(packet, frame.l3, frame.ip, icrc_at);
    packet[icrc_at..][..4].copy_from_slice(&icrc.to_le_bytes());
}

fn no_udp_checksum(packet: &mut [u8], udp: usize) {
    packet[udp + UdpHdr::LEN - 2..udp + UdpHdr::LEN].fill(0);
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// One's complement sum of a header's 16-bit words, from which its checksum is computed (RFC 1071).
fn ones_complement(header: &[u8]) -> u16 {
    let mut sum: u32 = (0..header.len()).step_by(2).map(|i| u16_at(header, i) as u32).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}
