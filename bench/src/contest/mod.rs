//! All-reduces of netsum and of its peers, in turns on one machine, on links with a bandwidth or
//! without: their times and costs.
//!
//! | module | content |
//! | --- | --- |
//! | this one | a contestant, and its orders |
//! | [`start`] | netsum by its box and by its ring, and its peers |
//! | [`plan`] | the default measurements of `bench wire` |
//! | [`collective`] | the collectives |
//! | [`wire`] | rounds of all contestants in turns, each at its best setting |
//! | [`cost`] | CPU time of the whole machine, bytes on the links |
//! | [`report`] | the results as a table, JSON and a picture |
//!
//! All contestants run at the same time, each in a lab of its own, and take turns: the machine's
//! noise affects all of them alike.

pub mod collective;
pub mod cost;
pub mod link;
pub mod plan;
pub mod report;
pub mod start;
pub mod wire;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use collective::Collective;
use cost::Cost;
use netsum_lab::cluster::Cluster;
use netsum_lab::process::Running;
use netsum_lab::racks::Racks;

/// The timeout of an order.
const TIMEOUT: Duration = Duration::from_secs(300);

/// An order to all ranks of a contestant, as a line of JSON.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Order {
    #[serde(default)]
    pub collective: Collective,
    /// Elements: 32-bit floats.
    pub len: usize,
    /// The number of all-reduces, one after the other. The ranks wait for each other before each
    /// one: a time does not include another rank's delay.
    pub iters: u32,
    /// The number of the contestant's setting.
    pub setting: usize,
}

/// A rank's answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// Time of each all-reduce in microseconds, without making its input; of the slowest rank once
    /// all ranks' answers are merged.
    pub micros: Vec<f64>,
    /// Busy time of the machine's CPUs during those times, in seconds.
    #[serde(default)]
    pub busy: f64,
    /// Busy time of the busiest CPU in each all-reduce.
    #[serde(default)]
    pub busiest: f64,
    /// CPU time of the process that answers in those times, in seconds; of all together once the
    /// answers are merged.
    #[serde(default)]
    pub cpu: f64,
    /// The number of wrong elements.
    pub wrong: u64,
    /// Packets sent again, if the contestant counts them.
    #[serde(default)]
    pub retransmissions: u64,
    /// All-reduces that were not done as the contestant should do them: by netsum's ring instead of
    /// the box.
    #[serde(default)]
    pub astray: u64,
}

/// A participant of the benchmark.
pub struct Contestant {
    /// Its name in tables.
    pub name: &'static str,
    /// Names of its settings.
    pub settings: Vec<String>,
    /// Rank 0 first. Open MPI has one program for all ranks.
    ranks: Vec<Running>,
    /// The programs of several boxes.
    _boxes: Option<Racks>,
    /// Its lab; dropped last.
    cluster: Cluster,
}

/// The result of an order.
#[derive(Clone, Debug)]
pub struct Round {
    /// All ranks' answers merged.
    pub answer: Answer,
    /// The work of the machine and the links.
    pub cost: Cost,
}

impl Round {
    /// Median time of an all-reduce, in milliseconds.
    fn millis(&self) -> f64 {
        median(self.answer.micros.clone()) / 1e3
    }
}

/// The median; for an even number of values the mean of the two in the middle.
pub(crate) fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let middle = numbers.len() / 2;
    if numbers.len() % 2 == 1 {
        numbers[middle]
    } else {
        (numbers[middle - 1] + numbers[middle]) / 2.0
    }
}

impl Contestant {
    /// Waits until all ranks say `ready` and their settings, if they have any.
    fn ready(name: &'static str, mut ranks: Vec<Running>, cluster: Cluster) -> Result<Self> {
        let mut settings = Vec::new();
        for rank in &mut ranks {
            let line = rank.line(TIMEOUT)?;
            let mut words = line.split(' ').map(str::to_owned);
            ensure!(words.next().as_deref() == Some("ready"), "{name}: {line}");
            settings = words.collect();
        }
        Ok(Self { name, settings, ranks, _boxes: None, cluster })
    }

    /// Runs an order at all ranks.
    ///
    /// # Errors
    /// If a rank ends or gives a wrong answer, if a sum was wrong, or if the links carried too
    /// little.
    pub fn run(&mut self, order: &Order) -> Result<Round> {
        let before = Cost::now(&self.cluster)?;
        for rank in &mut self.ranks {
            rank.send_line(&serde_json::to_string(order)?)?;
        }
        let mut answers = Vec::new();
        for rank in &mut self.ranks {
            let line = rank.line(TIMEOUT)?;
            let answer: Answer =
                serde_json::from_str(&line).with_context(|| format!("{}: `{line}`", self.name))?;
            answers.push(answer);
        }
        let cost = Cost::now(&self.cluster)?.since(&before);
        let element = if self.name.ends_with("16bit") { 2 } else { 4 };
        let ranks = self.cluster.lab().hosts().len() as u64;
        let least = order.collective.least(element * order.len as u64, ranks);
        cost.carried(least.map(|one| one * u64::from(order.iters))).with_context(|| self.name)?;
        Ok(Round { answer: self.merge(order, &answers)?, cost })
    }

    /// The times of the slowest rank, and the counts of all.
    fn merge(&self, order: &Order, answers: &[Answer]) -> Result<Answer> {
        let mut all = answers.first().with_context(|| format!("{}: no answer", self.name))?.clone();
        for answer in answers {
            ensure!(
                answer.micros.len() == order.iters as usize,
                "{}: {} times",
                self.name,
                answer.micros.len()
            );
        }
        for answer in &answers[1..] {
            all.micros
                .iter_mut()
                .zip(&answer.micros)
                .for_each(|(longest, time)| *longest = longest.max(*time));
            all.cpu += answer.cpu;
            all.wrong += answer.wrong;
            all.retransmissions += answer.retransmissions;
            all.astray += answer.astray;
        }
        ensure!(all.wrong == 0, "{}: {} elements were wrong with {order:?}", self.name, all.wrong);
        Ok(all)
    }
}
