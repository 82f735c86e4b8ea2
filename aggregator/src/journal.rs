//! The log as systemd's journal takes it from standard error: lines with their priority (sd-daemon(3)). It has the time and the program.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;

use env_logger::fmt::Formatter;
use log::{Level, Record};

/// Whether standard error goes to the journal: systemd names what it has connected (systemd.exec(5), `$JOURNAL_STREAM`).
pub fn is_stderr() -> bool {
    let stderr = || File::from(io::stderr().as_fd().try_clone_to_owned().ok()?).metadata().ok();
    let stream = std::env::var("JOURNAL_STREAM").ok();
    stream.zip(stderr()).is_some_and(|(stream, file)| stream == format!("{}:{}", file.dev(), file.ino()))
}

/// Writes a record.
pub fn write(to: &mut Formatter, record: &Record) -> io::Result<()> {
    let priority = match record.level() {
        Level::Error => 3,
        Level::Warn => 4,
        Level::Info => 6,
        Level::Debug | Level::Trace => 7,
    };
    record.args().to_string().lines().try_for_each(|line| writeln!(to, "<{priority}>{line}"))
}
