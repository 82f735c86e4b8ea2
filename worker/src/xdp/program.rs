//! The XDP program of a host: it is attached for as long as this process lives, and gets a map of
//! sockets.

use std::net::IpAddr;
use std::os::fd::RawFd;

use aya::Ebpf;
use aya::maps::{Array, MapError, XskMap};
use aya::programs::links::FdLink;
use aya::programs::{ProgramError, Xdp, XdpMode};
use nix::errno::Errno;

use super::error::XdpError;

/// Built from `worker/ebpf` by `cargo xtask build-ebpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!("../../../objects/host.bpf.o");

/// An attached program. It is detached when this is dropped, and when the process ends in any way.
pub(super) struct Program {
    // Dropped first: the kernel receives the packets again.
    _link: FdLink,
    ebpf: Ebpf,
}

impl Program {
    /// Loads the program and attaches it. It passes all packets to the kernel until it has sockets.
    pub fn attach(interface: &str, ifindex: u32, local: IpAddr) -> Result<Self, XdpError> {
        let failed = |step: &'static str, reason: String| XdpError::Program { step, reason };
        let mut ebpf = Ebpf::load(OBJECT).map_err(|e| failed("loading it", tree(&e)))?;
        let octets = match local {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        set_local(&mut ebpf, octets).map_err(|e| failed("setting its address", e))?;
        let program: &mut Xdp = match ebpf.program_mut("host") {
            Some(program) => {
                program.try_into().map_err(|e: ProgramError| failed("finding it", tree(&e)))?
            }
            None => {
                return Err(failed("finding it", "the object has no program `host`".to_owned()));
            }
        };
        program.load().map_err(|e| failed("loading it", tree(&e)))?;
        let attached = program.attach_to_if_index(ifindex, XdpMode::Default);
        let id = attached.map_err(|e| match errno(&e) {
            Some(Errno::EBUSY | Errno::EEXIST) => {
                XdpError::Occupied { interface: interface.to_owned() }
            }
            _ => failed("attaching it", tree(&e)),
        })?;
        let link = program.take_link(id).map_err(|e| failed("attaching it", tree(&e)))?;
        // Otherwise the program would stay when the process is killed.
        let link = FdLink::try_from(link).map_err(|_| {
            failed(
                "attaching it",
                "the kernel has no links for XDP, which need Linux 5.9".to_owned(),
            )
        })?;
        Ok(Self { _link: link, ebpf })
    }

    /// Sends the rank's packets of a queue to a socket from now on.
    pub fn set_socket(&mut self, queue: u32, socket: RawFd) -> Result<(), XdpError> {
        let failed = |reason: String| XdpError::Program { step: "giving it a socket", reason };
        let map =
            self.ebpf.map_mut("SOCKETS").ok_or_else(|| failed("no map SOCKETS".to_owned()))?;
        let mut map: XskMap<_> = map.try_into().map_err(|e: MapError| failed(tree(&e)))?;
        map.set(queue, socket, 0).map_err(|e| failed(tree(&e)))
    }
}

fn set_local(ebpf: &mut Ebpf, octets: [u8; 16]) -> Result<(), String> {
    let map = ebpf.map_mut("LOCAL").ok_or("no map LOCAL")?;
    let mut map: Array<_, [u8; 16]> = map.try_into().map_err(|e: MapError| tree(&e))?;
    map.set(0, octets, 0).map_err(|e| tree(&e))
}

/// The system's error in aya's.
fn errno(error: &ProgramError) -> Option<Errno> {
    match error {
        ProgramError::SyscallError(e) => e.io_error.raw_os_error().map(Errno::from_raw),
        _ => None,
    }
}

/// An error and its causes in one line.
fn tree(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text += ": ";
            text += &more;
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_has_the_program_and_its_maps() {
        let object = aya_names();
        for name in ["host", "LOCAL", "SOCKETS"] {
            assert!(object.contains(name), "{name}");
        }
    }

    /// All text in the object.
    fn aya_names() -> String {
        OBJECT.iter().filter(|b| b.is_ascii_graphic() || **b == 0).map(|b| *b as char).collect()
    }

    #[test]
    fn causes_are_said_once() {
        let error = std::io::Error::other(std::io::Error::other("inside"));
        assert_eq!(tree(&error), "inside");
    }
}
