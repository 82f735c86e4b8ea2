//! The training processes on the hosts.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use netsum_demo::report::{Line, Trained};
use netsum_demo::train::Config;
use netsum_lab::Lab;
use netsum_lab::process::Running;

use super::boxes::Boxes;
use super::daemon::Job;
use super::{interrupt, link};

/// A step, or connecting, may take so long before the demo gives up.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often we look for Ctrl-C and for a dead daemon.
const LOOK: Duration = Duration::from_millis(100);

/// Who sums.
#[derive(Clone, Copy)]
pub enum Summer<'a> {
    Box(&'a Job),
    /// Several boxes, which know of the ranks' connections.
    Boxes,
    /// The hosts themselves, by a ring that the box knows nothing of.
    Ring,
}

impl Summer<'_> {
    /// A rank's weights, in the folder for results.
    pub fn weights_file(self, rank: usize) -> String {
        match self {
            Self::Box(_) | Self::Boxes => format!("weights-{rank}.bin"),
            Self::Ring => format!("weights-ring-{rank}.bin"),
        }
    }

    fn arguments(self, lab: &Lab) -> Vec<String> {
        match self {
            Self::Box(job) => ["--controller", &job.controller, "--job", &job.name, "--token", &job.token]
                .map(str::to_owned)
                .into(),
            Self::Boxes | Self::Ring => vec!["--peers".to_owned(), link::addresses(lab)],
        }
    }
}

/// The arguments of `netsum-demo` that say what is trained.
pub fn training_arguments(config: &Config) -> Vec<String> {
    let (ranks, epochs, seed) =
        (config.ranks.to_string(), config.epochs.to_string(), config.seed.to_string());
    ["--ranks", &ranks, "--epochs", &epochs, "--seed", &seed].map(str::to_owned).into()
}

/// What comes from a rank.
enum Event {
    Line(Line),
    /// The process has ended: well, or with an error.
    Ended(Result<()>),
}

/// Training processes. They end with their lab.
pub struct Ranks {
    number: usize,
    events: Receiver<(usize, Event)>,
    /// Dropped when the ranks may leave.
    stay: Vec<Sender<()>>,
    steps: usize,
}

impl Ranks {
    /// Starts a rank on each host.
    pub fn start(lab: &Lab, config: &Config, program: &Path, summer: Summer<'_>, out: &Path) -> Result<Self> {
        let data = netsum_demo::data::Data::load()?;
        let (send, events) = channel();
        let mut stay = Vec::new();
        for (rank, host) in lab.hosts().iter().enumerate() {
            let mut command = host.command(program);
            command.args(["rank", "--stay", "--rank", &rank.to_string(), "--ip", &host.ip(0).to_string()]);
            command.args(summer.arguments(lab)).args(training_arguments(config));
            command.arg("--weights").arg(out.join(summer.weights_file(rank)));
            // Ctrl-C is for this process, which ends the ranks in order.
            command.process_group(0);
            // It dies with the thread that starts it, which is therefore this one and not the one that reads.
            let process = Running::start(&format!("rank {rank}"), &mut command)?;
            let (may_stay, leave) = channel();
            stay.push(may_stay);
            let send = send.clone();
            std::thread::spawn(move || {
                let ended = read(rank, process, &leave, |line| send.send((rank, Event::Line(line))).is_ok());
                // Nobody listens any more when the demo has failed already.
                let _ = send.send((rank, Event::Ended(ended)));
            });
        }
        Ok(Self { number: lab.hosts().len(), events, stay, steps: config.steps(&data) })
    }

    /// Shows the progress until all have trained; what each rank came to, and the loss of each step. The ranks stay.
    pub fn train(&self, boxes: &mut Boxes) -> Result<(Vec<Trained>, Vec<f32>)> {
        let style = "  {bar:40} step {pos}/{len}  {msg}  {elapsed} ";
        let bar = ProgressBar::new(self.steps as u64)
            .with_style(ProgressStyle::with_template(style)?.progress_chars("=> "))
            .with_message("connecting");
        let result = self.follow(boxes, &bar);
        // The bar stays where it is, and the next line begins below it.
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
            if let (_, Event::Ended(result)) = self.next(boxes)? {
                result?;
                ended += 1;
            }
        }
        Ok(())
    }

    fn follow(&self, boxes: &mut Boxes, bar: &ProgressBar) -> Result<(Vec<Trained>, Vec<f32>)> {
        let mut trained: Vec<Option<Trained>> = vec![None; self.number];
        let mut loss = Vec::with_capacity(self.steps);
        while trained.iter().any(Option::is_none) {
            match self.next(boxes)? {
                (0, Event::Line(Line::Connected)) => bar.set_message("connected"),
                (0, Event::Line(Line::Step { step, loss: l })) => {
                    loss.push(l);
                    bar.set_position(step as u64 + 1);
                    bar.set_message(format!("loss {l:.4}"));
                    // Without a terminal there is no bar; a line now and then says the same.
                    if bar.is_hidden() && (step + 1) % self.steps.div_ceil(5) == 0 {
                        println!("  step {}/{}  loss {l:.4}", step + 1, self.steps);
                    }
                }
                (rank, Event::Line(Line::Trained(t))) => trained[rank] = Some(t),
                (_, Event::Line(_)) => {}
                (rank, Event::Ended(Ok(()))) => bail!("rank {rank} has ended too early{}", boxes.said()),
                (_, Event::Ended(Err(error))) => bail!("{error:#}{}", boxes.said()),
            }
        }
        Ok((trained.into_iter().flatten().collect(), loss))
    }

    /// The next event.
    ///
    /// # Errors
    /// On Ctrl-C, when the daemon has died, and when nothing happens for long.
    fn next(&self, boxes: &mut Boxes) -> Result<(usize, Event)> {
        let start = Instant::now();
        loop {
            interrupt::check()?;
            match self.events.recv_timeout(LOOK) {
                Ok(event) => return Ok(event),
                Err(RecvTimeoutError::Disconnected) => bail!("the readers of the ranks have ended"),
                Err(RecvTimeoutError::Timeout) => boxes.check()?,
            }
            if start.elapsed() > PATIENCE {
                bail!("no rank has made a step within {PATIENCE:?}{}", boxes.said());
            }
        }
    }
}

/// Passes on the lines of a rank until it has trained and may leave, or until nobody wants them.
fn read(
    rank: usize,
    mut process: Running,
    leave: &Receiver<()>,
    mut pass_on: impl FnMut(Line) -> bool,
) -> Result<()> {
    let mut trained = false;
    while !trained {
        let line = match process.line(PATIENCE) {
            Ok(line) => line,
            Err(_) if !process.is_running() => bail!("rank {rank} has failed: {}", process.stderr().trim()),
            Err(_) => bail!("rank {rank} has been silent for {PATIENCE:?}: {}", process.stderr().trim()),
        };
        let line: Line = serde_json::from_str(&line).with_context(|| format!("rank {rank} said `{line}`"))?;
        trained = matches!(line, Line::Trained(_));
        if !pass_on(line) {
            return Ok(());
        }
    }
    // An error says that the other end is gone, which is the sign.
    let _ = leave.recv();
    process.say_no_more();
    process.success(PATIENCE).map(drop)
}
