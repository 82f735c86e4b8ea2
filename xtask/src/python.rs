//! Builds the Python package's wheel, and tests it in virtual environments in target/python.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::paths::{self, find_program, output};
use crate::tally::{Counts, Tally};
use crate::{plugins, setup};

/// Debian's Python, or another on the path.
const PYTHONS: [&str; 2] = ["/usr/bin/python3", "python3"];
/// The first version whose stable interface has the buffer protocol.
const OLDEST: (u32, u32) = (3, 11);

/// Arguments of `cargo xtask wheel`.
#[derive(clap::Args, Debug)]
pub struct WheelArgs {
    /// The folder for the wheel.
    #[arg(long, default_value = "target/wheels")]
    out: PathBuf,
}

/// Runs `cargo xtask wheel`.
///
/// # Errors
/// If something is missing, or the build fails.
pub fn run(args: &WheelArgs) -> Result<()> {
    let python = python()?;
    let wheel = wheel(&python, &tools(&python)?, "release", &paths::root()?.join(&args.out))?;
    println!("{}", wheel.display());
    Ok(())
}

/// A Python that is new enough and can make virtual environments.
fn python() -> Result<PathBuf> {
    let python = PYTHONS.iter().find_map(|name| find_program(name)).context("no python3")?;
    let version = output(
        Command::new(&python)
            .args(["-c", "import sys; print(sys.version_info[0], sys.version_info[1])"]),
    )?;
    let mut numbers = version.split_whitespace().map(|n| n.parse().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    ensure!(
        version >= OLDEST,
        "{} is Python {}.{}: {}.{} or later is needed",
        python.display(),
        version.0,
        version.1,
        OLDEST.0,
        OLDEST.1
    );
    if output(Command::new(&python).args(["-c", "import ensurepip, venv"])).is_err() {
        setup::require_venv()?;
    }
    Ok(python)
}

/// A package's line in the file of locked versions.
fn locked(package: &str) -> Result<String> {
    let file = paths::root()?.join("python/requirements.txt");
    let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let line = text.lines().find(|line| line.split("==").next() == Some(package));
    line.map(str::to_owned).with_context(|| format!("no {package} in {}", file.display()))
}

fn folder(name: &str) -> Result<PathBuf> {
    Ok(paths::target_dir()?.join("python").join(name))
}

/// Makes a virtual environment with these packages, with pip's options.
fn environment(python: &Path, name: &str, options: &[&str], packages: &[&str]) -> Result<PathBuf> {
    let place = folder(name)?;
    output(Command::new(python).args(["-m", "venv", "--clear"]).args(options).arg(&place))?;
    output(
        Command::new(place.join("bin/pip"))
            .args(["install", "--quiet", "--disable-pip-version-check"])
            .args(packages),
    )?;
    Ok(place.join("bin/python"))
}

/// maturin in its locked version.
fn tools(python: &Path) -> Result<PathBuf> {
    let (locked, maturin) = (locked("maturin")?, folder("tools")?.join("bin/maturin"));
    let version = output(Command::new(&maturin).arg("--version")).unwrap_or_default();
    if version.trim().replace(' ', "==") != locked {
        println!("installing {locked} into target/python: it builds the wheel");
        environment(python, "tools", &[], &[&locked])?;
    }
    Ok(maturin)
}

/// Builds the wheel into a folder.
fn wheel(python: &Path, maturin: &Path, profile: &str, out: &Path) -> Result<PathBuf> {
    // An earlier build leaves a file with the same name, or another version's.
    let built = tempfile::tempdir_in(paths::target_dir()?)?;
    let mut build = Command::new(maturin);
    paths::as_from_a_shell(&mut build);
    build.args([
        "build",
        "--quiet",
        "--locked",
        "--profile",
        profile,
        "--manifest-path",
        "python/Cargo.toml",
    ]);
    build.arg("--interpreter").arg(python).arg("--target-dir").arg(paths::target_dir()?);
    output(build.arg("--out").arg(built.path()).current_dir(paths::root()?))?;
    let made = std::fs::read_dir(built.path())?.next().context("maturin built no wheel")??;
    std::fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    let place = out.join(made.file_name());
    std::fs::copy(made.path(), &place).with_context(|| place.display().to_string())?;
    Ok(place)
}

/// Builds the wheel, installs it into fresh environments, and runs its tests there. Returns an
/// error if the lab's tests have no environment.
///
/// # Errors
/// If something is missing or fails.
pub fn test(tally: &mut Tally, torch: Torch, gpu: bool) -> Result<()> {
    let torch = if gpu { Torch::Pypi } else { torch };
    let ready = python().and_then(|python| tools(&python).map(|maturin| (python, maturin)));
    let (python, maturin) = match ready {
        Ok(ready) => ready,
        Err(reason) => {
            let text = format!("{reason:#}");
            for environment in ENVIRONMENTS.iter().chain([&PYPI_TORCH]) {
                tally.skip(environment.title, tests(), &text);
            }
            return Err(reason);
        }
    };
    if let Err(reason) = setup::require_torch() {
        println!("SKIP tests with PyTorch: {reason:#}");
    }
    println!("building the Python package");
    let wheel = match wheel(&python, &maturin, "dev", &folder("wheels")?) {
        Ok(wheel) => wheel,
        Err(error) => {
            tally.fail(ENVIRONMENTS[0].title, "maturin build", &format!("{error:#}"));
            return Err(error.context("no Python package"));
        }
    };
    let mut first = Ok(());
    if torch == Torch::Debian {
        tally.skip(PYPI_TORCH.title, tests(), "not asked for (--torch pypi: several GB)");
    }
    let asked = (torch == Torch::Pypi).then_some(&PYPI_TORCH);
    for environment in ENVIRONMENTS.iter().chain(asked) {
        match environment.make(&python, &wheel) {
            Ok(python) => unittest(&python, environment.title, gpu, tally),
            Err(error) => {
                tally.skip(environment.title, tests(), &format!("{error:#}"));
                first = first.and(Err(error));
            }
        }
    }
    first
}

/// Makes an environment with Debian's PyTorch and this package; returns its Python.
///
/// # Errors
/// If something is missing, or the build fails.
pub fn with_torch() -> Result<PathBuf> {
    let python = python()?;
    setup::require_torch()?;
    println!("building the Python package");
    let wheel = wheel(&python, &tools(&python)?, paths::profile()?, &folder("wheels")?)?;
    DEBIAN.make(&python, &wheel)
}

/// The PyTorch that the tests use.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Torch {
    /// Debian's PyTorch.
    Debian,
    /// Debian's, and PyPI's in the locked version: several GB, which are kept in
    /// target/python/torch.
    Pypi,
}

/// An environment for the tests.
struct Environment {
    title: &'static str,
    name: &'static str,
    /// The packages that are installed from PyPI.
    packages: &'static [&'static str],
    /// Whether it sees Debian's packages.
    debian: bool,
}

const DEBIAN: Environment = Environment {
    title: "Python, Debian's numpy and PyTorch",
    name: "debian",
    packages: &[],
    debian: true,
};
const ENVIRONMENTS: [Environment; 2] = [
    Environment {
        title: "Python",
        name: "pypi",
        packages: &["numpy", "kubernetes-validate"],
        debian: false,
    },
    DEBIAN,
];
const PYPI_TORCH: Environment = Environment {
    title: "Python, PyPI's PyTorch",
    name: "torch",
    packages: &["numpy", "torch"],
    debian: false,
};

impl Environment {
    /// Whether it exists with these packages: large ones are not fetched twice.
    fn has(&self, locked: &[String]) -> Result<bool> {
        let pip = folder(self.name)?.join("bin/pip");
        let there =
            output(Command::new(pip).args(["list", "--format", "freeze"])).unwrap_or_default();
        Ok(locked.iter().all(|package| there.lines().any(|line| line == package)))
    }

    /// Makes it; returns its Python.
    fn make(&self, python: &Path, wheel: &Path) -> Result<PathBuf> {
        let wheel = wheel.display().to_string();
        if !self.debian {
            let locked =
                self.packages.iter().map(|package| locked(package)).collect::<Result<Vec<_>>>()?;
            if self.has(&locked)? {
                let place = folder(self.name)?.join("bin");
                output(Command::new(place.join("pip")).args([
                    "install",
                    "--quiet",
                    "--no-index",
                    "--no-deps",
                    "--force-reinstall",
                    &wheel,
                ]))?;
                return Ok(place.join("python"));
            }
            let packages: Vec<&str> = locked.iter().map(String::as_str).chain([&*wheel]).collect();
            return environment(python, self.name, &[], &packages);
        }
        ensure!(python.starts_with("/usr/bin"), "{} is not Debian's", python.display());
        setup::require_debian_numpy()?;
        environment(python, self.name, &["--system-site-packages"], &["--no-index", &wheel])
    }
}

/// The number of tests.
fn tests() -> u32 {
    let text = |file| {
        let path = paths::root().map(|root| root.join("python/tests").join(file));
        path.and_then(|path| Ok(std::fs::read_to_string(path)?)).unwrap_or_default()
    };
    let files = [
        "test_conformance.py",
        "test_launch.py",
        "test_nccl.py",
        "test_netsum.py",
        "test_staging.py",
        "test_torch.py",
    ];
    files.iter().map(|file| text(file).matches("    def test_").count() as u32).sum()
}

fn unittest(python: &Path, title: &'static str, gpu: bool, tally: &mut Tally) {
    match run_tests(python, gpu) {
        Ok((counts, skipped)) => {
            tally.skip(title, counts.ignored, &skipped);
            tally.add(title, Counts { ignored: 0, ..counts });
        }
        Err(error) => tally.fail(title, "python/tests", &format!("{error:#}")),
    }
}

/// Runs the tests; returns their counts, and why some were skipped.
fn run_tests(python: &Path, gpu: bool) -> Result<(Counts, String)> {
    if gpu {
        plugins::nccl(paths::profile()?)?;
    }
    let out = Command::new(python)
        .args(["-m", "unittest", "--verbose"])
        .current_dir(paths::root()?.join("python/tests"))
        // Python must not write into the source folders.
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("NETSUM_TEST_GPU", if gpu { "1" } else { "" })
        .output()?;
    let text = String::from_utf8_lossy(&out.stderr);
    let counts =
        counts(&text).with_context(|| format!("{}, without a report:\n{text}", out.status))?;
    if counts.failed > 0 {
        println!("{text}");
    }
    println!("python/tests: {} passed, {} failed", counts.passed, counts.failed);
    let reasons = text.lines().filter_map(|line| line.split_once(" ... skipped "));
    let reasons: BTreeSet<_> =
        reasons.map(|(_, reason)| reason.trim_matches(['\'', '"'])).collect();
    Ok((counts, reasons.into_iter().collect::<Vec<_>>().join("; ")))
}

/// Parses unittest's summary.
fn counts(text: &str) -> Option<Counts> {
    let number = |word: &str| {
        let rest = text
            .rsplit('\n')
            .find(|line| line.starts_with("FAILED (") || line.starts_with("OK"))?;
        let (_, rest) = rest.split_once(&format!("{word}="))?;
        rest.split([',', ')']).next()?.parse::<u32>().ok()
    };
    let all: u32 = text.split("\nRan ").nth(1)?.split(' ').next()?.parse().ok()?;
    let failed = number("failures").unwrap_or(0) + number("errors").unwrap_or(0);
    let ignored = number("skipped").unwrap_or(0);
    Some(Counts { passed: all.checked_sub(failed + ignored)?, failed, ignored })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_unittest_are_read() {
        let text = "..F.s\n======\nFAIL: x\n\nRan 20 tests in 12.123s\n\nFAILED (failures=2, \
                    errors=1, skipped=1)\n";
        assert_eq!(counts(text), Some(Counts { passed: 16, failed: 3, ignored: 1 }));
        let text = "\nRan 1 test in 1s\n\nOK\n";
        assert_eq!(counts(text), Some(Counts { passed: 1, failed: 0, ignored: 0 }));
        assert_eq!(counts("Traceback"), None);
        assert!(super::tests() > 10);
    }
}
