//! Why a packet of a flow is refused, and what to do.

use std::net::IpAddr;

use netsum_common::counters::Counter;
use netsum_common::serial;

/// A refused packet of a flow, and the properties that its flow was registered with.
#[derive(Clone, Copy, Debug)]
pub struct RefusedPacket<'a> {
    /// The flow's port.
    pub port: &'a str,
    /// The flow's sender.
    pub src: IpAddr,
    /// The ring's path MTU.
    pub mtu: u32,
    /// The ring's credit in fragments.
    pub credit: u32,
    /// PSN of the flow's fragment index 0.
    pub base_psn: u32,
    /// The packet's PSN.
    pub psn: u32,
    /// The ring's lowest index that has not been released.
    pub low: u32,
    /// A packet of the flow has been accepted before.
    pub accepted: bool,
}

/// Why packets are refused, and what to do; the text follows the name of a rank.
pub fn explain(outcome: Counter, packet: &RefusedPacket<'_>) -> (String, String) {
    let &RefusedPacket { port, src, mtu, credit, base_psn, psn, low, accepted } = packet;
    let index = serial::sub(psn, base_psn);
    match outcome {
        Counter::BadIcrc => (
            "its packets have a wrong ICRC".into(),
            "find what changes packets between it and the box, or accept them with `netsum job \
             create --icrc ignore`"
                .into(),
        ),
        Counter::WrongPort => (
            format!("its packets arrive at another port than {port}"),
            "register the flow with the port that it is behind".into(),
        ),
        Counter::WrongSourceIp => (
            format!("packets for its connection come from another address than {src}"),
            "register the flow with that address, unless a foreign host pretends to be this rank"
                .into(),
        ),
        Counter::WrongSourceMac => (
            "packets for its connection come from another MAC address than its first did".into(),
            "register the flow again if the host or its router has changed; otherwise a foreign \
             host pretends to be this rank"
                .into(),
        ),
        Counter::Oversized => (
            format!("its packets are larger than the job's path MTU of {mtu}"),
            format!("set its path MTU to {mtu}, or create the job with that of the rank"),
        ),
        Counter::LayoutMismatch => (
            "has lost its place: its packet at this PSN is empty, or from another part of its \
             message than the other ranks' packets, so its PSNs no longer match its data; the ring \
             has stopped"
                .into(),
            "run `netsum job restart`, then reconnect all ranks with the same message size; \
             Linux's Soft-RoCE (rdma_rxe) does this when it retransmits while acknowledgements \
             are in flight: give its queue pairs a longer timeout (17 is 0.5 s)"
                .into(),
        ),
        Counter::ShortFragment => (
            format!(
                "its packets are shorter than the job's path MTU of {mtu}, and not the last \
                of their messages"
            ),
            format!("set its path MTU to {mtu}, or create the job with that of the rank"),
        ),
        Counter::LengthMismatch => (
            "its packets differ in length from the other ranks' at the same index".into(),
            format!("give all ranks the same path MTU ({mtu}) and message size"),
        ),
        Counter::CreditViolation | Counter::Stale if !accepted => (
            format!(
                "its first packets have other PSNs (last {psn:#x}) than registered (from \
                 {base_psn:#x} on)"
            ),
            "`netsum job restart`, and register the flows again with the first PSNs of the \
             connections"
                .into(),
        ),
        Counter::CreditViolation => (
            format!(
                "sends beyond its credit: index {index}, where {low} to {} are allowed",
                serial::sub(serial::add(low, credit), 1)
            ),
            "make it wait for sums: at most --window messages may be in flight".into(),
        ),
        Counter::Stale => (
            format!(
                "retransmits index {index}, whose sum has been released, instead of index {low}"
            ),
            "its acknowledgements may be lost: check the path from the next rank to it".into(),
        ),
        other => (
            format!("its packets are refused: {}", other.help().trim()),
            "find out why it sends them; `netsum stats` counts them by reason".into(),
        ),
    }
}
