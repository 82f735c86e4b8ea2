//! The project's own programs in C, which run only in VMs, compiled with the headers of the
//! unpacked packages.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::parts::PROGRAMS;
use anyhow::{Context, Result};

use super::{cached, userland};
use crate::paths;
use crate::paths::output;

/// Names, and sources in the folder `lab/verbs`.
const SOURCES: [(&str, &str); 1] = [("verbs-ring", "ring.c")];

const FLAGS: [&str; 7] =
    ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-Wl,--allow-shlib-undefined"];

/// Compiles them, unless they exist.
pub fn prepare(folder: &Path) -> Result<()> {
    let home = paths::root()?.join("lab/verbs");
    let read = |(_, source): &(&str, &str)| {
        let path = home.join(source);
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    };
    let texts: Vec<String> = SOURCES.iter().map(read).collect::<Result<_>>()?;
    let include = paths::root()?.join("worker/c/include");
    let header = fs::read_to_string(include.join("netsum.h"))?;
    let own = folder.join(PROGRAMS);
    let unpacked = folder.join(userland::UNPACKED).join("usr");
    cached(&own, &format!("{FLAGS:?}\n{}{header}", texts.concat()), || {
        for (name, source) in SOURCES {
            let mut cc = Command::new("cc");
            cc.args(FLAGS).arg("-o").arg(own.join(name));
            cc.arg("-isystem").arg(unpacked.join("include")).arg("-I").arg(&include);
            cc.arg(home.join(source)).arg(unpacked.join("lib/x86_64-linux-gnu/libibverbs.so.1"));
            output(&mut cc)?;
        }
        Ok(())
    })
}
