//! Opens the configured transport.

use std::net::IpAddr;
use std::path::Path;

use super::config::{Bootstrap, CommConfig, Transport};
use super::network::{Bind, Network};
use super::sockets::SocketNetwork;
use crate::verbs::gid::{self, GidEntry};
use netsum_collective::error::Error;
use netsum_collective::queue_pairs::SourcePorts;

/// Opens the configured transport.
pub(crate) fn open(config: &CommConfig, when: Bind) -> Result<Box<dyn Network>, Error> {
    let ip = config.ip;
    let listed = matches!(config.bootstrap, Bootstrap::Static { .. });
    let ports = config.listed_ports();
    let gid = match config.transport {
        Transport::Udp => None,
        Transport::Xdp => return open_xdp(ip, when),
        Transport::Auto if listed => None,
        Transport::Auto => gid::find(Path::new(gid::SYSFS), ip),
        Transport::Verbs if listed => {
            let text = "transport verbs: an adapter chooses its own queue pair numbers, which \
                        ranks exchange through the controller: set NETSUM_CONTROLLER instead of a \
                        list of addresses";
            return Err(Error::Config(text.to_owned()));
        }
        Transport::Verbs => match gid::find(Path::new(gid::SYSFS), ip) {
            Some(gid) => Some(gid),
            None => {
                let text = format!(
                    "transport verbs: no RDMA adapter has {ip} as a GID for RoCE v2: check \
                     `rdma link`"
                );
                return Err(Error::Config(text));
            }
        },
    };
    match gid {
        None => open_udp(ip, ports, when),
        Some(gid) => match (open_verbs(config, gid), config.transport) {
            (Err(e), Transport::Auto) => {
                log::warn!("rank {}: {e}: using UDP instead", config.rank);
                open_udp(ip, ports, when)
            }
            (opened, _) => opened,
        },
    }
}

fn open_udp(ip: IpAddr, ports: Option<SourcePorts>, when: Bind) -> Result<Box<dyn Network>, Error> {
    Ok(Box::new(SocketNetwork::udp(ip, ports, when)?))
}

#[cfg(feature = "xdp")]
fn open_xdp(ip: IpAddr, when: Bind) -> Result<Box<dyn Network>, Error> {
    Ok(Box::new(SocketNetwork::xdp(ip, when)?))
}

#[cfg(not(feature = "xdp"))]
fn open_xdp(_: IpAddr, _: Bind) -> Result<Box<dyn Network>, Error> {
    Err(Error::Config("transport xdp: this program was built without the feature `xdp`".to_owned()))
}

#[cfg(feature = "verbs")]
fn open_verbs(config: &CommConfig, gid: GidEntry) -> Result<Box<dyn Network>, Error> {
    super::verbs::open(config, gid)
}

#[cfg(not(feature = "verbs"))]
fn open_verbs(_: &CommConfig, gid: GidEntry) -> Result<Box<dyn Network>, Error> {
    let reason = "this program was built without the feature `verbs`".to_owned();
    Err(Error::Adapter { device: gid.device, reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(transport: Transport, bootstrap: Bootstrap) -> Option<String> {
        let config =
            CommConfig { transport, ..CommConfig::new(0, 2, [127, 0, 0, 1].into(), bootstrap) };
        open(&config, Bind::Now).err().map(|e| e.to_string())
    }

    #[test]
    fn a_missing_adapter_is_an_error_if_it_is_configured() {
        let peers = vec![[127, 0, 0, 1].into(), [127, 0, 0, 2].into()];
        let listed =
            Bootstrap::Static { peers, mtu: 1024, message_size: 4096, window: 2, rings: 1 };
        let text = refused(Transport::Verbs, listed).unwrap();
        assert!(text.contains("exchange through the controller"), "{text}");
        let controller =
            Bootstrap::Controller { address: "x:1".into(), job: "j".into(), token: "t".into() };
        let text = refused(Transport::Verbs, controller).unwrap();
        assert!(
            text.contains("no RDMA adapter has 127.0.0.1") && text.contains("rdma link"),
            "{text}"
        );
    }

    #[cfg(not(feature = "xdp"))]
    #[test]
    fn af_xdp_is_refused_if_it_is_not_built_in() {
        let controller =
            Bootstrap::Controller { address: "x:1".into(), job: "j".into(), token: "t".into() };
        let text = refused(Transport::Xdp, controller).unwrap();
        assert!(text.contains("transport xdp") && text.contains("feature `xdp`"), "{text}");
    }

    #[cfg(feature = "verbs")]
    #[test]
    fn an_adapter_that_libibverbs_cannot_open_is_named() {
        let gid = GidEntry { device: "nothing0".into(), port: 1, gid_index: 0 };
        let controller =
            Bootstrap::Controller { address: "x:1".into(), job: "j".into(), token: "t".into() };
        let config = CommConfig::new(0, 2, [127, 0, 0, 1].into(), controller);
        let text = open_verbs(&config, gid).err().unwrap().to_string();
        // Both the library and the kernel's part of it may be missing.
        let reasons = ["libibverbs", "ib_uverbs"];
        assert!(
            text.starts_with("adapter nothing0: ") && reasons.iter().any(|r| text.contains(r)),
            "{text}"
        );
    }
}
