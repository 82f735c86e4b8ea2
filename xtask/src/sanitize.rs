//! `cargo xtask sanitize`: runs the pure crates' tests under Miri and AddressSanitizer, if the
//! nightly toolchain has them.

use std::process::Command;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::paths;
use crate::paths::output;
use crate::tally::{Counts, Tally};
use crate::toolchain::nightly;

/// Tests that Miri can interpret: without sockets and foreign functions. Property tests and long
/// loops would take hours.
const MIRI: [&[&str]; 3] = [
    &["--package", "netsum-common", "--lib", "--test", "golden"],
    &["--package", "netsum-rc", "--lib", "--", "packet"],
    &["--package", "netsum-collective", "--lib", "--", "numeric::layout"],
];
/// Tests that run with instrumented memory accesses: those of all pure crates.
const ADDRESS: [&[&str]; 2] =
    [&["--package", "netsum-common", "--lib", "--tests"], &["--package", "netsum-rc", "--lib"]];

/// Runs `cargo xtask sanitize`.
///
/// # Errors
/// If a test has failed.
pub fn run() -> Result<()> {
    let start = Instant::now();
    let mut tally = Tally::default();
    match miri_is_there() {
        Ok(()) => tests("Miri", &MIRI, &["miri", "test"], &[], &mut tally),
        Err(reason) => tally.skip("Miri", MIRI.len() as u32, &format!("{reason:#}")),
    }
    match output(nightly("rustc").arg("-vV")) {
        Ok(version) => {
            let host = version.lines().find_map(|l| l.strip_prefix("host: ")).unwrap_or_default();
            let folder = paths::target_dir()?.join("sanitize");
            let options = ["--target", host, "--target-dir", &folder.display().to_string()];
            tests("AddressSanitizer", &ADDRESS, &["test"], &options, &mut tally);
        }
        Err(reason) => tally.skip("AddressSanitizer", ADDRESS.len() as u32, &format!("{reason:#}")),
    }
    tally.print(start.elapsed());
    if !tally.is_success() {
        bail!("tests have failed");
    }
    Ok(())
}

fn miri_is_there() -> Result<()> {
    // rustup's own `cargo-miri` only reports that the component is missing.
    output(nightly("cargo").args(["miri", "--version"])).map(drop).map_err(|_| {
        anyhow::anyhow!(
            "the nightly toolchain has no Miri (`rustup component add --toolchain nightly miri`)"
        )
    })
}

fn tests(
    set: &'static str,
    packages: &[&[&str]],
    command: &[&str],
    options: &[&str],
    tally: &mut Tally,
) {
    for package in packages {
        println!("{set}: {}", package.join(" "));
        let mut cargo: Command = nightly("cargo");
        cargo.args(command).args(options).args(*package);
        if set == "AddressSanitizer" {
            cargo.env("RUSTFLAGS", "-Zsanitizer=address");
        }
        let result = paths::root().and_then(|root| Ok(cargo.current_dir(root).output()?));
        match result {
            Ok(out) => {
                let text = String::from_utf8_lossy(&out.stdout);
                let counts: Counts = text.lines().filter_map(Counts::parse).sum();
                if !out.status.success() {
                    println!("{text}{}", String::from_utf8_lossy(&out.stderr));
                }
                if !out.status.success() && counts.failed == 0 || counts == Counts::default() {
                    tally.fail(set, &package.join(" "), &format!("{}", out.status));
                }
                tally.add(set, counts);
            }
            Err(error) => tally.fail(set, &package.join(" "), &format!("{error:#}")),
        }
    }
}
