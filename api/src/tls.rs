//! Certificates and keys for the workers' API over TCP, from PEM files. They are checked at the
//! start, when an error can name the file, instead of at the first connection.

use std::path::{Path, PathBuf};

use rustls::RootCertStore;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use tonic::transport::{Certificate, Identity};

/// An error in a file.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The file contains no certificate, or a broken one.
    #[error("{}: not a certificate in PEM form: {reason}", path.display())]
    Certificate {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The file contains no private key, or a broken one.
    #[error("{}: not a private key in PEM form: {reason}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// Both files are valid, but they are not a pair.
    #[error("{}: not the key of the certificate in {}", key.display(), certificate.display())]
    Pair {
        /// File of the certificate.
        certificate: PathBuf,
        /// File of the key.
        key: PathBuf,
    },
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|error| TlsError::Read { path: path.to_owned(), error })
}

fn certificates(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let broken = |reason: String| TlsError::Certificate { path: path.to_owned(), reason };
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|e| broken(e.to_string()))?;
    if found.is_empty() { Err(broken("it contains no certificate".into())) } else { Ok(found) }
}

/// The certificates of trusted authorities.
pub fn authority(path: &Path) -> Result<Certificate, TlsError> {
    let pem = read(path)?;
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path, &pem)? {
        roots
            .add(certificate)
            .map_err(|e| TlsError::Certificate { path: path.to_owned(), reason: e.to_string() })?;
    }
    Ok(Certificate::from_pem(pem))
}

/// A certificate, with the chain to an authority, and its key.
pub fn identity(certificate: &Path, key: &Path) -> Result<Identity, TlsError> {
    let (chain_pem, key_pem) = (read(certificate)?, read(key)?);
    let chain = certificates(certificate, &chain_pem)?;
    let no_key = |reason: String| TlsError::Key { path: key.to_owned(), reason };
    let secret = PrivateKeyDer::from_pem_slice(&key_pem).map_err(|e| no_key(e.to_string()))?;
    match CertifiedKey::from_der(chain, secret, &default_provider()) {
        Ok(_) => Ok(Identity::from_pem(chain_pem, key_pem)),
        Err(rustls::Error::InconsistentKeys(_)) => {
            Err(TlsError::Pair { certificate: certificate.to_owned(), key: key.to_owned() })
        }
        Err(rustls::Error::InvalidCertificate(e)) => {
            Err(TlsError::Certificate { path: certificate.to_owned(), reason: format!("{e:?}") })
        }
        Err(e) => Err(no_key(e.to_string())),
    }
}
