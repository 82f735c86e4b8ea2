//! A rank, as jobs, flows and rings have it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A rank of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub u32);

impl Rank {
    /// All of a job that has so many.
    pub fn all(ranks: u32) -> impl Iterator<Item = Self> + Clone {
        (0..ranks).map(Self)
    }

    /// The one that it sends to.
    pub fn next(self, ranks: u32) -> Self {
        Self((self.0 + 1) % ranks)
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
