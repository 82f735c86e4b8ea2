//! Bandwidth probes: rows of frames from one box to the box at a link's other end. Their arrival
//! times give the link's rate ([`netsum_core::bandwidth`]). Bridges do not forward these frames,
//! and hosts ignore them.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use netsum_api::v1 as api;
use netsum_core::bandwidth::{MAX_PROBE_BYTES, MIN_PROBE_FRAMES, fastest, rate};
use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, LinkAddr, MsgFlags, recvmsg, setsockopt, sockopt};
use nix::sys::time::TimeSpec;
use socket2::{Domain, Protocol, Socket, Type};

use super::frames::{HEADER, NEAREST_BRIDGE, bind_to, send};

/// IEEE 802 reserves this EtherType for local experiments.
const ETHERTYPE: u16 = 0x88b5;
/// Bytes of a probe's number, which follows the header.
const NUMBER: usize = 8;
/// Longest time to send a probe, if a slow link delays it.
const LONGEST: Duration = Duration::from_millis(200);
/// Longest frame, regardless of the MTU.
const FRAME: usize = 9000;
/// Most frames that are recorded. A foreign host that sends more causes no further work.
const FRAMES: usize = MAX_PROBE_BYTES / 1024;
/// Frames sent in a row before other tasks have their turn.
const BURST: usize = 64;
/// Pause until a full queue has room again.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// Opens a socket with room for one probe; needs CAP_NET_RAW. It receives nothing until it is bound.
pub fn open() -> Result<Socket> {
    let nothing = Some(Protocol::from(0));
    let socket = Socket::new(Domain::PACKET, Type::RAW.nonblocking(), nothing)
        .context("bandwidth probes: packet socket (CAP_NET_RAW)")?;
    // The kernel takes the times, because this process may be late.
    setsockopt(&socket, sockopt::ReceiveTimestampns, &true)
        .context("bandwidth probes: times of frames")?;
    // A frame takes more room than its bytes.
    setsockopt(&socket, sockopt::RcvBufForce, &(2 * MAX_PROBE_BYTES))
        .context("bandwidth probes: buffer")?;
    setsockopt(&socket, sockopt::SndBufForce, &(2 * MAX_PROBE_BYTES))
        .context("bandwidth probes: buffer")?;
    Ok(socket)
}

/// The last probe that has arrived at an interface.
#[derive(Default)]
struct Arrivals {
    ifindex: u32,
    number: u64,
    /// Arrival times in nanoseconds, and bytes.
    frames: Vec<(u64, u32)>,
}

/// Sends and receives bandwidth probes.
#[derive(Clone)]
pub struct BandwidthProbes {
    socket: Arc<Socket>,
    arrivals: Arc<Mutex<Arrivals>>,
    /// Held while sending: two probes at once would slow each other down.
    one: Arc<tokio::sync::Mutex<()>>,
}

impl BandwidthProbes {
    /// With a socket from [`open`].
    pub fn new(socket: Socket) -> Self {
        Self { socket: Arc::new(socket), arrivals: Arc::default(), one: Arc::default() }
    }

    /// The received part of the last probe at an interface, since the first call for it. The kernel
    /// records frames without this process, which would delay a sender on the same machine.
    ///
    /// The kernel's error.
    pub fn receive(&self, ifindex: u32) -> io::Result<api::BandwidthProbe> {
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        if arrivals.ifindex != ifindex {
            bind_to(&*self.socket, ETHERTYPE, ifindex)?;
            *arrivals = Arrivals { ifindex, ..Arrivals::default() };
        }
        for _ in 0..2 * FRAMES {
            match next(&self.socket) {
                Ok(Some((at, number, time, bytes))) if at == ifindex => {
                    arrivals.take_note(number, time, bytes)
                }
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            }
        }
        let (frames, rate) =
            (arrivals.frames.len() as u32, rate(&arrivals.frames).unwrap_or_default());
        Ok(api::BandwidthProbe { number: arrivals.number, frames, rate })
    }

    /// Sends a probe by a port. Its rate is the sender's maximum, regardless of the link.
    ///
    /// The kernel's error.
    pub async fn send(
        &self,
        ifindex: u32,
        mac: [u8; 6],
        mtu: u32,
        bytes: usize,
    ) -> io::Result<api::BandwidthProbe> {
        let _one = self.one.lock().await;
        let number = getrandom::u64().map_err(io::Error::other)?;
        let mut frame =
            [&NEAREST_BRIDGE[..], &mac, &ETHERTYPE.to_be_bytes(), &number.to_be_bytes()].concat();
        frame.resize(HEADER + (mtu as usize).clamp(64, FRAME), 0);
        let wanted = (bytes.min(MAX_PROBE_BYTES) / frame.len()).max(MIN_PROBE_FRAMES);
        let (start, mut waited, mut sent) = (Instant::now(), Duration::ZERO, Vec::new());
        while sent.len() < wanted && start.elapsed() < LONGEST {
            match send(&*self.socket, ETHERTYPE, ifindex, &frame) {
                Ok(()) => {
                    sent.push(((start.elapsed() - waited).as_nanos() as u64, frame.len() as u32));
                    if sent.len().is_multiple_of(BURST) {
                        tokio::task::yield_now().await;
                    }
                }
                Err(e)
                    if e.kind() == io::ErrorKind::WouldBlock
                        || e.raw_os_error() == Some(libc::ENOBUFS) =>
                {
                    let since = Instant::now();
                    tokio::time::sleep(RETRY_PAUSE).await;
                    waited += since.elapsed();
                }
                Err(e) => return Err(e),
            }
        }
        Ok(api::BandwidthProbe {
            number,
            frames: sent.len() as u32,
            rate: fastest(&sent).unwrap_or_default(),
        })
    }
}

impl Arrivals {
    fn take_note(&mut self, number: u64, time: u64, bytes: u32) {
        if self.number != number {
            (self.number, self.frames) = (number, Vec::new());
        }
        if self.frames.len() < FRAMES {
            self.frames.push((time, bytes));
        }
    }
}

/// The next frame: its interface, its probe's number, its arrival time and its bytes. `None` if it
/// is not part of a probe.
fn next(socket: &Socket) -> io::Result<Option<(u32, u64, u64, u32)>> {
    let mut head = [0; HEADER + NUMBER];
    let mut parts = [IoSliceMut::new(&mut head)];
    let mut space = cmsg_space!(TimeSpec);
    // MSG_TRUNC reports the full length of a truncated frame.
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC;
    let fd = socket.as_fd().as_raw_fd();
    let (bytes, from, time) = match recvmsg::<LinkAddr>(fd, &mut parts, Some(&mut space), flags) {
        Ok(message) => {
            let time = message.cmsgs()?.find_map(|m| match m {
                ControlMessageOwned::ScmTimestampns(time) => {
                    Some(Duration::from(time).as_nanos() as u64)
                }
                _ => None,
            });
            (message.bytes as u32, message.address, time)
        }
        Err(Errno::EAGAIN) => return Err(io::ErrorKind::WouldBlock.into()),
        Err(e) => return Err(e.into()),
    };
    let number = head.last_chunk().map(|number| u64::from_be_bytes(*number));
    let is_probe = head[..6] == NEAREST_BRIDGE && bytes as usize >= head.len();
    Ok(is_probe.then_some(()).and_then(|()| Some((from?.ifindex() as u32, number?, time?, bytes))))
}
