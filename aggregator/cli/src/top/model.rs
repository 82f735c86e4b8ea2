//! The state of `netsum top`: takes readings of the daemon, returns what to show. Pure.

use std::collections::{BTreeMap, VecDeque};

use netsum_api::v1 as api;

use crate::peers::senders;
use crate::rates;
use crate::timing::Sums;
use crate::view::{Job, JobRates, Rates};

/// Seconds of a graph's history.
pub const HISTORY: usize = 240;
/// Readings over which the last rank is determined: even at low rates some sums in these are timed.
pub const WINDOW: usize = 10;

/// The daemon's answers at one moment.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    /// Counters, load and timed sums.
    pub stats: api::StatsReply,
    pub jobs: Vec<api::Job>,
    pub rings: Vec<api::Ring>,
    pub ports: Vec<api::Port>,
}

/// A key with a function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Key {
    /// One line up.
    Up,
    /// One line down.
    Down,
    /// Show the selected job in detail.
    Enter,
    /// Leave the detail view.
    Back,
    /// Change the sort order.
    Sort,
    /// Show the keys.
    Help,
    /// Quit.
    Quit,
}

/// Sort order of the jobs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Sort {
    /// By name.
    #[default]
    Name,
    /// By rate, the highest first.
    Rate,
    /// By p99 of the sums, the slowest first.
    Time,
}

impl Sort {
    pub fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Rate => "Gb/s",
            Self::Time => "p99",
        }
    }

    fn next(self) -> Self {
        match self {
            Self::Name => Self::Rate,
            Self::Rate => Self::Time,
            Self::Time => Self::Name,
        }
    }
}

#[derive(Debug)]
pub struct JobRow {
    /// Its properties and state.
    pub job: Job,
    /// Its rates in the last interval; `None` until the second reading of it.
    pub rates: Option<JobRates>,
    /// Its timed sums in each of the last intervals.
    windows: VecDeque<Sums>,
    /// The total of these windows.
    pub sums: Sums,
    /// Received gigabits per second, the newest last.
    pub history: VecDeque<f64>,
    pub rings: Vec<api::Ring>,
}

impl JobRow {
    /// Received gigabits per second.
    pub fn gbps(&self) -> f64 {
        self.rates.as_ref().map_or(0.0, |r| r.gbps_in)
    }

    /// For each member, in order, the rank that owns its connection.
    pub fn senders(&self) -> Vec<u32> {
        senders(self.job.ranks, &self.job.members)
    }

    /// A rank's port and address, as far as known.
    pub fn place(&self, rank: u32) -> Option<(&str, &str)> {
        let flow = self.job.flows.iter().find(|f| f.rank == rank)?;
        Some((&flow.port, &flow.src))
    }

    /// Fragments that a member has sent beyond what has been released, in all rings, and the limit.
    pub fn credit(&self, member: usize) -> (u32, u32) {
        let used = self.rings.iter().filter_map(|r| r.credit_used.get(member)).sum();
        (used, self.rings.iter().map(|r| r.credit).sum())
    }
}

#[derive(Clone, Debug)]
pub struct PortRow {
    /// Its counters and state.
    pub port: api::Port,
    /// Gigabits per second of all traffic, received and sent.
    pub gbps: (f64, f64),
    /// Packets per second, likewise.
    pub packets: (f64, f64),
    /// Received gigabits per second, the newest last.
    pub history: VecDeque<f64>,
}

/// Whether the daemon answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DaemonState {
    /// No answer yet.
    Unknown,
    /// It answers.
    Up,
    /// It does not answer: why, and since when.
    Down {
        /// Message.
        why: String,
        /// Seconds by the clock of [`Model::take`].
        since: u64,
    },
}

/// The whole state.
#[derive(Debug)]
pub struct Model {
    last: Option<Reading>,
    /// Whether the daemon answers.
    pub daemon: DaemonState,
    /// Seconds since 1970, of the last reading or failure.
    pub time: f64,
    jobs: BTreeMap<String, JobRow>,
    /// The ports, in the daemon's order.
    pub ports: Vec<PortRow>,
    /// Rates of packets that belong to no job, in the last interval.
    pub no_job: Option<JobRates>,
    /// Sort order of the jobs.
    pub sort: Sort,
    /// The selected job.
    pub selected: Option<String>,
    /// The detail view is shown, scrolled by this many lines.
    pub detail: Option<usize>,
    /// The keys are shown.
    pub help: bool,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            last: None,
            daemon: DaemonState::Unknown,
            time: 0.0,
            jobs: BTreeMap::new(),
            ports: Vec::new(),
            no_job: None,
            sort: Sort::default(),
            selected: None,
            detail: None,
            help: false,
        }
    }
}

fn push<T>(queue: &mut VecDeque<T>, value: T, most: usize) {
    queue.push_back(value);
    while queue.len() > most {
        queue.pop_front();
    }
}

impl Model {
    /// Stores the daemon's answers, or why it does not answer; `time` is in seconds since 1970.
    pub fn take(&mut self, reading: Result<Reading, String>, time: f64) {
        self.time = time;
        match reading {
            Ok(reading) => self.reading(reading),
            Err(why) => {
                // Rates start again with the next daemon; the old values stay visible until then.
                self.last = None;
                let since = match self.daemon {
                    DaemonState::Down { since, .. } => since,
                    _ => time as u64,
                };
                self.daemon = DaemonState::Down { why, since };
            }
        }
    }

    fn reading(&mut self, new: Reading) {
        self.daemon = DaemonState::Up;
        let rates = match &self.last {
            Some(old) => rates::between(&old.stats, &new.stats, self.time),
            None => Rates { time: self.time, interval: 0.0, jobs: Vec::new() },
        };
        let interval = rates.interval;
        let mut by_job: BTreeMap<Option<String>, JobRates> =
            rates.jobs.into_iter().map(|r| (r.job.clone(), r)).collect();
        self.no_job = by_job.remove(&None);
        let mut before = std::mem::take(&mut self.jobs);
        for job in &new.jobs {
            let row = before.remove(&job.name);
            let mut row = row.unwrap_or_else(|| JobRow {
                job: Job::from(job.clone()),
                rates: None,
                windows: VecDeque::new(),
                sums: Sums::default(),
                history: VecDeque::new(),
                rings: Vec::new(),
            });
            row.job = Job::from(job.clone());
            row.rates = by_job.remove(&Some(job.name.clone()));
            row.rings = new.rings.iter().filter(|r| r.job == job.name).cloned().collect();
            if let Some(rates) = &row.rates {
                push(&mut row.history, rates.gbps_in, HISTORY);
            }
            if let Some(grown) =
                self.last.as_ref().and_then(|old| grown(&old.stats, &new.stats, &job.name))
            {
                push(&mut row.windows, grown, WINDOW);
                row.sums = Sums::default();
                row.windows.iter().for_each(|w| row.sums.merge(w));
            }
            self.jobs.insert(job.name.clone(), row);
        }
        self.take_ports(&new, interval);
        let gone = self.selected.as_ref().is_none_or(|name| !self.jobs.contains_key(name));
        if gone {
            self.detail = None;
            self.selected = self.sorted().first().map(|row| row.job.name.clone());
        }
        self.last = Some(new);
    }

    fn take_ports(&mut self, new: &Reading, interval: f64) {
        let old: Vec<api::Port> = self.last.as_ref().map(|r| r.ports.clone()).unwrap_or_default();
        let mut before: Vec<PortRow> = std::mem::take(&mut self.ports);
        for port in &new.ports {
            let at = before.iter().position(|row| row.port.ifindex == port.ifindex);
            let mut row = at.map(|at| before.swap_remove(at)).unwrap_or_else(|| PortRow {
                port: port.clone(),
                gbps: (0.0, 0.0),
                packets: (0.0, 0.0),
                history: VecDeque::new(),
            });
            if let Some(old) = old.iter().find(|p| p.ifindex == port.ifindex)
                && interval > 0.0
            {
                let rate = |new: u64, old: u64| new.saturating_sub(old) as f64 / interval;
                let gbps = |new: u64, old: u64| rate(new, old) * 8.0 / 1e9;
                row.gbps = (gbps(port.rx_bytes, old.rx_bytes), gbps(port.tx_bytes, old.tx_bytes));
                row.packets =
                    (rate(port.rx_packets, old.rx_packets), rate(port.tx_packets, old.tx_packets));
                push(&mut row.history, row.gbps.0, HISTORY);
            }
            row.port = port.clone();
            self.ports.push(row);
        }
    }

    /// The jobs, in their order on the screen.
    pub fn sorted(&self) -> Vec<&JobRow> {
        let mut rows: Vec<&JobRow> = self.jobs.values().collect();
        // Equal ones stay in the order of their names.
        match self.sort {
            Sort::Name => {}
            Sort::Rate => rows.sort_by(|a, b| b.gbps().total_cmp(&a.gbps())),
            Sort::Time => {
                rows.sort_by_key(|row| std::cmp::Reverse(row.sums.completion.percentile(990)));
            }
        }
        rows
    }

    /// The selected job, and its line.
    pub fn selected(&self) -> Option<(usize, &JobRow)> {
        let name = self.selected.as_ref()?;
        self.sorted().into_iter().enumerate().find(|(_, row)| row.job.name == *name)
    }

    /// Gigabits per second into and out of all jobs.
    pub fn totals(&self) -> (f64, f64) {
        let rates = self.jobs.values().filter_map(|row| row.rates.as_ref());
        rates.fold((0.0, 0.0), |(i, o), r| (i + r.gbps_in, o + r.gbps_out))
    }

    /// Handles a key; false if it quits.
    pub fn key(&mut self, key: Key) -> bool {
        if key == Key::Quit {
            return false;
        }
        if self.help {
            self.help = false;
            return true;
        }
        match key {
            Key::Help => self.help = true,
            Key::Sort if self.detail.is_none() => self.sort = self.sort.next(),
            Key::Enter if self.selected.is_some() => self.detail = Some(0),
            Key::Back => self.detail = None,
            Key::Up => self.step(-1),
            Key::Down => self.step(1),
            Key::Sort | Key::Enter | Key::Quit => {}
        }
        true
    }

    fn step(&mut self, by: isize) {
        let moved = |at: usize, len: usize| at.saturating_add_signed(by).min(len.saturating_sub(1));
        if let (Some(line), Some((_, row))) = (self.detail, self.selected()) {
            let ranks = row.senders().len();
            self.detail = Some(moved(line, ranks));
            return;
        }
        let Some((at, _)) = self.selected() else { return };
        let rows = self.sorted();
        let name = rows[moved(at, rows.len())].job.name.clone();
        self.selected = Some(name);
    }
}

/// The sums of a job that were timed between two readings.
fn grown(old: &api::StatsReply, new: &api::StatsReply, job: &str) -> Option<Sums> {
    let of = |reply: &api::StatsReply| reply.jobs.iter().find(|j| j.job == job).map(Sums::new);
    Some(of(new)?.since(&of(old)?))
}

#[cfg(test)]
pub(crate) mod tests {
    use netsum_common::counters::Counter;
    use netsum_common::timing::Histogram;

    use super::*;
    use crate::timing::tests::message;

    /// A daemon's answer after this many seconds: "train" with 4 ranks at 8 Gb/s in, always waiting
    /// for rank 2, "idle", and "alone", which begins after the fifth second.
    pub fn reading(second: u64) -> Reading {
        let stats = |name: &str, fragments: u64, ranks: u32| {
            let mut values = vec![0; Counter::ALL.len()];
            for counter in [Counter::Contributions, Counter::Results] {
                values[counter as usize] = fragments;
            }
            values[Counter::BadIcrc as usize] = fragments / 100_000;
            let sums = fragments / 64 / u64::from(ranks);
            let durations = |ns: u64| {
                let mut h = Histogram::EMPTY;
                h.counts[Histogram::bucket(ns)] = sums;
                h.sum_ns = sums * ns;
                message(&h)
            };
            let rank = |rank: u32| api::RankTiming {
                rank,
                last: if rank == ranks / 2 { sums } else { 0 },
                late: Some(durations(if rank == ranks / 2 {
                    50_000
                } else {
                    900 * u64::from(rank)
                })),
            };
            api::JobStats {
                job: name.into(),
                state: api::JobState::Active.into(),
                values,
                fragment_bytes: 1000.0,
                slots: 256,
                slots_used: 12,
                credit: 128,
                credit_used: 30,
                completion: Some(durations(50_000)),
                ranks: (0..ranks).map(rank).collect(),
            }
        };
        let job = |name: &str, ranks: u32, state: api::JobState| api::Job {
            name: name.into(),
            ranks,
            mtu: 1024,
            message_size: 65_536,
            window: 2,
            rings: 1,
            icrc: "verify".into(),
            order: "in-order".into(),
            state: state.into(),
            memory: 325_632,
            slots: 256,
            epoch: 1,
            flows: (0..ranks)
                .map(|rank| api::Flow {
                    rank,
                    port: format!("port{rank}"),
                    src: format!("10.0.0.{}", rank + 1),
                    ..Default::default()
                })
                .collect(),
            ..Default::default()
        };
        let ring = |name: &str, ranks: u32| api::Ring {
            job: name.into(),
            id: 3,
            cpu: 1,
            active: true,
            ranks,
            mtu: 1024,
            memory: 325_632,
            slots: 256,
            slots_used: 12,
            low: 4711,
            credit: 128,
            credit_used: (0..ranks).map(|r| 30 - r).collect(),
            ..Default::default()
        };
        let port = |n: u32| api::Port {
            name: format!("port{n}"),
            ifindex: 3 + n,
            mac: format!("02:00:00:00:00:0{n}"),
            mtu: 1500,
            up: n != 3,
            xdp: "native".into(),
            flows: 1,
            rx_bytes: second * 250_000_000,
            rx_packets: second * 250_000,
            tx_bytes: second * 250_000_000,
            tx_packets: second * 250_000,
            ..api::Port::default()
        };
        // Now faster, now slower.
        let fragments: u64 = (1..=second).map(|s| 1_000_000 - 300_000 * (s % 4)).sum();
        let mut jobs =
            vec![job("idle", 2, api::JobState::Waiting), job("train", 4, api::JobState::Active)];
        let mut of_jobs = vec![stats("idle", 0, 2), stats("train", fragments, 4)];
        if second > 5 {
            jobs.push(job("alone", 8, api::JobState::Active));
            of_jobs.push(stats("alone", (second - 5) * 100_000, 8));
        }
        of_jobs.push(api::JobStats { values: vec![0; Counter::ALL.len()], ..Default::default() });
        let counter = |c: &Counter| api::Counter {
            name: c.name().into(),
            kind: c.kind().name().into(),
            ..Default::default()
        };
        Reading {
            stats: api::StatsReply {
                counters: Counter::ALL.iter().map(counter).collect(),
                time_ns: second * 1_000_000_000,
                jobs: of_jobs,
                sampled: 64,
            },
            rings: jobs.iter().map(|j| ring(&j.name, j.ranks)).collect(),
            jobs,
            ports: (0..4).map(port).collect(),
        }
    }

    /// After this number of seconds.
    pub fn model(seconds: u64) -> Model {
        let mut model = Model::default();
        (0..=seconds).for_each(|s| model.take(Ok(reading(s)), 1_000_000.0 + s as f64));
        model
    }

    fn names(model: &Model) -> Vec<&str> {
        model.sorted().iter().map(|row| row.job.name.as_str()).collect()
    }

    #[test]
    fn rates_are_of_the_last_second_and_who_is_last_of_the_last_ten() {
        let model = model(8);
        let train = &model.jobs["train"];
        assert_eq!(train.gbps(), 8.0, "second 8 is one of a million fragments");
        let history: Vec<String> = train.history.iter().map(|gbps| format!("{gbps:.1}")).collect();
        assert_eq!(history, ["5.6", "3.2", "0.8", "8.0", "5.6", "3.2", "0.8", "8.0"]);
        assert_eq!(train.sums.straggler(), Some(2));
        assert_eq!(train.sums.ranks[2].last, train.sums.completion.count());
        assert_eq!((train.place(1), train.credit(1)), (Some(("port1", "10.0.0.2")), (29, 128)));
        assert_eq!(model.ports[0].gbps, (2.0, 2.0));
        assert_eq!(model.jobs["idle"].sums.straggler(), None);
        assert_eq!((model.totals(), model.daemon.clone()), ((8.8, 8.8), DaemonState::Up));
        // A job that was created in between appears with its second reading.
        assert_eq!(super::tests::model(6).jobs["alone"].rates, None);
        assert_eq!(model.jobs["alone"].gbps(), 0.8);
    }

    #[test]
    fn the_window_forgets_what_is_older() {
        let mut model = model(30);
        let all = model.jobs["train"].sums.completion.count();
        assert!(all > 100 && model.jobs["train"].windows.len() == WINDOW);
        // The job stands still.
        for s in 31..=31 + WINDOW as u64 {
            let mut still = reading(30);
            still.stats.time_ns = s * 1_000_000_000;
            model.take(Ok(still), s as f64);
        }
        assert_eq!(
            (model.jobs["train"].sums.completion.count(), model.jobs["train"].gbps()),
            (0, 0.0)
        );
    }

    #[test]
    fn keys_move_open_sort_and_end() {
        let mut model = model(8);
        assert_eq!(
            (names(&model), model.selected.as_deref()),
            (vec!["alone", "idle", "train"], Some("idle"))
        );
        assert!(model.key(Key::Down) && model.key(Key::Down));
        assert_eq!(model.selected.as_deref(), Some("train"), "the last line is the last");
        model.key(Key::Sort);
        assert_eq!(
            (names(&model), model.selected().unwrap().0),
            (vec!["train", "alone", "idle"], 0)
        );
        model.key(Key::Sort);
        assert_eq!(names(&model), ["alone", "train", "idle"]);
        model.key(Key::Enter);
        assert_eq!(model.detail, Some(0));
        (0..9).for_each(|_| assert!(model.key(Key::Down)));
        assert_eq!(model.detail, Some(3), "four ranks");
        model.key(Key::Up);
        assert_eq!((model.detail, model.selected.as_deref()), (Some(2), Some("train")));
        model.key(Key::Help);
        assert!(model.help);
        model.key(Key::Back);
        assert_eq!((model.help, model.detail), (false, Some(2)), "help goes first");
        model.key(Key::Back);
        assert_eq!(model.detail, None);
        assert!(!model.key(Key::Quit));
        let mut nothing = Model::default();
        for key in [Key::Up, Key::Down, Key::Enter, Key::Back, Key::Sort] {
            assert!(nothing.key(key) && nothing.detail.is_none());
        }
    }

    #[test]
    fn a_daemon_that_goes_and_comes_back_gives_no_nonsense() {
        let mut model = model(8);
        model.key(Key::Down);
        model.take(Err("no daemon".into()), 2_000.0);
        model.take(Err("no daemon".into()), 2_004.0);
        assert_eq!(model.daemon, DaemonState::Down { why: "no daemon".into(), since: 2_000 });
        assert_eq!(names(&model).len(), 3, "what was there stays in sight");
        // Its counters and its clock start again.
        model.take(Ok(reading(1)), 2_005.0);
        assert_eq!((&model.daemon, &model.jobs["train"].rates), (&DaemonState::Up, &None));
        model.take(Ok(reading(2)), 2_006.0);
        assert_eq!(model.jobs["train"].gbps(), 3.2);
        assert_eq!(model.selected.as_deref(), Some("train"));
    }

    #[test]
    fn a_job_that_ends_closes_its_detail() {
        let mut model = model(8);
        model.selected = Some("alone".into());
        model.key(Key::Enter);
        model.take(Ok(reading(4)), 0.0);
        assert_eq!((model.detail, model.selected.as_deref()), (None, Some("idle")));
        let none = Reading { jobs: Vec::new(), rings: Vec::new(), ports: Vec::new(), ..reading(5) };
        model.take(Ok(none), 1.0);
        assert!(model.selected.is_none() && names(&model).is_empty() && model.ports.is_empty());
    }
}
