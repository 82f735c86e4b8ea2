//! Messages, clients and servers of the control API; `proto/netsum.proto` documents them.

#[cfg(feature = "cli")]
pub mod arguments;
pub mod tls;

/// Version 1 of the API.
pub mod v1 {
    #![allow(clippy::all, reason = "generated")]
    #[cfg(feature = "cli")]
    use crate::arguments::{bytes, mtu, number};
    tonic::include_proto!("netsum.v1");
}

/// Version of the protocol between a job's ranks, and between them and the daemon: this API's
/// messages for workers, the check lanes, the layout of messages, the frames of the bypass
/// connections. Raise it with every change to any of them.
pub const PROTOCOL: u32 = 7;
/// Header with a manager's election number, which all its requests to a box carry.
pub const ELECTION: &str = "netsum-election";
/// The release of this build.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");
/// Port of the workers' API, unless configured otherwise.
pub const DEFAULT_PORT: u16 = 4790;
/// Path of the administration socket, unless configured otherwise.
pub const DEFAULT_SOCKET: &str = "/run/netsum/netsum.sock";
