//! The cost of a fabric manager with many boxes and ranks. The manager is the real one. Boxes have
//! a daemon's API and an empty data plane. Ranks make all calls to the manager, and send no
//! gradients.

mod boxes;
mod manager;
mod ranks;
pub mod start;

use std::fmt::{self, Display};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::Serialize;
use tokio::runtime::Runtime;

use boxes::FakeBox;
use manager::Manager;
use ranks::Ranks;

/// The size of a fabric.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct Size {
    #[arg(long, default_value_t = 60)]
    pub leaves: usize,
    #[arg(long, default_value_t = 4)]
    pub spines: usize,
    #[arg(long, default_value_t = 16)]
    pub jobs: usize,
    /// Ranks of each job; 64 at most.
    #[arg(long, default_value_t = 64)]
    pub ranks: usize,
    /// Rings of each job.
    #[arg(long, default_value_t = 4)]
    pub rings: usize,
}

/// The results in seconds; CPU time and memory are the manager's.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    pub size: Size,
    /// From the first rank's request to the last one's answer, all jobs at once.
    pub admit: f64,
    pub admit_cpu: f64,
    /// CPU time per second while all ranks send heartbeats and boxes are polled.
    pub idle_cpu: f64,
    /// From `kill -9` until the next manager has told all ranks that their job is active.
    pub restart: f64,
    /// From the last spine's death until all ranks have joined again, over the other spines.
    pub recover: f64,
    pub recover_cpu: f64,
    /// Resident bytes with all ranks active.
    pub memory: u64,
}

/// The time for which the idle manager is measured.
const IDLE: Duration = Duration::from_secs(4);

/// Measures one fabric.
///
/// # Errors
/// If a rank is not admitted, or not admitted again after the death of a spine.
pub fn measure(netsum: &Path, size: &Size) -> Result<Figures> {
    let hosts = size.jobs * size.ranks;
    ensure!(
        size.spines > 1 && size.leaves > 0 && hosts >= size.leaves,
        "--spines must be 2 or more, and each leaf needs a host"
    );
    let folder = tempfile::tempdir()?;
    let leaf = |leaf: usize| {
        let mine = (0..hosts).filter(|host| host * size.leaves / hosts == leaf);
        FakeBox::start(folder.path(), &format!("leaf{leaf}"), mine.collect(), size.spines)
    };
    let boxes = (0..size.leaves).map(leaf).collect::<Result<Vec<_>>>()?;
    let spine = |n| FakeBox::start(folder.path(), &format!("spine{n}"), Vec::new(), size.leaves);
    let mut spines = (0..size.spines).map(spine).collect::<Result<Vec<_>>>()?;
    let names: Vec<&str> = boxes.iter().chain(&spines).map(|b| &*b.name).collect();
    let mut manager = Manager::start(netsum, folder.path(), &names, size)?;

    let runtime = Runtime::new()?;
    // Channels must be made inside the runtime.
    let _inside = runtime.enter();
    manager.create_jobs(size)?;
    let ranks = Ranks::new(manager.workers, size);
    let cpu = manager.cpu()?;
    let admit = timed(|| runtime.block_on(ranks.join_all(0)))?;
    let admit_cpu = manager.cpu()? - cpu;

    let heart = runtime.spawn(ranks.clone().live());
    let (cpu, begin) = (manager.cpu()?, Instant::now());
    std::thread::sleep(IDLE);
    let idle_cpu = (manager.cpu()? - cpu) / begin.elapsed().as_secs_f64();
    let memory = manager.memory()?;

    let restart = timed(|| {
        manager.start_again()?;
        runtime.block_on(ranks.beat_all(false))
    })?;
    let cpu = manager.cpu()?;
    let recover = timed(|| {
        // Keep the first spine: jobs depend on the box above a leaf's first link.
        drop(spines.pop());
        runtime.block_on(async {
            ranks.beat_all(true).await?;
            ranks.join_all(1).await
        })
    })?;
    let recover_cpu = manager.cpu()? - cpu;
    heart.abort();
    drop(manager);
    drop(boxes);
    Ok(Figures {
        size: size.clone(),
        admit,
        admit_cpu,
        idle_cpu,
        restart,
        recover,
        recover_cpu,
        memory,
    })
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let begin = Instant::now();
    work()?;
    Ok(begin.elapsed().as_secs_f64())
}

/// The headings of [`Figures`]' line.
pub const HEAD: &str =
    "boxes  ranks  jobs  rings   admit s (CPU)   idle CPU   restart s   recover s (CPU)   MB";

impl Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Size { leaves, spines, jobs, ranks, rings } = self.size;
        write!(f, "{:>5}  {:>5}  {jobs:>4}  {rings:>5}", leaves + spines, jobs * ranks)?;
        write!(
            f,
            "  {:>7.2} ({:>4.2})  {:>8.1}%",
            self.admit,
            self.admit_cpu,
            100.0 * self.idle_cpu
        )?;
        write!(f, "  {:>10.2}  {:>9.2} ({:>4.2})", self.restart, self.recover, self.recover_cpu)?;
        write!(f, "  {:>5.1}", self.memory as f64 / 1e6)
    }
}
