//! Runs programs for tests: collects their output, and ends them with the test.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The rest of a program's standard error, and what it has written to it.
#[derive(Debug)]
struct Errors {
    pipe: ChildStderr,
    text: Vec<u8>,
}

impl Errors {
    /// Takes what is in the pipe. Returns whether the pipe has ended.
    fn take(&mut self) -> bool {
        let mut part = [0; 4096];
        loop {
            match self.pipe.read(&mut part) {
                Ok(0) => return true,
                Ok(n) => self.text.extend_from_slice(&part[..n]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return e.kind() != ErrorKind::WouldBlock,
            }
        }
    }
}

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
    stderr: Arc<Mutex<Errors>>,
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
        let ready = err.as_fd().try_clone_to_owned()?;
        fcntl(&err, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let stderr = Arc::new(Mutex::new(Errors { pipe: err, text: Vec::new() }));
        let (collected, (ended, stderr_ended)) = (stderr.clone(), channel());
        std::thread::spawn(move || {
            loop {
                let mut wait = [PollFd::new(ready.as_fd(), PollFlags::POLLIN)];
                let _ = poll(&mut wait, PollTimeout::NONE);
                if collected.lock().expect("not poisoned").take() {
                    break;
                }
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
        // The thread that collects it may be behind an answer on standard output.
        let mut errors = self.stderr.lock().expect("not poisoned");
        errors.take();
        String::from_utf8_lossy(&errors.text).into_owned()
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Writes a line to its input.
    pub fn send_line(&mut self, line: &str) -> Result<()> {
        let stdin = self.child.stdin.as_mut().context("its input has been closed")?;
        writeln!(stdin, "{line}").with_context(|| format!("{} does not read", self.name))
    }

    /// Closes its input.
    pub fn close_input(&mut self) {
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
        self.close_input();
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
