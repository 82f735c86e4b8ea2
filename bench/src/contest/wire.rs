//! All-reduces on links with a bandwidth: `cargo xtask bench wire`.

use anyhow::{Context, Result, ensure};

use super::link::{Link, Wire};
use super::report::{Row, millis};
use super::start::{Who, is_there, start};
use super::{Contestant, Order, Round};
use netsum_lab::cluster::JobSpec;

/// What is measured with one number of hosts and one rate.
#[derive(Clone, Debug)]
pub struct Part {
    /// netsum's job; its ranks are the hosts.
    pub job: JobSpec,
    pub wire: Wire,
    /// Bytes of vectors.
    pub sizes: Vec<usize>,
    pub who: Vec<Who>,
    /// All contestants are started so often.
    pub launches: u32,
    /// Of each contestant with each size in each launch.
    pub rounds: u32,
    /// Seconds that a round takes at least, if one all-reduce takes less.
    pub seconds: f64,
}

/// A contestant's rounds with a size.
#[derive(Default)]
struct Record {
    /// The setting that was best, once all have been tried.
    setting: Option<usize>,
    /// Of a round.
    iters: u32,
    rounds: Vec<Round>,
}

impl Part {
    /// Measures: a row for each size and contestant.
    ///
    /// # Errors
    /// If a contestant does not start, or a sum is wrong.
    pub fn measure(&self) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        let mut records: Vec<Vec<Record>> =
            self.sizes.iter().map(|_| self.who.iter().map(|_| Record::default()).collect()).collect();
        for launch in 0..self.launches {
            let start = |who: &Who| {
                start(*who, &self.job, self.wire).with_context(|| format!("{} does not start", who.name()))
            };
            eprintln!("{} hosts, {}: launch {} of {}", self.job.ranks, self.wire, launch + 1, self.launches);
            let mut contestants = self.who.iter().map(start).collect::<Result<Vec<_>>>()?;
            for (bytes, records) in self.sizes.iter().zip(&mut records) {
                self.turns(*bytes, &mut contestants, records)?;
            }
            if launch + 1 == self.launches {
                for (bytes, records) in self.sizes.iter().zip(&records) {
                    let row = |(c, record): (&Contestant, &Record)| {
                        let setting = c.settings.get(record.setting.unwrap_or(0));
                        let setting = setting.cloned().unwrap_or_default();
                        Row::new(c.name, setting, self.job.ranks, self.wire, *bytes, &record.rounds)
                    };
                    rows.extend(contestants.iter().zip(records).map(row));
                }
            }
        }
        Ok(rows)
    }

    /// All contestants with one size, round by round.
    fn turns(&self, bytes: usize, contestants: &mut [Contestant], records: &mut [Record]) -> Result<()> {
        let order = |setting, iters| Order { together: true, setting, ..Order::of(bytes, iters) };
        for (contestant, record) in contestants.iter_mut().zip(&mut *records) {
            match record.setting {
                // Only to warm up.
                Some(setting) => drop(contestant.run(&order(setting, 1))?),
                None => {
                    contestant.run(&order(0, 1))?;
                    let mut times = Vec::new();
                    for setting in 0..contestant.settings.len().max(1) {
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
                    record.iters = (self.seconds * 1e6 / micros).ceil().clamp(1.0, 1000.0) as u32;
                }
            }
        }
        for _ in 0..self.rounds {
            let mut line = format!("{} hosts, {}, {bytes} B, ms:", self.job.ranks, self.wire);
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

/// Those who take part: all usual ones at this rate, or those of these names; and why others do not, though they were to.
///
/// # Errors
/// If there is nobody of a name, or nobody takes part.
pub fn who(only: &[String], link: Link) -> Result<(Vec<Who>, Vec<String>)> {
    for name in only {
        let names = Who::ALL.map(Who::name).join(", ");
        ensure!(Who::ALL.iter().any(|who| who.name() == name), "--only {name}: there are {names}");
    }
    let wanted = |who: &Who| match only {
        [] => who.is_usual(link.0),
        names => names.iter().any(|name| who.name() == name),
    };
    let (mut there, mut missing) = (Vec::new(), Vec::new());
    for who in Who::ALL.into_iter().filter(wanted) {
        match is_there(who) {
            Ok(()) => there.push(who),
            Err(error) => missing.push(format!("without {}: {error:#}", who.name())),
        }
    }
    ensure!(!there.is_empty(), "nobody takes part: {}", missing.join("; "));
    Ok((there, missing))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_faster_link_has_a_larger_vector() {
        let size = |text: &str| text.parse::<Link>().unwrap().usual_size() >> 20;
        let sizes = ["10mbit", "100mbit", "250mbit", "500mbit", "1gbit", "2.5gbit", "none"].map(size);
        assert_eq!(sizes, [16, 16, 16, 32, 64, 64, 64]);
    }

    #[test]
    fn contestants_are_asked_for_by_name() {
        let link: Link = "100mbit".parse().unwrap();
        assert_eq!(link.to_string(), "100mbit");
        let (there, missing) = who(&["netsum-ring".to_owned(), "netsum".to_owned()], link).unwrap();
        assert_eq!((there, missing), (vec![Who::Box, Who::Ring { offload: true }], vec![]));
        let error = who(&["nccl".to_owned()], link).unwrap_err().to_string();
        assert!(error.contains("--only nccl: there are netsum, netsum-xdp"), "{error}");
        let usual = |link: &str| {
            let link: Link = link.parse().unwrap();
            Who::ALL.iter().filter(|who| who.is_usual(link.0)).count()
        };
        assert_eq!((usual("1gbit"), usual("none")), (9, 12));
    }
}
