//! The cost of a host alone: `cargo xtask bench host`.
//!
//! | module | content |
//! | --- | --- |
//! | this one | settings, and the rows of the table |
//! | [`reflector`] | the link, and the program at its other end that plays box and rank 1 |
//! | [`rank`] | the process of rank 0, which is measured |
//!
//! Rank 0 and its interface's receive thread run on one CPU, the reflector on the other.

pub mod rank;
pub mod reflector;

use std::fmt;
use std::time::Duration;

use anyhow::{Result, ensure};
use netsum_lab::cluster::JobSpec;
use serde::Serialize;

use crate::contest::collective::Collective;
use crate::contest::link::{Link, Wire};
use crate::contest::start::{Peer, is_there, start};
use crate::contest::{Order, median};
use rank::Answer;
use reflector::Reflector;

/// CPU of rank 0, and of the reflector.
pub const RANK_CPU: u32 = 0;
pub const REFLECTOR_CPU: u32 = 1;

/// The amount of measurements.
#[derive(clap::Args, Clone, Debug)]
pub struct Settings {
    /// Transports: udp, xdp.
    #[arg(long, value_delimiter = ',', default_value = "udp,xdp")]
    pub transports: Vec<String>,
    /// Path MTUs. The links' MTU is 1500, or 172 more than a path MTU that needs more.
    #[arg(long, value_delimiter = ',', default_value = "1024,1408,2048,3328")]
    pub mtus: Vec<u32>,
    /// MiB of a vector.
    #[arg(long, default_value_t = 16)]
    pub size: usize,
    /// Rounds of each row, whose median CPU time counts.
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Seconds of a round.
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
    /// Also measure Gloo with two ranks on the two CPUs, at link MTU 1500.
    #[arg(long)]
    pub gloo: bool,
}

/// A row of the table: its median round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub name: String,
    pub mtu: u32,
    /// Bytes of vectors, in Gb/s.
    pub gbps: f64,
    /// CPU seconds for 10^9 bytes of vectors, of the rank and its receive thread.
    pub cpu_per_gb: f64,
    /// Those of the rank's process, in the process and in the kernel for it, and those of the
    /// receive thread; `None` where only the sum is known.
    pub parts_per_gb: Option<[f64; 3]>,
    /// Packets received for each time that one of the rank's threads slept.
    pub packets_per_sleep: Option<f64>,
    /// How much of the time rank and reflector were busy.
    pub rank_busy: f64,
    pub reflector_busy: Option<f64>,
    /// Over all rounds.
    pub fallbacks: u64,
    pub retransmissions: u64,
}

/// The median rows of transports and path MTUs.
#[derive(Debug, Serialize)]
pub struct Figures {
    pub mib: usize,
    pub rows: Vec<Row>,
}

/// A round of the rank, with the CPU times of both receive threads.
#[derive(Clone, Debug)]
pub struct Round {
    pub answer: Answer,
    pub receive: f64,
    pub reflector: f64,
}

impl Round {
    fn cpu(&self) -> f64 {
        self.answer.user + self.answer.system + self.receive
    }

    fn cpu_per_gb(&self) -> f64 {
        self.cpu() / self.answer.gigabytes()
    }
}

impl Row {
    fn new(name: &str, mtu: u32, mut rounds: Vec<Round>) -> Self {
        rounds.sort_by(|a, b| a.cpu_per_gb().total_cmp(&b.cpu_per_gb()));
        let count = |of: fn(&Answer) -> u64| rounds.iter().map(|round| of(&round.answer)).sum();
        let (fallbacks, retransmissions) = (count(|a| a.fallbacks), count(|a| a.retransmissions));
        let round = &rounds[rounds.len() / 2];
        let Answer { user, system, seconds, packets, sleeps, .. } = round.answer;
        let gb = round.answer.gigabytes();
        Self {
            name: name.to_owned(),
            mtu,
            gbps: gb * 8.0 / seconds,
            cpu_per_gb: round.cpu_per_gb(),
            parts_per_gb: Some([user, system, round.receive].map(|part| part / gb)),
            packets_per_sleep: Some(packets as f64 / sleeps.max(1) as f64),
            rank_busy: round.cpu() / seconds,
            reflector_busy: Some(round.reflector / seconds),
            fallbacks,
            retransmissions,
        }
    }
}

/// The head of the table.
pub const HEAD: [&str; 2] = [
    "                   path          a core      CPU s per GB       receive  packets  rank  \
     reflector  fell",
    "transport           MTU   Gb/s     Gb/s    all   user system   thread  a sleep  busy       \
     busy  back retrans",
];

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, mtu, gbps, cpu_per_gb, rank_busy, fallbacks, retransmissions, .. } = self;
        let or_none = |x: Option<f64>, digits| x.map_or("-".into(), |x| format!("{x:.digits$}"));
        let [user, system, receive] =
            [0, 1, 2].map(|i| or_none(self.parts_per_gb.map(|parts| parts[i]), 2));
        let sleep = or_none(self.packets_per_sleep, 1);
        let reflector = self.reflector_busy.map_or("-".into(), |x| format!("{:.0} %", 100.0 * x));
        write!(
            f,
            "{name:<17} {mtu:>5} {gbps:>6.2} {:>8.2} {cpu_per_gb:>6.2} {user:>6} {system:>6} \
             {receive:>8} {sleep:>8} {:>3.0} % {reflector:>10} {fallbacks:>5} {retransmissions:>7}",
            8.0 / cpu_per_gb,
            100.0 * rank_busy,
        )
    }
}

/// Measures all rows; `tell` gets each when it is there.
///
/// # Errors
/// If a rank fails, or a sum is wrong.
pub fn measure(settings: &Settings, tell: impl Fn(&Row)) -> Result<Figures> {
    let mut rows = Vec::new();
    for transport in &settings.transports {
        ensure!(["udp", "xdp"].contains(&&**transport), "transport {transport:?}: udp or xdp");
        for &mtu in &settings.mtus {
            let mut reflector = Reflector::start(mtu, transport == "xdp")?;
            // The first round warms up.
            let round = |seconds| reflector.round(settings.size << 20, seconds);
            let seconds = std::iter::once(settings.seconds / 4.0)
                .chain(std::iter::repeat_n(settings.seconds, settings.rounds.max(1)));
            let rounds = seconds.map(round).collect::<Result<Vec<_>>>()?;
            rows.push(Row::new(transport, mtu, rounds[1..].to_vec()));
            tell(&rows[rows.len() - 1]);
        }
    }
    if settings.gloo {
        for offload in [true, false] {
            rows.push(gloo(settings, offload)?);
            tell(&rows[rows.len() - 1]);
        }
    }
    Ok(Figures { mib: settings.size, rows })
}

/// Gloo with two ranks, half of whose CPU time is one's. A veth receives on the CPU that sends, so
/// their processes' time includes that, and the bridge between them.
fn gloo(settings: &Settings, offload: bool) -> Result<Row> {
    let who = Peer::Gloo { offload };
    is_there(who)?;
    let wire = Wire { mtu: 1500, rate: Link(None), loss: 0.0, uplinks: None, ranks_per_host: 1 };
    let mut contestant = start(who, &JobSpec::new("host", 2), wire)?;
    let len = (settings.size << 20) / 4;
    contestant.run(&Order { collective: Collective::AllReduce, len, iters: 3, setting: 0 })?;
    let (mut cpu, mut times) = (Vec::new(), Vec::new());
    let until = std::time::Instant::now()
        + Duration::from_secs_f64(settings.seconds * settings.rounds as f64);
    while cpu.is_empty() || std::time::Instant::now() < until {
        let answer = contestant
            .run(&Order { collective: Collective::AllReduce, len, iters: 10, setting: 0 })?
            .answer;
        let seconds = answer.micros.iter().sum::<f64>() / 1e6;
        times.push(seconds / 10.0);
        cpu.push(answer.cpu / 2.0 / 10.0);
    }
    let (seconds, cpu, gb) = (median(times), median(cpu), len as f64 * 4.0 / 1e9);
    Ok(Row {
        name: format!("{}, 2 ranks", who.name()).replace("no-offload", "cut"),
        mtu: 1500,
        gbps: gb * 8.0 / seconds,
        cpu_per_gb: cpu / gb,
        parts_per_gb: None,
        packets_per_sleep: None,
        rank_busy: cpu / seconds,
        reflector_busy: None,
        fallbacks: 0,
        retransmissions: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(cpu: f64, fallbacks: u64) -> Round {
        let answer = Answer {
            bytes: 2_000_000_000,
            seconds: 8.0,
            user: cpu / 2.0,
            system: cpu / 4.0,
            packets: 3000,
            sleeps: 100,
            fallbacks,
            retransmissions: 1,
        };
        Round { answer, receive: cpu / 4.0, reflector: 2.0 }
    }

    #[test]
    fn a_row_has_the_median_round_and_the_failures_of_all() {
        let row = Row::new("udp", 1408, vec![round(7.0, 0), round(4.0, 1), round(5.0, 0)]);
        assert_eq!((row.gbps, row.cpu_per_gb), (2.0, 2.5));
        assert_eq!(row.parts_per_gb, Some([1.25, 0.625, 0.625]));
        assert_eq!((row.packets_per_sleep, row.rank_busy), (Some(30.0), 0.625));
        assert_eq!((row.reflector_busy, row.fallbacks, row.retransmissions), (Some(0.25), 1, 3));
        let text = row.to_string();
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(
            words,
            [
                "udp", "1408", "2.00", "3.20", "2.50", "1.25", "0.62", "0.62", "30.0", "62", "%",
                "25", "%", "1", "3"
            ]
        );
    }

    #[test]
    fn an_unknown_part_is_a_dash() {
        let row = Row {
            parts_per_gb: None,
            reflector_busy: None,
            ..Row::new("gloo, 2 ranks", 1500, vec![round(4.0, 0)])
        };
        assert_eq!(row.to_string().matches(" -").count(), 4, "{row}");
    }
}
