//! A rank, as used by jobs, flows and rings.

use std::fmt;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub u32);

impl Rank {
    /// All ranks of a job of this size.
    pub fn all(ranks: u32) -> impl Iterator<Item = Self> + Clone {
        (0..ranks).map(Self)
    }

    /// The rank that it sends to.
    pub fn next(self, ranks: u32) -> Self {
        Self((self.0 + 1) % ranks)
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
