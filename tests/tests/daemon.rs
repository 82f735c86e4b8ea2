//! The daemon as the system sees it: its privileges, its socket, its log, and workers over TLS.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;

use netsum_lab::LabSpec;
use netsum_lab::cluster::{
    Cluster, DaemonOptions, JobSpec, TIMEOUT, WORKER_PORT, one_on_each_host, program,
};
use netsum_lab::netns::output;
use netsum_lab::process::Running;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

/// CAP_NET_ADMIN is 12, CAP_BPF 39 (include/uapi/linux/capability.h).
const KEPT: u64 = 1 << 12 | 1 << 39;
/// A user and a group that own nothing.
const NOBODY: u32 = 65534;

/// Returns a field of the status of every thread of a process.
fn status(pid: u32, field: &str) -> BTreeSet<String> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads
        .map(|thread| {
            let text = std::fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
            let line = text.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':'));
            line.unwrap_or_else(|| panic!("no {field} in {text}")).trim().to_owned()
        })
        .collect()
}

/// Everything that a daemon does for a job and at the job's end must work with the privileges that
/// it has.
fn works(cluster: &mut Cluster) {
    for name in ["first", "second"] {
        let job = JobSpec { rings: 2, ..JobSpec::new(name, 2) };
        let token = cluster.create_job(&job).unwrap();
        let mut group = cluster.ranks(&job, &token, &one_on_each_host(2)).unwrap();
        for outcome in group.all_reduce("f32", 100_000, 1).unwrap() {
            assert_eq!(outcome.mode, "box", "{outcome:?}");
        }
        assert!(cluster.counter(Some(name), "released").unwrap() > 0);
        let slots = cluster.netsum_json(&["slot", "show", name]).unwrap();
        assert!(!slots["slots"].as_array().unwrap().is_empty(), "{slots}");
        cluster.netsum(&["job", "delete", name]).unwrap();
    }
    let ports = cluster.netsum_json(&["port", "show"]).unwrap();
    assert_eq!(ports[0]["xdp"], "native");
    cluster.stop_daemon().unwrap();
    let links = output(cluster.lab().box_().command("ip").args(["link", "show"])).unwrap();
    assert!(!links.contains("xdp"), "still attached: {links}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn every_thread_keeps_two_capabilities_and_they_are_enough() {
    let mut cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let pid = cluster.daemon_pid();
    assert!(
        std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count() > 1,
        "one thread proves little"
    );
    for (field, expected) in
        [("CapEff", KEPT), ("CapPrm", KEPT), ("CapBnd", KEPT), ("CapInh", 0), ("CapAmb", 0)]
    {
        assert_eq!(status(pid, field), BTreeSet::from([format!("{expected:016x}")]), "{field}");
    }
    assert_eq!(status(pid, "NoNewPrivs"), BTreeSet::from(["1".to_owned()]));
    works(&mut cluster);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_capabilities_of_the_systemd_unit_are_enough_to_start() {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/netsum.service");
    let unit = std::fs::read_to_string(unit).unwrap();
    let set = unit.lines().find_map(|l| l.strip_prefix("CapabilityBoundingSet=")).unwrap();
    let set: String = set
        .split(' ')
        .map(|c| format!(",+{}", c.trim_start_matches("CAP_").to_lowercase()))
        .collect();
    let prefix = ["setpriv", "--no-new-privs", "--bounding-set"].map(str::to_owned);
    let prefix = prefix.into_iter().chain([format!("-all{set}")]).collect();
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    cluster.start_daemon_as(&DaemonOptions { prefix, ..DaemonOptions::default() }).unwrap();
    let pid = cluster.daemon_pid();
    assert_eq!(status(pid, "CapEff"), BTreeSet::from([format!("{KEPT:016x}")]));
    works(&mut cluster);
}

/// Runs `netsum port show` as another user, with a group.
fn as_nobody(cluster: &Cluster, gid: u32) -> anyhow::Result<String> {
    // The program is in a folder that everybody can read, because the test is about the socket's
    // mode, not the folder's.
    std::fs::set_permissions(cluster.folder(), Permissions::from_mode(0o755))?;
    let copy = cluster.folder().join("netsum");
    if !copy.exists() {
        std::fs::copy(program("netsum")?, &copy)?;
    }
    let mut command = std::process::Command::new(copy);
    output(command.args(["--socket", &cluster.socket(), "port", "show"]).uid(NOBODY).gid(gid))
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn other_users_cannot_administer_unless_they_are_in_the_group() {
    let mut cluster = Cluster::start(LabSpec::hosts(1)).unwrap();
    let error = format!("{:#}", as_nobody(&cluster, NOBODY).unwrap_err());
    assert!(error.contains("netsum.sock") && error.contains("ermission denied"), "{error}");
    cluster.netsum(&["port", "show"]).expect("root can");
    cluster.stop_daemon().unwrap();

    let listen = "admin-mode = \"0660\"\nadmin-group = \"nogroup\"\n".to_owned();
    cluster.start_daemon_as(&DaemonOptions { listen, ..DaemonOptions::default() }).unwrap();
    assert!(as_nobody(&cluster, NOBODY).unwrap().contains("port0"));
    let error = format!("{:#}", as_nobody(&cluster, NOBODY - 1).unwrap_err());
    assert!(error.contains("ermission denied"), "{error}");
    cluster.stop_daemon().unwrap();

    let listen = "admin-group = \"no-such-group\"\n".to_owned();
    let refused = cluster.start_daemon_as(&DaemonOptions { listen, ..DaemonOptions::default() });
    let error = format!("{:#}", refused.unwrap_err());
    assert!(
        error.contains("listen.admin-group = \"no-such-group\": there is no such group"),
        "{error}"
    );
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn no_log_holds_a_token() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    let log = Some("trace".to_owned());
    cluster.start_daemon_as(&DaemonOptions { log, ..DaemonOptions::default() }).unwrap();
    let job = JobSpec::new("quiet", 2);
    let token = cluster.create_job(&job).unwrap();
    let wrong = "a-wrong-token-of-a-rank";
    let refused = cluster.ranks(&job, wrong, &one_on_each_host(2)).unwrap_err().to_string();
    assert!(refused.contains("the token is wrong"), "{refused}");
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(2)).unwrap();
    group.all_reduce("i32", 1000, 1).unwrap();
    cluster.netsum(&["job", "show", "quiet", "--show-token"]).unwrap();
    cluster.netsum(&["job", "delete", "quiet"]).unwrap();
    let log = cluster.daemon_log() + &group.log();
    assert!(log.contains("TRACE") && log.contains("a wrong token"), "{log}");
    assert!(!log.contains(&token) && !log.contains(wrong));
}

/// Runs `netsum-perf` on two hosts, with these files of the folder for TLS.
fn perf(cluster: &Cluster, token: &str, files: &[(&str, &str)]) -> Vec<anyhow::Result<String>> {
    let start = |rank: usize| {
        let host = cluster.lab().host(rank);
        let mut perf = host.command(program("netsum-perf").unwrap());
        perf.args(
            "all_reduce -b 1M -e 1M --iters 2 --check -j --connect-timeout 20 --job safe --ranks 2"
                .split(' '),
        )
        .args(["--controller", &format!("{}:{WORKER_PORT}", cluster.lab().box_().ip())])
        .args(["--rank", &rank.to_string(), "--ip", &host.ip(0).to_string()])
        .env("NETSUM_TOKEN", token);
        for (option, file) in files {
            perf.arg(option).arg(cluster.folder().join(file));
        }
        Running::start(&format!("netsum-perf of rank {rank}"), &mut perf).unwrap()
    };
    let ranks: Vec<_> = (0..2).map(start).collect();
    ranks.into_iter().map(|rank| rank.success(2 * TIMEOUT)).collect()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_job_over_tls_with_client_certificates() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    let path = |file: &str| cluster.folder().join(file);
    let mut ca = CertificateParams::new(Vec::new()).unwrap();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(ca, KeyPair::generate().unwrap()).unwrap();
    std::fs::write(path("ca.crt"), ca.pem()).unwrap();
    for (name, host) in
        [("box", cluster.lab().box_().ip().to_string()), ("worker", "worker".to_owned())]
    {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec![host]).unwrap().signed_by(&key, &ca).unwrap();
        std::fs::write(path(&format!("{name}.crt")), certificate.pem()).unwrap();
        std::fs::write(path(&format!("{name}.key")), key.serialize_pem()).unwrap();
    }
    let files = ["box.crt", "box.key", "ca.crt"].map(path);
    let listen = format!(
        "[listen.tls]\ncert = {:?}\nkey = {:?}\nclient-ca = {:?}\n",
        files[0], files[1], files[2]
    );
    cluster.start_daemon_as(&DaemonOptions { listen, ..DaemonOptions::default() }).unwrap();
    let token = cluster.create_job(&JobSpec::new("safe", 2)).unwrap();
    let good = [("--tls-ca", "ca.crt"), ("--tls-cert", "worker.crt"), ("--tls-key", "worker.key")];
    for printed in perf(&cluster, &token, &good) {
        let printed = printed.unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.daemon_log()));
        assert!(
            printed.is_empty()
                || printed.contains("\"by\": \"box\"") && printed.contains("\"wrong\": 0"),
            "{printed}"
        );
    }
    for refused in perf(&cluster, &token, &good[..1]) {
        let error = format!("{:#}", refused.unwrap_err());
        // The error says so even if the daemon's TLS alert was not read.
        assert!(error.contains("refuses this worker's certificate (none was given)"), "{error}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_files_with_the_tokens_are_their_owners_alone() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    cluster.pin();
    cluster.keep_jobs();
    cluster.start_daemon().unwrap();
    let token = cluster.create_job(&JobSpec::new("kept", 2)).unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    for file in [cluster.state_file(), cluster.jobs_file()] {
        assert!(
            std::fs::read_to_string(&file).unwrap().contains(&token),
            "{file:?} is not the file"
        );
        assert_eq!(mode(&file), 0o600);
    }
    assert_eq!(mode(cluster.jobs_file().parent().unwrap()), 0o700);
}
