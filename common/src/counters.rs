//! All counters of the data plane: numbers, names, meanings.
//!
//! Counters are per CPU and per ring; ring 0 counts packets of no ring. A counter with the meaning
//! of one of `rdma statistic` has its name.

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $variant:ident $name:literal $kind:ident,)+) => {
        /// A counter of the data plane.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        #[repr(u32)]
        pub enum Counter {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl Counter {
            /// All counters, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The name in tables, JSON and metrics.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// Its bit in a word of counters.
            #[inline(always)]
            pub const fn bit(self) -> u64 {
                1 << self as u32
            }

            /// Help text.
            pub const fn help(self) -> &'static str {
                match self { $(Self::$variant => concat!($($doc),+),)+ }
            }

            /// Its kind.
            pub const fn kind(self) -> Kind {
                match self { $(Self::$variant => Kind::$kind,)+ }
            }
        }
    };
}

/// Kind of the counted event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Part of the work.
    Work,
    /// A packet passed on to the bridge.
    Pass,
    /// A packet dropped, and why.
    Drop,
}

impl Kind {
    /// The name in API and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Work => "work",
            Self::Pass => "pass",
            Self::Drop => "drop",
        }
    }
}

counters! {
    /// contributions added to a slot
    Contributions "contributions" Work,
    /// slots that received their last contribution
    Completed "completed" Work,
    /// results sent to all ranks of a ring
    Released "released" Work,
    /// completed sums held back until an earlier one is released
    HeldBack "held_back" Work,
    /// results sent again to one rank
    Replays "replays" Work,
    /// result packets written at the egress of a port
    Results "results" Work,
    /// contributions that carried the congestion experienced mark
    EcnMarked "np_ecn_marked_roce_packets" Work,
    /// packets handed to the CPU of their ring
    Steered "steered" Work,
    /// contributions summed at once, because they arrived on the CPU of their ring
    Inline "inline" Work,
    /// fragments that arrived before an earlier one of the same rank
    OutOfSequence "out_of_sequence" Work,
    /// packets forwarded past a gap: their receiver then NAKs
    GapForwarded "gap_forwarded" Pass,
    /// retransmissions of released results that every receiver has: forwarded as duplicates, which
    /// are only acknowledged
    Stale "stale" Pass,
    /// packets that are not RoCEv2
    NotRoce "not_roce" Pass,
    /// RoCEv2 packets of no registered flow, such as acknowledgements to netsum's ranks
    NoFlow "no_flow" Pass,
    /// packets to a registered queue pair that carry no data for it: acknowledgements, CNP, READ
    NotData "not_data" Pass,
    /// packets to a registered queue pair with an opcode that RC does not define
    ReservedOpcode "reserved_opcode" Pass,
    /// RoCEv2 packets too short for their headers
    TruncatedHeaders "truncated_headers" Pass,
    /// first packets of a job set up in band, with a token of no job
    InBandWrongToken "in_band_wrong_token" Pass,
    /// first packets of a job set up in band, with a header of another version
    InBandVersion "in_band_version" Pass,
    /// contributions that were already added
    DuplicateRequest "duplicate_request" Drop,
    /// fragments beyond the sender's credit
    CreditViolation "credit_violation" Drop,
    /// contributions whose length differs from that of the first one to their slot
    LengthMismatch "length_mismatch" Drop,
    /// contributions that begin or end a message at another place than those of other ranks: their
    /// ring stops
    LayoutMismatch "layout_mismatch" Drop,
    /// data of a ring that has stopped, because of a layout mismatch or of an empty message
    RingStopped "ring_stopped" Drop,
    /// data with a wrong ICRC
    BadIcrc "rx_icrc_encapsulated" Drop,
    /// data that arrived at another port than its flow's
    WrongPort "wrong_port" Drop,
    /// data from another IP address than its flow's
    WrongSourceIp "wrong_source_ip" Drop,
    /// data from another MAC address than its flow's
    WrongSourceMac "wrong_source_mac" Drop,
    /// packets of any kind that carry a rank's MAC or IP address and arrived at another port than
    /// the rank's
    Spoofed "spoofed" Drop,
    /// data of a ring that is not active
    InactiveRing "inactive_ring" Drop,
    /// data of a connection whose job has ended, or has started again without it
    JobEnded "job_ended" Drop,
    /// data, or forged packets, that bypassed `ingress`: while a veth goes down, or if it was
    /// detached
    BypassedIngress "bypassed_ingress" Drop,
    /// data on another CPU than its ring's, which happens when that CPU was taken offline
    WrongCpu "wrong_cpu" Drop,
    /// data behind IPv4 options
    IpOptions "ip_options" Drop,
    /// data in a fragmented IP packet
    IpFragment "ip_fragment" Drop,
    /// RoCEv2 to a rank behind two VLAN tags, or behind one other than 802.1Q
    VlanTags "vlan_tags" Drop,
    /// RoCEv2 to a rank behind IPv6 extension headers
    Ipv6Extensions "ipv6_extensions" Drop,
    /// packets whose headers cannot be read, while there are ranks: behind more VLAN tags or IPv6
    /// extension headers than the box follows, or in a later fragment
    UnparsedHeaders "unparsed_headers" Drop,
    /// data in a form that cannot be summed: SEND with invalidate, atomic operations, transports
    /// other than reliable connections
    OtherData "other_data" Drop,
    /// IP and UDP lengths that contradict each other
    BadUdpLength "bad_udp_length" Drop,
    /// data that is shorter than its length fields
    Truncated "truncated" Drop,
    /// transport header version other than 0
    BadVersion "bad_version" Drop,
    /// partition key other than the default
    BadPkey "bad_pkey" Drop,
    /// a non-zero pad count: data must consist of whole lanes
    BadPad "bad_pad" Drop,
    /// payload that is empty, or not a multiple of 4 bytes
    BadPayloadLength "bad_payload_length" Drop,
    /// payload longer than the job's path MTU
    Oversized "oversized" Drop,
    /// data shorter than the job's path MTU that is not the last packet of its message
    ShortFragment "short_fragment" Drop,
    /// first packets by which a connection joins a job in band: noted and dropped; their senders
    /// retransmit them
    InBandFirst "in_band_first" Drop,
    /// data of connections that have joined a job in band and wait for those of other ranks
    InBandWaits "in_band_waits" Drop,
    /// first packets of messages of in-band jobs whose header is missing or names another ring
    /// position
    InBandHeader "in_band_header" Drop,
    /// steering to the ring's CPU failed
    SteerFailed "steer_failed" Drop,
    /// sending a result failed in the data plane itself
    RedirectFailed "redirect_failed" Drop,
    /// results dropped at egress: unknown rank, slot already reused, or no next hop
    EgressNoRoute "egress_no_route" Drop,
    /// the data plane's maps contradict each other: a defect of netsum
    InternalError "internal_error" Drop,
    /// partial sums sent to the parent box
    PartialsSent "partials_sent" Work,
    /// total sums received from the parent box
    TotalsReceived "totals_received" Work,
    /// partial sums sent to the parent box again, which makes it replay the total to the next group
    PartialsResent "partials_resent" Work,
    /// totals for which no partial sum was sent, and contributions that a box below forwarded
    /// unsummed
    UnexpectedTotal "unexpected_total" Drop,
    /// packets whose PSN another box has shifted, so that the receiver answers them instead of
    /// taking them for data
    ShiftedPsn "shifted_psn" Pass,
}

/// Number of counters for each ring.
pub const COUNTERS: u32 = Counter::ALL.len() as u32;

/// The counters whose bits are set in a word, in the order of their numbers.
pub fn of_bits(bits: u64) -> impl Iterator<Item = Counter> {
    Counter::ALL.iter().copied().filter(move |c| bits & c.bit() != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_holds_every_counter() {
        let all = Counter::ALL.iter().fold(0, |bits, c| bits | c.bit());
        assert_eq!(of_bits(all).collect::<Vec<_>>(), Counter::ALL);
        let two = Counter::Stale.bit() | Counter::Contributions.bit();
        assert_eq!(of_bits(two).collect::<Vec<_>>(), [Counter::Contributions, Counter::Stale]);
    }

    #[test]
    fn numbers_follow_the_list_and_names_are_unique() {
        for (i, c) in Counter::ALL.iter().enumerate() {
            assert_eq!(*c as usize, i);
            assert!(!c.help().is_empty());
            assert_eq!(
                Counter::ALL.iter().filter(|d| d.name() == c.name()).count(),
                1,
                "{}",
                c.name()
            );
        }
    }
}
