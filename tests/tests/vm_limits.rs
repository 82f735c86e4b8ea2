//! A box with little memory, without IPv6, with a clock that jumps, and with AppArmor.

use std::time::{Duration, Instant};

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, DaemonOptions, Group, JobSpec, one_on_each_host, program};
use netsum_lab::guide;
use netsum_lab::netns::output;
use netsum_lab::vm::Card;
use netsum_lab::vm::debian::Debian;
use netsum_lab::vm::parts::Kernel;
use serde_json::Value;

/// The machine is emulated.
const TIMEOUT: Duration = Duration::from_secs(60);
const TOKEN: &str = "a-token-of-all-jobs";
/// The tolerance for memory that the kernel itself uses, in KiB.
const NEARLY: u64 = 16 << 10;

/// The box, and the time of its start.
struct Site {
    cluster: Cluster,
    began: Instant,
}

impl Site {
    fn new() -> Self {
        let cluster = Cluster::without_daemon(LabSpec {
            box_vm: Some((Kernel::V6_1, Card::VirtioNet)),
            vm_cpus: 2,
            vm_memory: Some(512),
            // Each map is put into its place after a grace period of RCU, which takes long in an
            // emulator.
            box_line: "ipv6.disable=1 rcupdate.rcu_expedited=1".into(),
            ips_per_host: 4,
            ..LabSpec::hosts(2)
        });
        Self { cluster: cluster.unwrap(), began: Instant::now() }
    }

    fn shell(&self, script: &str) -> String {
        let mut sh = self.cluster.lab().box_().command("/bin/busybox");
        output(sh.args(["sh", "-euc", script])).unwrap()
    }

    /// The available memory of the machine, in KiB.
    fn available(&self) -> u64 {
        self.shell(
            "while read name value rest; do [ $name != MemAvailable: ] || echo $value; done < \
             /proc/meminfo",
        )
        .trim()
        .parse()
        .unwrap()
    }

    /// Runs commands, all of which succeed.
    fn all(&self, lines: impl Iterator<Item = String>) {
        for line in lines {
            let words: Vec<&str> = line.split(' ').collect();
            self.cluster.netsum(&words).unwrap_or_else(|e| panic!("{line}: {e:#}"));
        }
    }

    /// Runs a command that the daemon refuses, and returns the reason.
    fn refused(&self, line: &str) -> String {
        let words: Vec<&str> = line.split(' ').collect();
        let refusal = format!("{:#}", self.cluster.netsum(&words).unwrap_err());
        assert!(refusal.contains("exit status: 3"), "{refusal}");
        refusal
    }

    fn done(&self, what: &str) {
        println!(
            "{:6.1} s, {:6} KiB left  {what}",
            self.began.elapsed().as_secs_f64(),
            self.available()
        );
    }
}

fn job(number: u32) -> JobSpec {
    // The machine is slow, which must not make a rank count as dead.
    let rings = if number == 63 { 3 } else { 4 };
    JobSpec {
        rings,
        timeout: TIMEOUT,
        connect_timeout: TIMEOUT,
        ..JobSpec::new(&format!("job{number}"), 2)
    }
}

/// The ranks of a job, at the address with this number on each host.
fn ranks(site: &Site, number: u32, address: usize) -> Group {
    site.cluster.ranks(&job(number), TOKEN, &[(0, address), (1, address)]).unwrap()
}

fn sums(groups: &mut [Group], seed: u64) {
    for group in groups {
        for outcome in group.all_reduce("i32", 50_000, seed).unwrap() {
            assert_eq!(
                (&*outcome.mode, outcome.wrong, outcome.fallbacks),
                ("box", 0, 0),
                "{outcome:?}"
            );
        }
    }
}

/// 64 jobs with all the rings that there are, at once.
fn all_rings(site: &Site) {
    let before = site.available();
    site.all((0..63).map(|i| format!("{} --token {TOKEN}", job(i).create_arguments().join(" "))));
    let refusal = site.refused("job create one-more --ranks 2 --rings 4");
    assert!(refusal.contains("--rings 4: 3 of 255 rings are free"), "{refusal}");
    site.all([format!("{} --token {TOKEN}", job(63).create_arguments().join(" "))].into_iter());
    let refusal = site.refused("job create one-more --ranks 2 --window 1");
    assert!(refusal.contains("--rings 1: 0 of 255 rings are free"), "{refusal}");
    let jobs = site.cluster.netsum_json(&["job", "show"]).unwrap();
    let jobs = jobs.as_array().unwrap();
    let memory: u64 = jobs.iter().map(|job| job["memory"].as_u64().unwrap()).sum();
    let taken = before - site.available();
    site.done(&format!("{} jobs, {} KiB of rings, {taken} KiB taken", jobs.len(), memory >> 10));
    assert_eq!(jobs.len(), 64);
    assert!(taken.abs_diff(memory >> 10) < NEARLY, "{taken} KiB are taken for {memory} bytes");

    let mut groups: Vec<Group> =
        [0, 31, 63].into_iter().enumerate().map(|(k, i)| ranks(site, i, k)).collect();
    sums(&mut groups, 1);
    site.done("summed");
    the_clock_jumps(site, &mut groups);
    drop(groups);
    site.all((0..64).map(|i| format!("job delete job{i}")));
    site.done("deleted");
    let left = before - site.available().min(before);
    assert!(left < NEARLY, "{left} KiB are not given back");
}

/// The clock jumps forward and back, by hours and by years, in the middle of all-reduces: no rank
/// notices.
fn the_clock_jumps(site: &Site, groups: &mut Vec<Group>) {
    let epochs = || -> Vec<Value> {
        let jobs = site.cluster.netsum_json(&["job", "show"]).unwrap();
        jobs.as_array().unwrap().iter().map(|job| job["epoch"].clone()).collect()
    };
    let before = epochs();
    let files = groups[0].order_all_reduce("i32", 1_000_000, 7).unwrap();
    for hours in [3, -6, 24 * 365 * 10, -24 * 365 * 20] {
        site.shell(&format!(
            "/bin/busybox date -s @$(($(/bin/busybox date +%s) + {hours} * 3600)); /bin/busybox \
             sleep 0.3"
        ));
    }
    for outcome in groups[0].check_all_reduce("i32", 1_000_000, 7, &files).unwrap() {
        assert_eq!(
            (&*outcome.mode, outcome.wrong, outcome.fallbacks),
            ("box", 0, 0),
            "{outcome:?}"
        );
    }
    sums(groups, 2);
    assert_eq!(epochs(), before);
    // A rank that joins now is accepted with its token.
    groups.push(ranks(site, 32, 3));
    sums(groups, 3);
    let log = site.cluster.daemon_log();
    assert!(!log.contains("ERROR") && !log.contains("rank"), "{log}");
    site.done("the clock has jumped");
}

/// More jobs than the machine has memory for, although the configuration would allow them.
fn more_than_there_is(site: &Site) {
    let refusal =
        site.refused("job create too-large --ranks 2 --window 32 --message-size 1M --rings 4");
    assert!(refusal.contains("of 4.0 GiB are free, but the machine has "), "{refusal}");
    let created = (0..).find(|i| {
        let more = ["--window", "16", "--message-size", "256K", "--rings", "4"];
        let name = format!("large{i}");
        let result = site.cluster.create(&name, &[("--ranks", 2)], &more);
        let Err(error) = result else { return false };
        let refusal = format!("{error:#}");
        assert!(
            refusal.contains("exit status: 3") && refusal.contains("the machine has "),
            "{refusal}"
        );
        println!("{refusal}");
        true
    });
    site.done(&format!("{created:?} jobs of 40 MiB"));
    assert!(site.available() > 40 << 10, "nobody else has memory");
    site.all((0..created.unwrap()).map(|i| format!("job delete large{i}")));
    let killed =
        site.shell("/bin/busybox dmesg | /bin/busybox grep -iE 'out of memory|oom-kill' || true");
    assert_eq!(killed, "");
}

/// Without IPv6 the daemon cannot listen at an IPv6 address, and its error says so.
fn without_ipv6(site: &Site) {
    let config = site.cluster.folder().join("other.toml");
    std::fs::write(
        &config,
        "bridge = \"br0\"\n[restart]\npin = \"none\"\n[listen]\nworkers = \"[::]:4799\"\n",
    )
    .unwrap();
    let to = config.display().to_string();
    site.cluster.lab().box_().vm().unwrap().put(&config, &to).unwrap();
    let mut run = site.cluster.lab().box_().command(program("netsum").unwrap());
    let refusal = format!("{:#}", output(run.args(["run", "--config", &to])).unwrap_err());
    assert!(
        refusal.contains("listen.workers = \"[::]:4799\": cannot listen; this kernel has no IPv6"),
        "{refusal}"
    );
    site.done("no IPv6");
}

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn a_small_box_without_ipv6_serves_255_rings() {
    let mut site = Site::new();
    without_ipv6(&site);
    let before = site.available();
    let listen = "[pool]\nmemory = \"4GiB\"\n".into();
    site.cluster.start_daemon_as(&DaemonOptions { listen, ..DaemonOptions::default() }).unwrap();
    let log = site.cluster.daemon_log();
    assert!(
        log.contains("pool.memory: 4.0 GiB are unreserved, but the machine has only "),
        "{log}"
    );
    site.done(&format!("the daemon runs, {} KiB taken", before - site.available()));
    // Since Linux 5.11 maps do not count towards this limit: those of the daemon alone exceed it.
    let limit = site.shell("grep 'Max locked memory' /proc/$(/bin/busybox pidof netsum)/limits");
    assert!(limit.contains(" 8388608 "), "{limit}");
    all_rings(&site);
    more_than_there_is(&site);
}

/// The bridge, its ports and the daemon, as in the guide.
const SET_UP: &str = "ip link add br0 type bridge
    for port in eth1 eth2; do ip link set $port mtu 2200 master br0 up; done
    ip link set br0 up; ip address add 10.0.0.254/16 dev br0
    systemctl start netsum; systemctl reload netsum";

/// Shell commands under the daemon's profile, each of which must fail; and what the kernel logs
/// about them.
const FORBIDDEN: [(&str, &str); 4] = [
    ("echo > /etc/x", "name=\"/etc/x\""),
    ("cat /etc/shadow", "name=\"/etc/shadow\""),
    ("echo > /run/x", "name=\"/run/x\""),
    ("mount -t tmpfs tmpfs /mnt", "operation=\"mount\""),
];

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test --all"]
fn apparmor_lets_the_daemon_do_its_work_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let package = guide::package(folder.path()).unwrap();
    let cluster = Cluster::without_daemon(LabSpec {
        mtu: 2200,
        box_vm: Some((Kernel::V6_12, Card::VirtioNet)),
        box_debian: true,
        box_line: "apparmor=1 security=apparmor".into(),
        vm_cpus: 2,
        ..LabSpec::hosts(2)
    })
    .unwrap();
    let vm = cluster.lab().box_().vm().unwrap();
    vm.put(&package, "/root/netsum.deb").unwrap();
    let debian = Debian::new(vm).unwrap();
    let denied = || debian.run("dmesg | grep 'apparmor=\"DENIED\"' || true").unwrap();
    let run = |script: &str| {
        debian.run(script).unwrap_or_else(|e| {
            panic!("{e:#}\n{}{}", denied(), debian.journal("netsum").unwrap_or_default())
        })
    };
    let profile = "cat /proc/$(systemctl show --value -p MainPID netsum)/attr/current";
    println!(
        "{}",
        run("dpkg -i netsum.deb; apparmor_parser -Q -K /etc/apparmor.d/netsum; aa-status")
    );
    run(SET_UP);
    assert_eq!(run(profile).trim(), "netsum (enforce)");

    let job = JobSpec { timeout: TIMEOUT, connect_timeout: TIMEOUT, ..JobSpec::new("train", 2) };
    run(&format!("netsum {} --token {TOKEN}", job.create_arguments().join(" ")));
    let mut group = vec![cluster.ranks(&job, TOKEN, &one_on_each_host(2)).unwrap()];
    sums(&mut group, 1);
    // Another daemon takes over, which needs rights that the first one did not.
    run("systemctl restart netsum; netsum job show train; netsum stats train");
    assert_eq!(run(profile).trim(), "netsum (enforce)");
    sums(&mut group, 2);
    assert_eq!(denied(), "");
    println!("{}", debian.journal("netsum").unwrap());

    for (command, refusal) in FORBIDDEN {
        // The shell has the same restrictions as the daemon, and the rights that it needs to try.
        let tried = format!("aa-exec -p netsum-tries -- /bin/sh -c '{command}'");
        run(&format!(
            "sed 's/^profile netsum /profile netsum-tries /; s|^  /usr/bin/netsum \
             mr,|&\\n  /{{,usr/}}bin/* mrix,|' \
             /etc/apparmor.d/netsum | apparmor_parser -r
             if {tried} 2> /dev/null; then exit 1; fi"
        ));
        let denied = denied();
        assert!(
            denied.lines().any(|l| l.contains("netsum-tries") && l.contains(refusal)),
            "{command}: {denied}"
        );
    }
    drop(group);
    run("systemctl stop netsum; apt-get -y purge netsum; ! grep '^netsum ' \
         /sys/kernel/security/apparmor/profiles");
    assert!(
        run("ls /etc/apparmor.d/*netsum* /etc/apparmor.d/*/netsum 2> /dev/null || true").is_empty()
    );
}
