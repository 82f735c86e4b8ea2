//! Why a packet of a flow is refused, and what to do.

use std::net::IpAddr;

use netsum_common::counters::Counter;
use netsum_common::serial;

/// A refused packet of a flow, and the properties that its flow was registered with.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
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
pub fn explain(outcome: Counter, case: &Case<'_>) -> (String, String) {
    let &Case { port, src, mtu, credit, base_psn, psn, low, accepted } = case;
    let index = serial::sub(psn, base_psn);
    match outcome {
        Counter::BadIcrc => (
            "its packets have a wrong ICRC".into(),
            "look for whatever changes packets between it and the box; `netsum job create --icrc \
             ignore` takes them as they are"
                .into(),
        ),
        Counter::WrongPort => (
            format!("its packets come in on another port than {port}"),
            "register the flow with the port that it is behind".into(),
        ),
        Counter::WrongSourceIp => (
            format!("packets for its connection come from another address than {src}"),
            "register the flow with its address; or somebody pretends to be this rank".into(),
        ),
        Counter::WrongSourceMac => (
            "packets for its connection come from another MAC address than its first did".into(),
            "register the flow again if the host or its router has changed; or somebody pretends \
             to be this rank"
                .into(),
        ),
        Counter::Oversized => (
            format!("its packets are larger than the job's path MTU of {mtu}"),
            format!("set its path MTU to {mtu}, or create the job with its own"),
        ),
        Counter::LayoutMismatch => (
            "has lost its place: it has sent a packet of another place in its message than the \
             other ranks have at that PSN, or an empty one, so its data is not what its PSNs say \
             and the ring has stopped"
                .into(),
            "reconnect all ranks after `netsum job restart`, with the same message size; where it \
             is Linux's Soft-RoCE (rdma_rxe), which does so when it sends again while \
             acknowledgements are on their way, give its queue pairs a longer timeout (17 is 0.5 s)"
                .into(),
        ),
        Counter::ShortFragment => (
            format!(
                "its packets are shorter than the job's path MTU of {mtu}, and not the last \
                of their messages"
            ),
            format!("set its path MTU to {mtu}, or create the job with its own"),
        ),
        Counter::LengthMismatch => (
            "its packets have another length than the other ranks' at the same index".into(),
            format!("give all ranks the same path MTU ({mtu}) and message size"),
        ),
        Counter::CreditViolation | Counter::Stale if !accepted => (
            format!(
                "its first packets have other PSNs (last {psn:#x}) than registered ({base_psn:#x} \
                 and on)"
            ),
            "`netsum job restart`, and register the flows again with the first PSNs of the \
             connections"
                .into(),
        ),
        Counter::CreditViolation => (
            format!(
                "sends beyond its credit: index {index}, and {low} to {} are open",
                serial::sub(serial::add(low, credit), 1)
            ),
            "let it wait for sums before it continues: at most --window messages at a time".into(),
        ),
        Counter::Stale => (
            format!("sends index {index} again, which all others are past, and not index {low}"),
            "its acknowledgements may get lost: look at the way from its next rank to it".into(),
        ),
        other => (
            format!("its packets are refused: {}", other.help().trim()),
            "fix its packets; `netsum stats` counts them by reason".into(),
        ),
    }
}
