//! A job's token: the secret that its workers share.

use std::fmt;

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;

/// A secret. It is not printed by `{:?}`, so that no log can hold it; the state file alone does. And it is compared in constant time.
#[derive(Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Token(String);

impl Token {
    /// Whether `guess` is the secret. The time that this takes tells the length alone.
    pub fn is(&self, guess: &str) -> bool {
        self.0.as_bytes().ct_eq(guess.as_bytes()).into()
    }

    /// The secret itself, for those who may see it.
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
}
