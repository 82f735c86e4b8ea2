//! All-reduces on links with a bandwidth: `cargo xtask bench wire`.

use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::collective::Collective;
use super::link::{Link, Wire};
use super::report::{Row, millis};
use super::start::{Peer, is_there, start};
use super::{Contestant, Order, Round};
use netsum_lab::cluster::JobSpec;

/// The measurements with one number of hosts and one rate.
#[derive(Clone, Debug)]
pub struct Part {
    /// netsum's job.
    pub job: JobSpec,
    pub wire: Wire,
    pub collective: Collective,
    /// Bytes of vectors.
    pub sizes: Vec<usize>,
    pub who: Vec<Peer>,
    /// Number of times that all contestants are started.
    pub launches: u32,
    /// Rounds of each contestant with each size in each launch.
    pub rounds: u32,
    /// The least time of a round, in seconds; several all-reduces fill it.
    pub round_seconds: f64,
}

/// A contestant's rounds with a size.
#[derive(Default)]
struct Record {
    /// The best setting, once all have been tried.
    setting: Option<usize>,
    /// All-reduces in a round.
    iters: u32,
    rounds: Vec<Round>,
}

impl Part {
    /// Measures: a row for each size and contestant.
    ///
    /// # Errors
    /// If a contestant does not start, or a sum is wrong.
    pub fn measure(&self, progress: &mut Progress) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        let mut records: Vec<Vec<Record>> = self
            .sizes
            .iter()
            .map(|_| self.who.iter().map(|_| Record::default()).collect())
            .collect();
        for launch in 0..self.launches {
            let start = |who: &Peer| {
                start(*who, &self.job, self.wire)
                    .with_context(|| format!("{} does not start", who.name()))
            };
            let (of, left) = (self.launches, progress.minutes_left());
            eprintln!(
                "{} hosts, {}, {}: launch {} of {of}; {left}",
                self.hosts(),
                self.wire,
                self.collective,
                launch + 1
            );
            let mut contestants = self.who.iter().map(start).collect::<Result<Vec<_>>>()?;
            for (bytes, records) in self.sizes.iter().zip(&mut records) {
                self.turns(*bytes, &mut contestants, records)?;
            }
            progress.done += self.seconds_of_launch();
            if launch + 1 == self.launches {
                for (bytes, records) in self.sizes.iter().zip(&records) {
                    let row = |(c, record): (&Contestant, &Record)| {
                        let setting = c.settings.get(record.setting.unwrap_or(0));
                        let setting = setting.cloned().unwrap_or_default();
                        let (hosts, wire, rounds) = (self.hosts(), self.wire, &record.rounds);
                        Row::new(c.name, setting, hosts, wire, self.collective, *bytes, rounds)
                    };
                    rows.extend(contestants.iter().zip(records).map(row));
                }
            }
        }
        Ok(rows)
    }

    pub fn hosts(&self) -> u32 {
        self.job.ranks / self.wire.ranks_per_host
    }

    /// A rough estimate of the time, in seconds; [`Progress`] corrects it.
    pub fn seconds(&self) -> f64 {
        f64::from(self.launches) * self.seconds_of_launch()
    }

    fn seconds_of_launch(&self) -> f64 {
        let one = |bytes: &usize| {
            // A ring has up to two vectors on each link. In addition, two cores move 0.4 GB per
            // second for all hosts.
            let by_links = self.wire.rate.0.map_or(0.0, |rate| 1.6 * rate.seconds(*bytes));
            let by_cores = *bytes as f64 * f64::from(self.job.ranks) / 4e8;
            let once = by_links.max(by_cores);
            // Includes warming up, and settings that are tried in one of the launches.
            f64::from(self.rounds) * once.max(self.round_seconds) + 2.5 * once
        };
        let starts = 0.3 * f64::from(self.job.ranks) + 0.5;
        self.who.len() as f64 * (self.sizes.iter().map(one).sum::<f64>() + starts)
    }

    /// All contestants with one size, round by round.
    fn turns(
        &self,
        bytes: usize,
        contestants: &mut [Contestant],
        records: &mut [Record],
    ) -> Result<()> {
        let collective = self.collective;
        let order = |setting, iters| Order { collective, len: bytes / 4, iters, setting };
        for (contestant, record) in contestants.iter_mut().zip(&mut *records) {
            match record.setting {
                // Only to warm up.
                Some(setting) => drop(contestant.run(&order(setting, 1))?),
                None => {
                    contestant.run(&order(0, 1))?;
                    let mut times = Vec::new();
                    // Settings are of all-reduces.
                    let is_set = collective == Collective::AllReduce;
                    let settings = if is_set { contestant.settings.len() } else { 0 };
                    for setting in 0..settings.max(1) {
                        let micros = contestant.run(&order(setting, 1))?.answer.micros[0];
                        times.push((micros, setting));
                    }
                    if times.len() > 1 {
                        let tried = times.iter().zip(&contestant.settings);
                        let tried: Vec<String> = tried
                            .map(|((micros, _), name)| format!("{name} {}", millis(micros / 1e3)))
                            .collect();
                        eprintln!("{}, ms: {}", contestant.name, tried.join(", "));
                    }
                    let (micros, best) =
                        *times.iter().min_by(|a, b| a.0.total_cmp(&b.0)).context("a setting")?;
                    record.setting = Some(best);
                    record.iters =
                        (self.round_seconds * 1e6 / micros).ceil().clamp(1.0, 1000.0) as u32;
                }
            }
        }
        for _ in 0..self.rounds {
            let mut line =
                format!("{} hosts, {}, {collective} of {bytes} B, ms:", self.hosts(), self.wire);
            for (contestant, record) in contestants.iter_mut().zip(&mut *records) {
                let order = order(record.setting.unwrap_or(0), record.iters);
                let round = contestant.run(&order)?;
                line += &format!(" {} {}", contestant.name, millis(round.millis()));
                record.rounds.push(round);
            }
            eprintln!("{line}");
        }
        Ok(())
    }
}

/// The progress of all parts.
pub struct Progress {
    begun: Instant,
    /// Estimated seconds of all parts, and of the finished ones.
    all: f64,
    done: f64,
}

impl Progress {
    /// No part is finished yet.
    pub fn of(parts: &[Part]) -> Self {
        Self { begun: Instant::now(), all: parts.iter().map(Part::seconds).sum(), done: 0.0 }
    }

    fn minutes_left(&self) -> String {
        format!(
            "about {:.0} min left",
            (left(self.all, self.done, self.begun.elapsed().as_secs_f64()) / 60.0).ceil()
        )
    }
}

/// The remaining seconds of `all`, scaled by the ratio of the time taken to the estimate so far.
fn left(all: f64, done: f64, took: f64) -> f64 {
    (all - done).max(0.0) * if done > 0.0 { took / done } else { 1.0 }
}

/// The contestants to measure: all usual ones at this rate, or those with these names.
///
/// # Errors
/// If a name is unknown.
pub fn wanted(only: &[String], link: Link) -> Result<Vec<Peer>> {
    for name in only {
        let names = Peer::ALL.map(Peer::name).join(", ");
        ensure!(
            Peer::ALL.iter().any(|who| who.name() == name),
            "--only {name}: choose from \
             {names}"
        );
    }
    let wanted = |who: &Peer| match only {
        [] => who.is_usual(link.0),
        names => names.iter().any(|name| who.name() == name),
    };
    Ok(Peer::ALL.into_iter().filter(wanted).collect())
}

/// Removes contestants that cannot run on this machine from all parts; returns their names, each
/// with the reason.
///
/// # Errors
/// If a part has no contestants left.
pub fn without_missing(parts: &mut [Part]) -> Result<Vec<String>> {
    let mut missing = Vec::new();
    for who in Peer::ALL {
        if !parts.iter().any(|part| part.who.contains(&who)) {
            continue;
        }
        if let Err(error) = is_there(who) {
            // The last line of Python's or pip's message has the reason.
            let why = format!("{error:#}");
            missing.push(format!(
                "without {}: {}",
                who.name(),
                why.lines().last().unwrap_or_default()
            ));
            parts.iter_mut().for_each(|part| part.who.retain(|other| *other != who));
        }
    }
    ensure!(
        parts.iter().all(|part| !part.who.is_empty()),
        "no contestant can run: {}",
        missing.join("; ")
    );
    Ok(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_faster_link_has_a_larger_vector() {
        let size = |text: &str| text.parse::<Link>().unwrap().usual_size() >> 20;
        let sizes =
            ["10mbit", "100mbit", "250mbit", "500mbit", "1gbit", "2.5gbit", "none"].map(size);
        assert_eq!(sizes, [8, 8, 16, 32, 64, 64, 64]);
    }

    #[test]
    fn contestants_are_asked_for_by_name() {
        let link: Link = "100mbit".parse().unwrap();
        assert_eq!(link.to_string(), "100mbit");
        let names = ["netsum-ring".to_owned(), "netsum".to_owned()];
        assert_eq!(wanted(&names, link).unwrap(), [Peer::Box, Peer::Ring { offload: true }]);
        let error = wanted(&["nccl".to_owned()], link).unwrap_err().to_string();
        assert!(error.contains("--only nccl: choose from netsum, netsum-flat"), "{error}");
        let usual = |link: &str| wanted(&[], link.parse().unwrap()).unwrap().len();
        assert_eq!((usual("1gbit"), usual("none")), (9, 12));
    }

    #[test]
    fn the_remaining_time_is_scaled_by_the_time_taken() {
        assert_eq!(left(600.0, 0.0, 5.0), 600.0);
        assert_eq!(left(600.0, 200.0, 100.0), 200.0);
        assert_eq!(left(600.0, 700.0, 100.0), 0.0);
    }
}
