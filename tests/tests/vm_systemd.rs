//! The package on a Debian 12 with systemd, in a virtual machine: tests the unit, the package's
//! scripts and the guide.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, Group, JobSpec, Outcome, one_on_each_host, program};
use netsum_lab::guide::{self, Block, blocks};
use netsum_lab::netns::output;
use netsum_lab::process::Running;
use netsum_lab::vm::Card;
use netsum_lab::vm::debian::Debian;
use netsum_lab::vm::parts::Kernel;
use tempfile::TempDir;

/// The machine is emulated.
const TIMEOUT: Duration = Duration::from_secs(60);
const TOKEN: &str = "a-token-that-no-log-has";

/// A box that runs Debian with systemd, two hosts, and the package.
struct Site {
    cluster: Cluster,
    package: PathBuf,
    _folder: TempDir,
    began: Instant,
}

impl Site {
    fn new() -> Self {
        let began = Instant::now();
        let folder = tempfile::tempdir().unwrap();
        let spec = LabSpec {
            mtu: 2200,
            box_vm: Some((Kernel::V6_12, Card::VirtioNet)),
            box_debian: true,
            vm_cpus: 2,
            ..LabSpec::hosts(2)
        };
        // Both take long. The lab's processes die with the thread that starts them, so this thread
        // starts the lab.
        let (package, cluster) = std::thread::scope(|s| {
            let package = s.spawn(|| guide::package(folder.path()).unwrap());
            let cluster = Cluster::without_daemon(spec).unwrap();
            (package.join().unwrap(), cluster)
        });
        let site = Self { cluster, package, _folder: folder, began };
        site.put(&site.package);
        site
    }

    fn debian(&self) -> Debian<'_> {
        Debian::new(self.cluster.lab().box_().vm().unwrap()).unwrap()
    }

    /// Copies a file into root's home.
    fn put(&self, file: &Path) {
        let to = Path::new("/root").join(file.file_name().unwrap());
        self.cluster.lab().box_().vm().unwrap().put(file, to.to_str().unwrap()).unwrap();
    }

    fn run(&self, script: &str) -> String {
        let vm = self.cluster.lab().box_().vm().unwrap();
        Debian::of(vm).run(script).unwrap_or_else(|e| panic!("{e:#}\n{}", self.journal()))
    }

    /// Runs the guide's commands on both hosts, with the programs of the package. Returns rank 0's
    /// output.
    fn on_hosts(&self, commands: [&str; 2]) -> String {
        let folder = program("netsum-perf").unwrap().parent().unwrap().display().to_string();
        let start = |(i, commands): (usize, &str)| {
            let mut shell = self.cluster.lab().host(i).command("sh");
            shell.args(["-euc", &format!("PATH={folder}:$PATH; {commands}")]);
            Running::start(&format!("host {i}"), &mut shell).unwrap()
        };
        let ranks: Vec<_> = commands.into_iter().enumerate().map(start).collect();
        let printed: Vec<_> =
            ranks.into_iter().map(|rank| rank.success(TIMEOUT).unwrap()).collect();
        printed[0].clone()
    }

    /// The log of the unit, with priorities.
    fn journal(&self) -> String {
        Debian::of(self.cluster.lab().box_().vm().unwrap()).journal("netsum").unwrap()
    }

    /// Waits until the unit has logged this text `times` times.
    fn wait_for_log(&self, text: &str, times: usize) {
        self.wait(text, || self.journal().matches(text).count() >= times);
    }

    fn wait(&self, what: &str, condition: impl Fn() -> bool) {
        let start = Instant::now();
        while !condition() {
            assert!(
                start.elapsed() < TIMEOUT,
                "not within {TIMEOUT:?}: {what}\n{}",
                self.journal()
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Prints the progress.
    fn done(&self, what: &str) {
        println!("{:6.1} s  {what}", self.began.elapsed().as_secs_f64());
    }
}

fn job() -> JobSpec {
    // The machine is slow, which must not make a rank count as dead.
    JobSpec { timeout: TIMEOUT, connect_timeout: TIMEOUT, ..JobSpec::new("train", 2) }
}

fn create_job(site: &Site, job: &JobSpec) {
    site.run(&format!("netsum {} --token {TOKEN}", job.create_arguments().join(" ")));
}

/// All of the guide except its end: the daemon is running, and the guide's own job is done.
fn follow_the_guide(site: &Site) {
    let (mut first, mut printed) = (None, String::new());
    for Block { who, commands } in blocks().unwrap() {
        match &*who {
            "hosts" | "box remove" => {}
            "host0" => first = Some(commands.clone()),
            "host1" => {
                let table = site.on_hosts([first.as_deref().unwrap(), &commands]);
                assert!(
                    table.contains("# wrong elements: 0;") && table.contains(" box "),
                    "{table}"
                );
            }
            _ => printed = site.run(&commands),
        }
        if commands.starts_with("netsum port show") {
            // No wait is needed: systemd reports the unit as started only when the daemon answers.
            assert!(printed.contains("eth1") && printed.contains("eth2"), "{printed}");
        }
        site.done(commands.lines().next().unwrap());
    }
}

/// The length of the ranks' all-reduce while something is done to the box: it takes some seconds.
const LONG: usize = 3_000_000;

/// How long the all-reduce should take where the box must not finish it first.
const AT_WORK: Duration = Duration::from_secs(10);

/// A job that runs through all of the following.
struct RunningJob<'a> {
    site: &'a Site,
    group: Group,
    seed: u64,
    /// Elements per second of the fastest all-reduce so far.
    speed: f64,
}

impl RunningJob<'_> {
    /// Something happens to the box in the middle of an all-reduce, and every element is right.
    /// Returns the outcomes.
    fn through(&mut self, what: &str, happens: impl FnOnce(&Site)) -> Vec<Outcome> {
        self.through_all(what, LONG, happens)
    }

    /// The same, with this many elements.
    fn through_all(&mut self, what: &str, len: usize, happens: impl FnOnce(&Site)) -> Vec<Outcome> {
        self.seed += 1;
        let files = self.group.order_all_reduce("i32", len, self.seed).unwrap();
        std::thread::sleep(Duration::from_secs(1));
        happens(self.site);
        let outcomes = self.group.check_all_reduce("i32", len, self.seed, &files);
        let outcomes = outcomes.unwrap_or_else(|e| {
            panic!("{what}: {e:#}\n{}{}", self.group.log(), self.site.journal())
        });
        self.speed =
            self.speed.max(len as f64 / Duration::from_micros(outcomes[0].micros).as_secs_f64());
        self.site
            .done(&format!("{what}: {:?}", outcomes.iter().map(|o| &*o.mode).collect::<Vec<_>>()));
        outcomes
    }

    /// The same, with too many elements for the box to finish first. The ranks give the box up.
    fn through_without_box(&mut self, what: &str, happens: impl FnOnce(&Site)) {
        let len = (self.speed * AT_WORK.as_secs_f64()) as usize;
        for o in self.through_all(what, len, happens) {
            assert_eq!(o.mode, "ring", "{what}: {o:?} {}", self.group.log());
        }
    }

    /// Only the box has summed.
    fn unnoticed(&mut self, what: &str, happens: impl FnOnce(&Site)) {
        let falls = self.short().fallbacks;
        for o in self.through(what, happens) {
            assert_eq!(
                (&*o.mode, o.wrong, o.fallbacks),
                ("box", 0, falls),
                "{what}: {o:?}\n{}",
                self.site.journal()
            );
        }
        assert_eq!(self.short().fallbacks, falls);
    }

    /// Runs a small all-reduce, and returns rank 0's outcome.
    fn short(&mut self) -> Outcome {
        self.seed += 1;
        self.group.all_reduce("f32", 20_000, self.seed).unwrap().swap_remove(0)
    }

    /// Runs small all-reduces until the box sums.
    fn until_box(&mut self, what: &str) {
        let start = Instant::now();
        while self.short().mode != "box" {
            assert!(
                start.elapsed() < TIMEOUT,
                "{what}: {}{}",
                self.group.log(),
                self.site.journal()
            );
            std::thread::sleep(Duration::from_millis(200));
        }
        self.site.done(&format!("{what}: the box sums again"));
        let o = self.through(&format!("{what}: a large one"), |_| {}).swap_remove(0);
        assert_eq!(
            (&*o.mode, o.wrong),
            ("box", 0),
            "{o:?}\n{}{}",
            self.group.log(),
            self.site.journal()
        );
    }
}

/// Tries, from the daemon's own mount namespace, what the sandbox must prevent.
fn the_sandbox_is_closed(site: &Site) {
    let security = site.run("systemd-analyze security --no-pager netsum");
    let left: Vec<_> =
        security.lines().filter(|line| line.contains('✗') || line.contains('→')).collect();
    println!("{}", left.join("\n"));
    assert!(
        security.contains("Overall exposure level for netsum.service: 2.6 OK"),
        "SECURITY.md has this figure"
    );
    let writable = site.run(
        "inside=\"nsenter --mount --target $(systemctl show --value -p MainPID netsum)\"
        for file in /etc/netsum/x /etc/x /run/x /run/systemd/system/x /sys/kernel/mm/ksm/run \
        /usr/bin/x /var/lib/x; do
            $inside sh -c \": >> $file\" 2> /dev/null && echo $file
        done
        $inside systemctl is-active netsum 2> /dev/null || true",
    );
    assert_eq!(writable, "");
    site.done("sandbox");
}

/// A valid configuration is read again and an invalid one is not, which `systemctl status` reports.
fn reload(running: &mut RunningJob) {
    const FILE: &str = "/etc/netsum/netsum.toml";
    running.unnoticed("systemctl reload", |site| {
        site.run(&format!(
            "sed -i 's/^memory = .*/memory = \"200MiB\"/' {FILE}; systemctl reload netsum"
        ));
        site.wait_for_log("netsum.toml: reloaded", 1);
        site.run(&format!(
            "sed -i 's/^memory = .*/memory = \"much\"/' {FILE}; systemctl reload netsum"
        ));
        site.wait_for_log("<3> reload failed", 1);
        assert!(site.run("systemctl status netsum").contains("Reload failed: "));
        site.run(&format!(
            "sed -i 's/^memory = .*/memory = \"256MiB\"/' {FILE}; systemctl reload netsum"
        ));
        site.wait_for_log("netsum.toml: reloaded", 2);
    });
}

/// A newer version of the package is installed, and its daemon takes over.
fn upgrade(running: &mut RunningJob) {
    let newer = repacked(&running.site.package);
    running.site.done("a newer version is made");
    running.site.put(&newer);
    running.site.done("and there");
    let before = running.site.run("systemctl show --value -p MainPID netsum");
    running.unnoticed("dpkg -i of a newer version", |site| {
        let printed = site.run(&format!("dpkg -i {}", newer.file_name().unwrap().display()));
        assert!(printed.contains("'systemctl restart netsum' changes over"), "{printed}");
        assert_eq!(
            site.run("systemctl show --value -p MainPID netsum"),
            before,
            "at work until it is told"
        );
        site.run("systemctl restart netsum");
        assert_ne!(site.run("systemctl show --value -p MainPID netsum"), before);
    });
}

/// The same package with a higher version.
fn repacked(package: &Path) -> PathBuf {
    let folder = package.parent().unwrap();
    let tree = folder.join("tree");
    let dpkg_deb = |arguments: &[&Path]| output(Command::new("dpkg-deb").args(arguments)).unwrap();
    dpkg_deb(&["-R".as_ref(), package, &tree]);
    let control = tree.join("DEBIAN/control");
    let text = std::fs::read_to_string(&control).unwrap().replacen("Version: ", "Version: 9.", 1);
    std::fs::write(&control, text).unwrap();
    let newer = folder.join("newer.deb");
    dpkg_deb(&[
        "--root-owner-group".as_ref(),
        "-Zgzip".as_ref(),
        "-z1".as_ref(),
        "-b".as_ref(),
        &tree,
        &newer,
    ]);
    newer
}

/// A job survives a restart, and a hanging daemon is replaced.
fn restart_and_watchdog(running: &mut RunningJob) {
    // The same limit as in the unit, but shorter.
    let limit = Duration::from_secs(5);
    let mut started = Instant::now();
    running.unnoticed("systemctl restart", |site| {
        site.run(&format!(
            "mkdir -p /run/systemd/system/netsum.service.d
            printf '[Service]\nWatchdogSec={}\n' > /run/systemd/system/netsum.service.d/soon.conf
            systemctl daemon-reload; systemctl restart netsum",
            limit.as_secs()
        ));
        started = Instant::now();
    });
    // The daemon stays alive for longer than that.
    std::thread::sleep((limit + Duration::from_secs(2)).saturating_sub(started.elapsed()));
    assert_eq!(running.site.run("systemctl show --value -p NRestarts netsum").trim(), "0");
    running.unnoticed("kill -STOP", |site| {
        site.run("kill -STOP $(systemctl show --value -p MainPID netsum)");
        site.wait("another daemon", || {
            site.run("systemctl show --value -p NRestarts netsum").trim() == "1"
        });
        site.wait("it answers", || !site.run("netsum job list || true").is_empty());
    });
    let journal = running.site.run("journalctl -u netsum --no-pager");
    assert!(journal.contains("Watchdog timeout"), "{journal}");
    // The running daemon keeps the limit.
    running.site.run("rm -r /run/systemd/system/netsum.service.d; systemctl daemon-reload");
}

/// `systemctl stop` ends the job: the ranks continue by themselves, and return when the next start
/// has created it again.
fn stop_and_start(running: &mut RunningJob) {
    running.through_without_box("systemctl stop", |site| {
        site.run("systemctl stop netsum");
        assert!(site.run("ls -A /run/netsum 2>&1 || true").contains("No such file"));
        site.run("systemctl start netsum");
        site.wait_for_log("job train created again", 1);
        assert!(!site.journal().contains("cannot send"), "nothing is wrong: {}", site.journal());
    });
    running.until_box("stopped and started");
}

/// The machine reboots in the middle of an all-reduce. Without any intervention, the same ranks
/// return to the box.
fn reboot(running: &mut RunningJob) {
    let site = running.site;
    // Ranks do not reach each other while the box boots.
    let patient = JobSpec { name: "patient".into(), timeout: 5 * TIMEOUT / 2, ..job() };
    create_job(site, &patient);
    // An address can have only one rank at a time.
    running.group.end();
    running.group = site.cluster.ranks(&patient, TOKEN, &one_on_each_host(2)).unwrap();
    running.unnoticed("all-reduce of patient ranks", |_| {});
    let created = "job patient created again";
    assert!(!site.journal().contains(created));
    running.through_without_box("reboot", |site| {
        site.debian().reboot().unwrap();
        site.done("booted again");
        site.wait("the unit runs", || {
            site.run("systemctl is-active netsum || true").trim() == "active"
        });
        site.done("the daemon is there");
        let ports = site.run("netsum port show; ip address show br0");
        assert!(
            ports.contains("eth1") && ports.contains("eth2") && ports.contains("10.0.0.254"),
            "{ports}"
        );
        site.wait_for_log(created, 1);
    });
    running.until_box("booted again");
    let jobs = site.run("netsum job list");
    assert!(
        jobs.contains("train") && jobs.contains("patient") && !jobs.contains("trial"),
        "{jobs}"
    );
}

/// Records have the journal's own priorities, no time of their own and no token, and name their
/// job.
fn the_journal(site: &Site) {
    let journal = site.journal();
    for level in [
        "<3> reload failed",
        "<5> ports eth1, eth2; 2 CPUs",
        "<5> SIGUSR1: ending; 1 jobs continue",
    ] {
        assert!(journal.contains(level), "{level}: {journal}");
    }
    assert!(!journal.contains(" INFO "), "{journal}");
    let of = |what: &str| -> Vec<serde_json::Value> {
        let lines = site.run(&format!("journalctl {what} --no-pager -o json"));
        assert!(!lines.contains(TOKEN));
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    // Records of this job only.
    let (train, all) = (of("-u netsum NETSUM_JOB=train"), of("-u netsum"));
    let says = |record: &serde_json::Value, what| {
        record["MESSAGE"].as_str().is_some_and(|m| m.contains(what))
    };
    assert_eq!(train.len(), all.iter().filter(|r| says(r, "job train")).count(), "{train:?}");
    for record in &train {
        assert_eq!(record["NETSUM_JOB"], "train");
    }
    let created = train.iter().find(|r| says(r, "job train created")).unwrap();
    assert_eq!(
        (&created["TARGET"], &created["PRIORITY"]),
        (&"netsum_controller::jobs".into(), &"5".into())
    );
    assert!(
        created["CODE_FILE"].as_str().is_some_and(|file| file.ends_with("src/jobs.rs")),
        "{created}"
    );
    assert_eq!(of("-u netsum NETSUM_JOB=trial").len(), 2, "created and deleted");
    // The output of a process that has ended before journald reads it.
    site.run(
        "systemd-run --quiet --wait --collect --unit netsum-fails netsum run --config \
        /nowhere || true",
    );
    let last = of("-u netsum-fails -p err");
    assert!(last.iter().any(|r| says(r, "cannot read /nowhere: No such file")), "{last:?}");
    site.done("journal");
}

/// All files except those that change all the time.
fn files(site: &Site) -> BTreeSet<String> {
    let changing = [
        "/var/log",
        "/var/lib/dpkg",
        "/var/lib/apt",
        "/var/lib/systemd",
        "/var/cache",
        "/var/tmp",
        "/tmp",
        "/root",
    ];
    let prune: String = changing.iter().map(|path| format!("-path {path} -o ")).collect();
    let all = site.run(&format!("find / -xdev \\( {prune} -false \\) -prune -o -print"));
    // The guide has enabled systemd-networkd.
    let ours = |path: &&str| !path.starts_with("/etc/systemd/") || path.contains("netsum");
    all.lines().filter(ours).map(str::to_owned).collect()
}

/// Programs on network interfaces, and pinned objects.
fn in_the_kernel(site: &Site) -> String {
    site.run(
        "bpftool prog show | grep -E ' (xdp|sched_cls) ' || true; ls /sys/fs/bpf; ip link | \
        grep -o xdp || true; ls -d /run/netsum* || true; getent passwd | grep netsum || true",
    )
}

/// The end: the package is removed in the middle of a job, and purged.
fn removed(mut running: RunningJob, before: &BTreeSet<String>) {
    running.through("apt-get remove", |site| {
        site.run("apt-get -y remove netsum");
    });
    let RunningJob { site, group, .. } = running;
    drop(group);
    site.wait("nothing is left in the kernel", || in_the_kernel(site).is_empty());
    let left: Vec<String> = files(site).difference(before).cloned().collect();
    let [jobs, kept] = ["/var/lib/netsum", "/var/lib/netsum/jobs.json"];
    let ours = [
        "/etc/apparmor.d/netsum",
        "/etc/netsum",
        "/etc/netsum/netsum.toml",
        "/etc/sysctl.d/50-netsum.conf",
    ];
    assert_eq!(left, [&ours[..], &[jobs, kept]].concat());
    site.run("apt-get -y purge netsum");
    let left: Vec<String> = files(site).difference(before).cloned().collect();
    assert_eq!(left, [""; 0]);
    // The exit code is 1 where there is nothing to list.
    let known = site.run(
        "systemctl list-unit-files 'netsum*' --no-legend || true; dpkg -s netsum 2> \
            /dev/null || true",
    );
    assert_eq!(known, "");
    site.done("purged");
}

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn the_package_does_what_systemd_and_dpkg_expect() {
    the_package(|_| {});
}

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test --all"]
fn a_job_survives_an_upgrade_a_stop_and_a_reboot() {
    the_package(|running| {
        upgrade(running);
        stop_and_start(running);
        reboot(running);
    });
}

/// Everything from the installation to the removal, with something more before the end.
fn the_package(more: impl FnOnce(&mut RunningJob)) {
    let site = Site::new();
    site.done("the package is made, and there");
    site.debian();
    site.done("booted");
    let before = files(&site);
    assert_eq!(in_the_kernel(&site), "");
    site.done("looked at");
    follow_the_guide(&site);
    create_job(&site, &job());
    let group = site.cluster.ranks(&job(), TOKEN, &one_on_each_host(2)).unwrap();
    let mut running = RunningJob { site: &site, group, seed: 0, speed: 0.0 };
    running.unnoticed("all-reduce", |_| {});
    the_sandbox_is_closed(&site);
    reload(&mut running);
    restart_and_watchdog(&mut running);
    the_journal(&site);
    more(&mut running);
    removed(running, &before);
}
