//! What the manager of a fabric costs with many boxes and ranks. The manager is the real one. Boxes
//! have a daemon's API and a data plane that does nothing. Ranks ask what ranks ask, and send no
//! gradients.

mod boxes;
mod manager;
mod ranks;

use std::fmt::{self, Display};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::Serialize;
use tokio::runtime::Runtime;

use boxes::FakeBox;
use manager::Manager;
use ranks::Ranks;

/// How large a fabric is.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct Size {
    #[arg(long, default_value_t = 60)]
    pub leaves: usize,
    #[arg(long, default_value_t = 4)]
    pub spines: usize,
    #[arg(long, default_value_t = 16)]
    pub jobs: usize,
    /// Of each job; 64 at the most.
    #[arg(long, default_value_t = 64)]
    pub ranks: usize,
    /// Of each job.
    #[arg(long, default_value_t = 4)]
    pub rings: usize,
}

/// What was measured. Seconds; processor time and memory are the manager's.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    pub size: Size,
    /// From the first rank's question to the last one's answer, all jobs at once.
    pub admit: f64,
    pub admit_cpu: f64,
    /// Processor time for a second in which all ranks say that they are alive, and boxes are looked
    /// at.
    pub idle_cpu: f64,
    /// From `kill -9` until the next manager has answered all ranks that they are at work.
    pub restart: f64,
    /// From the last spine's death until all ranks have joined again, by the other spines.
    pub recover: f64,
    pub recover_cpu: f64,
    /// Resident bytes with all ranks at work.
    pub memory: u64,
}

/// A second and more is watched.
const IDLE: Duration = Duration::from_secs(4);

/// Measures one fabric.
///
/// # Errors
/// If not all ranks are admitted, or not all are again after the death of a spine.
pub fn measure(netsum: &Path, size: &Size) -> Result<Figures> {
    let hosts = size.jobs * size.ranks;
    ensure!(
        size.spines > 1 && size.leaves > 0 && hosts >= size.leaves,
        "two spines are needed, and a host for each leaf"
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
    // Channels want to know it.
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
        // Not the first one: jobs cannot do without the box above a leaf's first link.
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

/// Heads of [`Figures`]' line.
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
