//! `netsum top` in a real terminal, which tmux provides: a running job, keys, a daemon that stops
//! and starts again, and a terminal that is restored at the end.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, Group, JobSpec, TIMEOUT, one_on_each_host, program};
use netsum_lab::netns::output;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A terminal with a shell that runs `netsum top` and then prints its exit status.
struct Terminal {
    folder: PathBuf,
}

impl Terminal {
    fn start(cluster: &Cluster, size: (u16, u16)) -> Self {
        let netsum = program("netsum").unwrap();
        let command = format!("{} --socket {} top", netsum.display(), cluster.socket());
        Self::with(cluster.folder(), &command, size)
    }

    /// A shell that runs another command.
    fn with(folder: &Path, command: &str, (width, height): (u16, u16)) -> Self {
        let terminal = Self { folder: folder.join(format!("terminal-{width}")) };
        std::fs::create_dir(&terminal.folder).unwrap();
        // `exec` gives the command the inner shell's pid.
        let script = format!(
            "cd {}; stty -g > before; sh -c 'echo $$ > pid; exec {command}'; \
             echo ended with $?; stty -g > after; touch over; exec sleep 600",
            terminal.folder.display()
        );
        let size = [width.to_string(), height.to_string()];
        let mut tmux = terminal.tmux();
        tmux.args([
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-x",
            &size[0],
            "-y",
            &size[1],
            "sh",
            "-c",
            &script,
        ]);
        output(&mut tmux).unwrap();
        terminal
    }

    fn tmux(&self) -> Command {
        let mut tmux = Command::new("tmux");
        tmux.arg("-u")
            .arg("-S")
            .arg(self.folder.join("tmux"))
            .env("LC_ALL", "C.UTF-8")
            .env_remove("TMUX");
        tmux
    }

    fn file(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.join(name)).unwrap_or_default()
    }

    fn screen(&self) -> String {
        output(self.tmux().args(["capture-pane", "-p"])).unwrap()
    }

    fn press(&self, key: &str) {
        output(self.tmux().args(["send-keys", key])).unwrap();
    }

    /// Waits for a text on the screen, and returns the screen.
    fn wait_for(&self, text: &str) -> String {
        self.wait(text, |screen| screen.contains(text))
    }

    fn wait(&self, what: &str, holds: impl Fn(&str) -> bool) -> String {
        let start = Instant::now();
        loop {
            let screen = self.screen();
            if holds(&screen) {
                return screen;
            }
            assert!(start.elapsed() < TIMEOUT, "{what}:\n{screen}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Checks that it ended without an error, and that the terminal is restored.
    fn is_restored(&self) {
        self.is_restored_by("ended with 0");
    }

    /// Checks that it ended with this status and that the terminal is restored. Returns the screen.
    fn is_restored_by(&self, end: &str) -> String {
        let screen = self.wait("the end", |screen| screen.contains(end) && self.has("over"));
        assert!(!screen.contains("netsum top"), "its screen is still there:\n{screen}");
        let flags =
            output(self.tmux().args(["display-message", "-p", "#{alternate_on} #{cursor_flag}"]))
                .unwrap();
        assert_eq!(flags.trim(), "0 1", "alternate screen, cursor");
        assert!(!self.file("before").is_empty());
        assert_eq!(self.file("before"), self.file("after"), "stty");
        screen
    }

    fn has(&self, file: &str) -> bool {
        Path::new(&self.folder).join(file).exists()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.tmux().arg("kill-server").output();
    }
}

/// A daemon with a job of three ranks.
fn busy() -> (Cluster, Group) {
    let cluster = Cluster::start(LabSpec::hosts(3)).unwrap();
    let job = JobSpec { rings: 2, ..JobSpec::new("train", 3) };
    let token = cluster.create_job(&job).unwrap();
    let group = cluster.ranks(&job, &token, &one_on_each_host(3)).unwrap();
    cluster.create_job(&JobSpec::new("idle", 2)).unwrap();
    (cluster, group)
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_job_at_work_is_seen_and_the_terminal_is_given_back() {
    let (mut cluster, mut group) = busy();
    let terminal = Terminal::start(&cluster, (80, 24));
    let screen = terminal.wait_for("train");
    assert!(
        screen.contains("idle") && screen.contains("waiting") && screen.contains("sorted by name"),
        "{screen}"
    );
    assert!((0..3).all(|p| screen.contains(&cluster.lab().box_().port(p))), "{screen}");
    group.work(10).unwrap();
    let screen = terminal.wait("who is last", |screen| {
        screen.lines().any(|l| l.trim_start().starts_with("train") && l.contains("!2 "))
    });
    println!("{screen}");

    // Sorted by throughput, `train` is above `idle`.
    terminal.press("s");
    terminal.wait_for("sorted by Gb/s");
    group.work(10).unwrap();
    terminal.wait("train is above idle", |screen| {
        let found = screen.find("train").zip(screen.find("idle"));
        found.is_some_and(|(train, idle)| train < idle)
    });
    terminal.press("k");
    terminal.press("Enter");
    group.work(10).unwrap();
    let screen = terminal.wait_for("The others wait for rank 2");
    println!("{screen}");
    assert!(screen.contains("10.0.0.3") && screen.contains("<- the last"), "{screen}");
    terminal.press("?");
    terminal.wait_for("keys and columns");
    terminal.press("Escape");
    terminal.wait("help goes", |screen| {
        !screen.contains("keys and columns") && screen.contains("rank 2")
    });
    terminal.press("Escape");
    terminal.wait_for("sorted by Gb/s");

    // The daemon stops, and starts again.
    cluster.stop_daemon().unwrap();
    let screen = terminal.wait_for("no daemon for");
    assert!(screen.contains("train"), "what was there stays in sight:\n{screen}");
    cluster.start_daemon().unwrap();
    terminal.wait("it is back", |screen| {
        !screen.contains("no daemon for") && screen.contains("No jobs")
    });
    terminal.press("q");
    terminal.is_restored();
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_signal_and_another_size_leave_no_mess() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let terminal = Terminal::start(&cluster, (120, 40));
    terminal.wait_for("No jobs");
    let resize = |width: &str, height: &str| {
        output(terminal.tmux().args(["resize-window", "-x", width, "-y", height])).unwrap();
    };
    resize("50", "10");
    terminal.wait_for("needs 60 columns");
    resize("100", "30");
    terminal.wait_for("No jobs");
    let pid: i32 = terminal.file("pid").trim().parse().unwrap();
    kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap();
    terminal.is_restored();
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn without_a_terminal_it_says_so() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let mut top = Command::new(program("netsum").unwrap());
    let out = top.args(["--socket", &cluster.socket(), "top"]).output().unwrap();
    let printed = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && printed.contains("top needs a terminal"), "{out:?}");
    assert!(out.stdout.is_empty());
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_panic_gives_the_terminal_back_and_can_be_read_there() {
    let folder = tempfile::tempdir().unwrap();
    let panics = program("lab-top-panics").unwrap();
    for (width, thread) in [(80, ""), (90, "thread")] {
        let command = format!("{} {thread}", panics.display());
        let terminal = Terminal::with(folder.path(), &command, (width, 24));
        let flags =
            || output(terminal.tmux().args(["display-message", "-p", "#{alternate_on}"])).unwrap();
        terminal.wait_for("netsum top");
        assert_eq!(flags().trim(), "1", "it has a screen of its own");
        terminal.press("x");
        let screen = terminal.is_restored_by("ended with 101");
        assert!(screen.contains("panicked at") && screen.contains("on purpose"), "{screen}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_fabric_is_seen_with_a_box_that_goes() {
    let mut cluster =
        Cluster::without_daemon(LabSpec { hosts: 4, racks: 2, mtu: 2300, ..LabSpec::default() })
            .unwrap();
    cluster.start_daemon().unwrap();
    cluster.start_leaves().unwrap();
    let manager = cluster.start_manager().unwrap();
    let mut group =
        cluster.ranks_of(&manager, &JobSpec::new("train", 4), &one_on_each_host(4)).unwrap();
    let command = format!(
        "{} --socket {} top --fabric",
        program("netsum").unwrap().display(),
        cluster.folder().join("fabric.sock").display()
    );
    let terminal = Terminal::with(cluster.folder(), &command, (120, 24));
    terminal.wait_for("3 of 3 boxes answer, 2 of 2 links are up");
    group.work(50).unwrap();
    let is_at_work = |line: &str| line.contains("leaf0") && line.contains("train");
    println!("{}", terminal.wait("train at leaf0", |screen| screen.lines().any(is_at_work)));
    cluster.kill_box(Some(1)).unwrap();
    println!("{}", terminal.wait_for("2 of 3 boxes answer"));
    terminal.press("q");
    terminal.is_restored();
}
