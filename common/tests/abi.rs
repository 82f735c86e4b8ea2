//! The layout of what programs and user space share, as it was when its version was raised last:
//! `abi.txt`.

use std::fmt::Write;
use std::mem::{offset_of, size_of};

use netsum_common::abi::{
    Address, Claim, ClaimKey, ConnectionKey, EgressKey, EgressPort, Flow, FlowKey, Hop, HopKey,
    InBandJob, Owner, ReleaseTag, RingConfig, SavedHeader, SpreadFlow, SpreadKey, SpreadUplink,
    Token, TraceEvent, TraceFilter, TraceRecord, VERSION,
};
use netsum_common::counters::Counter;
use netsum_common::slot::{RingState, Slot};
use netsum_common::timing::Timing;

macro_rules! layout {
    ($out:ident, $($type:ident { $($field:ident)* })*) => {
        $(
            let _ = write!($out, "{} {}:", stringify!($type), size_of::<$type>());
            $(let _ = write!($out, " {} {}", stringify!($field), offset_of!($type, $field));)*
            $out.push('\n');
        )*
    };
}

fn layout() -> String {
    let mut out = format!("version {VERSION}\n");
    layout!(out,
        FlowKey { dst_ip qpn }
        Flow {
            ring rank base_psn ifindex src_ip src_mac mac_given group_mark packets refused last_psn last_verdict next_psn mismatch_psn
            mismatch_len dst_ifindex
        }
        ConnectionKey { src_ip dst_ip qpn ifindex }
        Address {}
        Owner { ifindex flows }
        TraceFilter { rings counters capture }
        TraceEvent {
            time counters contributors ring rank index low expected slot_index slot_flags ifindex program len captured cpu
        }
        TraceRecord { event frame }
        Token {}
        InBandJob { job ranks rings flags }
        ClaimKey { job ring rank ifindex }
        Claim { header connection psn len src_mac only }
        RingConfig { flags members slots credit mtu cpu lsb }
        SavedHeader { words len ip v6 }
        EgressKey { ring ifindex }
        EgressPort { count cursor ranks }
        HopKey { ring member }
        Hop { own dst src }
        SpreadKey { src_ip dst_ip src_port }
        SpreadFlow { uplink given bytes advance }
        SpreadUplink { ifindex up load flows }
        ReleaseTag { ring index rank payload }
        Slot { index flags contributors len checksum crc }
        RingState { low stopped expected up }
        Timing { started completion ranks }
    );
    // Their numbers are places in a map.
    let names: Vec<_> = Counter::ALL.iter().map(|counter| counter.name()).collect();
    out + &format!("counters: {}\n", names.join(" "))
}

#[test]
fn the_layout_changes_only_with_its_version() {
    let (known, now) = (include_str!("abi.txt"), layout());
    if known == now {
        return;
    }
    let same_version = known.lines().next() == now.lines().next();
    assert!(
        !same_version,
        "raise `abi::VERSION`: a daemon would take over maps of another layout\n{known}\n{now}"
    );
    panic!("common/tests/abi.txt is of another version; it is now:\n{now}");
}
