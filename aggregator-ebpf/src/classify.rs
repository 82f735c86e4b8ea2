//! Classifies packets: which flow they belong to, and whether they may be added.

use aya_ebpf::programs::XdpContext;
use netsum_common::abi::{Address, Flow, FlowKey};
use netsum_common::counters::Counter;
use netsum_common::slot;
use netsum_common::wire::{self, Frame, Reject, Wrapped};

use crate::maps;

/// A packet's class. Details are in the arguments of [`classify`]; a bare enum leaves no value
/// undefined.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Data of a registered flow.
    Data,
    /// Forwarded unchanged.
    Pass,
    /// Invalid data of a registered flow. It is dropped, because its receiver could take it for a
    /// result.
    Refuse,
}

/// Result of [`classify`].
pub struct Classified {
    /// The packet's headers, for data.
    pub frame: Frame,
    /// The packet's flow; null if it has none.
    pub flow: *mut Flow,
    /// The flow's ring, or 0.
    pub ring: u32,
    /// The counter, unless the packet is data.
    pub counter: Counter,
    /// Data of a connection that is not a flow, or no longer one.
    pub unknown_flow: bool,
    /// In addition the first packet of a message, valid up to the BTH.
    pub first: bool,
}

impl Classified {
    /// Whether it is data of a flow whose job has ended: it must not be forwarded.
    #[inline(always)]
    pub fn has_ended(&self) -> bool {
        self.counter as u32 == Counter::JobEnded as u32
    }

    /// Before classification.
    pub const NOTHING: Self = Self {
        frame: Frame::EMPTY,
        flow: core::ptr::null_mut(),
        ring: 0,
        counter: Counter::NotRoce,
        unknown_flow: false,
        first: false,
    };
}

#[inline(always)]
pub fn classify(p: &impl Wrapped, found: &mut Classified) -> Class {
    let rejected = match wire::parse_into(p, &mut found.frame) {
        Ok(()) => false,
        Err(Reject::NotRoce) => return Class::Pass,
        Err(
            reject @ (Reject::Spoofed | Reject::VlanTags | Reject::Ipv6Extensions | Reject::Hidden),
        ) => {
            found.counter = reject.counter();
            return Class::Refuse;
        }
        Err(reject) => {
            found.counter = reject.counter();
            if reject == Reject::TruncatedHeaders {
                return Class::Pass;
            }
            true
        }
    };
    let Some(flow) = find(&found.frame) else {
        found.counter = Counter::NoFlow;
        let opcode = found.frame.bth.opcode;
        found.unknown_flow = opcode.is_rc_data() || opcode.is_other_data();
        found.first = opcode.is_rc_data() && !rejected && opcode.is_first();
        return Class::Pass;
    };
    found.flow = flow;
    // SAFETY: a map value; flows are written by user space as a whole, except for the learned MAC
    // address.
    found.ring = unsafe { (*flow).ring.0 };
    if rejected {
        return Class::Refuse;
    }
    if found.frame.bth.opcode.is_rc_data() {
        if found.ring != Flow::ENDED.0 {
            return Class::Data;
        }
        found.counter = Counter::JobEnded;
        found.unknown_flow = true;
        found.first = found.frame.bth.opcode.is_first();
        return Class::Pass;
    }
    if found.frame.bth.opcode.is_other_data() {
        found.counter = Counter::OtherData;
        return Class::Refuse;
    }
    found.counter =
        if found.frame.bth.opcode.is_known() { Counter::NotData } else { Counter::ReservedOpcode };
    Class::Pass
}

#[inline(always)]
fn find(frame: &Frame) -> Option<*mut Flow> {
    maps::flow(&FlowKey { dst_ip: frame.dst_ip, qpn: frame.bth.qpn })
}

/// Checks that data comes from its flow's sender: at the right port, from the right addresses.
#[inline(always)]
pub fn from_its_sender(ctx: &XdpContext, frame: &Frame, flow: &Flow) -> Result<(), Counter> {
    if !maps::is_port(ctx.ingress_ifindex() as u32, flow.ifindex) {
        return Err(Counter::WrongPort);
    }
    if frame.src_ip != flow.src_ip {
        return Err(Counter::WrongSourceIp);
    }
    if flow.src_mac != [0; 6] && frame.src_mac != flow.src_mac {
        return Err(Counter::WrongSourceMac);
    }
    Ok(())
}

/// Whether a box has moved a packet's PSN, which makes its receiver take it for something other
/// than data.
#[inline(always)]
pub fn is_psn_shifted(flow: &Flow, frame: &Frame) -> bool {
    let Some(ring) = maps::ring(flow.ring.0) else { return false };
    flow.next_psn != Flow::NO_PSN && slot::is_psn_shifted(frame.bth.psn, flow.next_psn, ring.slots)
}

/// Whether a packet of an unknown flow carries an address of a rank behind another port: a forged
/// acknowledgement, or any other packet that would make hosts or the bridge locate the rank here.
#[inline(always)]
pub fn is_spoofed(port: u32, frame: &Frame) -> bool {
    if let Some(owner) = maps::owner(&Address::mac(frame.src_mac))
        && !maps::is_port(port, owner.ifindex)
    {
        return true;
    }
    maps::owner(&Address::ip(frame.src_ip)).is_some_and(|owner| !maps::is_port(port, owner.ifindex))
}

/// Counts a refused packet and, at debug level, logs it.
#[inline(never)]
pub fn refused(ctx: &XdpContext, ring: u32, counter: Counter) {
    maps::count(ring, counter);
    aya_log_ebpf::debug!(ctx, "ring {}: packet refused, counter {}", ring, counter as u32);
}
