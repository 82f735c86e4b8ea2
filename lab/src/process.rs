//! Runs programs for tests: collects their output, and ends them with the test.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Timeout for anything that should be quick.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// One of the project's programs, beside the test programs in cargo's target folder.
///
/// # Errors
/// If it has not been built.
pub fn program(name: &str) -> Result<PathBuf> {
    let me = std::env::current_exe()?;
    // <target>/<profile>/deps/<test>, or <target>/<profile>/<program>.
    let found =
        me.ancestors().skip(1).take(2).map(|folder| folder.join(name)).find(|path| path.is_file());
    found.with_context(|| {
        format!("no program `{name}` near {}: run `cargo build --workspace`", me.display())
    })
}

/// A running program. It is killed on drop.
#[derive(Debug)]
pub struct Running {
    name: String,
    child: Child,
    lines: Receiver<String>,
    stdout: String,
    stderr: Arc<Mutex<String>>,
    stderr_ended: Receiver<()>,
}

/// How a program ended.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Running {
    /// Starts a program; `name` appears in messages.
    pub fn start(name: &str, command: &mut Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {name}: {command:?}"))?;
        let (out, err) =
            (child.stdout.take().context("stdout")?, child.stderr.take().context("stderr")?);
        let (send_line, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if send_line.send(line).is_err() {
                    break;
                }
            }
        });
        let stderr = Arc::new(Mutex::new(String::new()));
        let (collected, (ended, stderr_ended)) = (stderr.clone(), channel());
        std::thread::spawn(move || {
            let mut err = BufReader::new(err);
            let mut line = Vec::new();
            while matches!(err.read_until(b'\n', &mut line), Ok(n) if n > 0) {
                collected.lock().expect("not poisoned").push_str(&String::from_utf8_lossy(&line));
                line.clear();
            }
            drop(ended);
        });
        Ok(Self {
            name: name.to_owned(),
            child,
            lines,
            stdout: String::new(),
            stderr,
            stderr_ended,
        })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its standard error so far.
    pub fn stderr(&self) -> String {
        self.stderr.lock().expect("not poisoned").clone()
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Writes a line to its input.
    pub fn say(&mut self, line: &str) -> Result<()> {
        let stdin = self.child.stdin.as_mut().context("its input has been closed")?;
        writeln!(stdin, "{line}").with_context(|| format!("{} does not read", self.name))
    }

    /// Closes its input.
    pub fn say_no_more(&mut self) {
        drop(self.child.stdin.take());
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(self.child.id() as i32), signal)
            .with_context(|| format!("{signal} to {}", self.name))
    }

    /// Waits for the next line of its output.
    ///
    /// # Errors
    /// If no line arrives within `timeout`, or the program has ended.
    pub fn line(&mut self, timeout: Duration) -> Result<String> {
        match self.lines.recv_timeout(timeout) {
            Ok(line) => {
                self.stdout += &line;
                self.stdout.push('\n');
                Ok(line)
            }
            Err(RecvTimeoutError::Timeout) => {
                bail!(
                    "{} has printed nothing more within {timeout:?}:\n{}{}",
                    self.name,
                    self.stdout,
                    self.stderr()
                )
            }
            Err(RecvTimeoutError::Disconnected) => {
                bail!("{} has ended:\n{}{}", self.name, self.stdout, self.stderr())
            }
        }
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// If it does not end within `timeout`. The program is killed then.
    pub fn end(mut self, timeout: Duration) -> Result<Ended> {
        self.say_no_more();
        let deadline = Instant::now() + timeout;
        let left = || deadline.saturating_duration_since(Instant::now());
        loop {
            match self.lines.recv_timeout(left()) {
                Ok(line) => {
                    self.stdout += &line;
                    self.stdout.push('\n');
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    bail!(
                        "{} has not ended within {timeout:?}:\n{}{}",
                        self.name,
                        self.stdout,
                        self.stderr()
                    )
                }
            }
        }
        // Closed outputs mean that the program ends, unless it closes them early.
        if matches!(self.stderr_ended.recv_timeout(left()), Err(RecvTimeoutError::Timeout)) {
            bail!(
                "{} has not ended within {timeout:?}:\n{}{}",
                self.name,
                self.stdout,
                self.stderr()
            );
        }
        let status = self.child.wait()?;
        Ok(Ended { status, stdout: std::mem::take(&mut self.stdout), stderr: self.stderr() })
    }

    /// Waits for its end, which must be a success; returns its output.
    pub fn success(self, timeout: Duration) -> Result<String> {
        let name = self.name.clone();
        let ended = self.end(timeout)?;
        if !ended.status.success() {
            bail!("{name}: {}\n{}{}", ended.status, ended.stdout, ended.stderr);
        }
        Ok(ended.stdout)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Harmless if the program has ended: its process ID is not reused before `wait`.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
