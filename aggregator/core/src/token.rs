//! A job's token: the secret that its workers share.

use std::fmt;

use netsum_common::wire::InBandToken;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

/// A secret. `{:?}` does not print it, which keeps it out of logs; only the state file has it. It
/// is compared in constant time.
#[derive(Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Token(String);

impl Token {
    /// Whether `guess` is the secret. The time that this takes reveals only the length.
    pub fn is(&self, guess: &str) -> bool {
        self.0.as_bytes().ct_eq(guess.as_bytes()).into()
    }

    /// The form in packets of a job that is set up in band: the first half of a SHA-256. A reader
    /// of packets cannot call the API with it.
    pub fn in_band(&self) -> InBandToken {
        let digest =
            Sha256::new_with_prefix(b"netsum in band\0").chain_update(self.0.as_bytes()).finalize();
        let mut token = [0; 16];
        token.copy_from_slice(&digest[..16]);
        InBandToken(token)
    }

    /// The secret itself, for callers that may see it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        self.is(&other.0)
    }
}

impl Eq for Token {}

impl<S: Into<String>> From<S> for Token {
    fn from(secret: S) -> Self {
        Self(secret.into())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_compared_whole_and_never_printed() {
        let token = Token::from("secret");
        assert!(token.is("secret"));
        for wrong in ["", "s", "secres", "tecret", "secret2", "SECRET"] {
            assert!(!token.is(wrong), "{wrong}");
        }
        assert!(!format!("{token:?}{token:#?}").contains("secret"));
    }

    #[test]
    fn the_token_in_packets_is_half_a_sha_256() {
        // printf 'netsum in band\0secret' | sha256sum
        let expected = "05e693c30ae62ac808eef2b35c030dc1";
        let hex: String =
            Token::from("secret").in_band().0.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, expected);
        assert_ne!(Token::from("Secret").in_band(), Token::from("secret").in_band());
    }
}
