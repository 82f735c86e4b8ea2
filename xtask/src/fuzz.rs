//! `cargo xtask fuzz`: runs a target of the package `fuzz` under libFuzzer, guided by coverage.
//!
//! The compiler flags are those of cargo-fuzz without a sanitizer. They need neither cargo-fuzz nor
//! a nightly compiler, but libFuzzer itself needs a C++ compiler.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::{paths, setup};

#[path = "../../fuzz/src/targets.rs"]
mod targets;

/// Flags for libFuzzer's coverage, and all checks of a debug build.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Cdebug-assertions=on -Coverflow-checks=on";
/// The most files of a committed corpus.
const COMMITTED: usize = 40;

/// Arguments of `cargo xtask fuzz`.
#[derive(clap::Args, Debug)]
pub struct FuzzArgs {
    /// The target: parser, rc, frames, config, api or xdp (needs root). Default: all, in turn.
    target: Option<String>,
    /// The time for each target: `90`, `90s`, `5m` or `1h`.
    #[arg(long, value_parser = duration, default_value = "60s", conflicts_with = "inputs")]
    time: Duration,
    /// Run this many inputs instead.
    #[arg(long)]
    inputs: Option<u64>,
    /// Run only this input.
    #[arg(long, value_name = "FILE", requires = "target", conflicts_with_all = ["time", "inputs"])]
    replay: Option<PathBuf>,
    /// Put the smallest set of inputs with the same coverage into fuzz/corpus, to be committed.
    #[arg(long)]
    keep: bool,
}

/// Parses a time such as 90s, 5m or 1h.
pub fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) =
        text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let seconds = match unit {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return Err("use a time such as 90s, 5m or 1h".into()),
    };
    let number: u32 = number.parse().map_err(|_| "use a time such as 90s, 5m or 1h")?;
    Ok(Duration::from_secs(u64::from(number) * seconds))
}

/// Runs `cargo xtask fuzz`.
///
/// # Errors
/// If an input made a target fail, or the fuzzer could not run.
pub fn run(args: &FuzzArgs) -> Result<()> {
    let all = targets::TARGETS.iter();
    let chosen: Vec<_> =
        all.filter(|t| args.target.as_deref().is_none_or(|name| name == t.name)).collect();
    ensure!(!chosen.is_empty(), "unknown target; choose one of {}", names());
    let program = build()?;
    let mut lines = Vec::new();
    let mut failed = false;
    for target in chosen {
        let line = match one(&program, target, args) {
            Ok(Some(line)) => line,
            Ok(None) => continue,
            Err(error) => {
                failed = true;
                format!("{:<8} FAILED: {error:#}", target.name)
            }
        };
        println!("{line}");
        lines.push(line);
    }
    if lines.len() > 1 {
        println!("\n{}", lines.join("\n"));
    }
    ensure!(!failed, "fuzzing found failing inputs, see above");
    Ok(())
}

fn names() -> String {
    targets::TARGETS.map(|t| t.name).join(", ")
}

fn build() -> Result<PathBuf> {
    if ["c++", "g++", "clang++"].iter().all(|c| paths::find_program(c).is_none()) {
        bail!("building libFuzzer needs a C++ compiler: install the Debian package g++");
    }
    let version = Command::new("rustc").arg("-vV").output().context("rustc")?;
    let version = String::from_utf8(version.stdout)?;
    let host = version.lines().find_map(|l| l.strip_prefix("host: ")).context("rustc's host")?;
    let folder = paths::target_dir()?.join("fuzz");
    println!("building for libFuzzer (minutes the first time)");
    let mut cargo = paths::cargo()?;
    cargo
        .args(["build", "--quiet", "--release", "--package", "netsum-fuzz", "--bin", "fuzz"])
        // With --target, cargo builds build scripts and macros without the flags.
        .args(["--features", "libfuzzer", "--target", host, "--target-dir"])
        .arg(&folder)
        .env("RUSTFLAGS", FLAGS);
    let status = cargo.status().context("cargo")?;
    ensure!(status.success(), "cargo build: {status}");
    Ok(folder.join(host).join("release/fuzz"))
}

/// Runs a target; returns a message about its result.
fn one(program: &Path, target: &targets::Target, args: &FuzzArgs) -> Result<Option<String>> {
    if target.name == "xdp"
        && let Err(reason) = setup::require_bpf()
    {
        ensure!(args.target.is_none(), "{reason:#}");
        return Ok(Some(format!("{:<8} SKIP: {reason:#}", target.name)));
    }
    let committed = paths::root()?.join("fuzz");
    let work = paths::target_dir()?.join("fuzz");
    let (corpus, findings) = (work.join("corpus").join(target.name), work.join("findings"));
    fs::create_dir_all(&corpus)?;
    fs::create_dir_all(&findings)?;
    let mut fuzzer = Command::new(program);
    // libFuzzer looks for scripts in the parent of the corpora, so they get a folder of their own.
    fuzzer.env("NETSUM_FUZZ_TARGET", target.name).current_dir(&work);
    if let Some(input) = &args.replay {
        let status = fuzzer
            .arg(input.canonicalize().with_context(|| input.display().to_string())?)
            .status()?;
        ensure!(status.success(), "{}: {status}", input.display());
        return Ok(None);
    }
    let limit = match args.inputs {
        Some(inputs) => format!("-runs={inputs}"),
        None => format!("-max_total_time={}", args.time.as_secs()),
    };
    fuzzer
        .args([limit, format!("-max_len={}", target.longest)])
        .args(["-print_final_stats=1", "-timeout=20"])
        .arg(format!("-artifact_prefix={}/{}-", findings.display(), target.name))
        .arg(&corpus)
        .args(
            ["corpus", "regressions"]
                .map(|kind| committed.join(kind).join(target.name))
                .iter()
                .filter(|p| p.is_dir()),
        );
    let (status, ran, coverage) = watch(&mut fuzzer)?;
    ensure!(
        status.success(),
        "{status} after {ran} inputs. The failing input is {}; save it under a name in \
         fuzz/regressions/{}",
        findings.display(),
        target.name
    );
    if args.keep {
        keep(program, target.name, &corpus, &committed.join("corpus").join(target.name))?;
    }
    Ok(Some(format!("{:<8} {ran} inputs ran without a failure{coverage}", target.name)))
}

/// Runs libFuzzer; returns its status, the number of inputs, and their coverage.
fn watch(fuzzer: &mut Command) -> Result<(std::process::ExitStatus, u64, String)> {
    let mut child = fuzzer.stderr(Stdio::piped()).spawn().context("the fuzzer")?;
    let stderr = child.stderr.take().context("stderr")?;
    let (mut ran, mut coverage) = (0, String::new());
    for line in BufReader::new(stderr).lines() {
        let line = line?;
        if let Some(number) = line.strip_prefix("stat::number_of_executed_units:") {
            ran = number.trim().parse().unwrap_or(0);
        } else if line.starts_with('#') {
            // Some lines have it: `#1024 pulse  cov: 553 ft: 1201 corp: ...`.
            if let Some((_, cov)) = line.split_once("cov: ") {
                coverage =
                    format!(", {} places covered", cov.split(' ').next().unwrap_or_default());
            }
            if line.contains("pulse") {
                println!("{line}");
            }
        } else if !line.starts_with("INFO:") && !line.starts_with("stat::") && !line.is_empty() {
            println!("{line}");
        }
    }
    Ok((child.wait()?, ran, coverage))
}

/// Keeps libFuzzer's own selection of inputs for the committed corpus.
fn keep(program: &Path, target: &str, corpus: &Path, committed: &Path) -> Result<()> {
    let merged = corpus.with_extension("merged");
    if merged.exists() {
        fs::remove_dir_all(&merged)?;
    }
    fs::create_dir_all(&merged)?;
    let mut fuzzer = Command::new(program);
    fuzzer.env("NETSUM_FUZZ_TARGET", target).current_dir(corpus.parent().context("a folder")?);
    let out = fuzzer.arg("-set_cover_merge=1").arg(&merged).arg(committed).arg(corpus).output()?;
    ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let mut files: Vec<(u64, PathBuf)> = fs::read_dir(&merged)?
        .map(|entry| {
            let entry = entry?;
            Ok((entry.metadata()?.len(), entry.path()))
        })
        .collect::<Result<_>>()?;
    files.sort();
    // Small and large files alike: large ones have more coverage.
    let step = files.len().div_ceil(COMMITTED).max(1);
    let mut kept = 0;
    for (_, path) in files.iter().step_by(step) {
        let name = path.file_name().context("a file name")?.to_string_lossy();
        fs::copy(path, committed.join(&name[..name.len().min(12)]))?;
        kept += 1;
    }
    println!("{target}: {kept} of {} inputs are in {}", files.len(), committed.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        for (text, seconds) in [("90", 90), ("90s", 90), ("5m", 300), ("1h", 3600)] {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)));
        }
        for text in ["", "s", "5 m", "-1", "5d", "99999999999h"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
