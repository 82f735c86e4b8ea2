//! The training processes on the hosts.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use netsum_demo::failure::StepTime;
use netsum_demo::report::{Line, Trained};
use netsum_demo::train::Config;
use netsum_lab::Lab;
use netsum_lab::process::Running;

use super::boxes::{Boxes, Job};
use super::failure::{DueAction, Plan};
use super::{interrupt, link};

/// The timeout of a step, and of connecting.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The interval of checks for Ctrl-C and for a failure that is due.
const LOOK: Duration = Duration::from_millis(100);

/// The component that sums.
#[derive(Clone, Copy)]
pub enum SumBackend<'a> {
    /// The box, or several boxes.
    Box(&'a Job),
    /// The same, with sums sealed by this secret.
    Sealed(&'a Job, &'a str),
    /// The hosts' ring, which is not registered at any box.
    Ring,
}

impl SumBackend<'_> {
    /// The name of a rank's weights file in the folder for results.
    pub fn weights_file(self, rank: usize) -> String {
        match self {
            Self::Box(_) => format!("weights-{rank}.bin"),
            Self::Sealed(..) => format!("weights-sealed-{rank}.bin"),
            Self::Ring => format!("weights-ring-{rank}.bin"),
        }
    }

    fn arguments(self, lab: &Lab) -> Vec<String> {
        match self {
            Self::Box(job) | Self::Sealed(job, _) => {
                ["--controller", &job.controller, "--job", job.name, "--token", &job.token]
                    .map(str::to_owned)
                    .into()
            }
            Self::Ring => vec!["--peers".to_owned(), link::addresses(lab)],
        }
    }
}

/// The arguments of `netsum-demo` that describe the training.
pub fn training_arguments(config: &Config) -> Vec<String> {
    let (ranks, epochs, seed) =
        (config.ranks.to_string(), config.epochs.to_string(), config.seed.to_string());
    ["--ranks", &ranks, "--epochs", &epochs, "--seed", &seed].map(str::to_owned).into()
}

/// The result of a training.
pub struct Training {
    /// By rank.
    pub ranks: Vec<Trained>,
    /// The loss of each step.
    pub loss: Vec<f32>,
    pub times: Vec<StepTime>,
    pub began: Instant,
}

/// An event of a rank's process.
enum Event {
    Line(Line),
    /// The process has ended, possibly with an error.
    Ended(Result<()>),
}

/// Training processes. They end with their lab.
pub struct Ranks {
    number: usize,
    events: Receiver<(usize, Instant, Event)>,
    /// Dropped to let the ranks leave.
    stay: Vec<Sender<()>>,
    pub steps: usize,
}

impl Ranks {
    /// Starts a rank on each host.
    pub fn start(
        lab: &Lab,
        config: &Config,
        program: &Path,
        summer: SumBackend<'_>,
        compute: f64,
        out: &Path,
    ) -> Result<Self> {
        let data = netsum_demo::data::Data::load()?;
        let (send, events) = channel();
        let mut stay = Vec::new();
        for (rank, host) in lab.hosts().iter().enumerate() {
            let mut command = host.command(program);
            command.args([
                "rank",
                "--stay",
                "--rank",
                &rank.to_string(),
                "--ip",
                &host.ip(0).to_string(),
            ]);
            command.args(summer.arguments(lab)).args(training_arguments(config));
            if let SumBackend::Sealed(_, secret) = summer {
                command.env("NETSUM_SECRET", secret);
            }
            command.args(["--compute", &compute.to_string()]);
            command.arg("--weights").arg(out.join(summer.weights_file(rank)));
            // Ctrl-C is for this process, which ends the ranks in order.
            command.process_group(0);
            // The process dies with the thread that starts it, which is therefore this one and not
            // the reader.
            let process = Running::start(&format!("rank {rank}"), &mut command)?;
            let (may_stay, leave) = channel();
            stay.push(may_stay);
            let send = send.clone();
            std::thread::spawn(move || {
                let pass_on = |event| send.send((rank, Instant::now(), event)).is_ok();
                let ended = read(rank, process, &leave, |line| pass_on(Event::Line(line)));
                // If the demo has failed already, the channel has no receiver.
                pass_on(Event::Ended(ended));
            });
        }
        Ok(Self { number: lab.hosts().len(), events, stay, steps: config.steps(&data) })
    }

    /// Shows the progress until all have trained. The ranks stay.
    pub fn train(&self, boxes: &mut Boxes, plan: Option<&mut Plan>) -> Result<Training> {
        let style = "  {bar:40} step {pos}/{len}  {msg}  {elapsed} ";
        let bar = ProgressBar::new(self.steps as u64)
            .with_style(ProgressStyle::with_template(style)?.progress_chars("=> "))
            .with_message("connecting");
        let result = self.follow(boxes, plan, &bar);
        // The bar stays on the screen, and the next line begins below it.
        bar.abandon();
        if !bar.is_hidden() {
            println!();
        }
        result
    }

    /// Lets the ranks leave, and waits until they have ended.
    pub fn leave(mut self, boxes: &mut Boxes) -> Result<()> {
        self.stay.clear();
        let mut ended = 0;
        while ended < self.number {
            if let (_, _, Event::Ended(result)) = self.next(boxes, |_| Ok(()))? {
                result?;
                ended += 1;
            }
        }
        Ok(())
    }

    fn follow(
        &self,
        boxes: &mut Boxes,
        mut plan: Option<&mut Plan>,
        bar: &ProgressBar,
    ) -> Result<Training> {
        let mut trained: Vec<Option<Trained>> = vec![None; self.number];
        let (mut loss, mut times) =
            (Vec::with_capacity(self.steps), Vec::with_capacity(self.steps));
        let mut began = Instant::now();
        while trained.iter().any(Option::is_none) {
            let (rank, when, event) = self.next(boxes, |boxes| {
                let Some(plan) = plan.as_deref_mut() else { return Ok(()) };
                let now = Instant::now();
                let Some(what) = plan.due(loss.len(), now) else { return Ok(()) };
                let words = plan.victim.words(boxes.lab().spec());
                let seconds = (now - began).as_secs_f64();
                bar.suspend(|| {
                    println!(
                        "  step {}, {seconds:.1} s: {}",
                        loss.len(),
                        words[usize::from(what == DueAction::Recover)]
                    );
                });
                match what {
                    DueAction::Fail => boxes.fail(&plan.victim),
                    DueAction::Recover => boxes.recover(&plan.victim),
                }
            })?;
            match (rank, event) {
                (0, Event::Line(Line::Connected)) => {
                    began = when;
                    bar.set_message("connected");
                }
                (0, Event::Line(Line::Step { step, loss: l, took, by_box })) => {
                    loss.push(l);
                    times.push(StepTime { at: (when - began).as_secs_f64(), took, by_box });
                    bar.set_position(step as u64 + 1);
                    bar.set_message(format!("loss {l:.4}"));
                    // Without a terminal the bar is hidden; print a line from time to time.
                    if bar.is_hidden() && (step + 1) % self.steps.div_ceil(5) == 0 {
                        println!("  step {}/{}  loss {l:.4}", step + 1, self.steps);
                    }
                }
                (rank, Event::Line(Line::Trained(t))) => trained[rank] = Some(t),
                (_, Event::Line(_)) => {}
                (rank, Event::Ended(Ok(()))) => {
                    bail!("rank {rank} ended too early{}", boxes.logs())
                }
                (_, Event::Ended(Err(error))) => bail!("{error:#}{}", boxes.logs()),
            }
        }
        Ok(Training { ranks: trained.into_iter().flatten().collect(), loss, times, began })
    }

    /// The next event. `meanwhile` is called from time to time.
    ///
    /// # Errors
    /// On Ctrl-C, and after a timeout without an event.
    fn next(
        &self,
        boxes: &mut Boxes,
        mut meanwhile: impl FnMut(&mut Boxes) -> Result<()>,
    ) -> Result<(usize, Instant, Event)> {
        let start = Instant::now();
        loop {
            interrupt::check()?;
            meanwhile(boxes)?;
            match self.events.recv_timeout(LOOK) {
                Ok(event) => return Ok(event),
                Err(RecvTimeoutError::Disconnected) => bail!("all readers of ranks have ended"),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if start.elapsed() > TIMEOUT {
                bail!("no rank made a step within {TIMEOUT:?}{}", boxes.logs());
            }
        }
    }
}

/// Forwards a rank's lines until it has trained and may leave, or until the receiver is dropped.
fn read(
    rank: usize,
    mut process: Running,
    leave: &Receiver<()>,
    mut pass_on: impl FnMut(Line) -> bool,
) -> Result<()> {
    let mut trained = false;
    while !trained {
        let line = match process.line(TIMEOUT) {
            Ok(line) => line,
            Err(_) if !process.is_running() => {
                bail!("rank {rank} failed: {}", process.stderr().trim())
            }
            Err(_) => {
                bail!("rank {rank} printed nothing for {TIMEOUT:?}: {}", process.stderr().trim())
            }
        };
        let line: Line =
            serde_json::from_str(&line).with_context(|| format!("rank {rank} printed `{line}`"))?;
        trained = matches!(line, Line::Trained(_));
        if !pass_on(line) {
            return Ok(());
        }
    }
    // An error means that the sender was dropped, which is the signal to leave.
    let _ = leave.recv();
    process.close_input();
    process.success(TIMEOUT).map(drop)
}
