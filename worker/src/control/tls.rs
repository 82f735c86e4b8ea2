//! TLS to the controller, and why it fails.

use std::error::Error;
use std::io;

use netsum_api::tls::{self, TlsError};
use rustls::{CertificateError, Error as Rustls};
use tonic::transport::ClientTlsConfig;

use crate::comm::config::Tls;

/// Reads and checks the files.
pub fn client_config(files: &Tls) -> Result<ClientTlsConfig, TlsError> {
    let config = ClientTlsConfig::new().ca_certificate(tls::authority(&files.ca)?);
    Ok(match &files.identity {
        Some((certificate, key)) => config.identity(tls::identity(certificate, key)?),
        None => config,
    })
}

/// The reason of a TLS error, with the file to check; `None` for other errors.
pub fn reason(error: &(dyn Error + 'static), files: Option<&Tls>) -> Option<String> {
    let Some(files) = files else {
        // The first bytes of an alert, taken for HTTP/2, are a frame of 1.3 MB.
        let in_clear = find_text(error, "frame with invalid size");
        return in_clear.then(|| {
            "this port does not speak unencrypted gRPC: the controller may require TLS".to_owned()
        });
    };
    let cause = find(error)?;
    let ca = files.ca.display();
    Some(match cause {
        Cause::Tls(Rustls::InvalidCertificate(CertificateError::UnknownIssuer)) => {
            format!("TLS: the controller's certificate is not signed by an authority in {ca}")
        }
        Cause::Tls(Rustls::InvalidCertificate(why)) => {
            format!("TLS: the controller's certificate is refused: {why}")
        }
        Cause::Tls(Rustls::AlertReceived(alert)) => refused(&format!("{alert:?}"), files),
        Cause::Alert(alert) => refused(&alert, files),
        Cause::Tls(Rustls::InvalidMessage(_)) => {
            "TLS: the controller does not speak TLS on this port".to_owned()
        }
        Cause::Tls(other) => format!("TLS: {other}"),
    })
}

/// A likely reason if a connection over TLS breaks before the first answer. In TLS 1.3 the
/// controller refuses a certificate after the worker has begun to send. The worker then sends to a
/// closed connection, and may never read the alert with the reason.
pub fn suspicion(files: &Tls) -> String {
    format!("perhaps the controller refuses this worker's certificate ({})", own(files))
}

/// This worker's certificate.
fn own(files: &Tls) -> String {
    match &files.identity {
        Some((certificate, _)) => certificate.display().to_string(),
        None => "none was given".to_owned(),
    }
}

/// The meaning of the controller's alert, by its name in RFC 8446, section 6.
fn refused(alert: &str, files: &Tls) -> String {
    let own = own(files);
    let why = match alert {
        "CertificateRequired" => "it asks for one",
        "CertificateExpired" => "it has expired",
        "UnknownCA" | "DecryptError" => {
            "it is not signed by the authority that the controller trusts"
        }
        "BadCertificate" | "CertificateUnknown" | "UnsupportedCertificate" => "it is not valid",
        _ => return format!("TLS: the controller ends the connection: {alert}"),
    };
    format!("TLS: the controller refuses this worker's certificate ({own}): {why}")
}

enum Cause<'a> {
    Tls(&'a Rustls),
    /// The name of an alert, where HTTP/2 has kept only the text of an error. In TLS 1.3 the
    /// controller checks the worker's certificate after the worker has begun to send.
    Alert(String),
}

/// Whether the text of an error or of one of its causes contains this.
fn find_text(error: &(dyn Error + 'static), text: &str) -> bool {
    let mut next = Some(error);
    while let Some(e) = next {
        if e.to_string().contains(text) {
            return true;
        }
        next = e.source();
    }
    false
}

/// The beginning of rustls's text for an alert.
const ALERT: &str = "received fatal alert: ";

/// Finds a TLS error among an error and its causes.
fn find<'a>(error: &'a (dyn Error + 'static)) -> Option<Cause<'a>> {
    let mut next = Some(error);
    while let Some(e) = next {
        if let Some(found) = e.downcast_ref::<Rustls>() {
            return Some(Cause::Tls(found));
        }
        // An I/O error does not return its inner error as its source.
        if let Some(inside) = e.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            let alert = || Some(Cause::Alert(inside.to_string().strip_prefix(ALERT)?.to_owned()));
            return find(inside).or_else(alert);
        }
        next = e.source();
    }
    None
}
