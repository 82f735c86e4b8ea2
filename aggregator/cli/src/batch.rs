//! `netsum batch file`: many commands over one connection.

use std::io::{Read as _, Write};
use std::path::Path;

use clap::Parser as _;

use super::args::{Command, Line};
use super::client::Client;
use super::command::one;
use super::failure::{Failure, Kind, Result};
use super::format::Format;
use super::view::BatchEntry;

/// A line that is not empty.
struct Work {
    number: usize,
    words: Vec<String>,
}

/// Runs a file's commands until one fails.
pub async fn file(
    path: &Path,
    format: Format,
    client: &mut Client,
    out: &mut impl Write,
) -> Result<()> {
    let name =
        if path.as_os_str() == "-" { "standard input".into() } else { path.display().to_string() };
    let text = read(path).map_err(|e| Failure::new(Kind::Failed, format!("{name}: {e}")))?;
    let mut entries = Vec::new();
    let mut failed = None;
    for line in
        lines(&text).map_err(|(n, why)| Failure::new(Kind::Usage, format!("{name}:{n}: {why}")))?
    {
        let mut printed = Vec::new();
        let result = match format {
            Format::Text => carry_out(&line.words, format, client, out).await,
            Format::Json | Format::Pretty => {
                carry_out(&line.words, Format::Json, client, &mut printed).await
            }
        };
        let error = result.as_ref().err().map(|e| e.message.clone());
        entries.push(BatchEntry {
            command: line.words,
            output: serde_json::from_slice(&printed).ok().filter(|_| error.is_none()),
            error,
        });
        if let Err(e) = result {
            failed = Some(Failure::new(e.kind, format!("{name}:{}: {}", line.number, e.message)));
            break;
        }
    }
    let printed = format.json(out, &entries)?;
    match failed {
        // The array has it already.
        Some(failure) if printed => Err(Failure::new(failure.kind, "")),
        Some(failure) => Err(failure),
        None => Ok(()),
    }
}

async fn carry_out(
    words: &[String],
    format: Format,
    client: &mut Client,
    out: &mut impl Write,
) -> Result<()> {
    let command = match Line::try_parse_from(words) {
        Ok(line) => line.command,
        // Requested help is not a mistake.
        Err(e) if !e.use_stderr() && format == Format::Text => {
            return Ok(write!(out, "{}", e.render())?);
        }
        Err(e) if !e.use_stderr() => return Ok(()),
        Err(e) => {
            let text = e.to_string();
            let first = text.lines().next().unwrap_or_default();
            return Err(Failure::new(Kind::Usage, first.trim_start_matches("error: ")));
        }
    };
    let refuse = |why: &str| Err(Failure::new(Kind::Usage, why));
    match command {
        Command::Run { .. } => refuse("`run` cannot be in a batch"),
        Command::Check { .. } => refuse("`check` cannot be in a batch"),
        Command::Top { .. } => refuse("`top` cannot be in a batch"),
        Command::Batch(_) => refuse("a batch cannot be in a batch"),
        Command::Stats { command: None, ref show }
        | Command::Stats { command: Some(super::args::StatsCommand::Show(ref show)), .. }
            if show.interval.is_some() =>
        {
            refuse("`stats --interval` cannot be in a batch")
        }
        command => one(command, format, client, out).await,
    }
}

fn read(path: &Path) -> std::io::Result<String> {
    if path.as_os_str() == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text)?;
        return Ok(text);
    }
    std::fs::read_to_string(path)
}

/// The words of each line, split as by a shell; all lines are checked before the first one runs.
fn lines(text: &str) -> std::result::Result<Vec<Work>, (usize, &'static str)> {
    let mut all = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let words = shlex::split(line).ok_or((i + 1, "a quote is not closed"))?;
        if !words.is_empty() {
            all.push(Work { number: i + 1, words });
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_split_like_a_shells() {
        let found = lines("# all\n\njob create 'a b' # one\n  port   show\n").unwrap();
        let words: Vec<(usize, Vec<&str>)> = found
            .iter()
            .map(|w| (w.number, w.words.iter().map(String::as_str).collect()))
            .collect();
        assert_eq!(words, [(3, vec!["job", "create", "a b"]), (4, vec!["port", "show"])]);
        assert_eq!(lines("port show\njob 'x").err(), Some((2, "a quote is not closed")));
    }
}
