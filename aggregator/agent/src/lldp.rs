//! LLDP (IEEE 802.1AB): every port announces itself, and learns which port is at the other end of
//! its link. Bridges do not forward these frames.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use netsum_controller::message::{mac_from_text, mac_text};
use nix::sys::socket::{LinkAddr, recvfrom};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::unix::AsyncFd;

use super::agent::Shared;
use super::frames::{HEADER, NEAREST_BRIDGE, send};
use super::neighbours::{LldpNeighbours, Neighbour};
use super::netlink::{Interface, Netlink};

/// Interval between frames, and their time to live: two may be lost.
const INTERVAL: Duration = Duration::from_secs(1);
const TTL: u16 = 3;

const ETHERTYPE: u16 = 0x88cc;

/// Types of TLVs, and subtypes of the first two.
const END: u8 = 0;
const CHASSIS: u8 = 1;
const PORT: u8 = 2;
const TIME_TO_LIVE: u8 = 3;
const SYSTEM_NAME: u8 = 5;
const CHASSIS_MAC: u8 = 4;
const CHASSIS_LOCAL: u8 = 7;
const PORT_MAC: u8 = 3;
const PORT_INTERFACE: u8 = 5;

/// Opens a socket for the frames of all interfaces; needs CAP_NET_RAW.
pub fn open() -> Result<Socket> {
    let protocol = Protocol::from(i32::from(ETHERTYPE.to_be()));
    Socket::new(Domain::PACKET, Type::RAW.nonblocking(), Some(protocol))
        .context("LLDP: packet socket (CAP_NET_RAW)")
}

/// A chassis id for a daemon. It is random, because machines cloned from one image share every
/// other identifier.
pub fn chassis_id() -> io::Result<String> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|e| io::Error::other(e.to_string()))?;
    Ok(format!("{:032x}", u128::from_ne_bytes(id)))
}

/// Sends and receives frames on all of netsum's ports. `netlink` reports `neighbours`.
pub async fn send_and_receive(
    socket: Socket,
    shared: Shared,
    netlink: Netlink,
    neighbours: LldpNeighbours,
) {
    // SAFETY: the socket owns its descriptor for as long as it lives, and always returns the same
    // one.
    let socket = match unsafe { AsyncFd::register(socket) } {
        Ok(socket) => socket,
        Err(e) => return log::error!("LLDP: {e}: this box cannot find its links"),
    };
    let name = nix::unistd::gethostname()
        .map_or_else(|_| "netsum".into(), |n| n.to_string_lossy().into_owned());
    let mut tick = tokio::time::interval(INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = tick.tick() => announce(&socket, &shared, &netlink, [&neighbours.own, &name]).await,
            result = receive(&socket, &neighbours) => {
                if let Err(e) = result {
                    // For example, because a port is taken down.
                    log::debug!("LLDP: {e}");
                }
            }
        }
    }
}

/// Sends a frame on each port that is up.
async fn announce(
    socket: &AsyncFd<Socket>,
    shared: &Shared,
    netlink: &Netlink,
    machine: [&str; 2],
) {
    let interfaces = match netlink.interfaces().await {
        Ok(interfaces) => interfaces,
        Err(e) => return log::error!("LLDP: cannot list the interfaces: {e:#}"),
    };
    let ports: Vec<u32> = shared.lock().controller.ports().iter().map(|p| p.ifindex).collect();
    for Interface { ifindex, name, mac, .. } in
        interfaces.into_iter().filter(|l| l.up && ports.contains(&l.ifindex))
    {
        let Some(mac) = mac_from_text(&mac) else { continue };
        // A lost frame does not matter: the next one follows soon.
        if let Err(e) = send(socket, ETHERTYPE, ifindex, &frame(mac, machine, &name)) {
            log::debug!("LLDP: port {name}: {e}");
        }
    }
}

/// Records the next frame.
async fn receive(socket: &AsyncFd<Socket>, neighbours: &LldpNeighbours) -> io::Result<()> {
    let mut guard = socket.readable().await?;
    let mut frame = [0; 1600];
    let received =
        guard.try_io(|socket| Ok(recvfrom::<LinkAddr>(socket.as_fd().as_raw_fd(), &mut frame)?));
    let Ok(received) = received else { return Ok(()) };
    if let (length, Some(from)) = received?
        && let Some(neighbour) = parse(&frame[..length])
    {
        neighbours.set(from.ifindex() as u32, neighbour, Instant::now());
    }
    Ok(())
}

/// A port's announcement: its name, and its machine's chassis id and name.
fn frame(mac: [u8; 6], [id, chassis]: [&str; 2], port: &str) -> Vec<u8> {
    let mut frame = [&NEAREST_BRIDGE[..], &mac, &ETHERTYPE.to_be_bytes()].concat();
    let mut add = |kind: u8, head: &[u8], value: &[u8]| {
        let value = &value[..value.len().min(255)];
        let length = (head.len() + value.len()) as u16;
        frame.extend((u16::from(kind) << 9 | length).to_be_bytes());
        frame.extend(head);
        frame.extend(value);
    };
    add(CHASSIS, &[CHASSIS_LOCAL], id.as_bytes());
    add(PORT, &[PORT_INTERFACE], port.as_bytes());
    add(TIME_TO_LIVE, &[], &TTL.to_be_bytes());
    add(SYSTEM_NAME, &[], chassis.as_bytes());
    add(END, &[], &[]);
    frame
}

/// Parses a frame's sender; `None` if it is not a valid LLDP frame.
fn parse(frame: &[u8]) -> Option<Neighbour> {
    let (header, mut rest) = frame.split_at_checked(HEADER)?;
    // Bridges forward frames to any other address.
    if header[..6] != NEAREST_BRIDGE || header[12..] != ETHERTYPE.to_be_bytes() {
        return None;
    }
    let (mut chassis, mut port, mut ttl, mut name) = (None, None, None, None);
    while let Some((head, after)) = rest.split_first_chunk::<2>() {
        let head = u16::from_be_bytes(*head);
        let (value, after) = after.split_at_checked(usize::from(head & 0x1ff))?;
        match (head >> 9) as u8 {
            END => break,
            CHASSIS => chassis = Some(id(value, CHASSIS_MAC)?),
            PORT => port = Some(id(value, PORT_MAC)?),
            TIME_TO_LIVE => ttl = Some(u16::from_be_bytes(*value.first_chunk()?)),
            SYSTEM_NAME => name = Some(text(value)),
            _ => {}
        }
        rest = after;
    }
    Some(Neighbour {
        mac: header[6..12].try_into().ok()?,
        chassis: name.filter(|name| !name.is_empty()).or(chassis.clone())?,
        id: chassis?,
        port: port?,
        ttl: Duration::from_secs(ttl?.into()),
    })
}

/// A chassis or port id: a MAC address, if it has that subtype, or a text.
fn id(value: &[u8], of_mac: u8) -> Option<String> {
    let (kind, value) = value.split_first()?;
    let mac = value.try_into().ok().filter(|_| *kind == of_mac);
    Some(mac.map_or_else(|| text(value), mac_text))
}

/// Replaces control characters, which a foreign host may send: logs and terminals must not receive
/// them.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];

    #[test]
    fn a_frame_says_whose_it_is() {
        let mut frame = frame(MAC, ["7", "leaf0"], "swp9");
        assert_eq!(frame[..14], [1, 0x80, 0xc2, 0, 0, 0x0e, 2, 0, 0, 0, 0, 7, 0x88, 0xcc]);
        let announced = Neighbour {
            mac: MAC,
            id: "7".into(),
            chassis: "leaf0".into(),
            port: "swp9".into(),
            ttl: Duration::from_secs(TTL.into()),
        };
        assert_eq!(parse(&frame), Some(announced.clone()));
        for other in [MAC, [1, 0x80, 0xc2, 0, 0, 0]] {
            assert_eq!(
                parse(&[&other[..], &frame[6..]].concat()),
                None,
                "a bridge may have passed it on"
            );
        }
        // Short frames are padded.
        frame.resize(60, 0);
        assert_eq!(parse(&frame), Some(announced));
    }

    #[test]
    fn a_switch_is_called_by_its_system_name_or_by_what_it_has() {
        let of = |tlvs: &[u8]| {
            parse(&[&NEAREST_BRIDGE[..], &MAC, &[0x88, 0xcc], tlvs].concat())
                .map(|n| (n.id, n.chassis, n.port))
        };
        let plain = [
            2, 7, 4, 2, 0, 0, 0, 0, 9, 4, 7, 3, 2, 0, 0, 0, 0, 8, 6, 2, 0, 120, 10, 2, b's', b'w',
            0, 0,
        ];
        let mac = String::from("02:00:00:00:00:09");
        assert_eq!(of(&plain), Some((mac.clone(), "sw".into(), "02:00:00:00:00:08".into())));
        assert_eq!(of(&plain[..22]), Some((mac.clone(), mac, "02:00:00:00:00:08".into())));
        assert_eq!(of(&plain[..18]), None, "without a time to live");
        assert_eq!(
            of(&[2, 3, 7, 27, b'[', 4, 2, 5, b'p', 6, 2, 0, 1]),
            Some(("?[".into(), "?[".into(), "p".into()))
        );
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_parsed_without_panic(head in 0..=HEADER, tail in proptest::collection::vec(any::<u8>(), 0..600)) {
            let whole = frame(MAC, ["7", "leaf0"], "swp9");
            parse(&[&whole[..head], &tail].concat());
        }

        #[test]
        fn damaged_frames_yield_no_control_characters(
            at in HEADER..40usize, by in 1u8.., length in 0usize..200,
        ) {
            let mut damaged = frame(MAC, ["a chassis with a long id", "leaf0"], "swp9");
            damaged[at] ^= by;
            damaged.truncate(length.max(HEADER));
            if let Some(n) = parse(&damaged) {
                prop_assert!(!n.chassis.chars().chain(n.port.chars()).any(char::is_control));
            }
        }
    }
}
