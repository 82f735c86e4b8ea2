//! Messages, clients and servers of the control API; see `proto/netsum.proto` for what they mean.

pub mod tls;

/// Version 1 of the API.
pub mod v1 {
    #![allow(clippy::all, reason = "generated")]
    tonic::include_proto!("netsum.v1");
}

/// Port of the workers' API, unless configured otherwise.
pub const DEFAULT_PORT: u16 = 4790;
/// Path of the administration socket, unless configured otherwise.
pub const DEFAULT_SOCKET: &str = "/run/netsum/netsum.sock";
