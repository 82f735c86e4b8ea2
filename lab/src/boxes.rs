//! Tests boxes that are virtual machines: a kernel, network cards with a driver, and the events
//! that such a box must survive.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::LabSpec;
use crate::cluster::{Cluster, JobSpec, TIMEOUT, one_on_each_host, program};
use crate::faults::Faults;
use crate::group::Group;
use crate::netns::output;
use crate::process::Running;
use crate::verbs_ring::{self, Operation, VerbsRingSpec};
use crate::vm::parts::Kernel;
use crate::vm::{Card, NOT_THERE};

const RANKS: u32 = 3;
const JOB: &str = "train";
const LOSS: f64 = 0.01;
/// Lanes of a vector, and of one whose all-reduce still runs when a port is disturbed.
const LEN: usize = 200_000;
const LONG: usize = 4_000_000;
/// Disturbances of a port: a command, and the command that reverts it.
const DOWN: [&str; 2] = ["/usr/bin/ip link set port1 down", "/usr/bin/ip link set port1 up"];
const MTU: [&str; 2] =
    ["/usr/bin/ip link set port1 mtu 2250", "/usr/bin/ip link set port1 mtu 2300"];
const RESET: [&str; 2] = ["/usr/bin/ethtool -r port1", "true"];

/// A script that runs a disturbance when the port has received some packets, and fails if none
/// arrive afterwards.
const DISTURB: &str = "f=/sys/class/net/port1/statistics/rx_packets; read from <$f; echo ready; \
    wait_for() \
    { i=0; while read now <$f; [ $now -lt $1 ]; do i=$((i + 1)); [ $i -lt 600 ] || exit 1; /bin/busybox sleep 0.05; done; }; \
    wait_for $((from + 500)); $0 || exit 1; read now <$f; echo $((now - from)); /bin/busybox sleep \
    0.3; $1; wait_for $((now + 100))";

/// Results for one box: a column of the table and its text.
pub type BoxResults = Vec<(&'static str, String)>;

/// The columns of the table, in order.
pub const COLUMNS: [&str; 12] = [
    "Linux",
    "driver",
    "instructions verified",
    "queues",
    "path MTU 1024",
    "path MTU 2048, 1 % loss",
    "interrupts elsewhere",
    "link down, up",
    "MTU changed",
    "ethtool -r",
    "VLAN",
    "hosts with Soft-RoCE",
];

/// Whether a driver has no native XDP with that kernel: vmxnet3 has it since Linux 6.6.
pub fn is_without_xdp(kernel: Kernel, card: Card) -> bool {
    (kernel, card) == (Kernel::V6_1, Card::Vmxnet3)
}

fn spec(kernel: Kernel, card: Card) -> LabSpec {
    LabSpec {
        mtu: 2300,
        faulty_links: true,
        box_vm: Some((kernel, card)),
        vm_cpus: 2,
        ..LabSpec::hosts(RANKS as usize)
    }
}

/// Has a box sum under all circumstances, for hosts that are namespaces outside; compares every sum
/// bit by bit.
///
/// # Errors
/// If a sum is wrong, or the box has not summed where it should have.
pub fn try_all(kernel: Kernel, card: Card) -> Result<BoxResults> {
    let mut trial = Trial::start(spec(kernel, card), card)?;
    trial.sums("path MTU 1024", 1024, 0.0)?;
    trial.sums("path MTU 2048, 1 % loss", 2048, LOSS)?;
    trial.interrupts_elsewhere()?;
    // With Linux 6.12, vmxnet3 lets frames bypass the XDP program after its link was down: see the
    // book's `platforms.md`.
    if card != Card::Vmxnet3 {
        trial.disturbed("link down, up", DOWN)?;
        trial.disturbed("MTU changed", MTU)?;
    }
    // Only igb among these drivers negotiates its link.
    if card == Card::Igb {
        trial.disturbed("ethtool -r", RESET)?;
    }
    Ok(trial.found)
}

/// Runs [`try_all`] and the slower tests: hosts in a VLAN, and hosts that are virtual machines with
/// their kernels' Soft-RoCE. Failures are in the table and in `errors`.
pub fn try_everything(kernel: Kernel, card: Card, errors: &mut Vec<String>) -> BoxResults {
    let mut found = vec![("Linux", kernel.to_string()), ("driver", card.to_string())];
    let mut tried = |column: &'static str, run: &dyn Fn() -> Result<BoxResults>| match run() {
        Ok(printed) => found.extend(printed),
        Err(error) => {
            let error = format!("{kernel}, {card}, {column}: {error:#}");
            println!("{error}");
            errors.push(error);
            found.push((column, "failed".into()));
        }
    };
    tried("path MTU 1024", &|| again(|| try_all(kernel, card)));
    tried("VLAN", &|| Ok(vec![("VLAN", again(|| in_a_vlan(kernel, card))?)]));
    tried("hosts with Soft-RoCE", &|| {
        Ok(vec![("hosts with Soft-RoCE", again(|| stock(kernel, card))?)])
    });
    found
}

/// Tries again if a machine has not booted: one with Linux 6.1 once hung for lack of a timer,
/// before netsum ran on it.
fn again<T>(run: impl Fn() -> Result<T>) -> Result<T> {
    run().or_else(|error| match format!("{error:#}").contains(NOT_THERE) {
        true => {
            println!("again: {error:#}");
            run()
        }
        false => Err(error),
    })
}

/// Checks that a driver without native XDP is refused with a reason.
///
/// # Errors
/// If it is not refused.
pub fn refused(kernel: Kernel, card: Card) -> Result<BoxResults> {
    let cluster = Cluster::without_daemon(spec(kernel, card))?;
    let mut found = head(&cluster, card)?;
    let mut cluster = cluster;
    let error = format!("{:#}", cluster.start_daemon().err().context("it is not refused")?);
    ensure!(error.contains("port0") && error.contains("no native XDP"), "{error}");
    found.push(("path MTU 1024", "refused: no native XDP".into()));
    Ok(found)
}

/// The kernel's release, and the driver's name.
fn head(cluster: &Cluster, card: Card) -> Result<BoxResults> {
    let release = output(cluster.lab().box_().command("/bin/busybox").args(["uname", "-r"]))?;
    Ok(vec![("Linux", release.trim().to_owned()), ("driver", card.to_string())])
}

struct Trial {
    cluster: Cluster,
    card: Card,
    job: JobSpec,
    group: Option<Group>,
    seed: u64,
    found: BoxResults,
}

impl Trial {
    fn start(spec: LabSpec, card: Card) -> Result<Self> {
        let mut cluster = Cluster::without_daemon(spec)?;
        let mut found = head(&cluster, card)?;
        let queues = check(&cluster)?;
        cluster.start_daemon()?;
        let log = cluster.daemon_log();
        println!("{log}");
        ensure!(!log.contains("redirects to it"), "{log}");
        let programs = cluster.netsum_json(&["prog"])?;
        let programs = programs["programs"].as_array().context("no programs")?;
        let verified: u64 = programs.iter().filter_map(|p| p["verified_insns"].as_u64()).sum();
        found.push(("instructions verified", verified.to_string()));
        found.push(("queues", queues.to_string()));
        let job = JobSpec::new(JOB, RANKS);
        Ok(Self { cluster, card, job, group: None, seed: 0, found })
    }

    /// Replaces the present job by one with this path MTU.
    fn begin(&mut self, mtu: u32) -> Result<()> {
        if self.group.take().is_some() {
            self.cluster.netsum(&["job", "delete", JOB])?;
        }
        // The machine is slow: short timeouts would declare live ranks dead.
        let patient = Duration::from_secs(60);
        self.job =
            JobSpec { mtu, timeout: patient, connect_timeout: patient, ..JobSpec::new(JOB, RANKS) };
        let token = self.cluster.create_job(&self.job)?;
        self.group = Some(self.cluster.ranks(&self.job, &token, &one_on_each_host(RANKS))?);
        Ok(())
    }

    fn group(&mut self) -> Result<&mut Group> {
        self.group.as_mut().context("no ranks")
    }

    /// Runs an all-reduce of each type by the box; returns how long they took.
    fn reduce(&mut self) -> Result<String> {
        let mut printed = String::from("right;");
        for dtype in ["i32", "f32"] {
            self.seed += 1;
            let seed = self.seed;
            let outcomes = self.group()?.all_reduce(dtype, LEN, seed)?;
            assert!(outcomes.iter().all(|o| o.wrong == 0), "{dtype}: {outcomes:?}");
            ensure!(
                outcomes.iter().all(|o| o.mode == "box"),
                "{dtype}: {outcomes:?}\n{}",
                self.cluster.daemon_log()
            );
            let slowest = outcomes.iter().map(|o| o.micros).max().unwrap_or_default();
            write!(printed, " {dtype} {:.2} s", slowest as f64 / 1e6)?;
        }
        Ok(printed)
    }

    fn sums(&mut self, column: &'static str, mtu: u32, loss: f64) -> Result<()> {
        self.lose(loss)?;
        self.begin(mtu)?;
        let printed = self.reduce().with_context(|| format!("{} {column}", self.card))?;
        self.lose(0.0)?;
        self.found.push((column, printed));
        Ok(())
    }

    fn lose(&self, share: f64) -> Result<()> {
        self.cluster.lab().hosts().iter().try_for_each(|host| {
            host.set_faults(Faults::loss(share), Faults::loss(share), 7 + host.number() as u32)
        })
    }

    fn ip(&self, arguments: &[&str]) -> Result<()> {
        output(self.cluster.lab().box_().command("/usr/bin/ip").args(arguments)).map(drop)
    }

    /// Has one CPU serve all interrupts of the ports, then the other CPU. One of the two also
    /// serves the ring.
    fn interrupts_elsewhere(&mut self) -> Result<()> {
        let script = "n=0; for irq in $(/bin/busybox awk -F: '/virtio[1-9]|port|Tx|Rx/ {print $1}' \
            /proc/interrupts); do echo $0 > /proc/irq/$irq/smp_affinity_list && n=$((n + 1)); \
            done; echo $n";
        let mut moved = 0;
        for cpu in ["0", "1"] {
            let mut shell = self.cluster.lab().box_().command("/bin/busybox");
            moved = output(shell.args(["sh", "-c", script, cpu]))?.trim().parse::<u32>()?;
            ensure!(moved >= RANKS, "{moved} interrupts were moved to CPU {cpu}");
            self.reduce().with_context(|| format!("{}, all interrupts at CPU {cpu}", self.card))?;
        }
        self.found.push(("interrupts elsewhere", format!("right; {moved} interrupts")));
        Ok(())
    }

    /// Disturbs a port in the middle of an all-reduce, and reverts it. The sum must be right, and
    /// the box must sum afterwards.
    fn disturbed(&mut self, column: &'static str, [happens, back]: [&str; 2]) -> Result<()> {
        self.seed += 1;
        let seed = self.seed;
        let mut shell = self.cluster.lab().box_().command("/bin/busybox");
        let mut disturbing =
            Running::start(column, shell.args(["sh", "-c", DISTURB, happens, back]))?;
        ensure!(disturbing.line(TIMEOUT)? == "ready");
        let files = self.group()?.order_all_reduce("i32", LONG, seed)?;
        let outcomes = self.group()?.check_all_reduce("i32", LONG, seed, &files);
        let outcomes = outcomes
            .with_context(|| format!("{} {column}\n{}", self.card, self.cluster.daemon_log()))?;
        assert!(outcomes.iter().all(|o| o.wrong == 0), "{column}: {outcomes:?}");
        let printed =
            disturbing.success(TIMEOUT).with_context(|| format!("{} {column}", self.card))?;
        println!(
            "{column}, after {} packets: {outcomes:?}",
            printed.lines().last().unwrap_or_default()
        );
        // Ranks that fell back try the box again after a second.
        let mut without = 0;
        while let Err(error) = self.reduce() {
            without += 1;
            ensure!(
                without < 10,
                "{} after {column}: {error:#}\n{}",
                self.card,
                self.cluster.daemon_log()
            );
            std::thread::sleep(Duration::from_millis(500));
        }
        let again: u64 = outcomes.iter().map(|o| o.retransmissions).sum();
        let how = if without > 0 || outcomes[0].mode != "box" {
            "hosts went on alone, and came back"
        } else {
            "right"
        };
        self.found.push((column, format!("{how}; {again} packets sent again")));
        Ok(())
    }
}

/// Checks that `netsum check` finds no error before the daemon starts; returns the port's queues.
fn check(cluster: &Cluster) -> Result<u32> {
    let mut command = cluster.lab().box_().command(program("netsum")?);
    let printed = output(command.args(["--json", "check", "--bridge", "br0"]))?;
    let report: Value = serde_json::from_str(&printed).context("netsum check")?;
    ensure!(report["level"] != "error", "{report:#}");
    println!("{report:#}");
    let queues = output(cluster.lab().box_().command("/bin/busybox").args([
        "sh",
        "-c",
        "ls -d /sys/class/net/port1/queues/rx-* | /bin/busybox wc -l",
    ]))?;
    Ok(queues.trim().parse()?)
}

/// Puts hosts and the box into VLAN 5. If the driver strips tags, the daemon reports it with a fix.
fn in_a_vlan(kernel: Kernel, card: Card) -> Result<String> {
    let mut trial = Trial::start(
        LabSpec { tagged: (0..RANKS as usize).collect(), ..spec(kernel, card) },
        card,
    )?;
    let ip = format!("{}/16", trial.cluster.lab().box_().ip());
    trial.ip(&["address", "flush", "dev", "br0"])?;
    trial.ip(&["link", "add", "link", "br0", "name", "vlan5", "type", "vlan", "id", "5"])?;
    trial.ip(&["address", "add", &ip, "dev", "vlan5"])?;
    trial.ip(&["link", "set", "vlan5", "up"])?;
    let warned = trial.cluster.daemon_log().contains("rxvlan off");
    if warned {
        for host in 0..RANKS {
            let port = trial.cluster.lab().box_().port(host as usize);
            let mut ethtool = trial.cluster.lab().box_().command("/usr/bin/ethtool");
            output(ethtool.args(["-K", &port, "rxvlan", "off"]))?;
        }
    }
    trial.begin(1024)?;
    trial.reduce().with_context(|| format!("{card} in a VLAN\n{}", trial.cluster.daemon_log()))?;
    Ok(if warned { "right with rxvlan off, which netsum asks for" } else { "right" }.into())
}

/// Runs a ring on virtual machines with their kernels' Soft-RoCE.
fn stock(kernel: Kernel, card: Card) -> Result<String> {
    let cluster = Cluster::start(LabSpec {
        faulty_links: false,
        vms: vec![Kernel::V6_1; RANKS as usize],
        ..spec(kernel, card)
    })?;
    let spec = VerbsRingSpec::new(RANKS as usize, 1024, Operation::Send, 20);
    let reports = verbs_ring::run(&cluster, &spec, Duration::from_secs(200))?;
    for (rank, report) in reports.iter().enumerate() {
        if (report.messages, report.wrong) != (spec.messages.into(), 0) {
            bail!("rank {rank}: {report:?}");
        }
    }
    Ok("right".into())
}

/// The table in Markdown.
pub fn table(rows: &[BoxResults]) -> String {
    let line = |cells: Vec<&str>| format!("| {} |\n", cells.join(" | "));
    let mut text = line(COLUMNS.to_vec()) + &line(vec!["---"; COLUMNS.len()]);
    for row in rows {
        let cell = |column: &&str| {
            row.iter().rfind(|(c, _)| c == column).map_or("not run", |(_, printed)| printed)
        };
        text += &line(COLUMNS.iter().map(cell).collect());
    }
    text
}
