//! Builds the workspace's test programs and runs them one by one.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::paths;
use crate::tally::Counts;

/// A test program that cargo has built, or a module of the lab's tests.
#[derive(Clone, Debug)]
pub struct TestProgram {
    pub package: String,
    /// Name of the target: the package's library or binary, or a file in `tests/`.
    pub name: String,
    integration: bool,
    /// The tests of a module, with its name before each.
    tests: Vec<String>,
    executable: PathBuf,
    folder: PathBuf,
}

/// Cargo's message about an artifact (`cargo build --message-format json`, "Artifact messages").
#[derive(Deserialize)]
struct Artifact {
    reason: String,
    manifest_path: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// Builds the workspace with all programs that tests start; returns the test programs.
///
/// # Errors
/// If the build fails; the compiler has printed why.
pub fn test_programs() -> Result<Vec<TestProgram>> {
    // One build: in two builds, dependencies would have different features, and most of our crates
    // would be built twice.
    let mut build = paths::cargo()?;
    build.args(["build", "--workspace", "--lib", "--bins", "--examples", "--tests"]);
    let out = build
        .args(["--message-format", "json-render-diagnostics"])
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(out.status.success(), "cargo build: {}", out.status);
    let messages = String::from_utf8_lossy(&out.stdout);
    let built: Vec<_> = messages.lines().filter_map(test_program).collect();
    ensure!(!built.is_empty(), "cargo built no tests");
    let mut programs = Vec::new();
    for program in built {
        match (&*program.package, &*program.name) {
            ("tests", "all") => programs.extend(program.modules()?),
            _ => programs.push(program),
        }
    }
    programs.sort_by(|a, b| {
        (&a.package, a.integration, &a.name).cmp(&(&b.package, b.integration, &b.name))
    });
    Ok(programs)
}

fn test_program(message: &str) -> Option<TestProgram> {
    let artifact: Artifact = serde_json::from_str(message).ok()?;
    if artifact.reason != "compiler-artifact" || !artifact.profile?.test {
        return None;
    }
    let (folder, target) = (artifact.manifest_path?.parent()?.to_owned(), artifact.target?);
    Some(TestProgram {
        package: folder.file_name()?.to_string_lossy().into_owned(),
        name: target.name,
        integration: target.kind.iter().any(|kind| kind == "test"),
        tests: Vec::new(),
        executable: artifact.executable?,
        folder,
    })
}

impl TestProgram {
    /// The tests of a module.
    pub fn tests(&self) -> &[String] {
        &self.tests
    }

    /// For messages.
    pub fn title(&self) -> String {
        if self.integration {
            format!("{}/tests/{}", self.package, self.name)
        } else {
            format!("{}: {}", self.package, self.name)
        }
    }

    /// Whether its tests need namespaces, root or BPF. That is true of the lab's tests, of
    /// benchmarks, and of the fuzzing of XDP programs.
    pub fn needs_lab(&self) -> bool {
        self.integration
            && (["tests", "bench"].contains(&&*self.package)
                || self.package == "fuzz" && self.name == "xdp")
    }

    /// Whether its tests also need the lab's virtual machines.
    pub fn needs_vms(&self) -> bool {
        self.needs_lab() && self.name.starts_with("vm")
    }

    /// Whether its tests also need a terminal.
    pub fn needs_terminal(&self) -> bool {
        self.needs_lab() && self.name.starts_with("terminal")
    }

    /// Whether its tests also start Prometheus.
    pub fn needs_prometheus(&self) -> bool {
        self.needs_lab() && self.name.starts_with("monitor")
    }

    /// Whether its tests also run programs of MPI.
    pub fn needs_mpi(&self) -> bool {
        self.needs_lab() && self.name == "mpi"
    }

    /// Whether its tests compile C.
    pub fn needs_compiler(&self) -> bool {
        self.is_nccl() || self.integration && self.package == "c" && self.name == "programs"
    }

    /// Whether its tests load NCCL's plugin.
    pub fn is_nccl(&self) -> bool {
        self.integration && ["c", "tests"].contains(&&*self.package) && self.name == "nccl"
    }

    /// Whether its tests also start the Python package.
    pub fn needs_python(&self) -> bool {
        self.needs_torch() || self.needs_lab() && self.name.starts_with("python")
    }

    /// Whether its tests also train with PyTorch.
    pub fn needs_torch(&self) -> bool {
        self.needs_lab() && self.name.starts_with("train")
    }

    /// Its modules as separate programs; each is one file.
    fn modules(&self) -> Result<Vec<Self>> {
        let mut modules: Vec<Self> = Vec::new();
        for test in self.names()? {
            let module = test.split("::").next().unwrap_or_default();
            if modules.last().is_none_or(|last| last.name != module) {
                modules.push(Self { name: module.to_owned(), ..self.clone() });
            }
            if let Some(last) = modules.last_mut() {
                last.tests.push(test);
            }
        }
        Ok(modules)
    }

    /// Splits it into the tests that the list names, as `module` or `module::test`, and the others.
    pub fn split(self, list: &[&str]) -> [Option<Self>; 2] {
        let is_named = |test: &str| {
            let rest = |name: &&str| test.strip_prefix(*name);
            list.iter().filter_map(rest).any(|rest| rest.is_empty() || rest.starts_with("::"))
        };
        if self.tests.is_empty() {
            return if is_named(&self.name) { [Some(self), None] } else { [None, Some(self)] };
        }
        let (named, others): (Vec<_>, _) =
            self.tests.iter().cloned().partition(|test| is_named(test));
        [named, others].map(|tests| (!tests.is_empty()).then(|| Self { tests, ..self.clone() }))
    }

    fn names(&self) -> Result<Vec<String>> {
        let arguments = ["--list", "--format", "terse", "--include-ignored"];
        let out = self.command(&arguments, None).output().with_context(|| self.title())?;
        let text = String::from_utf8_lossy(&out.stdout);
        Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }

    /// Its command line with these arguments, in the environment that cargo would give it.
    pub fn command(&self, arguments: &[&str], filter: Option<&str>) -> Command {
        let mut command = Command::new(&self.executable);
        if self.tests.is_empty() {
            command.args(filter);
        } else {
            // With an empty list of names it would run all tests.
            let asked =
                self.tests.iter().filter(|test| filter.is_none_or(|filter| test.contains(filter)));
            command.arg("--exact").arg(&self.name).args(asked);
        }
        command.args(arguments).current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }

    /// The number of its tests.
    pub fn list(&self, filter: Option<&str>) -> Result<u32> {
        let names = if self.tests.is_empty() { self.names()? } else { self.tests.clone() };
        Ok(names.iter().filter(|name| filter.is_none_or(|filter| name.contains(filter))).count()
            as u32)
    }

    /// Runs its tests. Tests of the lab are shown one by one, with their seconds; others are summed
    /// up in one line unless one fails.
    ///
    /// # Errors
    /// If it ends without a report, or does not end within `timeout`.
    pub fn run(&self, filter: Option<&str>, in_lab: bool, timeout: Duration) -> Result<Counts> {
        let start = Instant::now();
        let arguments: &[&str] =
            if in_lab { &["--include-ignored", "--test-threads=1"] } else { &[] };
        let mut child = self
            .command(arguments, filter)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .with_context(|| self.title())?;
        let (send, lines) = channel();
        let stdout = child.stdout.take().context("stdout")?;
        std::thread::spawn(move || {
            BufReader::new(stdout)
                .lines()
                .map_while(Result::ok)
                .try_for_each(|line| send.send(line))
        });
        let (mut counts, mut text, mut last) = (None, String::new(), start);
        loop {
            match lines.recv_timeout(timeout.saturating_sub(start.elapsed())) {
                Ok(line) => {
                    counts = counts.or(Counts::parse(&line));
                    if in_lab && line.starts_with("test ") && line.ends_with("... ok") {
                        let line = line.replacen(&format!("{}::", self.name), "", 1);
                        println!(
                            "  {}: {line} {:.1} s",
                            self.title(),
                            last.elapsed().as_secs_f64()
                        );
                        last = Instant::now();
                    } else if !line.is_empty() && !line.starts_with("running ") {
                        text += &line;
                        text.push('\n');
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    // Each lab has a cleaner that removes it when the process ends.
                    child.kill()?;
                    child.wait()?;
                    bail!("timed out after {} s:\n{text}", timeout.as_secs());
                }
            }
        }
        let status = child.wait()?;
        let Some(counts) = counts else { bail!("{status}, without a report:\n{text}") };
        if !status.success() {
            println!("{text}");
        }
        ensure!(status.success() || counts.failed > 0, "{status}");
        if counts != Counts::default() {
            let seconds = start.elapsed().as_secs_f64();
            println!(
                "{}: {} passed, {} failed in {seconds:.1} s",
                self.title(),
                counts.passed,
                counts.failed
            );
        }
        Ok(counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_labs_tests_is_built() {
        let folder = paths::root().unwrap().join("tests/tests");
        let all = std::fs::read_to_string(folder.join("all.rs")).unwrap();
        for file in std::fs::read_dir(folder).unwrap() {
            let name = file.unwrap().file_name().into_string().unwrap();
            let Some(module) = name.strip_suffix(".rs").filter(|module| *module != "all") else {
                continue;
            };
            assert!(
                all.contains(&format!("\nmod {module};\n")),
                "tests/tests/all.rs does not list {module}"
            );
        }
    }

    #[test]
    fn a_module_is_split_by_its_own_name_or_by_those_of_its_tests() {
        let module = TestProgram {
            package: "tests".into(),
            name: "lab".into(),
            integration: true,
            tests: ["lab::a", "lab::b", "lab::ab"].map(str::to_owned).into(),
            executable: PathBuf::new(),
            folder: PathBuf::new(),
        };
        let split = |list: &[&str]| {
            module.clone().split(list).map(|part| part.map_or(Vec::new(), |part| part.tests))
        };
        assert_eq!(split(&["lab::a", "la"]), [vec!["lab::a"], vec!["lab::b", "lab::ab"]]);
        assert_eq!(split(&["lab"]), [module.tests.clone(), vec![]]);
        assert_eq!(split(&["labels"]), [vec![], module.tests.clone()]);
        let whole = TestProgram { tests: Vec::new(), ..module.clone() };
        assert!(matches!(whole.clone().split(&["lab"]), [Some(_), None]));
        assert!(matches!(whole.split(&["lab::a"]), [None, Some(_)]));
    }

    #[test]
    fn test_programs_are_found_in_cargos_messages() {
        let message = r#"{"reason":"compiler-artifact","package_id":"p","manifest_path":"/w/tests/Cargo.toml",
            "target":{"kind":["test"],"crate_types":["bin"],"name":"lab","src_path":"/w/tests/tests/lab.rs"},
            "profile":{"opt_level":"0","test":true},"features":[],"filenames":[],"executable":"/t/lab-1","fresh":false}"#;
        let program = test_program(message).unwrap();
        assert!(program.needs_lab());
        assert_eq!(program.title(), "tests/tests/lab");
        assert_eq!(program.executable, PathBuf::from("/t/lab-1"));
        let of_library = test_program(&message.replace(r#"["test"]"#, r#"["lib"]"#)).unwrap();
        assert!(!of_library.needs_lab());
        assert!(test_program(&message.replace("true", "false")).is_none());
        assert!(test_program(r#"{"reason":"build-finished","success":true}"#).is_none());
    }
}
