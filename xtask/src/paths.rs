//! Finds files and programs, and runs commands.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

pub fn root() -> Result<PathBuf> {
    // Set by `cargo run` and `cargo test`; a workspace may have moved since it was built.
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or(PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    Ok(xtask.parent().context("xtask's folder has no parent")?.to_owned())
}

/// Cargo's target folder, which contains this program: `<target>/<profile>/xtask`.
pub fn target_dir() -> Result<PathBuf> {
    let me = std::env::current_exe()?;
    Ok(me.ancestors().nth(2).context("xtask is not in a target folder")?.to_owned())
}

/// The cargo profile of this program.
pub fn profile() -> Result<&'static str> {
    Ok(if std::env::current_exe()?.parent().is_some_and(|folder| folder.ends_with("release")) {
        "release"
    } else {
        "dev"
    })
}

/// A program in one of the usual places or on the path.
pub fn find_program(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        // Debian's folders, which a short PATH may lack.
        .chain(["/usr/sbin", "/sbin", "/usr/bin"].map(Into::into))
        .map(|folder| folder.join(program))
        .find(|p| p.is_file())
}

/// Cargo in the workspace's root, with the environment of a shell.
///
/// Some build scripts depend on variables that `cargo run` sets for its program (`ring`'s does).
/// They would run again, and everything that depends on them would be rebuilt.
pub fn cargo() -> Result<Command> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    as_from_a_shell(&mut cargo);
    cargo.current_dir(root()?);
    Ok(cargo)
}

/// Removes the variables that `cargo run` has set.
pub fn as_from_a_shell(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "OUT_DIR"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
        {
            command.env_remove(name);
        }
    }
}

/// Runs a command to its end and returns its output; an error contains the command and the last
/// lines of the output.
pub fn output(command: &mut Command) -> Result<String> {
    let words: Vec<_> = std::iter::once(command.get_program()).chain(command.get_args()).collect();
    let line = words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    let out = command.output().with_context(|| format!("cannot start {line}"))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    let printed = String::from_utf8_lossy(&out.stderr);
    let lines: Vec<&str> = printed.trim().lines().collect();
    bail!("{line}: {}: {}", out.status, lines[lines.len().saturating_sub(30)..].join("\n"))
}
