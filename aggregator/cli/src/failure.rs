//! Why a command failed, with its exit code.

use std::fmt;

/// Kind of failure; its number is the exit code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// An error that is not the user's mistake: a file, the kernel, a defect.
    Failed = 1,
    /// The command line cannot be understood.
    Usage = 2,
    /// The daemon refuses: an invalid value, a full pool, missing permissions.
    Refused = 3,
    /// The named object does not exist.
    NotFound = 4,
    /// No daemon answers.
    NoDaemon = 5,
}

/// A command that failed.
#[derive(Debug)]
pub struct Failure {
    pub kind: Kind,
    /// Message; empty if it has been printed already.
    pub message: String,
    broken_pipe: bool,
}

impl Failure {
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), broken_pipe: false }
    }

    /// The reader of standard output has closed it.
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

/// Exit codes, as in the manual.
pub const EXIT_STATUS: &str = "\
0  done
1  something went wrong
2  usage: the command line is wrong
3  refused: the daemon refuses, or the socket does not allow access
4  not found: no such job, port or program
5  no daemon answers";

/// The result of a command.
pub type Result<T> = std::result::Result<T, Failure>;
