//! Values on a command line, and in the JSON that it prints.

use std::num::{NonZero, ParseIntError};

use netsum_common::size::{NotASize, Size};

/// A number, decimal or hexadecimal.
///
/// # Errors
/// If it is not a number.
pub fn number(text: &str) -> Result<u32, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| "a number is expected, decimal or 0x".into())
}

/// `auto` gives 0, which leaves the choice to the daemon.
pub(crate) fn mtu(text: &str) -> Result<u32, ParseIntError> {
    if text == "auto" { Ok(0) } else { text.parse().map(NonZero::<u32>::get) }
}

pub(crate) fn bytes(text: &str) -> Result<u64, NotASize> {
    text.parse().map(|Size(bytes)| bytes)
}

/// Serializes 0, which says that a number is unknown, as null.
pub(crate) fn unless_zero<S: serde::Serializer>(number: &u64, to: S) -> Result<S::Ok, S::Error> {
    serde::Serialize::serialize(&(*number > 0).then_some(number), to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_decimal_or_hexadecimal() {
        assert_eq!((number("17"), number("0x11")), (Ok(17), Ok(17)));
        assert!(number("seventeen").is_err() && number("-1").is_err() && number("0xg").is_err());
    }
}
