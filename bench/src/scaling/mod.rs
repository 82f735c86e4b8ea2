//! How all-reduces depend on ranks, rings, jobs, window and message size: `cargo xtask bench
//! scaling`.
//!
//! One of them is varied at a time, the others are as in [`Point::USUAL`]. All points of a curve
//! run at the same time, each in a lab of its own, and take turns, as in [`crate::contest`].

pub mod report;

use anyhow::{Context, Result};

use crate::contest::link::{Link, Wire};
use crate::contest::start::Who;
use crate::contest::{Contestant, Order, Round, jobs, start};
use netsum_lab::cluster::JobSpec;
pub use report::Row;

/// The path MTU; the links' MTU is 104 bytes larger.
const MTU: u32 = 2048;
const LINK_MTU: u32 = MTU + 104;

/// The quantity that is varied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Curve {
    /// Hosts with one rank each; also with netsum's own ring.
    Ranks,
    /// Rings of the job.
    Rings,
    /// Simultaneous jobs on the same hosts.
    Jobs,
    /// Messages of each rank in flight.
    Window,
    /// Bytes of a message.
    Message,
}

impl Curve {
    pub const ALL: [Self; 5] = [Self::Ranks, Self::Rings, Self::Jobs, Self::Window, Self::Message];

    /// The label of the x axis in a picture.
    pub fn text(self) -> &'static str {
        match self {
            Self::Ranks => "ranks",
            Self::Rings => "rings",
            Self::Jobs => "jobs at the same time",
            Self::Window => "window, messages",
            Self::Message => "bytes of a message",
        }
    }

    /// The usual point with another value of the varied quantity.
    fn point(self, x: u32) -> Point {
        let usual = Point::USUAL;
        match self {
            Self::Ranks => Point { ranks: x, ..usual },
            Self::Rings => Point { rings: x, ..usual },
            Self::Jobs => Point { jobs: x, ..usual },
            Self::Window => Point { window: x, ..usual },
            Self::Message => Point { message_size: x, ..usual },
        }
    }

    /// The values of the varied quantity.
    fn values(self, quick: bool) -> &'static [u32] {
        match (self, quick) {
            (Self::Ranks, false) => &[2, 4, 8, 16],
            (Self::Rings, false) => &[1, 2, 3, 4],
            (Self::Jobs, false) => &[1, 2, 4, 8],
            (Self::Window, false) => &[1, 2, 4, 8, 16, 32],
            (Self::Message, false) => &[4096, 16_384, 65_536, 262_144],
            (Self::Ranks, true) => &[2, 4],
            (Self::Rings | Self::Jobs, true) => &[1, 2],
            (Self::Window, true) => &[1, 8],
            (Self::Message, true) => &[4096, 65_536],
        }
    }
}

/// The parameters of equal jobs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct Point {
    /// Hosts.
    pub ranks: u32,
    pub rings: u32,
    /// Simultaneous jobs.
    pub jobs: u32,
    /// Messages of each rank in flight.
    pub window: u32,
    /// Bytes of a message.
    pub message_size: u32,
}

impl Point {
    /// The default values.
    pub const USUAL: Self = Self { ranks: 4, rings: 1, jobs: 1, window: 8, message_size: 65_536 };

    fn job(&self) -> JobSpec {
        let Self { ranks, rings, window, message_size, .. } = *self;
        JobSpec { mtu: MTU, message_size, window, rings, ..JobSpec::new("scaling", ranks) }
    }
}

/// The amount of measurements.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The varied quantities.
    pub curves: Vec<Curve>,
    /// Measure only the ends of each curve, and little of everything.
    pub quick: bool,
    /// Bytes of the vector for bandwidth.
    pub bytes: usize,
    /// Bytes of the vector for latency.
    pub small_bytes: usize,
    /// The number of measurements of each point.
    pub rounds: u32,
    /// The approximate time of a round with the large vector, in seconds; the small one takes a
    /// third.
    pub seconds: f64,
}

impl Settings {
    /// Settings for figures, or for a smoke test.
    pub fn new(quick: bool) -> Self {
        let curves = Curve::ALL.to_vec();
        if quick {
            Self { curves, quick, bytes: 1 << 20, small_bytes: 4096, rounds: 1, seconds: 0.1 }
        } else {
            Self { curves, quick, bytes: 16 << 20, small_bytes: 4096, rounds: 3, seconds: 0.5 }
        }
    }
}

/// A contestant at a point.
struct Entrant {
    point: Point,
    x: u32,
    contestant: Contestant,
    /// All-reduces of a round, with the large vector and with the small one.
    iters: [u32; 2],
    /// The rounds of each job, in the same order.
    rounds: [Vec<Vec<Round>>; 2],
}

/// Measures a curve.
///
/// # Errors
/// If a point cannot be started, or a sum is wrong.
pub fn measure(curve: Curve, settings: &Settings) -> Result<Vec<Row>> {
    let mut entrants = Vec::new();
    for &x in curve.values(settings.quick) {
        let point = curve.point(x);
        let with = || format!("{} {x}", curve.text());
        let contestant = jobs::start(point.jobs, &point.job(), LINK_MTU).with_context(with)?;
        entrants.push(Entrant::new(point, x, contestant));
        if curve == Curve::Ranks {
            let ring = start::start(
                Who::Ring { offload: true },
                &point.job(),
                Wire { mtu: LINK_MTU, rate: Link(None), loss: 0.0, uplinks: None },
            )
            .with_context(with)?;
            entrants.push(Entrant::new(point, x, ring));
        }
    }
    let sizes = [settings.bytes, settings.small_bytes];
    for entrant in &mut entrants {
        entrant.warm_up(sizes, settings.seconds).with_context(|| format!("{:?}", entrant.point))?;
    }
    for _ in 0..settings.rounds {
        for entrant in &mut entrants {
            entrant.round(sizes).with_context(|| format!("{:?}", entrant.point))?;
        }
    }
    let row = |e: &Entrant| Row::new(curve, e.x, e.contestant.name, e.point, sizes, &e.rounds);
    Ok(entrants.iter().map(row).collect())
}

impl Entrant {
    fn new(point: Point, x: u32, contestant: Contestant) -> Self {
        Self { point, x, contestant, iters: [1; 2], rounds: [Vec::new(), Vec::new()] }
    }

    /// The first all-reduce of each size is not counted, and the second is timed.
    fn warm_up(&mut self, sizes: [usize; 2], seconds: f64) -> Result<()> {
        for (which, (bytes, seconds)) in sizes.into_iter().zip([seconds, seconds / 3.0]).enumerate()
        {
            self.contestant.run_jobs(&Order::of(bytes, 1), self.point.ranks)?;
            let tried = self.contestant.run_jobs(&Order::of(bytes, 1), self.point.ranks)?;
            let slowest = tried.iter().map(report::seconds).fold(0.0, f64::max);
            self.iters[which] = (seconds / slowest).clamp(1.0, 500.0) as u32;
        }
        Ok(())
    }

    fn round(&mut self, sizes: [usize; 2]) -> Result<()> {
        for (which, bytes) in sizes.into_iter().enumerate() {
            let round =
                self.contestant.run_jobs(&Order::of(bytes, self.iters[which]), self.point.ranks)?;
            self.rounds[which].push(round);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_quantity_is_varied_at_a_time() {
        for curve in Curve::ALL {
            for quick in [false, true] {
                let values = curve.values(quick);
                assert!(values.is_sorted() && values.len() > 1, "{curve:?}");
                let usual = values.iter().filter(|x| curve.point(**x) == Point::USUAL).count();
                // Every curve goes through the usual point.
                assert_eq!(usual, 1, "{curve:?}");
            }
        }
        assert_eq!(Curve::Window.point(1), Point { window: 1, ..Point::USUAL });
    }
}
