//! The links of hosts.

use std::fmt;
use std::str::FromStr;

use anyhow::Result;
use netsum_lab::Rate;

/// A bandwidth each way, or unlimited.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Link(pub Option<Rate>);

impl FromStr for Link {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(Self(if text == "none" { None } else { Some(text.parse()?) }))
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.0 {
            Some(rate) => rate.fmt(f),
            None => f.write_str("none"),
        }
    }
}

/// The links of a lab, each way.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Wire {
    pub rate: Link,
    pub mtu: u32,
    /// The fraction of packets that are lost; 0 without a rate.
    pub loss: f64,
    /// `None`: one box for all.
    pub uplinks: Option<Uplinks>,
    /// Ranks of each host, which share its address and its link.
    pub ranks_per_host: u32,
}

/// Hosts in racks, each with a box, and a spine between these.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Uplinks {
    pub racks: u32,
    /// The rate of each uplink from a rack's box to the spine.
    pub rate: Rate,
    /// The rate of a rack's hosts together, divided by that of its uplink.
    pub oversubscribed: u32,
}

impl Uplinks {
    /// The uplinks of this many racks, with hosts whose links have this rate.
    pub fn new(racks: u32, hosts: u32, rate: Rate, oversubscribed: u32) -> Self {
        Self { racks, rate: rate.share(hosts / racks, oversubscribed), oversubscribed }
    }
}

impl fmt::Display for Wire {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if self.ranks_per_host > 1 {
            write!(f, "{} ranks each, ", self.ranks_per_host)?;
        }
        write!(f, "rate {}, link MTU {}", self.rate, self.mtu)?;
        if self.loss > 0.0 {
            write!(f, ", {} % lost", self.loss * 100.0)?;
        }
        match self.uplinks {
            Some(Uplinks { racks, rate, oversubscribed }) => {
                write!(f, ", {racks} racks, uplinks {rate} ({oversubscribed}:1)")
            }
            None => Ok(()),
        }
    }
}

impl Wire {
    /// The least time for a sum in the network, in seconds: every link carries one vector each way,
    /// as a host can sum its ranks' vectors.
    pub fn least(&self, bytes: usize) -> Option<f64> {
        let host = self.rate.0?.seconds(bytes);
        Some(self.uplinks.map_or(host, |uplinks| host.max(uplinks.rate.seconds(bytes))))
    }
}

impl Link {
    /// Bytes of a vector that takes half a second to a second: 8 to 64 MiB.
    pub fn usual_size(self) -> usize {
        let megabytes = self.0.map_or(64.0, |rate| (1.0 / rate.seconds(1 << 20)).clamp(8.0, 64.0));
        1 << (20 + megabytes.log2() as usize)
    }
}
