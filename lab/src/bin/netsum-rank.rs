//! A rank for tests: carries out orders from standard input, one JSON object a line, and answers in
//! the same form.

use std::io::{BufRead, Write};
use std::path::Path;

use anyhow::{Context, Result};
use netsum_lab::cluster::{Order, Outcome, RankReply, RankSpec, to_hex};
use netsum_lab::data;
use netsum_worker::{CommConfig, Communicator, Element, Error, Pending, Report};

fn main() -> Result<()> {
    env_logger::init();
    let spec: RankSpec =
        serde_json::from_str(&std::env::args().nth(1).context("a RankSpec is missing")?)?;
    let config = spec.config();
    let Some(mut communicator) = connect(&config)? else { return Ok(()) };
    let mut part = None;
    for line in std::io::stdin().lock().lines() {
        match serde_json::from_str(&line?)? {
            Order::Reconnect => {
                drop(communicator);
                let Some(another) = connect(&config)? else { return Ok(()) };
                communicator = another;
            }
            Order::Split { color, key } => {
                drop(part.take());
                let split = split(&mut communicator, color, key, spec.rank);
                answer(&match split {
                    Ok((outcome, made)) => {
                        part = made;
                        RankReply::Done(outcome)
                    }
                    Err(error) => RankReply::Error(error.to_string()),
                })?;
            }
            Order::InFlight { operations, seed, out } => {
                answer(&in_flight(&mut communicator, spec.rank, &operations, seed, &out)?)?;
            }
            order => answer(&obey(&mut communicator, spec.rank, &order)?)?,
        }
    }
    Ok(())
}

/// Connects, and reports the result; `None` if it failed.
fn connect(config: &CommConfig) -> Result<Option<Communicator>> {
    Ok(match Communicator::connect(config.clone()) {
        Ok(communicator) => {
            let transport = communicator.transport().to_owned();
            answer(&RankReply::Done(Outcome { transport, ..Outcome::default() }))?;
            Some(communicator)
        }
        Err(error) => {
            answer(&RankReply::Error(error.to_string()))?;
            None
        }
    })
}

fn answer(answer: &RankReply) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(answer)?)?;
    Ok(out.flush()?)
}

fn obey(communicator: &mut Communicator, rank: u32, order: &Order) -> Result<RankReply> {
    let Order::AllReduce { dtype, len, seed, out, together } = order else {
        anyhow::bail!("not here: {order:?}")
    };
    let (reduced, bytes) = match &**dtype {
        "i32" => {
            reduce(communicator, *together, data::ints(rank, *seed, *len), |x| x.to_le_bytes())
        }
        "f32" => {
            reduce(communicator, *together, data::floats(rank, *seed, *len), |x| x.to_le_bytes())
        }
        other => anyhow::bail!("no data type {other}"),
    };
    let result = match out {
        Some(file) => std::fs::write(file, bytes).map(|()| None)?,
        None => Some(to_hex(&bytes)),
    };
    Ok(match reduced {
        Ok(report) => RankReply::Done(outcome(communicator, &report, result)),
        Err(error) => RankReply::Error(error.to_string()),
    })
}

fn outcome(communicator: &Communicator, report: &Report, result: Option<String>) -> Outcome {
    let statistics = communicator.statistics();
    Outcome {
        mode: report.mode.name().to_owned(),
        verified: report.verified,
        retransmissions: report.retransmissions.unwrap_or(0),
        micros: report.elapsed.as_micros() as u64,
        fallbacks: statistics.fallbacks,
        wrong: statistics.wrong,
        marked: statistics.traffic.map_or(0, |t| t.congestion_marks),
        restarts: statistics.restarts,
        reconnects: statistics.reconnects,
        hierarchical: report.hierarchical,
        bytes_sent: statistics.traffic.map_or(0, |t| t.bytes_sent),
        transport: communicator.transport().to_owned(),
        result,
    }
}

/// Splits the communicator, and sums in it and in the part at the same time.
fn split(
    communicator: &mut Communicator,
    color: Option<u32>,
    key: i32,
    rank: u32,
) -> Result<(Outcome, Option<Communicator>), Error> {
    const LEN: usize = 50_000;
    let mut part = communicator.split(color, key)?;
    let whole = communicator.all_reduce_async(vec![1i32 << rank; LEN])?;
    let (mut numbers, mut of_part) = (String::new(), Outcome::default());
    if let Some(part) = &mut part {
        let mut sums = vec![1i32 << rank; LEN];
        let report = part.all_reduce(&mut sums)?;
        of_part = outcome(part, &report, None);
        let (own, ranks) = (part.rank(), part.ranks());
        numbers = format!("rank {own} of {ranks}, {} in the part, ", only(&sums));
    }
    let (sums, _) = whole.wait()?;
    let result = Some(numbers + &format!("{} in all", only(&sums)));
    Ok((Outcome { result, ..of_part }, part))
}

/// The value of all elements; -1 if they differ.
fn only(elements: &[i32]) -> i32 {
    if elements.iter().all(|x| *x == elements[0]) { elements[0] } else { -1 }
}

/// An all-reduce in flight.
enum Handle {
    Ints(Pending<Vec<i32>>),
    Floats(Pending<Vec<f32>>),
}

impl Handle {
    /// The result's bytes.
    fn wait(self) -> Result<(Vec<u8>, Report), Error> {
        fn bytes<T, const N: usize>(x: &[T], bytes: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
            x.iter().flat_map(bytes).collect()
        }
        match self {
            Self::Ints(pending) => pending.wait().map(|(x, r)| (bytes(&x, |x| x.to_le_bytes()), r)),
            Self::Floats(pending) => {
                pending.wait().map(|(x, r)| (bytes(&x, |x| x.to_le_bytes()), r))
            }
        }
    }
}

/// Starts all operations, then waits for all. The answer is the last one's outcome, or the errors
/// of all, one a line.
fn in_flight(
    communicator: &mut Communicator,
    rank: u32,
    operations: &[(String, usize)],
    seed: u64,
    out: &Path,
) -> Result<RankReply> {
    let mut handles = Vec::new();
    for ((dtype, len), seed) in operations.iter().zip(seed..) {
        handles.push(match &**dtype {
            "i32" => communicator.all_reduce_async(data::ints(rank, seed, *len)).map(Handle::Ints),
            "f32" => {
                communicator.all_reduce_async(data::floats(rank, seed, *len)).map(Handle::Floats)
            }
            other => anyhow::bail!("no data type {other}"),
        });
    }
    let (mut all, mut last, mut errors) = (Vec::new(), None, Vec::new());
    for handle in handles {
        match handle.and_then(Handle::wait) {
            Ok((bytes, report)) => {
                all.extend(bytes);
                last = Some(report);
            }
            Err(error) => errors.push(error.to_string()),
        }
    }
    std::fs::write(out, all)?;
    Ok(match last {
        Some(report) if errors.is_empty() => RankReply::Done(outcome(communicator, &report, None)),
        _ => RankReply::Error(errors.join("\n")),
    })
}

/// Reduces; returns the result and the slice's bytes.
fn reduce<T: Element>(
    communicator: &mut Communicator,
    together: bool,
    mut data: Vec<T>,
    bytes: impl Fn(&T) -> [u8; 4],
) -> (Result<Report, Error>, Vec<u8>) {
    let ready = if together { communicator.barrier() } else { Ok(()) };
    let result = ready.and_then(|()| communicator.all_reduce(&mut data));
    (result, data.iter().flat_map(bytes).collect())
}
