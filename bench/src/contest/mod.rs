//! All-reduces of netsum and of others, one after the other on one machine, on links with a
//! bandwidth or without: who is faster, and what it costs.
//!
//! | module | what lives there |
//! | --- | --- |
//! | this one | a contestant, and what it is told to do |
//! | [`start`] | netsum by its box and by its ring, and its peers |
//! | [`plan`] | what is measured where nobody says what |
//! | [`wire`] | rounds of all contestants in turns, each at its best setting |
//! | [`jobs`] | several jobs of netsum at the same time |
//! | [`cost`] | processor time of the whole machine, bytes on the links |
//! | [`report`] | what came of it, as a table, JSON and a picture |
//!
//! All contestants live at the same time, each in a lab of its own, and take turns: noise of the
//! machine meets all of them.

pub mod cost;
pub mod jobs;
pub mod link;
pub mod plan;
pub mod report;
pub mod start;
pub mod wire;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use cost::Cost;
use netsum_lab::cluster::Cluster;
use netsum_lab::process::Running;
use netsum_lab::racks::Racks;

/// Longest that an order may take.
const PATIENCE: Duration = Duration::from_secs(300);

/// What all ranks of a contestant are told, as a line of JSON.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Order {
    /// Elements, of four bytes.
    pub len: usize,
    /// Of 32-bit floats, else of 32-bit integers.
    pub float: bool,
    /// All-reduces, one after the other.
    pub iters: u32,
    /// Before each of them the ranks wait for each other, so that no time has another rank's
    /// lateness in it.
    pub together: bool,
    /// Which of the contestant's settings.
    pub setting: usize,
}

impl Order {
    /// All-reduces of so many bytes, as floats, one straight after the other.
    pub fn of(bytes: usize, iters: u32) -> Self {
        Self { len: bytes / 4, float: true, iters, together: false, setting: 0 }
    }
}

/// What a rank answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// Time of each all-reduce in microseconds, of the slowest rank where all ranks' answers are
    /// put together; that of making its input is not in it.
    pub micros: Vec<f64>,
    /// Seconds in which processors of the machine were busy in those times.
    #[serde(default)]
    pub busy: f64,
    /// The same of the busiest one in each all-reduce.
    #[serde(default)]
    pub busiest: f64,
    /// Elements that were no sum.
    pub wrong: u64,
    /// Packets sent again, where the contestant knows.
    #[serde(default)]
    pub retransmissions: u64,
    /// All-reduces that were not done as the contestant is to do them: by netsum's ring in place of
    /// the box.
    #[serde(default)]
    pub astray: u64,
}

/// Somebody who can all-reduce.
pub struct Contestant {
    /// As in tables.
    pub name: &'static str,
    /// Names of its settings.
    pub settings: Vec<String>,
    /// Rank 0 first. Open MPI has one program for all.
    ranks: Vec<Running>,
    /// The programs of several boxes.
    _boxes: Option<Racks>,
    /// Where they live: gone after them.
    cluster: Cluster,
}

/// An order, carried out.
#[derive(Clone, Debug)]
pub struct Round {
    /// All ranks' answers in one.
    pub answer: Answer,
    /// What the machine and the links had to do for it.
    pub cost: Cost,
}

impl Round {
    /// Median time of an all-reduce, in milliseconds.
    fn millis(&self) -> f64 {
        median(self.answer.micros.clone()) / 1e3
    }
}

/// Of an even number the mean of those in the middle.
fn median(mut numbers: Vec<f64>) -> f64 {
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
            let line = rank.line(PATIENCE)?;
            let mut words = line.split(' ').map(str::to_owned);
            ensure!(words.next().as_deref() == Some("ready"), "{name}: {line}");
            settings = words.collect();
        }
        Ok(Self { name, settings, ranks, _boxes: None, cluster })
    }

    /// Has all ranks carry an order out.
    ///
    /// # Errors
    /// If one of them ends or says something else, if a sum was wrong, and if the links carried too
    /// little.
    pub fn run(&mut self, order: &Order) -> Result<Round> {
        let (answers, cost) = self.carry_out(order)?;
        Ok(Round { answer: self.merge(order, &answers)?, cost })
    }

    /// Has all ranks carry an order out at the same time, where those of several jobs come one
    /// after the other, `ranks` of each: a round for each job, each with the cost of all.
    ///
    /// # Errors
    /// As [`Contestant::run`].
    pub fn run_jobs(&mut self, order: &Order, ranks: u32) -> Result<Vec<Round>> {
        let (answers, cost) = self.carry_out(order)?;
        answers
            .chunks(ranks as usize)
            .map(|of_job| Ok(Round { answer: self.merge(order, of_job)?, cost }))
            .collect()
    }

    /// All ranks' answers, and what it cost.
    fn carry_out(&mut self, order: &Order) -> Result<(Vec<Answer>, Cost)> {
        let before = Cost::now(&self.cluster)?;
        for rank in &mut self.ranks {
            rank.say(&serde_json::to_string(order)?)?;
        }
        let mut answers = Vec::new();
        for rank in &mut self.ranks {
            let line = rank.line(PATIENCE)?;
            let answer: Answer =
                serde_json::from_str(&line).with_context(|| format!("{}: `{line}`", self.name))?;
            answers.push(answer);
        }
        let cost = Cost::now(&self.cluster)?.since(&before);
        cost.carried(4 * order.len as u64 * u64::from(order.iters)).with_context(|| self.name)?;
        Ok((answers, cost))
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
            all.wrong += answer.wrong;
            all.retransmissions += answer.retransmissions;
            all.astray += answer.astray;
        }
        ensure!(all.wrong == 0, "{}: {} elements were no sum with {order:?}", self.name, all.wrong);
        Ok(all)
    }
}
