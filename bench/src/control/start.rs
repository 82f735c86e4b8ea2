//! The cost of starting an operation: two ranks over loopback, without a box.

use std::net::IpAddr;
use std::sync::{Arc, Barrier, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use netsum_worker::{Bootstrap, CommConfig, Communicator, Error};
use serde::Serialize;

/// Operations in a round.
const OPERATIONS: usize = 20;
/// The time between two starts.
const PACE: Duration = Duration::from_millis(4);
/// The delay of the other rank's start, if it is late.
const LATE: Duration = Duration::from_secs(1);
const ELEMENTS: usize = 4096;

/// The time of the call that starts an operation.
#[derive(Serialize)]
pub struct Row {
    /// Whether another thread waits for the operations.
    waiter: bool,
    /// Whether the other rank is late.
    late: bool,
    starts: usize,
    p50_us: f64,
    p99_us: f64,
    most_us: f64,
}

fn connect(rank: u32) -> Result<Communicator, Error> {
    let [high, low, ..] = std::process::id().to_le_bytes();
    let peers: Vec<IpAddr> = [1, 2].map(|last| [127, high | 1, low, last].into()).to_vec();
    let (ip, mtu, message_size) = (peers[rank as usize], 1024, 16384);
    let bootstrap = Bootstrap::Static { peers, mtu, message_size, window: 4, rings: 1 };
    Communicator::connect(CommConfig::new(rank, 2, ip, bootstrap))
}

/// One rank's part; returns the time of each start.
fn work(rank: u32, row: &Row, rounds: usize, begin: &Barrier) -> Result<Vec<Duration>, Error> {
    let mut comm = connect(rank)?;
    let mut took = Vec::with_capacity(rounds * OPERATIONS);
    for _ in 0..rounds {
        begin.wait();
        if rank == 1 && row.late {
            thread::sleep(LATE);
        }
        thread::scope(|scope| {
            let (tell, told) = mpsc::channel::<Arc<netsum_worker::Pending<Vec<f32>>>>();
            if row.waiter {
                scope.spawn(move || {
                    told.iter().for_each(|work| while !work.wait_for(Duration::from_secs(1)) {})
                });
            }
            let mut all = Vec::with_capacity(OPERATIONS);
            for _ in 0..OPERATIONS {
                let data = vec![1.0f32; ELEMENTS];
                let started = Instant::now();
                let work = Arc::new(comm.all_reduce_async(data)?);
                took.push(started.elapsed());
                // Without a waiter the channel has no receiver.
                let _ = tell.send(Arc::clone(&work));
                all.push(work);
                thread::sleep(PACE);
            }
            drop(tell);
            for work in all {
                while !work.wait_for(Duration::from_secs(1)) {}
                work.take().unwrap_or(Err(Error::Closed))?;
            }
            Ok::<(), Error>(())
        })?;
    }
    Ok(took)
}

fn measure(row: &mut Row, rounds: usize) -> Result<()> {
    let begin = Barrier::new(2);
    let mut took = thread::scope(|scope| {
        let (row, begin) = (&*row, &begin);
        let other = scope.spawn(move || work(1, row, rounds, begin));
        let took = work(0, row, rounds, begin)?;
        other.join().map_err(|_| Error::Closed)?.map(|_| took)
    })?;
    took.sort();
    let at =
        |share: f64| took[((took.len() - 1) as f64 * share).round() as usize].as_secs_f64() * 1e6;
    (row.starts, row.p50_us, row.p99_us, row.most_us) = (took.len(), at(0.5), at(0.99), at(1.0));
    Ok(())
}

/// Measures all cases, and prints them.
///
/// # Errors
/// If the ranks do not connect, or an operation fails.
pub fn table(rounds: usize) -> Result<Vec<Row>> {
    println!(
        "Starting an all-reduce of {} KiB, {OPERATIONS} times, {PACE:?} apart; 2 ranks over \
         loopback, us.\n",
        ELEMENTS * 4 / 1024
    );
    println!("thread that waits   other rank     starts    p50    p99   most");
    let mut rows = Vec::new();
    for (waiter, late) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut row = Row { waiter, late, starts: 0, p50_us: 0.0, p99_us: 0.0, most_us: 0.0 };
        measure(&mut row, rounds)?;
        let Row { starts, p50_us, p99_us, most_us, .. } = row;
        let (waiter, late) =
            (if waiter { "yes" } else { "no" }, if late { "1 s late" } else { "in time" });
        println!(
            "{waiter:<17}   {late:<12} {starts:>8} {p50_us:>6.0} {p99_us:>6.0} {most_us:>6.0}"
        );
        rows.push(row);
    }
    Ok(rows)
}
