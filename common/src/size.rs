//! Sizes in bytes as text.

use core::fmt;
use core::str::FromStr;

/// A number of bytes; `64K`, `64KiB` and `65536` are the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Size(pub u64);

/// The text is not a size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotASize;

impl fmt::Display for NotASize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("must be a number like 65536, 64K, 64KiB or 1MiB")
    }
}

impl core::error::Error for NotASize {}

impl FromStr for Size {
    type Err = NotASize;

    fn from_str(text: &str) -> Result<Self, NotASize> {
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let number: u64 = text[..digits].parse().map_err(|_| NotASize)?;
        let shift = match &text[digits..] {
            "" | "B" => 0,
            "K" | "k" | "KiB" => 10,
            "M" | "m" | "MiB" => 20,
            "G" | "g" | "GiB" => 30,
            _ => return Err(NotASize),
        };
        number.checked_mul(1 << shift).map(Self).ok_or(NotASize)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n >= 1 << 30 => write!(f, "{:.1} GiB", n as f64 / (1u64 << 30) as f64),
            n if n >= 1 << 20 => write!(f, "{:.1} MiB", n as f64 / (1 << 20) as f64),
            n if n >= 1 << 10 => write!(f, "{:.1} KiB", n as f64 / 1024.0),
            n => write!(f, "{n} B"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        for (text, bytes) in [
            ("0", 0),
            ("1500", 1500),
            ("64K", 65536),
            ("64KiB", 65536),
            ("2M", 2 << 20),
            ("2m", 2 << 20),
            ("1GiB", 1 << 30),
        ] {
            assert_eq!(text.parse::<Size>().unwrap().0, bytes);
        }
        for text in ["", "K", "-1", "1.5K", "1X", "99999999999G"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
        assert_eq!(Size(1536).to_string(), "1.5 KiB");
        assert_eq!(Size(5 << 20).to_string(), "5.0 MiB");
    }
}
