//! Cables that lose packets.
use anyhow::{Result, bail};

use crate::netns::Netns;

/// Which packets a cable loses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Share of the packets from the host that are lost, 0 to 1.
    pub up: f64,
    /// Share of the packets to the host that are lost, 0 to 1.
    pub down: f64,
    /// Chooses which.
    pub seed: u32,
}

/// The cable between a host and its port.
#[derive(Debug)]
pub struct Cable {}

impl Cable {
    /// The cable of host `number`.
    pub fn new(_wire: &Netns, _number: usize) -> Result<Self> {
        Ok(Self {})
    }
    /// Loses packets from now on.
    pub fn set(&self, _faults: Faults) -> Result<()> {
        bail!("not there yet")
    }
}
