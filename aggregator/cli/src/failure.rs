//! Why a command failed, and the exit code that says so.

use std::fmt;

/// What kind of failure; its number is the exit code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Something went wrong that is nobody's mistake: a file, the kernel, a defect.
    Failed = 1,
    /// The command line cannot be understood.
    Usage = 2,
    /// The daemon says no: a value that cannot be, nothing left to give, no right to ask.
    Refused = 3,
    /// What was named is not there.
    NotFound = 4,
    /// No daemon answers.
    NoDaemon = 5,
}

/// A command that failed.
#[derive(Debug)]
pub struct Failure {
    pub kind: Kind,
    /// In words; empty where they have been printed already.
    pub message: String,
    broken_pipe: bool,
}

impl Failure {
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), broken_pipe: false }
    }

    /// Nobody reads what is printed any more.
    pub fn is_broken_pipe(&self) -> bool {
        self.broken_pipe
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::new(Kind::Failed, format!("{error:#}"))
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        let broken_pipe = error.kind() == std::io::ErrorKind::BrokenPipe;
        Self { broken_pipe, ..Self::new(Kind::Failed, error.to_string()) }
    }
}

/// What the manual says about exit codes.
pub const EXIT_STATUS: &str = "\
0  done
1  something went wrong
2  usage: the command line is not understood
3  refused: the daemon says no, or you may not ask it
4  not found: no such job, port or program
5  no daemon answers";

/// The result of a command.
pub type Result<T> = std::result::Result<T, Failure>;
