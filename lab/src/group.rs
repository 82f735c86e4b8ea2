//! The ranks of a job, each in a process of its own: their settings, orders and answers, and the
//! check of their results.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use netsum_worker::{AdapterRetry, Bootstrap, CommConfig, Secret, Transport, reference_sum};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::data;
use crate::job::JobSpec;
use crate::process::{Running, TIMEOUT};

/// Settings with which `netsum-rank` is started.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankSpec {
    pub rank: u32,
    pub ranks: u32,
    pub ip: IpAddr,
    /// Address of the daemon's API for workers. Without one, the ranks find each other by `peers`.
    pub controller: Option<String>,
    pub job: String,
    pub token: String,
    pub peers: Vec<IpAddr>,
    /// Path MTU, without a daemon.
    pub mtu: u32,
    /// Message size, without a daemon.
    pub message_size: u32,
    /// Window, without a daemon.
    pub window: u32,
    /// Rings, without a daemon.
    pub rings: u32,
    /// Silence after which a rank is considered dead, in milliseconds.
    pub timeout_ms: u64,
    /// How long the rank waits for others when it connects, in milliseconds.
    pub connect_timeout_ms: u64,
    /// Retry settings of an RDMA adapter.
    pub retry: (u8, u8),
    /// Use AF_XDP; otherwise the rank uses what is available.
    pub xdp: bool,
    /// `auto`, `on` or `off`; empty for the default.
    pub hierarchy: String,
    /// `secret` of the settings; empty for none.
    pub secret: String,
}

impl RankSpec {
    /// Rank `rank` of a job, at `peers[rank]`. `daemon` has the address of a daemon, if there is
    /// one, and the job's token.
    pub fn new(job: &JobSpec, rank: usize, peers: &[IpAddr], daemon: Option<(&str, &str)>) -> Self {
        let (controller, token) = daemon.unzip();
        Self {
            rank: rank as u32,
            ranks: job.ranks,
            ip: peers[rank],
            controller: controller.map(str::to_owned),
            job: job.name.clone(),
            token: token.unwrap_or_default().to_owned(),
            peers: peers.to_vec(),
            mtu: job.mtu,
            message_size: job.message_size,
            window: job.window,
            rings: job.rings,
            timeout_ms: job.timeout.as_millis() as u64,
            connect_timeout_ms: job.connect_timeout.as_millis() as u64,
            retry: job.retry,
            xdp: job.xdp.contains(&(rank as u32)),
            hierarchy: job.hierarchy.to_owned(),
            secret: job.secret.to_owned(),
        }
    }

    /// The same settings for the library.
    pub fn config(&self) -> CommConfig {
        let bootstrap = match &self.controller {
            Some(address) => Bootstrap::Controller {
                address: address.clone(),
                job: self.job.clone(),
                token: self.token.clone(),
            },
            None => Bootstrap::Static {
                peers: self.peers.clone(),
                mtu: self.mtu,
                message_size: self.message_size,
                window: self.window,
                rings: self.rings,
            },
        };
        let mut config = CommConfig::new(self.rank, self.ranks, self.ip, bootstrap);
        config.timeout = Duration::from_millis(self.timeout_ms);
        config.connect_timeout = Duration::from_millis(self.connect_timeout_ms);
        config.retry = AdapterRetry { timeout: self.retry.0, count: self.retry.1 };
        config.hierarchy = self.hierarchy.parse().unwrap_or_default();
        config.secret = Secret::new(&self.secret).ok();
        if self.xdp {
            config.transport = Transport::Xdp;
        }
        config
    }
}

/// Orders to `netsum-rank`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Reduce generated data.
    AllReduce {
        /// `i32` or `f32`.
        dtype: String,
        len: usize,
        /// Seed of the data.
        seed: u64,
        /// File for the result's bytes. Without one, as in a virtual machine, they are in the
        /// answer.
        out: Option<PathBuf>,
        /// Wait for the others first: otherwise a rank's timer runs while another rank still
        /// generates its data.
        together: bool,
    },
    /// Reduce several generated vectors, all in flight at once.
    InFlight {
        /// Type and elements of each.
        operations: Vec<(String, usize)>,
        /// Seed of the first vector's data; each further vector's seed is one higher.
        seed: u64,
        /// File for the bytes of all results, in order.
        out: PathBuf,
    },
    /// Drop the communicator, and connect a new one to the same job.
    Reconnect,
    /// Drop the part of an earlier split, split the communicator, and sum in it and in the part at
    /// the same time. The answer's result has the rank and the ranks of the part and both sums, of
    /// two to the power of each rank.
    Split { color: Option<u32>, key: i32 },
}

/// Answers of `netsum-rank`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RankReply {
    Done(Outcome),
    Error(String),
}

impl RankReply {
    fn transport(self) -> String {
        match self {
            Self::Done(outcome) => outcome.transport,
            Self::Error(_) => String::new(),
        }
    }
}

/// Outcome of an operation; see `netsum_worker::Report` and `netsum_worker::Statistics`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// `box` or `ring`.
    pub mode: String,
    /// Sums verified by their check lanes.
    pub verified: u64,
    /// Packets sent again; 0 over an RDMA adapter, which does not report them.
    pub retransmissions: u64,
    pub micros: u64,
    /// Fallbacks to the ring, since the start.
    pub fallbacks: u64,
    /// Messages whose sum was wrong, since the start.
    pub wrong: u64,
    /// Packets that had met congestion, since the start.
    pub marked: u64,
    /// How often all ranks have reconnected, since the start.
    pub reconnects: u64,
    /// Connections that an adapter gave up and that were restarted, since the start.
    pub restarts: u64,
    /// Whether the ranks of each host added their data first.
    pub hierarchical: bool,
    /// Bytes of packets that the rank has sent, since the start.
    pub bytes_sent: u64,
    /// The rank's transport.
    pub transport: String,
    /// The result's bytes in hexadecimal digits, if requested; of a split, its numbers.
    pub result: Option<String>,
}

/// The running ranks of a job.
#[derive(Debug)]
pub struct Group {
    job: JobSpec,
    ranks: Vec<Option<Running>>,
    /// Each rank's host and settings.
    homes: Vec<(usize, RankSpec)>,
    /// Which ranks share no files with the test.
    elsewhere: Vec<bool>,
    files: u32,
    together: bool,
    folder: TempDir,
    /// Each rank's transport.
    pub transports: Vec<String>,
}

/// A rank that has been started.
#[derive(Debug)]
pub(crate) struct Started {
    pub running: Running,
    pub host: usize,
    pub spec: RankSpec,
    /// Whether it shares no files with the test.
    pub elsewhere: bool,
}

impl Group {
    /// Waits until all ranks are connected.
    pub(crate) fn new(job: &JobSpec, started: Vec<Started>) -> Result<Self> {
        let mut group = Self {
            job: job.clone(),
            ranks: Vec::new(),
            homes: Vec::new(),
            elsewhere: Vec::new(),
            files: 0,
            together: false,
            folder: tempfile::tempdir()?,
            transports: Vec::new(),
        };
        for Started { running, host, spec, elsewhere } in started {
            group.ranks.push(Some(running));
            group.homes.push((host, spec));
            group.elsewhere.push(elsewhere);
        }
        let answers = group.answers(TIMEOUT)?;
        let errors: String = answers
            .iter()
            .filter_map(|(rank, answer)| match answer {
                RankReply::Done(_) => None,
                RankReply::Error(error) => Some(format!("rank {rank} cannot connect: {error}\n")),
            })
            .collect();
        ensure!(errors.is_empty(), "{errors}{}", group.log());
        group.transports = answers.into_iter().map(|(_, answer)| answer.transport()).collect();
        Ok(group)
    }

    /// Runs all-reduces that the last rank starts late. Each fits into a window, and so all of it
    /// waits.
    pub fn work(&mut self, rounds: u64) -> Result<()> {
        for seed in 0..rounds {
            self.order_all_reduce_last_late("i32", 50_000, seed, Duration::from_millis(60))?;
            let answers = self.answers(TIMEOUT)?;
            ensure!(answers.len() == self.ranks.len(), "{answers:?}");
        }
        Ok(())
    }

    /// Makes all ranks wait for each other before each operation. Then only the network can delay
    /// an operation.
    pub fn start_together(&mut self) {
        self.together = true;
    }

    /// Ends the effect of [`Group::start_together`].
    pub fn start_as_told(&mut self) {
        self.together = false;
    }

    /// Kills a rank as `kill -9` does.
    pub fn kill(&mut self, rank: usize) -> Result<()> {
        let victim = self.ranks[rank].take().context("that rank has gone already")?;
        victim.signal(Signal::SIGKILL)
    }

    /// Kills all ranks, and waits until they have ended: then others can use their addresses.
    pub fn end(&mut self) {
        self.ranks.iter_mut().for_each(|rank| drop(rank.take()));
    }

    /// Starts a killed rank again, by a function that starts one on a host. It answers when all
    /// ranks have reconnected.
    pub(crate) fn start_again(
        &mut self,
        rank: usize,
        start: impl FnOnce(usize, &RankSpec) -> Result<Running>,
    ) -> Result<()> {
        let (host, spec) = &self.homes[rank];
        self.ranks[rank] = Some(start(*host, spec)?);
        Ok(())
    }

    /// Orders a rank to reconnect.
    pub fn order_reconnect(&mut self, rank: usize) -> Result<()> {
        self.order(rank, &Order::Reconnect)
    }

    fn order(&mut self, rank: usize, order: &Order) -> Result<()> {
        let running = self.ranks[rank].as_mut().context("that rank has gone")?;
        running.send_line(&serde_json::to_string(order)?)
    }

    /// Splits the communicators of all ranks by these colors, with keys that reverse the order.
    pub fn split(&mut self, colors: &[Option<u32>]) -> Result<Vec<Outcome>> {
        for (rank, color) in colors.iter().enumerate() {
            self.order(rank, &Order::Split { color: *color, key: -(rank as i32) })?;
        }
        let answers = self.answers(2 * TIMEOUT)?.into_iter();
        answers
            .map(|(rank, answer)| match answer {
                RankReply::Done(outcome) => Ok(outcome),
                RankReply::Error(error) => bail!("rank {rank}: {error}"),
            })
            .collect()
    }

    pub fn answer(&mut self, rank: usize, timeout: Duration) -> Result<RankReply> {
        let line = self.ranks[rank].as_mut().context("that rank has gone")?.line(timeout)?;
        serde_json::from_str(&line).with_context(|| line.clone())
    }

    /// Orders all ranks to reduce generated data, and does not wait. Returns the files for their
    /// results.
    pub fn order_all_reduce(&mut self, dtype: &str, len: usize, seed: u64) -> Result<Vec<PathBuf>> {
        self.order_all_reduce_last_late(dtype, len, seed, Duration::ZERO)
    }

    /// The same, but the last rank gets its order with a delay.
    pub fn order_all_reduce_last_late(
        &mut self,
        dtype: &str,
        len: usize,
        seed: u64,
        late: Duration,
    ) -> Result<Vec<PathBuf>> {
        self.files += 1;
        let (mut files, last) = (Vec::new(), self.ranks.len() - 1);
        for (rank, running) in self.ranks.iter_mut().enumerate() {
            if rank == last {
                std::thread::sleep(late);
            }
            let out = self.folder.path().join(format!("{}-{rank}", self.files));
            let order = Order::AllReduce {
                dtype: dtype.into(),
                len,
                seed,
                out: (!self.elsewhere[rank]).then(|| out.clone()),
                together: self.together,
            };
            if let Some(running) = running {
                running.send_line(&serde_json::to_string(&order)?)?;
            }
            files.push(out);
        }
        Ok(files)
    }

    /// The next answer of every live rank.
    pub fn answers(&mut self, timeout: Duration) -> Result<Vec<(usize, RankReply)>> {
        let mut answers = Vec::new();
        for (rank, running) in self.ranks.iter_mut().enumerate() {
            if let Some(running) = running {
                let line = running.line(timeout)?;
                answers.push((rank, serde_json::from_str(&line).with_context(|| line.clone())?));
            }
        }
        Ok(answers)
    }

    /// All ranks reduce generated data; compares every result bit by bit with a sum computed here.
    pub fn all_reduce(&mut self, dtype: &str, len: usize, seed: u64) -> Result<Vec<Outcome>> {
        let files = self.order_all_reduce(dtype, len, seed)?;
        self.check_all_reduce(dtype, len, seed, &files)
    }

    /// Waits for the operation that [`Group::order_all_reduce`] has started, and compares.
    pub fn check_all_reduce(
        &mut self,
        dtype: &str,
        len: usize,
        seed: u64,
        files: &[PathBuf],
    ) -> Result<Vec<Outcome>> {
        let mut outcomes = Vec::new();
        let mut errors = Vec::new();
        for (rank, answer) in self.answers(2 * TIMEOUT)? {
            match answer {
                RankReply::Done(mut outcome) => {
                    if let Some(result) = outcome.result.take() {
                        std::fs::write(&files[rank], from_hex(&result)?)?;
                    }
                    outcomes.push(outcome);
                }
                RankReply::Error(error) => errors.push(format!("rank {rank}: {error}")),
            }
        }
        ensure!(errors.is_empty(), "{}", errors.join("\n"));
        let expected = expected(dtype, len, seed, &self.job)?;
        for (rank, file) in files.iter().enumerate() {
            let got = std::fs::read(file)?;
            ensure!(
                got.len() == expected.len(),
                "rank {rank}: {} bytes, not {}",
                got.len(),
                expected.len()
            );
            let (got, expected) = (got.as_chunks::<4>().0, expected.as_chunks::<4>().0);
            let wrong: Vec<usize> = (0..len).filter(|&i| got[i] != expected[i]).collect();
            if let Some(&first) = wrong.first() {
                bail!(
                    "rank {rank}, {dtype}: {} of {len} elements are wrong; element {first} has \
                     the bits {:02x?}, not {:02x?}",
                    wrong.len(),
                    got[first],
                    expected[first]
                );
            }
            std::fs::remove_file(file)?;
        }
        Ok(outcomes)
    }

    /// Orders all ranks to reduce several generated vectors in flight at once, and does not wait.
    /// Returns the files for their results.
    pub fn order_in_flight(
        &mut self,
        operations: &[(&str, usize)],
        seed: u64,
    ) -> Result<Vec<PathBuf>> {
        self.files += 1;
        let mut files = Vec::new();
        for (rank, running) in self.ranks.iter_mut().enumerate() {
            let out = self.folder.path().join(format!("{}-{rank}", self.files));
            let operations =
                operations.iter().map(|(dtype, len)| ((*dtype).to_owned(), *len)).collect();
            let order = Order::InFlight { operations, seed, out: out.clone() };
            if let Some(running) = running {
                running.send_line(&serde_json::to_string(&order)?)?;
            }
            files.push(out);
        }
        Ok(files)
    }

    /// The same, and waits; compares every result bit by bit with a sum computed here. Returns the
    /// last operation's outcome at each rank.
    pub fn in_flight(&mut self, operations: &[(&str, usize)], seed: u64) -> Result<Vec<Outcome>> {
        let files = self.order_in_flight(operations, seed)?;
        let mut outcomes = Vec::new();
        for (rank, answer) in self.answers(2 * TIMEOUT)? {
            match answer {
                RankReply::Done(outcome) => outcomes.push(outcome),
                RankReply::Error(error) => bail!("rank {rank}: {error}"),
            }
        }
        let mut all = Vec::new();
        for (n, (dtype, len)) in operations.iter().enumerate() {
            all.extend(expected(dtype, *len, seed + n as u64, &self.job)?);
        }
        for (rank, file) in files.iter().enumerate() {
            let got = std::fs::read(file)?;
            ensure!(got.len() == all.len(), "rank {rank}: {} bytes, not {}", got.len(), all.len());
            if let Some(at) = (0..got.len()).find(|at| got[*at] != all[*at]) {
                bail!("rank {rank}: byte {at} of all results is wrong");
            }
            std::fs::remove_file(file)?;
        }
        Ok(outcomes)
    }

    /// Process IDs of the live ranks.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        self.ranks.iter().flatten().map(Running::pid)
    }

    /// The ranks' standard error.
    pub fn log(&self) -> String {
        self.ranks.iter().flatten().map(Running::stderr).collect()
    }
}

/// Bytes as hexadecimal digits, two for each.
pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Result<Vec<u8>> {
    let byte = |digits: &[u8; 2]| Ok(u8::from_str_radix(str::from_utf8(digits)?, 16)?);
    text.as_bytes().as_chunks::<2>().0.iter().map(byte).collect()
}

/// The bytes of the right result.
fn expected(dtype: &str, len: usize, seed: u64, job: &JobSpec) -> Result<Vec<u8>> {
    let layout = job.layout();
    match dtype {
        "i32" => {
            let all: Vec<_> = (0..job.ranks).map(|rank| data::ints(rank, seed, len)).collect();
            // Plain addition, independent of the library's own reference.
            let sum = (0..len).map(|i| all.iter().fold(0i32, |sum, x| sum.wrapping_add(x[i])));
            Ok(sum.flat_map(i32::to_le_bytes).collect())
        }
        "f32" => {
            let all: Vec<_> = (0..job.ranks).map(|rank| data::floats(rank, seed, len)).collect();
            let slices: Vec<_> = all.iter().map(|x| &x[..]).collect();
            let sum = reference_sum(&slices, &layout);
            for (i, sum) in sum.iter().enumerate() {
                // The reference itself must be near the sum in double precision: 8 ranks,
                // magnitudes below 32.
                let exact: f64 = all.iter().map(|x| f64::from(x[i])).sum();
                ensure!((f64::from(*sum) - exact).abs() < 1e-5, "element {i}: {sum}, not {exact}");
            }
            Ok(sum.into_iter().flat_map(f32::to_le_bytes).collect())
        }
        other => bail!("no data type {other}"),
    }
}
