//! A box's uplinks: ports towards parent boxes. A ring is a tree, so each of a job's rings has one
//! parent.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{JobRing, Refusal};

/// The uplink of each ring: `swp9`, or for several parents the number of rings of each, in the
/// order of the rings: `swp9=2,swp10=1`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Uplinks(Vec<(String, Option<u32>)>);

impl Uplinks {
    /// The uplink of a ring.
    pub fn of(&self, ring: JobRing) -> &str {
        let mut end = 0;
        let has = |(_, rings): &&(String, Option<u32>)| {
            end = rings.map_or(u32::MAX, |rings| end + rings);
            ring.0 < end
        };
        self.0.iter().find(has).map_or("", |(port, _)| port)
    }

    /// All ports. Unsummed packets also arrive at the first one: a bridge has only one path.
    pub fn ports(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(port, _)| port.as_str())
    }

    /// Checks that each of this many rings has an uplink.
    ///
    /// # Errors
    /// If the numbers differ.
    pub fn check(&self, rings: u32) -> Result<(), Refusal> {
        match self.0.iter().map(|(_, rings)| *rings).sum::<Option<u32>>() {
            Some(all) if all != rings => Err(Refusal::Invalid(format!(
                "--uplink {self}: {all} rings, and the job has --rings {rings}"
            ))),
            _ => Ok(()),
        }
    }
}

impl FromStr for Uplinks {
    type Err = Refusal;

    fn from_str(text: &str) -> Result<Self, Refusal> {
        let each: Vec<&str> = text.split(',').collect();
        let one = |part: &&str| match part.split_once('=') {
            Some((port, rings)) => {
                Some((port.to_owned(), Some(rings.parse().ok().filter(|r| (1..256).contains(r))?)))
            }
            None => (each.len() == 1).then(|| ((*part).to_owned(), None)),
        };
        let all: Option<Vec<_>> = each.iter().map(one).collect();
        all.map(Self).ok_or_else(|| {
            Refusal::Invalid(format!(
                "--uplink {text}: of several ports each has its number of rings, like \
                 swp9=2,swp10=1"
            ))
        })
    }
}

impl TryFrom<String> for Uplinks {
    type Error = Refusal;

    fn try_from(text: String) -> Result<Self, Refusal> {
        text.parse()
    }
}

impl From<Uplinks> for String {
    fn from(uplinks: Uplinks) -> Self {
        uplinks.to_string()
    }
}

impl fmt::Display for Uplinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (port, rings)) in self.0.iter().enumerate() {
            f.write_str(if i > 0 { "," } else { "" })?;
            f.write_str(port)?;
            rings.map_or(Ok(()), |rings| write!(f, "={rings}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_ring_has_its_port_and_as_many_as_it_says() {
        let uplinks: Uplinks = "swp9=2,swp10=1".parse().unwrap();
        assert_eq!([0, 1, 2].map(|ring| uplinks.of(JobRing(ring))), ["swp9", "swp9", "swp10"]);
        assert_eq!(uplinks.ports().collect::<Vec<_>>(), ["swp9", "swp10"]);
        uplinks.check(3).unwrap();
        let error = uplinks.check(4).unwrap_err().to_string();
        assert_eq!(error, "--uplink swp9=2,swp10=1: 3 rings, and the job has --rings 4");
        let one: Uplinks = "swp9".parse().unwrap();
        assert_eq!((one.of(JobRing(7)), one.check(8)), ("swp9", Ok(())));
    }

    #[test]
    fn they_are_kept_as_they_are_written() {
        for text in ["swp9", "swp9=2,swp10=1"] {
            let json = format!("\"{text}\"");
            let uplinks: Uplinks = serde_json::from_str(&json).unwrap();
            assert_eq!(serde_json::to_string(&uplinks).unwrap(), json);
        }
        for text in ["swp9,swp10", "swp9=0", "swp9=2,swp10", "swp9=x", "swp9=256"] {
            assert!(text.parse::<Uplinks>().is_err(), "{text}");
        }
    }
}
