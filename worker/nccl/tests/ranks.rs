//! Compiles the plugin and its driver, and runs ranks of it, whose handles this passes on.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

#[path = "../../../xtask/src/compile.rs"]
mod compile;

/// The compiled plugin and driver, in a folder that is removed on drop.
pub struct Built {
    pub room: PathBuf,
}

impl Built {
    /// Compiles both, against the library that cargo has built.
    pub fn new(library: &Path) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let room = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("nccl-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&room).unwrap();
        // By the name that programs look for.
        let beside = room.join("libnetsum.so.1");
        std::os::unix::fs::symlink(library, &beside).unwrap();
        let built = Self { room };
        let sources = Path::new(file!()).ancestors().nth(2).unwrap();
        let sources = Path::new(env!("CARGO_MANIFEST_DIR"))
            .ancestors()
            .map(|folder| folder.join(sources))
            .find(|folder| folder.join("plugin.h").is_file())
            .expect("the plugin's sources");
        let mut plugin = compile::nccl();
        compile::add(&mut plugin, &sources, &beside, &built.plugin()).unwrap();
        run(&mut plugin);
        let mut drive = Command::new("cc");
        drive.args(["-std=c11", "-Wall", "-Wextra", "-Werror"]).arg(sources.join("tests/drive.c"));
        run(drive.args(["-ldl", "-o"]).arg(built.drive()));
        built
    }

    fn plugin(&self) -> PathBuf {
        self.room.join("libnccl-net-netsum.so")
    }

    fn drive(&self) -> PathBuf {
        self.room.join("drive")
    }

    /// Starts the ranks of a case, with tables of this version. `command` makes the command that
    /// runs a program as a rank.
    pub fn start(
        &self,
        (version, case): (u32, &str),
        ranks: usize,
        more: &[String],
        command: impl Fn(&Path, usize) -> Command,
    ) -> Ranks {
        let start = |rank: usize| {
            let mut command = command(&self.drive(), rank);
            command.arg(self.plugin()).arg(version.to_string()).arg(case);
            command.arg(rank.to_string()).arg(ranks.to_string()).args(more);
            // Cargo's path would come first, where an older library may be. NCCL searches this one.
            command.env("LD_LIBRARY_PATH", &self.room);
            let log = self.room.join(format!("{version}-{case}-{rank}.log"));
            let mut child = command
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(File::create(&log).unwrap())
                .spawn()
                .unwrap();
            let out = BufReader::new(child.stdout.take().unwrap());
            Rank { child, out, log }
        };
        Ranks((0..ranks).map(start).collect())
    }
}

impl Drop for Built {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.room));
    }
}

fn run(command: &mut Command) {
    let out = command.output().expect("a C compiler");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

struct Rank {
    child: Child,
    out: BufReader<ChildStdout>,
    log: PathBuf,
}

impl Drop for Rank {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Ranks that run. They are killed on drop, and end themselves after two minutes.
pub struct Ranks(Vec<Rank>);

impl Ranks {
    /// The next line of each rank: its part of an exchange, or its result.
    pub fn lines(&mut self) -> Vec<String> {
        let line = |rank: &mut Rank| {
            let mut line = String::new();
            rank.out.read_line(&mut line).unwrap();
            line.trim().to_owned()
        };
        let lines: Vec<String> = self.0.iter_mut().map(line).collect();
        assert!(lines.iter().all(|line| !line.is_empty()), "{lines:?}\n{}", self.logs());
        lines
    }

    /// Completes an exchange, in which each rank gets the lines of all.
    pub fn exchange(&mut self, lines: &[String]) {
        for rank in &mut self.0 {
            writeln!(rank.child.stdin.as_mut().unwrap(), "{}", lines.join(" ")).unwrap();
        }
    }

    /// Passes handles on until all ranks have printed their result, and succeeded.
    pub fn results(mut self) -> Vec<String> {
        loop {
            let lines = self.lines();
            if lines.iter().any(|line| line.contains(|c: char| !c.is_ascii_hexdigit())) {
                for at in 0..self.0.len() {
                    let status = self.0[at].child.wait().unwrap();
                    assert!(status.success(), "rank {at}: {status}\n{}", self.logs());
                }
                return lines;
            }
            self.exchange(&lines);
        }
    }

    /// Kills the last rank.
    pub fn kill_last(&mut self) {
        self.0.pop();
    }

    /// The logs of all ranks.
    pub fn logs(&self) -> String {
        let log = |rank: &Rank| std::fs::read_to_string(&rank.log).unwrap_or_default();
        self.0.iter().enumerate().map(|(at, rank)| format!("rank {at}:\n{}", log(rank))).collect()
    }
}
