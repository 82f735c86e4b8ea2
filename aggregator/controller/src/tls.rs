//! TLS on TCP ports.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use netsum_api::tls;
use serde::Deserialize;
use tonic::transport::ServerTlsConfig;

/// Files for TLS, in PEM form.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Tls {
    /// The box's certificate, with its chain to an authority.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Authority that signs workers' certificates; `None`: workers need no certificate.
    pub client_ca: Option<PathBuf>,
}

/// Longest time for a handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// A description of the workers' TLS, for the log.
pub fn kind(files: Option<&Tls>) -> &'static str {
    match files {
        None => "without TLS: tokens go in clear",
        Some(Tls { client_ca: None, .. }) => "with TLS",
        Some(_) => "with TLS and client certificates",
    }
}

/// Reads and checks these files; errors name this field of the configuration.
///
/// # Errors
/// If a file cannot be read, or has no certificate or key.
pub fn server_config(field: &'static str, files: &Tls) -> Result<ServerTlsConfig> {
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
