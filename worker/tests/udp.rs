//! The endpoint over real sockets, on loopback addresses that each test chooses for itself.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use netsum_worker::rc::{Endpoint, EndpointConfig, Event, Psn, QpConfig, Qpn};
use netsum_worker::udp::{BindError, UdpDriver};

/// An address of 127.0.0.0/8 that no other test run uses at the same time.
fn address(n: u8) -> IpAddr {
    let pid = std::process::id();
    Ipv4Addr::new(127, 1 + (pid >> 8) as u8 % 250, pid as u8, n).into()
}

#[test]
fn messages_of_all_sizes_cross_the_kernel_unchanged() {
    let ips = [address(1), address(2)];
    let mut drivers = ips.map(|ip| UdpDriver::bind(ip).unwrap());
    let mut ends = ips.map(|ip| Endpoint::new(ip, EndpointConfig::default()));
    let (qpns, psn) = ([5, 6].map(Qpn::new), Psn::new(0xff_fff0));
    let qps = [0, 1].map(|i| {
        let c = QpConfig::new(qpns[i], ips[1 - i], qpns[1 - i], psn, psn, 1024);
        ends[i].add_qp(c).unwrap()
    });
    let lengths = [4, 8, 252, 1020, 1024, 1028, 4096, 65_536, 300_000];
    let message = |i: usize| -> Vec<u8> { (0..lengths[i]).map(|b| (b * 7 + i) as u8).collect() };
    for i in 0..lengths.len() {
        ends[1].post_receive(qps[1], Vec::new());
        ends[0].post_send(qps[0], i as u64, message(i), None);
    }
    let (mut received, mut sent) = (0, 0);
    let end = Instant::now() + Duration::from_secs(10);
    while (received, sent) != (lengths.len(), lengths.len()) {
        assert!(
            Instant::now() < end,
            "{received} received, {sent} acknowledged: {:?}",
            ends[0].stats()
        );
        for i in 0..2 {
            drivers[i].drive(&mut ends[i], Instant::now() + Duration::from_micros(100)).unwrap();
            while let Some(event) = ends[i].poll_event() {
                match event {
                    Event::Received { data, .. } => {
                        assert!(data == message(received), "message {received}");
                        received += 1;
                    }
                    Event::Sent { .. } => sent += 1,
                    Event::Failed { error, .. } => panic!("{error}"),
                }
            }
        }
    }
    assert_eq!(ends[1].stats().rx_icrc_encapsulated, 0);
    assert_eq!(ends[0].stats().retransmissions, 0);
    assert!(drivers[0].receive_capacity(1024) >= 16);
}

#[test]
fn errors_say_what_is_wrong() {
    let ip = address(9);
    let first = UdpDriver::bind(ip).unwrap();
    let second = UdpDriver::bind(ip).unwrap_err();
    assert!(matches!(second, BindError::InUse(..)), "{second}");
    drop(first);
    // As Soft-RoCE's, this socket is not shared.
    let _others = std::net::UdpSocket::bind((ip, 4791)).unwrap();
    let second = UdpDriver::share(ip, [0; 2]).unwrap_err();
    assert!(matches!(second, BindError::InUse(..)), "{second}");
    assert!(second.to_string().contains("4791"));
    let nowhere = UdpDriver::bind("192.0.2.1".parse().unwrap()).unwrap_err();
    assert!(matches!(nowhere, BindError::NoSuchAddress(_)), "{nowhere}");
}
