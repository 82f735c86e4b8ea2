//! TLS on the workers' TCP port.

use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use anyhow::{Context, Result};
use netsum_api::tls;
use tonic::transport::ServerTlsConfig;

use crate::config::{Fabric, Tls};

/// Longest time for a handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Reads and checks the files for workers; errors name this field of the configuration.
pub fn server_config(field: &'static str, files: &Tls) -> Result<ServerTlsConfig> {
    read(field, files)
}

/// A description of the workers' TLS, for the log.
pub fn kind(files: Option<&Tls>) -> &'static str {
    match files {
        None => "without TLS: tokens go in clear",
        Some(Tls { client_ca: None, .. }) => "with TLS",
        Some(_) => "with TLS and client certificates",
    }
}

/// The same for the port of a fabric's manager, which must show a certificate.
pub fn fabric_config(fabric: &Fabric) -> Result<ServerTlsConfig> {
    let Fabric { cert, key, ca, .. } = fabric.clone();
    read("listen.fabric", &Tls { cert, key, client_ca: Some(ca) })
}

fn read(field: &'static str, files: &Tls) -> Result<ServerTlsConfig> {
    let mut config = ServerTlsConfig::new()
        .identity(tls::identity(&files.cert, &files.key).context(field)?)
        .timeout(HANDSHAKE);
    if let Some(ca) = &files.client_ca {
        config = config
            .client_ca_root(tls::authority(ca).with_context(|| format!("{field}.client-ca"))?);
    }
    if std::fs::metadata(&files.key).is_ok_and(|m| m.mode() & 0o007 != 0) {
        log::warn!("{field}.key = {:?}: every user can read it; `chmod 600` it", files.key);
    }
    Ok(config)
}
