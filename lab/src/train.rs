//! Trains a model with PyTorch, with one rank on each host: `python/examples/train.py`.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::Host;
use crate::cluster::Cluster;
use crate::process::Running;

/// Timeout until all ranks have loaded PyTorch and found each other, and for a step.
const TIMEOUT: Duration = Duration::from_secs(90);

/// The model and its training.
#[derive(Clone, Debug)]
pub struct TrainSpec {
    /// A Python that has torch and netsum.
    pub python: PathBuf,
    /// `mlp`, `cnn` or `transformer`.
    pub model: String,
    pub steps: usize,
    /// Seed of the first weights and of the order of the data.
    pub seed: u64,
    /// Bits of a gradient that netsum sends, `32bit` or `16bit`.
    pub wire: &'static str,
}

/// Which library sums. A job on the box has a name and a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumBackend<'a> {
    Gloo,
    /// netsum, as the backend of `torch.distributed`.
    Backend(&'a str, &'a str),
    /// netsum for the gradients, as a hook, and Gloo for everything else.
    Hook(&'a str, &'a str),
}

/// Results of a training.
#[derive(Clone, Debug, Default)]
pub struct Trained {
    /// Loss of rank 0's batch, at each step.
    pub loss: Vec<f64>,
    /// Time of each step at rank 0.
    pub seconds: Vec<f64>,
    /// Loss on the test data.
    pub test: f64,
    /// Hash of each rank's weights.
    pub weights: Vec<String>,
    /// Statistics of each rank's communicator, with the hook.
    pub statistics: Vec<Value>,
}

/// The processes, which wait for the start.
#[derive(Debug)]
pub struct Trainers {
    ranks: Vec<Running>,
    steps: usize,
    /// Number of the model's parameters.
    pub floats: u64,
}

impl Trainers {
    /// Starts a rank on each host, and waits until they have found each other.
    pub fn start(cluster: &Cluster, spec: &TrainSpec, summer: SumBackend<'_>) -> Result<Self> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../python/examples/train.py");
        let hosts = cluster.lab().hosts();
        let first = hosts[0].ip(0).to_string();
        let start = |(rank, host): (usize, &Host)| {
            let mut command = host.command(&spec.python);
            command.arg(&script).args(["--wait", "--model", &spec.model]);
            command.args(["--steps", &spec.steps.to_string(), "--seed", &spec.seed.to_string()]);
            let (backend, job) = match summer {
                SumBackend::Gloo => ("gloo", None),
                SumBackend::Backend(job, token) => ("netsum", Some((job, token))),
                SumBackend::Hook(job, token) => ("hook", Some((job, token))),
            };
            command.args(["--backend", backend]);
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", hosts.len().to_string());
            command.env("LOCAL_RANK", "0").env("MASTER_ADDR", &first).env("MASTER_PORT", "29500");
            // Otherwise Gloo would resolve the host's name, which has no address there.
            command.env("GLOO_SOCKET_IFNAME", Host::INTERFACE);
            // At most one core for each rank.
            command.env("OMP_NUM_THREADS", "1").env("PYTHONDONTWRITEBYTECODE", "1");
            command.env("NETSUM_WIRE", spec.wire);
            if let Some((job, token)) = job {
                command.env("NETSUM_CONTROLLER", cluster.workers().to_string());
                command.env("NETSUM_JOB", job).env("NETSUM_TOKEN", token);
            }
            // Ctrl-C goes to the program that started them.
            command.process_group(0);
            Running::start(&format!("rank {rank}"), &mut command)
        };
        let ranks = hosts.iter().enumerate().map(start).collect::<Result<Vec<_>>>()?;
        let mut trainers = Self { ranks, steps: spec.steps, floats: 0 };
        for rank in 0..hosts.len() {
            let reported = trainers.receive(rank, "ready")?;
            trainers.floats = reported["floats"].as_u64().context("no number of floats")?;
        }
        Ok(trainers)
    }

    /// Runs the training. Then the ranks wait to leave, and their links are idle.
    ///
    /// # Errors
    /// A rank's error, or that of `step`, which gets each step and its loss.
    pub fn train(&mut self, mut step: impl FnMut(usize, f64) -> Result<()>) -> Result<Trained> {
        self.ranks.iter_mut().try_for_each(|rank| rank.send_line("begin"))?;
        let mut trained = Trained::default();
        for number in 0..self.steps {
            let reported = self.receive(0, "step")?;
            let loss = reported["loss"].as_f64().context("the loss is not a number")?;
            trained.loss.push(loss);
            trained.seconds.push(reported["seconds"].as_f64().context("no time")?);
            step(number, loss)?;
        }
        for rank in 0..self.ranks.len() {
            let reported = self.receive(rank, "trained")?;
            trained.test =
                reported["test"].as_f64().context("the loss of the test is not a number")?;
            trained
                .weights
                .push(reported["weights"].as_str().context("no hash of the weights")?.to_owned());
            trained.statistics.push(reported);
        }
        Ok(trained)
    }

    /// Ends the ranks, and waits until they have ended.
    pub fn leave(self) -> Result<()> {
        let mut ranks = self.ranks;
        ranks.iter_mut().try_for_each(|rank| rank.send_line("leave"))?;
        ranks.into_iter().try_for_each(|rank| rank.success(TIMEOUT).map(drop))
    }

    /// The next line of a rank, which must report this event. An error contains the other ranks'
    /// output.
    fn receive(&mut self, rank: usize, event: &str) -> Result<Value> {
        let line = self.ranks[rank].line(TIMEOUT).and_then(|line| {
            let reported: Value = serde_json::from_str(&line).with_context(|| line.clone())?;
            ensure!(
                reported["event"] == event,
                "rank {rank} reported `{line}` in place of {event}"
            );
            Ok(reported)
        });
        line.with_context(|| self.ranks.iter().map(Running::stderr).collect::<String>())
    }
}
