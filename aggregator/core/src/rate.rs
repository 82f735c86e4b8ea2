//! Bits per second as text.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;

/// Bits per second on a link, including all headers from Ethernet's on; written as by `tc`:
/// `100mbit`, `2.5gbit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct Rate(pub u64);

impl Rate {
    const UNITS: [(&str, u64); 3] = [("gbit", 1_000_000_000), ("mbit", 1_000_000), ("kbit", 1000)];

    /// `times` this rate, divided by `by`.
    #[must_use]
    pub fn share(self, times: u32, by: u32) -> Self {
        Self(self.0 * u64::from(times) / u64::from(by))
    }

    /// Seconds to transmit this many bytes.
    pub fn seconds(self, bytes: usize) -> f64 {
        bytes as f64 * 8.0 / self.0 as f64
    }
}

/// Why a text is not a rate.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Error(String);

impl FromStr for Rate {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let unit =
            Self::UNITS.iter().find_map(|(unit, bits)| Some((text.strip_suffix(unit)?, *bits)));
        let (number, bits) =
            unit.ok_or_else(|| Error(format!("`{text}` is not a rate like 100mbit or 2.5gbit")))?;
        let number: f64 = number
            .parse()
            .map_err(|e| Error(format!("`{text}`: `{number}` is not a number: {e}")))?;
        let rate = (number * bits as f64).round();
        if !(1e5..=1e13).contains(&rate) {
            return Err(Error(format!("`{text}`: must be 100kbit to 10000gbit")));
        }
        Ok(Self(rate as u64))
    }
}

impl TryFrom<String> for Rate {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let [larger @ .., smallest] = Self::UNITS;
        let (unit, bits) = larger.into_iter().find(|(_, bits)| self.0 >= *bits).unwrap_or(smallest);
        write!(f, "{}{unit}", self.0 as f64 / bits as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_and_written_as_tc_does() {
        for text in ["100mbit", "2.5gbit", "1gbit", "500kbit"] {
            assert_eq!(text.parse::<Rate>().unwrap().to_string(), text);
        }
        assert_eq!("2500mbit".parse::<Rate>().unwrap().to_string(), "2.5gbit");
        assert!(("100mbit".parse::<Rate>().unwrap().seconds(12_500_000) - 1.0).abs() < 1e-9);
        for (text, why) in
            [("100", "is not a rate"), ("xmbit", "is not a number"), ("0mbit", "must be 100kbit")]
        {
            let error = text.parse::<Rate>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
