//! A whole netsum in a lab: the daemon on the box, jobs, and ranks on the hosts.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use netsum_aggregator::dataplane::FlowSpec;
use netsum_worker::{Layout, reference_sum};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tempfile::TempDir;

use crate::process::Running;
use crate::{Lab, LabSpec, data, janitor, netns};

/// How long anything may take that should be quick.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// TCP port of the workers' API on the box.
pub const WORKER_PORT: u16 = 4790;

/// One of the project's programs, beside the test programs in cargo's target folder.
///
/// # Errors
/// If it has not been built.
pub fn program(name: &str) -> Result<PathBuf> {
    let me = std::env::current_exe()?;
    // <target>/<profile>/deps/<test>, or <target>/<profile>/<program>.
    let found = me.ancestors().skip(1).take(2).map(|folder| folder.join(name)).find(|path| path.is_file());
    found.with_context(|| format!("no program `{name}` near {}: run `cargo build --workspace`", me.display()))
}

/// What a job is created with.
#[derive(Clone, Debug)]
pub struct JobSpec {
    /// Name.
    pub name: String,
    /// World size.
    pub ranks: u32,
    /// Path MTU in bytes.
    pub mtu: u32,
    /// Message size in bytes.
    pub message_size: u32,
    /// Window in messages; the most, where there is a least.
    pub window: u32,
    /// The least window that will do.
    pub least_window: Option<u32>,
    /// Rings.
    pub rings: u32,
    /// After which silence a rank is dead.
    pub timeout: Duration,
    /// How long ranks wait for each other when they connect.
    pub connect_timeout: Duration,
    /// How ranks with an RDMA adapter try again; see `netsum_worker::AdapterRetry`.
    pub retry: (u8, u8),
}

impl JobSpec {
    /// A job of `ranks` ranks, and defaults for the rest.
    pub fn new(name: &str, ranks: u32) -> Self {
        Self {
            name: name.to_owned(),
            ranks,
            mtu: 1024,
            message_size: 16384,
            window: 8,
            least_window: None,
            rings: 1,
            timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(20),
            retry: (17, 7),
        }
    }

    /// `job create` with all of it, as arguments of `netsum`.
    pub fn create_arguments(&self) -> Vec<String> {
        let Self { name, ranks, mtu, message_size, window, rings, .. } = self;
        let window = self.least_window.map_or(window.to_string(), |least| format!("{least}..{window}"));
        let options = [
            ("--ranks", ranks.to_string()),
            ("--dtype", "i32".to_owned()),
            ("--mtu", mtu.to_string()),
            ("--message-size", message_size.to_string()),
            ("--window", window),
            ("--rings", rings.to_string()),
        ];
        let words = ["job", "create", name].map(str::to_owned).into_iter();
        words.chain(options.into_iter().flat_map(|(option, value)| [option.to_owned(), value])).collect()
    }

    fn layout(&self) -> Layout {
        Layout { message_size: self.message_size, window: self.window, rings: self.rings }
    }
}

/// Where a rank lives: number of the host, and which of its addresses.
pub type Place = (usize, usize);

/// Rank r on host r.
pub fn one_on_each_host(ranks: u32) -> Vec<Place> {
    (0..ranks as usize).map(|host| (host, 0)).collect()
}

/// What `netsum-rank` is started with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankSpec {
    /// Its rank.
    pub rank: u32,
    /// World size.
    pub ranks: u32,
    /// Its address.
    pub ip: IpAddr,
    /// Address of the daemon's API for workers; without one the ranks find each other by `peers`.
    pub controller: Option<String>,
    /// The job's name.
    pub job: String,
    /// The job's token.
    pub token: String,
    /// Addresses of all ranks.
    pub peers: Vec<IpAddr>,
    /// Path MTU, without a daemon.
    pub mtu: u32,
    /// Message size, without a daemon.
    pub message_size: u32,
    /// Window, without a daemon.
    pub window: u32,
    /// Rings, without a daemon.
    pub rings: u32,
    /// After which silence a rank is dead, in milliseconds.
    pub timeout_ms: u64,
    /// How long it waits for others when it connects, in milliseconds.
    pub connect_timeout_ms: u64,
    /// How an RDMA adapter tries again.
    pub retry: (u8, u8),
}

/// What `netsum-rank` is told to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Reduce made-up data.
    AllReduce {
        /// `i32` or `f32`.
        dtype: String,
        /// Elements.
        len: usize,
        /// Of the data.
        seed: u64,
        /// File for the result's bytes; without one, as in another machine, they are in the answer.
        out: Option<PathBuf>,
        /// Wait for the others first, so that nobody's timer runs while another rank still makes up its data.
        together: bool,
    },
    /// Give the communicator up, and connect a new one to the same job.
    Reconnect,
}

/// What `netsum-rank` answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Done.
    Done(Outcome),
    /// The communicator's error.
    Error(String),
}

impl Answer {
    fn transport(self) -> String {
        match self {
            Self::Done(outcome) => outcome.transport,
            Self::Error(_) => String::new(),
        }
    }
}

/// What an operation came to; see `netsum_worker::Report` and `netsum_worker::Statistics`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// `box` or `ring`.
    pub mode: String,
    /// Sums verified by their check lanes.
    pub verified: u64,
    /// Packets sent again; 0 over an RDMA adapter, where nobody knows.
    pub retransmissions: u64,
    /// Time taken.
    pub micros: u64,
    /// Fall-backs to the ring, since the start.
    pub fall_backs: u64,
    /// Messages that were no right sum, since the start.
    pub wrong: u64,
    /// Packets that had met congestion, since the start.
    pub marked: u64,
    /// How often all ranks have connected anew for another window, since the start.
    #[serde(default)]
    pub renewals: u64,
    /// Connections that an adapter gave up and that were started anew, since the start.
    pub restarts: u64,
    /// What carries the rank's packets.
    pub transport: String,
    /// The result's bytes in hexadecimal digits, if they were asked for.
    pub result: Option<String>,
}

/// How a daemon is run, beyond the usual.
#[derive(Clone, Debug, Default)]
pub struct DaemonOptions {
    /// Further lines for the section `[listen]` of its configuration.
    pub listen: String,
    /// `RUST_LOG`.
    pub log: Option<String>,
    /// More arguments to `netsum run`.
    pub arguments: Vec<String>,
    /// A program that starts it, with arguments.
    pub prefix: Vec<String>,
}

/// A lab, and a daemon on its box.
#[derive(Debug)]
pub struct Cluster {
    daemon: Option<Running>,
    /// Whether jobs outlive a daemon that is killed.
    pinned: bool,
    /// Whether the daemon listens on the box's IPv6 address.
    v6: bool,
    folder: TempDir,
    lab: Lab,
}

impl Cluster {
    /// Builds a lab and starts the daemon.
    pub fn start(spec: LabSpec) -> Result<Self> {
        let mut cluster = Self::without_daemon(spec)?;
        cluster.start_daemon()?;
        Ok(cluster)
    }

    /// Builds a lab; its box is a plain bridge.
    pub fn without_daemon(spec: LabSpec) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("netsum-lab-").tempdir()?;
        Ok(Self { daemon: None, pinned: false, v6: false, folder, lab: Lab::new(spec)? })
    }

    /// From the next start on, the daemon's jobs outlive it when it is killed.
    pub fn pin(&mut self) {
        self.pinned = true;
    }

    /// From the next start on, the daemon listens for workers over IPv6.
    pub fn listen_over_ipv6(&mut self) {
        self.v6 = true;
    }

    /// Where the daemon listens for workers.
    pub fn workers(&self) -> SocketAddr {
        let box_ = self.lab.box_();
        SocketAddr::new(if self.v6 { box_.ipv6() } else { box_.ip() }, WORKER_PORT)
    }

    /// Where the daemon pins what outlives it. The janitor removes it with the lab.
    pub fn pins(&self) -> PathBuf {
        PathBuf::from(janitor::PINS).join(self.lab.prefix())
    }

    /// The file with the jobs that outlive the daemon.
    pub fn state_file(&self) -> PathBuf {
        self.folder.path().join("state.json")
    }

    /// The daemon's process; 0 when none runs.
    pub fn daemon_pid(&self) -> u32 {
        self.daemon.as_ref().map_or(0, Running::pid)
    }

    /// Kills the daemon as `kill -9` does.
    pub fn kill_daemon(&mut self) -> Result<()> {
        let daemon = self.daemon.take().context("no daemon runs")?;
        daemon.signal(Signal::SIGKILL)?;
        daemon.end(PATIENCE).map(drop)
    }

    /// The lab.
    pub fn lab(&self) -> &Lab {
        &self.lab
    }

    /// Starts the daemon and waits until it answers.
    pub fn start_daemon(&mut self) -> Result<()> {
        self.start_daemon_as(&DaemonOptions::default())
    }

    /// The same, with more arguments to `netsum run`.
    pub fn start_daemon_with(&mut self, arguments: &[&str]) -> Result<()> {
        let arguments = arguments.iter().map(|&a| a.to_owned()).collect();
        self.start_daemon_as(&DaemonOptions { arguments, ..DaemonOptions::default() })
    }

    /// Starts the daemon in a special way and waits until it answers.
    pub fn start_daemon_as(&mut self, options: &DaemonOptions) -> Result<()> {
        let config = self.folder.path().join("netsum.toml");
        std::fs::write(&config, self.config() + &options.listen)?;
        let netsum = program("netsum")?;
        let mut command = match &*options.prefix {
            [] => self.lab.box_().command(netsum),
            [first, rest @ ..] => {
                let mut command = self.lab.box_().command(first);
                command.args(rest).arg(netsum);
                command
            }
        };
        let log = options.log.clone().unwrap_or_else(log_level);
        command.args(["run", "--config"]).arg(&config).args(&options.arguments).env("RUST_LOG", log);
        let mut daemon = Running::start("netsum run", &mut command)?;
        let start = Instant::now();
        while let Err(error) = self.netsum(&["port", "show"]) {
            ensure!(daemon.is_running(), "the daemon has ended: {}", daemon.stderr());
            ensure!(start.elapsed() < PATIENCE, "the daemon does not answer: {error:#}\n{}", daemon.stderr());
            std::thread::sleep(Duration::from_millis(10));
        }
        self.daemon = Some(daemon);
        Ok(())
    }

    /// Ends the daemon as an administrator would, and waits for its end.
    pub fn stop_daemon(&mut self) -> Result<()> {
        let daemon = self.daemon.take().context("no daemon runs")?;
        daemon.signal(Signal::SIGTERM)?;
        daemon.success(PATIENCE).map(drop)
    }

    /// What the daemon has said so far.
    pub fn daemon_log(&self) -> String {
        self.daemon.as_ref().map(Running::stderr).unwrap_or_default()
    }

    /// The folder of the daemon's configuration and socket.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Path of the administration socket.
    pub fn socket(&self) -> String {
        self.folder.path().join("netsum.sock").display().to_string()
    }

    fn config(&self) -> String {
        let pins = self.pins();
        let pin = if self.pinned { pins.to_str().unwrap_or_default() } else { "none" };
        let restart = format!("[restart]\npin = {pin:?}\nstate = {:?}\n", self.state_file());
        format!(
            "bridge = \"br0\"\n{restart}[watch]\nstall-ms = 1000\n[listen]\nadmin = \"{}\"\nworkers = \"{}\"\n",
            self.socket(),
            self.workers()
        )
    }

    /// Runs `netsum ARGUMENTS` on the box; what it prints.
    pub fn netsum(&self, arguments: &[&str]) -> Result<String> {
        let mut command = self.lab.box_().command(program("netsum")?);
        netns::output(command.args(["--socket", &self.socket()]).args(arguments))
    }

    /// Runs `netsum -j ARGUMENTS` on the box.
    pub fn netsum_json(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.netsum(&[&["-j"], arguments].concat())?;
        serde_json::from_str(&text).with_context(|| format!("not JSON: {text}"))
    }

    /// Creates a job; its token.
    pub fn create_job(&self, job: &JobSpec) -> Result<String> {
        let arguments = job.create_arguments();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let created = self.netsum_json(&arguments)?;
        let token = created["token"].as_str().with_context(|| format!("no token in {created}"))?;
        Ok(token.to_owned())
    }

    /// Registers a flow by hand, as an administrator does.
    pub fn add_flow(&self, job: &str, flow: &FlowSpec, port: &str) -> Result<String> {
        let FlowSpec { ring, rank, base_psn, src, dst, qpn, src_mac, .. } = flow;
        let numbers = [ring, rank, qpn, base_psn].map(u32::to_string);
        let [ring, rank, qpn, psn] = numbers.each_ref().map(String::as_str);
        let (src, dst) = (src.to_string(), dst.to_string());
        let mac = src_mac.map(|mac| mac.map(|b| format!("{b:02x}")).join(":")).unwrap_or_default();
        let mut arguments = vec!["flow", "add", job, "--ring", ring, "--rank", rank, "--port", port];
        arguments.extend(["--src", &src, "--dst", &dst, "--qpn", qpn, "--psn", psn]);
        if !mac.is_empty() {
            arguments.extend(["--src-mac", &mac]);
        }
        self.netsum(&arguments)
    }

    /// Starts the ranks of a job and waits until they are connected.
    pub fn ranks(&self, job: &JobSpec, token: &str, places: &[Place]) -> Result<Group> {
        let controller = self.workers().to_string();
        self.group(job, Some((controller, token)), places, false)
    }

    /// The same over IPv6.
    pub fn ranks_v6(&self, job: &JobSpec, token: &str, places: &[Place]) -> Result<Group> {
        let controller = self.workers().to_string();
        self.group(job, Some((controller, token)), places, true)
    }

    /// Ranks that know of no daemon.
    pub fn ranks_alone(&self, job: &JobSpec, places: &[Place]) -> Result<Group> {
        self.group(job, None, places, false)
    }

    fn group(
        &self,
        job: &JobSpec,
        controller: Option<(String, &str)>,
        places: &[Place],
        v6: bool,
    ) -> Result<Group> {
        ensure!(places.len() == job.ranks as usize, "{} places for {} ranks", places.len(), job.ranks);
        let ip = |&(host, k): &Place| {
            if v6 { self.lab.host(host).ipv6(k) } else { self.lab.host(host).ip(k) }
        };
        let (controller, token) = controller.unzip();
        let (mut ranks, mut homes, mut elsewhere) = (Vec::new(), Vec::new(), Vec::new());
        for (rank, place) in places.iter().enumerate() {
            let spec = RankSpec {
                rank: rank as u32,
                ranks: job.ranks,
                ip: ip(place),
                controller: controller.clone(),
                job: job.name.clone(),
                token: token.unwrap_or_default().to_owned(),
                peers: places.iter().map(ip).collect(),
                mtu: job.mtu,
                message_size: job.message_size,
                window: job.window,
                rings: job.rings,
                timeout_ms: job.timeout.as_millis() as u64,
                connect_timeout_ms: job.connect_timeout.as_millis() as u64,
                retry: job.retry,
            };
            ranks.push(Some(self.rank(place.0, &spec)?));
            homes.push((place.0, spec));
            elsewhere.push(self.lab.host(place.0).vm().is_some());
        }
        let mut group = Group {
            job: job.clone(),
            ranks,
            homes,
            elsewhere,
            files: 0,
            together: false,
            folder: tempfile::tempdir()?,
            transports: Vec::new(),
        };
        let answers = group.answers(PATIENCE)?;
        let mut errors = answers.iter().filter_map(|(rank, answer)| match answer {
            Answer::Done(_) => None,
            Answer::Error(error) => Some(format!("rank {rank} cannot connect: {error}\n")),
        });
        if errors.clone().next().is_some() {
            bail!("{}{}{}", errors.by_ref().collect::<String>(), group.log(), self.daemon_log());
        }
        group.transports = answers.into_iter().map(|(_, answer)| answer.transport()).collect();
        Ok(group)
    }

    /// Starts a rank's process on a host.
    fn rank(&self, host: usize, spec: &RankSpec) -> Result<Running> {
        let mut command = self.lab.host(host).command(program("netsum-rank")?);
        command.arg(serde_json::to_string(spec)?).env("RUST_LOG", log_level());
        Running::start(&format!("{} rank {}", spec.job, spec.rank), &mut command)
    }

    /// A counter of the box, or of one job on it.
    pub fn counter(&self, job: Option<&str>, name: &str) -> Result<u64> {
        let mut arguments = vec!["stats"];
        arguments.extend(job);
        let stats = self.netsum_json(&arguments)?;
        stats[name].as_u64().with_context(|| format!("no counter {name} in {stats}"))
    }
}

/// `RUST_LOG` of the programs that tests start.
fn log_level() -> String {
    std::env::var("RUST_LOG").unwrap_or_else(|_| "info".into())
}

/// The ranks of a job that run.
#[derive(Debug)]
pub struct Group {
    job: JobSpec,
    ranks: Vec<Option<Running>>,
    /// Each rank's host, and what it was started with.
    homes: Vec<(usize, RankSpec)>,
    /// Which of them share no files with the test.
    elsewhere: Vec<bool>,
    files: u32,
    together: bool,
    folder: TempDir,
    /// What carries each rank's packets.
    pub transports: Vec<String>,
}

impl Group {
    /// From now on all ranks wait for each other before each operation, in which nothing is then late but the network.
    pub fn start_together(&mut self) {
        self.together = true;
    }

    /// Kills a rank as `kill -9` does.
    pub fn kill(&mut self, rank: usize) -> Result<()> {
        let victim = self.ranks[rank].take().context("that rank has gone already")?;
        victim.signal(Signal::SIGKILL)
    }

    /// Starts a killed rank again. It answers when all ranks have connected anew.
    pub fn start_again(&mut self, cluster: &Cluster, rank: usize) -> Result<()> {
        let (host, spec) = &self.homes[rank];
        self.ranks[rank] = Some(cluster.rank(*host, spec)?);
        Ok(())
    }

    /// Has a rank connect anew.
    pub fn order_reconnect(&mut self, rank: usize) -> Result<()> {
        let running = self.ranks[rank].as_mut().context("that rank has gone")?;
        running.say(&serde_json::to_string(&Order::Reconnect)?)
    }

    /// The next answer of one rank.
    pub fn answer(&mut self, rank: usize, timeout: Duration) -> Result<Answer> {
        let line = self.ranks[rank].as_mut().context("that rank has gone")?.line(timeout)?;
        serde_json::from_str(&line).with_context(|| line.clone())
    }

    /// Tells all ranks to reduce made-up data, without waiting for them. The files for their results.
    pub fn order_all_reduce(&mut self, dtype: &str, len: usize, seed: u64) -> Result<Vec<PathBuf>> {
        self.order_all_reduce_last_late(dtype, len, seed, Duration::ZERO)
    }

    /// The same, but the last rank is told so much later.
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
                running.say(&serde_json::to_string(&order)?)?;
            }
            files.push(out);
        }
        Ok(files)
    }

    /// The next answer of every rank that lives.
    pub fn answers(&mut self, timeout: Duration) -> Result<Vec<(usize, Answer)>> {
        let mut answers = Vec::new();
        for (rank, running) in self.ranks.iter_mut().enumerate() {
            if let Some(running) = running {
                let line = running.line(timeout)?;
                answers.push((rank, serde_json::from_str(&line).with_context(|| line.clone())?));
            }
        }
        Ok(answers)
    }

    /// All ranks reduce made-up data; every result is compared bit by bit with a sum done here.
    pub fn all_reduce(&mut self, dtype: &str, len: usize, seed: u64) -> Result<Vec<Outcome>> {
        let files = self.order_all_reduce(dtype, len, seed)?;
        self.check_all_reduce(dtype, len, seed, &files)
    }

    /// Waits for what [`Group::order_all_reduce`] has begun, and compares.
    pub fn check_all_reduce(
        &mut self,
        dtype: &str,
        len: usize,
        seed: u64,
        files: &[PathBuf],
    ) -> Result<Vec<Outcome>> {
        let mut outcomes = Vec::new();
        let mut errors = Vec::new();
        for (rank, answer) in self.answers(2 * PATIENCE)? {
            match answer {
                Answer::Done(mut outcome) => {
                    if let Some(result) = outcome.result.take() {
                        std::fs::write(&files[rank], from_hex(&result)?)?;
                    }
                    outcomes.push(outcome);
                }
                Answer::Error(error) => errors.push(format!("rank {rank}: {error}")),
            }
        }
        ensure!(errors.is_empty(), "{}", errors.join("\n"));
        let expected = expected(dtype, len, seed, &self.job)?;
        for (rank, file) in files.iter().enumerate() {
            let got = std::fs::read(file)?;
            ensure!(got.len() == expected.len(), "rank {rank}: {} bytes, not {}", got.len(), expected.len());
            let (got, expected) = (got.as_chunks::<4>().0, expected.as_chunks::<4>().0);
            let wrong: Vec<usize> = (0..len).filter(|&i| got[i] != expected[i]).collect();
            if let Some(&first) = wrong.first() {
                bail!(
                    "rank {rank}, {dtype}: {} of {len} elements are wrong; element {first} has the bits {:02x?}, not {:02x?}",
                    wrong.len(),
                    got[first],
                    expected[first]
                );
            }
            std::fs::remove_file(file)?;
        }
        Ok(outcomes)
    }

    /// What the ranks have said on standard error.
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
            // Nothing but addition: no need to trust the library's own reference.
            let sum = (0..len).map(|i| all.iter().fold(0i32, |sum, x| sum.wrapping_add(x[i])));
            Ok(sum.flat_map(i32::to_le_bytes).collect())
        }
        "f32" => {
            let all: Vec<_> = (0..job.ranks).map(|rank| data::floats(rank, seed, len)).collect();
            let slices: Vec<_> = all.iter().map(|x| &x[..]).collect();
            let sum = reference_sum(&slices, &layout);
            for (i, sum) in sum.iter().enumerate() {
                // The reference in turn must be near the sum in double precision: 8 ranks, magnitudes below 32.
                let exact: f64 = all.iter().map(|x| f64::from(x[i])).sum();
                ensure!((f64::from(*sum) - exact).abs() < 1e-5, "element {i}: {sum}, not {exact}");
            }
            Ok(sum.into_iter().flat_map(f32::to_le_bytes).collect())
        }
        other => bail!("no data type {other}"),
    }
}
