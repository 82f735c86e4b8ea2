//! Every counter of the data plane, in one place: number, name, meaning.
//!
//! Counters are per CPU and per ring; ring 0 counts what belongs to no ring. Where the meaning is
//! that of a counter of `rdma statistic`, so is the name.

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

            /// Its bit in a word that has one for each counter.
            #[inline(always)]
            pub const fn bit(self) -> u64 {
                1 << self as u32
            }

            /// What it counts.
            pub const fn help(self) -> &'static str {
                match self { $(Self::$variant => concat!($($doc),+),)+ }
            }

            /// Whether it counts work done, packets passed on or packets dropped.
            pub const fn kind(self) -> Kind {
                match self { $(Self::$variant => Kind::$kind,)+ }
            }
        }
    };
}

/// What kind of event a counter counts.
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
    /// As API and JSON have it.
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
    Fragments "fragments" Work,
    /// slots that received their last contribution
    Completed "completed" Work,
    /// results sent to all ranks of a ring
    Released "released" Work,
    /// completed slots that had to wait for an earlier one
    Held "held" Work,
    /// results sent again to one rank
    Replays "replay" Work,
    /// result packets written at the egress of a port
    Results "results" Work,
    /// contributions that carried the congestion experienced mark
    EcnMarked "np_ecn_marked_roce_packets" Work,
    /// packets handed to the CPU of their ring
    Steered "steered" Work,
    /// contributions that came in on the CPU of their ring, and were taken there at once
    Inline "inline" Work,
    /// fragments that arrived while an earlier one of the same rank had not
    OutOfSequence "out_of_sequence" Work,
    /// packets forwarded past a gap so that their receiver NAKs
    GapForwarded "gap_forwarded" Pass,
    /// retransmissions whose result every receiver has, forwarded as duplicates that can only be
    /// acknowledged
    Stale "stale" Pass,
    /// packets that are not RoCEv2
    NotRoce "not_roce" Pass,
    /// RoCEv2 packets of no registered flow
    NoFlow "no_flow" Pass,
    /// packets to a registered queue pair that carry no data for it: acknowledgements, CNP, READ
    NotData "not_data" Pass,
    /// packets to a registered queue pair with an opcode that RC does not define
    ReservedOpcode "reserved_opcode" Pass,
    /// RoCEv2 packets too short for their headers
    TruncatedHeaders "truncated_headers" Pass,
    /// first packets of a job set up in band that have a token of no job
    InBandToken "in_band_wrong_token" Pass,
    /// first packets of a job set up in band whose header is of another version
    InBandVersion "in_band_version" Pass,
    /// contributions that were already added
    Duplicate "duplicate_request" Drop,
    /// fragments beyond the sender's credit
    CreditViolation "credit_violation" Drop,
    /// contributions of another length than the first one to their slot
    LengthMismatch "length_mismatch" Drop,
    /// contributions that begin or end a message where those of other ranks do not: their ring
    /// stops
    LayoutMismatch "layout_mismatch" Drop,
    /// data of a ring that has stopped, because of that or of an empty message
    RingStopped "ring_stopped" Drop,
    /// data with a wrong ICRC
    BadIcrc "rx_icrc_encapsulated" Drop,
    /// data that came in on another port than its flow's
    WrongPort "wrong_port" Drop,
    /// data from another IP address than its flow's
    WrongSourceIp "wrong_source_ip" Drop,
    /// data from another MAC address than its flow's
    WrongSourceMac "wrong_source_mac" Drop,
    /// packets of any kind that bear a rank's MAC or IP address and came in on another port than
    /// the rank's
    Spoofed "spoofed" Drop,
    /// data of a ring that is not active
    InactiveRing "inactive_ring" Drop,
    /// data of a connection whose job has ended, or has begun anew without it
    JobEnded "job_ended" Drop,
    /// data, or forgeries, that came in past `ingress`, as while a veth goes down or where somebody
    /// has detached it
    PastIngress "past_ingress" Drop,
    /// data that reached another CPU than its ring's, as happens when that one was taken offline
    WrongCpu "wrong_cpu" Drop,
    /// data behind IPv4 options
    IpOptions "ip_options" Drop,
    /// data in a fragmented IP packet
    IpFragment "ip_fragment" Drop,
    /// RoCEv2 to a rank behind two VLAN tags, or behind one that is not of 802.1Q
    VlanTags "vlan_tags" Drop,
    /// RoCEv2 to a rank behind IPv6 extension headers
    Ipv6Extensions "ipv6_extensions" Drop,
    /// packets, while there are ranks, that cannot be seen through: more VLAN tags or IPv6
    /// extension headers than the box follows, or headers that are in a later fragment
    Hidden "hidden_headers" Drop,
    /// data in a form that cannot be summed: SEND with invalidate, atomic operations, other than
    /// reliable connections
    OtherData "other_data" Drop,
    /// IP and UDP lengths that contradict each other
    BadUdpLength "bad_udp_length" Drop,
    /// data that ends before its length fields say
    Truncated "truncated" Drop,
    /// transport header version other than 0
    BadVersion "bad_version" Drop,
    /// partition key other than the default
    BadPkey "bad_pkey" Drop,
    /// a pad count in data that must be whole lanes
    BadPad "bad_pad" Drop,
    /// payload empty or no multiple of 4 bytes
    BadPayloadLength "bad_payload_length" Drop,
    /// payload longer than the job's path MTU
    Oversized "oversized" Drop,
    /// data shorter than the job's path MTU that is not the last packet of its message
    ShortFragment "short_fragment" Drop,
    /// first packets by which a connection joins a job in band: noted, and their senders send them
    /// again
    InBandFirst "in_band_first" Drop,
    /// data of connections that have joined a job in band, while those of other ranks have not
    InBandWaits "in_band_waits" Drop,
    /// first packets of a message, of a job set up in band, that have no header or one of another
    /// place in the ring
    InBandHeader "in_band_header" Drop,
    /// steering to the ring's CPU failed
    SteerFailed "steer_failed" Drop,
    /// sending a result failed in the data plane itself
    RedirectFailed "redirect_failed" Drop,
    /// result packets that found no rank or slot at egress, or no next hop to a rank
    EgressNoSlot "egress_no_slot" Drop,
    /// the data plane's maps contradict each other: a defect of netsum
    Internal "internal_error" Drop,
    /// partial sums sent to the parent box
    Partials "partial_sent" Work,
    /// total sums received from the parent box
    Totals "total_received" Work,
    /// partial sums sent to the parent box once more, so that it replays the total to the next
    /// group
    SentUpAgain "sent_up_again" Work,
    /// totals of another box to which no partial sum was sent, and data of one rank where a box
    /// should have added up
    TotalUnexpected "total_unexpected" Drop,
    /// packets of another box that are no data to their receiver, who answers them: passed on
    Moved "moved" Pass,
}

/// How many counters there are for each ring.
pub const COUNTERS: u32 = Counter::ALL.len() as u32;

/// The counters whose bits a word has, in the order of their numbers.
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
        let two = Counter::Stale.bit() | Counter::Fragments.bit();
        assert_eq!(of_bits(two).collect::<Vec<_>>(), [Counter::Fragments, Counter::Stale]);
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
