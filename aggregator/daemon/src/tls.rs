//! TLS on the workers' TCP port.

use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use anyhow::{Context, Result};
use netsum_api::tls;
use tonic::transport::ServerTlsConfig;

use crate::config::Tls;

/// A handshake may take so long.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Reads and checks the files.
pub fn server_config(files: &Tls) -> Result<ServerTlsConfig> {
    let mut config = ServerTlsConfig::new()
        .identity(tls::identity(&files.cert, &files.key).context("listen.tls")?)
        .timeout(HANDSHAKE);
    if let Some(ca) = &files.client_ca {
        config = config.client_ca_root(tls::authority(ca).context("listen.tls.client-ca")?);
    }
    if std::fs::metadata(&files.key).is_ok_and(|m| m.mode() & 0o007 != 0) {
        log::warn!("listen.tls.key = {:?}: every user can read it; `chmod 600` it", files.key);
    }
    Ok(config)
}
