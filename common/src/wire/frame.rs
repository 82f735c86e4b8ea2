//! Parses an Ethernet frame: finds its RoCEv2 headers, or the reason why it has none.
//!
//! The same code runs in the XDP programs, over packet pointers, and in user space, over slices.

use core::mem::offset_of;

use super::extensions;
use super::*;
use crate::counters::Counter;
use crate::slot::Slot;

/// Lowest of the three flags of an IPv4 header.
const MORE_FRAGMENTS: u8 = 1;

/// Bounds-checked access to a frame. In XDP this is the comparison with `data_end` that the
/// verifier needs.
pub trait Bytes {
    /// The bytes from `offset` on, or `None` if the frame is too short.
    fn load<const N: usize>(&self, offset: usize) -> Option<[u8; N]>;
    /// The same for a variable offset, for which an XDP program needs another implementation.
    fn load_far<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.load(offset)
    }
    /// Length of the frame in bytes.
    fn len(&self) -> usize;
    /// Whether the frame has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Parses headers that data of netsum never has, and classifies the frame. Programs implement this
/// in global functions, because of the stack's limit.
pub trait Wrapped: Bytes {
    /// Verdict on a frame whose headers are in a later fragment.
    fn hidden(&self) -> Reject {
        Reject::Hidden
    }
    /// Classifies a frame behind two tags, or behind one that is not of 802.1Q.
    fn tagged(&self, frame: &mut Frame) -> Reject {
        match behind_tags(self) {
            Ok((ethertype, ip)) => {
                frame.ip = ip;
                network(self, ethertype, frame).err().unwrap_or(Reject::VlanTags)
            }
            Err(reject) => reject,
        }
    }
    /// Classifies an IPv6 packet behind its extension headers, and fills in the fields that follow
    /// them.
    fn extended(&self, frame: &mut Frame) -> Reject {
        let behind = extensions::behind(self, frame.ip);
        if let Some(target) = behind.advertisement().and_then(|at| self.load_far(at + 8)) {
            frame.src_ip = target;
        }
        if let Some(bth) = behind.udp().and_then(|at| self.load_far(at + UdpHdr::LEN)) {
            frame.bth = Bth::decode(&bth);
        }
        behind.reject()
    }
}

impl Bytes for [u8] {
    fn load<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.get(offset..offset.checked_add(N)?)?.try_into().ok()
    }
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }
}

impl Wrapped for [u8] {}

/// The network layer of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum L3 {
    /// IPv4 without options.
    V4,
    /// IPv6 without extension headers.
    V6,
}

impl L3 {
    /// Length of the IP header.
    #[inline(always)]
    pub const fn header_len(self) -> usize {
        match self {
            L3::V4 => Ipv4Hdr::LEN,
            L3::V6 => Ipv6Hdr::LEN,
        }
    }
}

/// Where things are in a RoCEv2 frame. Offsets count from the start of the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// IPv4 or IPv6.
    pub l3: L3,
    /// Offset of the IP header: 14, or 18 behind a VLAN tag; in frames that are rejected, 22 behind
    /// two.
    pub ip: usize,
    /// Source address; IPv4 in mapped form. Also found in frames that are not RoCEv2; there it is
    /// the address that the sender calls its own: the sender's in ARP, the target in a neighbour
    /// advertisement.
    pub src_ip: [u8; 16],
    /// Destination address; IPv4 in mapped form.
    pub dst_ip: [u8; 16],
    pub src_mac: [u8; 6],
    /// The packet carries the congestion experienced mark.
    pub ce: bool,
    /// The base transport header.
    pub bth: Bth,
    /// UDP payload length that both length fields agree on; 0 if they do not.
    pub udp_payload: usize,
}

impl Frame {
    /// A frame with nothing in it, to be filled by [`parse_into`].
    pub const EMPTY: Self = Self {
        l3: L3::V4,
        ip: 0,
        src_ip: [0; 16],
        dst_ip: [0; 16],
        src_mac: [0; 6],
        ce: false,
        bth: Bth::decode(&[0; BTH_LEN]),
        udp_payload: 0,
    };

    /// Offset of the UDP header.
    #[inline(always)]
    pub const fn udp(&self) -> usize {
        self.ip + self.l3.header_len()
    }
    #[inline(always)]
    pub const fn bth_offset(&self) -> usize {
        self.udp() + UdpHdr::LEN
    }
    /// Offset of the payload of an RC data packet: what precedes it is what a slot saves.
    #[inline(always)]
    pub const fn payload(&self) -> usize {
        self.bth_offset() + BTH_LEN + self.bth.opcode.extended_len()
    }

    /// Where an RC data packet is in its message: bits of [`Slot::FIRST`] and [`Slot::LAST`].
    #[inline(always)]
    pub const fn bounds(&self) -> u32 {
        ((BOUNDS >> (2 * (self.bth.opcode.0 & 31))) as u32 & 3) * Slot::FIRST
    }

    /// Whether an RC data packet is a whole message without payload.
    #[inline(always)]
    pub const fn is_empty_message(&self) -> bool {
        self.udp_payload == BTH_LEN + self.bth.opcode.extended_len() + ICRC_LEN
            && self.bounds() == Slot::FIRST | Slot::LAST
    }

    /// Length of the payload of an RC data packet, if the packet is one that can be added: whole
    /// lanes, no pad, lengths that agree with each other and with the frame, transport version 0,
    /// default partition.
    #[inline(always)]
    pub fn data_len(&self, frame_len: usize) -> Result<usize, Reject> {
        let udp_payload = self.udp_payload;
        if udp_payload == 0 {
            return Err(Reject::UdpLength);
        }
        if self.bth.version != 0 {
            return Err(Reject::Version);
        }
        if self.bth.pkey != DEFAULT_PKEY {
            return Err(Reject::Pkey);
        }
        // Ethernet may pad short frames to 60 bytes, so a frame may be longer than its lengths, not
        // shorter.
        if self.bth_offset() + udp_payload > frame_len {
            return Err(Reject::Truncated);
        }
        let headers = BTH_LEN + self.bth.opcode.extended_len() + ICRC_LEN;
        if udp_payload <= headers {
            return Err(Reject::PayloadLength);
        }
        let len = udp_payload - headers;
        if self.bth.pad != 0 {
            return Err(Reject::Pad);
        }
        if !len.is_multiple_of(4) {
            return Err(Reject::PayloadLength);
        }
        Ok(len)
    }
}

/// For each opcode of RC two bits: whether it begins a message, and whether it ends one. Branches
/// would cost the programs stack.
const BOUNDS: u64 = {
    assert!(Slot::LAST == 2 * Slot::FIRST);
    let (mut bits, mut op) = (0, 0);
    while op < 32 {
        let opcode = Opcode(op);
        bits |= (opcode.is_first() as u64 | (opcode.is_last() as u64) << 1) << (2 * op);
        op += 1;
    }
    bits
};

/// Why a frame is not RoCEv2, or not data that can be added up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reject {
    /// Not UDP to port 4791 over IPv4 or IPv6.
    NotRoce,
    /// RoCEv2 by its port, but the frame ends within its headers.
    TruncatedHeaders,
    /// The frame ends before its length fields say.
    Truncated,
    /// RoCEv2 by its port, behind IPv4 options.
    IpOptions,
    /// The first fragment of a fragmented RoCEv2 packet.
    IpFragment,
    /// RoCEv2 by its port, behind another VLAN tag than one of 802.1Q, or behind two.
    VlanTags,
    /// RoCEv2 by its port, behind IPv6 extension headers.
    Ipv6Extensions,
    /// Unreadable: behind more tags or extension headers than are followed, or in a later fragment
    /// whose first one is shorter than UDP and BTH.
    Hidden,
    /// It carries an address of another port, behind other headers. Only programs that know the
    /// owners of addresses return this.
    Spoofed,
    /// IP and UDP length fields contradict each other.
    UdpLength,
    /// Transport header version is not 0.
    Version,
    /// Not the default partition key.
    Pkey,
    /// A pad count in a packet that must consist of whole lanes.
    Pad,
    /// Payload that is empty, or not a multiple of 4 bytes.
    PayloadLength,
}

impl Reject {
    /// The counter of packets with this defect.
    #[inline(always)]
    pub const fn counter(self) -> Counter {
        match self {
            Self::NotRoce => Counter::NotRoce,
            Self::TruncatedHeaders => Counter::TruncatedHeaders,
            Self::Truncated => Counter::Truncated,
            Self::IpOptions => Counter::IpOptions,
            Self::IpFragment => Counter::IpFragment,
            Self::VlanTags => Counter::VlanTags,
            Self::Ipv6Extensions => Counter::Ipv6Extensions,
            Self::Hidden => Counter::UnparsedHeaders,
            Self::Spoofed => Counter::Spoofed,
            Self::UdpLength => Counter::BadUdpLength,
            Self::Version => Counter::BadVersion,
            Self::Pkey => Counter::BadPkey,
            Self::Pad => Counter::BadPad,
            Self::PayloadLength => Counter::BadPayloadLength,
        }
    }
}

/// Finds the RoCEv2 headers of a frame.
///
/// Two VLAN tags, IPv4 options, IPv6 extension headers and first fragments are followed as far as
/// the BTH, and returned as `Err` with the frame: the caller can then tell a registered flow's
/// invalid packet from a foreign one.
pub fn parse<B: Wrapped + ?Sized>(b: &B) -> Result<Frame, (Reject, Option<Frame>)> {
    let mut frame = Frame::EMPTY;
    match parse_into(b, &mut frame) {
        Ok(()) => Ok(frame),
        Err(
            r
            @ (Reject::IpOptions | Reject::IpFragment | Reject::VlanTags | Reject::Ipv6Extensions),
        ) => Err((r, Some(frame))),
        Err(r) => Err((r, None)),
    }
}

/// [`parse`] into a frame that the caller has initialised with [`Frame::EMPTY`]. For BPF: no value
/// is ever undefined on any path, which the verifier would refuse when the compiler spills it.
///
/// With `IpOptions`, `IpFragment`, `VlanTags` and `Ipv6Extensions` the frame is filled in as far as
/// its BTH; with other errors only `src_mac` and `src_ip` are, where the frame has them.
#[inline(always)]
pub fn parse_into<B: Wrapped + ?Sized>(b: &B, frame: &mut Frame) -> Result<(), Reject> {
    let Some(eth) = EthHdr::load(b, 0) else { return Err(Reject::NotRoce) };
    frame.src_mac = eth.src_addr;
    let mut ethertype = u16::from_be(eth.ether_type);
    frame.ip = EthHdr::LEN;
    // Hosts strip tags of VLAN 0, any number of them (Linux: `__netif_receive_skb_core` in
    // net/core/dev.c), so packets behind tags may be for them. `egress` can write one tag of
    // 802.1Q; packets with others are only classified.
    if is_tag(ethertype) {
        let Some(tagged) = b.load::<2>(EthHdr::LEN + offset_of!(VlanHdr, ether_type)) else {
            return Err(Reject::NotRoce);
        };
        let tagged = u16::from_be_bytes(tagged);
        if ethertype != ETHERTYPE_VLAN || is_tag(tagged) {
            return Err(b.tagged(frame));
        }
        ethertype = tagged;
        frame.ip = EthHdr::LEN + VlanHdr::LEN;
    }
    network(b, ethertype, frame)
}

/// Parses the packet behind Ethernet header and tags.
#[inline(always)]
fn network<B: Wrapped + ?Sized>(b: &B, ethertype: u16, frame: &mut Frame) -> Result<(), Reject> {
    match ethertype {
        ETHERTYPE_IPV4 => ipv4(b, frame),
        ETHERTYPE_IPV6 => ipv6(b, frame),
        ETHERTYPE_ARP => {
            // RFC 826: types and lengths, operation, the sender's MAC address, its IP address.
            if let Some([a, b, c, d]) = b.load::<4>(frame.ip + 14) {
                frame.src_ip = ipv4_mapped([a, b, c, d]);
            }
            Err(Reject::NotRoce)
        }
        _ => Err(Reject::NotRoce),
    }
}

/// The EtherType behind one tag or two, and the offset of the header that it names.
#[inline(always)]
pub fn behind_tags<B: Bytes + ?Sized>(b: &B) -> Result<(u16, usize), Reject> {
    let Some(inner) = b.load::<2>(EthHdr::LEN + offset_of!(VlanHdr, ether_type)) else {
        return Err(Reject::NotRoce);
    };
    let inner = u16::from_be_bytes(inner);
    if !is_tag(inner) {
        return Ok((inner, EthHdr::LEN + VlanHdr::LEN));
    }
    let Some(innermost) = b.load::<2>(EthHdr::LEN + VlanHdr::LEN + offset_of!(VlanHdr, ether_type))
    else {
        return Err(Reject::NotRoce);
    };
    let innermost = u16::from_be_bytes(innermost);
    if is_tag(innermost) {
        Err(Reject::Hidden)
    } else {
        Ok((innermost, EthHdr::LEN + 2 * VlanHdr::LEN))
    }
}

/// Whether it is the type of a tag: of 802.1Q, of 802.1ad, or 0x9100, used before 802.1ad. Linux
/// does not treat 0x9100 as a tag.
#[inline(always)]
const fn is_tag(ethertype: u16) -> bool {
    matches!(ethertype, ETHERTYPE_VLAN | ETHERTYPE_VLAN_AD | ETHERTYPE_VLAN_OLD)
}

/// UDP and BTH at an offset, behind an IP header whose payload is `ip_payload` bytes long.
#[inline(always)]
fn transport<B: Bytes + ?Sized>(
    b: &B,
    udp_at: usize,
    ip_payload: usize,
    frame: &mut Frame,
) -> Result<(), Reject> {
    let Some(udp) = UdpHdr::load(b, udp_at) else { return Err(Reject::NotRoce) };
    if udp.dst_port() != ROCE_PORT {
        return Err(Reject::NotRoce);
    }
    let Some(bth) = b.load::<BTH_LEN>(udp_at + UdpHdr::LEN) else {
        return Err(Reject::TruncatedHeaders);
    };
    frame.bth = Bth::decode(&bth);
    let udp_len = udp.len() as usize;
    frame.udp_payload = if udp_len >= UdpHdr::LEN + BTH_LEN && udp_len == ip_payload {
        udp_len - UdpHdr::LEN
    } else {
        0
    };
    Ok(())
}

#[inline(always)]
fn ipv4<B: Wrapped + ?Sized>(b: &B, frame: &mut Frame) -> Result<(), Reject> {
    let Some(h) = Ipv4Hdr::load(b, frame.ip) else { return Err(Reject::NotRoce) };
    frame.src_ip = ipv4_mapped(h.src_addr);
    let header_len = h.ihl() as usize;
    if h.version() != 4
        || h.proto != IPPROTO_UDP
        || header_len < Ipv4Hdr::LEN
        || h.frag_offset() != 0
    {
        return Err(Reject::NotRoce);
    }
    let fragmented = h.frag_flags() & MORE_FRAGMENTS != 0;
    frame.l3 = L3::V4;
    frame.dst_ip = ipv4_mapped(h.dst_addr);
    frame.ce = h.ecn() == 3;
    let ip_payload = (h.tot_len() as usize).wrapping_sub(header_len);
    // Reassembly drops the bytes behind the IP packet of a fragment. No link needs such short
    // fragments: all carry at least 68 bytes (RFC 791).
    if fragmented && ip_payload < UdpHdr::LEN + BTH_LEN {
        return Err(b.hidden());
    }
    if header_len != Ipv4Hdr::LEN {
        // At most 60 bytes; the mask tells the verifier.
        transport(b, frame.ip + (header_len & 0x3f), ip_payload, frame)?;
        return Err(Reject::IpOptions);
    }
    transport(b, frame.ip + Ipv4Hdr::LEN, ip_payload, frame)?;
    if fragmented { Err(Reject::IpFragment) } else { Ok(()) }
}

#[inline(always)]
fn ipv6<B: Wrapped + ?Sized>(b: &B, frame: &mut Frame) -> Result<(), Reject> {
    let Some(h) = Ipv6Hdr::load(b, frame.ip) else { return Err(Reject::NotRoce) };
    frame.src_ip = h.src_addr;
    if h.version() != 6 {
        return Err(Reject::NotRoce);
    }
    frame.l3 = L3::V6;
    frame.dst_ip = h.dst_addr;
    frame.ce = h.ecn() == 3;
    let ip_payload = h.payload_len() as usize;
    if h.next_hdr == IPPROTO_UDP {
        return transport(b, frame.ip + Ipv6Hdr::LEN, ip_payload, frame);
    }
    if h.next_hdr == IPPROTO_ICMPV6 {
        if let Some(target) = b.load::<16>(frame.ip + Ipv6Hdr::LEN + 8)
            && let Some([NEIGHBOUR_ADVERTISEMENT]) = b.load::<1>(frame.ip + Ipv6Hdr::LEN)
        {
            frame.src_ip = target;
        }
        return Err(Reject::NotRoce);
    }
    if !extensions::is_extension(h.next_hdr) {
        return Err(Reject::NotRoce);
    }
    Err(b.extended(frame))
}
