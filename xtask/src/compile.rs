//! The compiler's command for a plugin. Tests of the plugins include this file, too.

use std::io::Result;
use std::path::Path;
use std::process::Command;

/// Compiles NCCL's plugin.
pub fn nccl() -> Command {
    let mut compiler = Command::new("cc");
    compiler.args(["-D_POSIX_C_SOURCE=200809L", "-fvisibility=hidden"]);
    // NCCL closes the library while the threads of libnetsum still run.
    compiler.arg("-Wl,-z,nodelete");
    compiler
}

/// Adds what compiles the C files of a folder in `worker/` to a plugin. It looks for the library
/// in its own folder.
///
/// # Errors
/// If the folder cannot be read.
pub fn add(compiler: &mut Command, sources: &Path, library: &Path, plugin: &Path) -> Result<()> {
    compiler.args(["-std=c11", "-O2", "-fPIC", "-shared", "-pthread"]);
    compiler.args(["-Wall", "-Wextra", "-Werror", "-Wl,-z,defs", "-Wl,-rpath,$ORIGIN"]);
    compiler.arg("-I").arg(sources.join("../c/include"));
    let mut files = Vec::new();
    for entry in std::fs::read_dir(sources)? {
        files.push(entry?.path());
    }
    files.retain(|path| path.extension().is_some_and(|end| end == "c"));
    files.sort();
    compiler.args(files).arg(library).arg("-o").arg(plugin);
    Ok(())
}
