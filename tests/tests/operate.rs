//! The administrator's view: the command line is checked against its schemas, and the metrics
//! against parsers and the dashboard.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use netsum_lab::LabSpec;
use netsum_lab::cluster::{
    Cluster, DaemonOptions, Group, JobSpec, TIMEOUT, one_on_each_host, program,
};
use netsum_lab::netns::output;
use openmetrics_parser::openmetrics::parse_openmetrics;
use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A daemon with metrics, a running job and a waiting one.
fn busy() -> (Cluster, Group) {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    // In a new namespace the loopback interface is down.
    cluster.lab().box_().set_link("lo", true).unwrap();
    let limits = "[tenants.default]\njobs = 9\nrings = 20\nslots = 100000\nmemory = \"128MiB\"\n";
    let listen = format!("[metrics]\nlisten = \"127.0.0.1:4792\"\n{limits}");
    cluster.start_daemon_as(&DaemonOptions { listen, ..DaemonOptions::default() }).unwrap();
    let job = JobSpec { rings: 2, ..JobSpec::new("train", 2) };
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(2)).unwrap();
    group.all_reduce("f32", 100_000, 1).unwrap();
    cluster.create_job(&JobSpec::new("idle", 3)).unwrap();
    (cluster, group)
}

/// Runs `netsum` on the box, and returns its output and exit status.
fn netsum(cluster: &Cluster, line: &str) -> Output {
    let mut command: Command = cluster.lab().box_().command(program("netsum").unwrap());
    command.env("NETSUM_SOCKET", cluster.socket()).args(line.split_whitespace()).output().unwrap()
}

fn validator(file: &str) -> jsonschema::Validator {
    let text = std::fs::read_to_string(root().join("netsum/schema").join(file)).unwrap();
    jsonschema::draft202012::new(&serde_json::from_str(&text).unwrap()).unwrap()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn all_json_is_what_its_schema_says() {
    let (cluster, _group) = busy();
    let flow = "flow add by-hand --ring 0 --rank 0 --port port0 --src 10.0.0.9 --dst 10.0.0.8 \
        --qpn 9 --psn 9";
    for (line, schema, code) in [
        ("job show", "jobs.json", 0),
        ("job create by-hand --ranks 2", "job.json", 0),
        ("job create grows --ranks 4 --min-ranks 2", "job.json", 0),
        ("job create floats --ranks 2 --dtype f32", "job.json", 0),
        (flow, "job.json", 0),
        ("job show train --show-token", "job.json", 0),
        ("job show idle", "job.json", 0),
        ("ring show", "rings.json", 0),
        ("ring show train", "rings.json", 0),
        ("flow show", "flows.json", 0),
        ("flow show train", "flows.json", 0),
        ("slot show train", "slots.json", 0),
        ("port show", "ports.json", 0),
        ("stats", "stats.json", 0),
        ("stats train", "stats.json", 0),
        ("stats --interval 50ms --count 1", "rates.json", 0),
        ("prog show", "progs.json", 0),
        ("tenant show", "tenants.json", 0),
        ("tenant show default", "tenants.json", 0),
        ("diagnose train --watch 100ms", "diagnosis.json", 0),
        ("diagnose idle --watch 100ms", "diagnosis.json", 0),
        ("job show nobody", "error.json", 4),
        ("job create train --ranks 2", "error.json", 3),
    ] {
        let validator = validator(schema);
        for option in ["-j", "-p"] {
            // Commands that change something do so only once.
            if option == "-p" && (code == 4 || line.contains(" create ") || line.contains(" add "))
            {
                continue;
            }
            let out = netsum(&cluster, &format!("{option} {line}"));
            let text = String::from_utf8(out.stdout).unwrap();
            assert_eq!(out.status.code(), Some(code), "{line}: {text}");
            let value: Value =
                serde_json::from_str(&text).unwrap_or_else(|e| panic!("{line}: {e}: {text}"));
            let errors: Vec<String> =
                validator.iter_errors(&value).map(|e| e.to_string()).collect();
            assert!(errors.is_empty(), "{line}: {errors:?}\n{value:#}");
            assert!(!text.contains('\u{1b}'), "{line}");
            without_a_field_it_is_refused(&validator, &value, line);
        }
    }
}

/// Asserts that the schema is not empty: it rejects a value whose first object lacks its first
/// field, or has it with another type.
fn without_a_field_it_is_refused(validator: &jsonschema::Validator, value: &Value, line: &str) {
    let mut broken = value.clone();
    let object = match &mut broken {
        Value::Array(all) if all.is_empty() => return,
        Value::Array(all) => &mut all[0],
        other => other,
    };
    let fields = object.as_object_mut().unwrap();
    let first = fields.keys().next().unwrap().clone();
    fields.insert(first.clone(), Value::Array(vec![Value::Bool(true)]));
    assert!(!validator.is_valid(&broken), "{line}: {first} may be anything");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn exit_codes_and_prefixes_are_as_the_manual_says() {
    let (mut cluster, _group) = busy();
    for (line, code) in [
        ("j s", 0),
        ("ri", 0),
        ("f l train", 0),
        ("po l port0", 0),
        ("pr", 0),
        ("te l default", 0),
        ("-j stats show train", 0),
        ("help", 0),
        ("job help", 0),
        ("stats help", 0),
        ("s", 2),
        ("nonsense", 2),
        ("", 2),
        ("job create x --ranks 2 --mtu 4096", 3),
        ("port show eth9", 4),
        ("tenant show nobody", 4),
        ("--socket /nowhere/netsum.sock job", 5),
        ("run --config /nowhere/netsum.toml", 1),
    ] {
        let out = netsum(&cluster, line);
        let printed = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(code), "netsum {line}: {printed}");
        assert_eq!(code == 0, printed.is_empty(), "netsum {line}: {printed}");
    }
    let rates =
        String::from_utf8(netsum(&cluster, "stats -i 100ms -c 3 --job train").stdout).unwrap();
    assert_eq!(rates.lines().filter(|l| l.contains("  train  ")).count(), 3, "{rates}");
    let programs = String::from_utf8(netsum(&cluster, "prog").stdout).unwrap();
    assert!(programs.contains("attached to port port0, port port1"), "{programs}");
    cluster.stop_daemon().unwrap();
    assert_eq!(netsum(&cluster, "job").status.code(), Some(5));
}

/// Returns the text of `/metrics`.
fn scrape(cluster: &Cluster) -> String {
    let answer = cluster.lab().box_().enter(|| {
        let mut tcp = TcpStream::connect("127.0.0.1:4792").unwrap();
        tcp.write_all(b"GET /metrics HTTP/1.1\r\nHost: box\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        tcp.read_to_string(&mut answer).unwrap();
        answer
    });
    let (head, text) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    text.to_owned()
}

/// Samples by name, each with the names of its labels.
fn samples(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap();
        let labels =
            line.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map_or("", |(l, _)| l);
        let names =
            labels.split(',').filter_map(|l| l.split_once('=')).map(|(name, _)| name.to_owned());
        all.entry(name.to_owned()).or_default().extend(names);
    }
    all
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn metrics_count_what_the_command_line_shows() {
    // By now the daemon has dropped all capabilities but two.
    let (cluster, mut group) = busy();
    for line in [
        "job create train --ranks 2",
        "job create x --ranks 2 --mtu 4096",
        "job create x --ranks 2 --rings 200",
    ] {
        assert_eq!(netsum(&cluster, line).status.code(), Some(3), "{line}");
    }
    let before = scrape(&cluster);
    parse_openmetrics(&before).unwrap_or_else(|e| panic!("{e:?}\n{before}"));
    group.all_reduce("i32", 200_000, 2).unwrap();
    let after = scrape(&cluster);
    let value = |text: &str, sample: &str| -> f64 {
        let line = text.lines().find(|l| l.starts_with(sample));
        let line = line.unwrap_or_else(|| panic!("no {sample} in {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let fragments = "netsum_contributions_total{job_name=\"train\"}";
    assert!(value(&after, fragments) >= value(&before, fragments) + 2.0 * 200_000.0 * 4.0 / 1024.0);
    assert_eq!(
        value(&after, fragments),
        cluster.counter(Some("train"), "contributions").unwrap() as f64
    );
    let timing = &cluster.netsum_json(&["stats", "train"]).unwrap()["timing"];
    let timed = timing["completion"]["count"].as_f64().unwrap();
    assert!(timed > 0.0 && timing["sampled"] == 64, "{timing:#}");
    let completion = |what: &str| value(&after, &format!("netsum_slot_completion_seconds_{what}"));
    assert_eq!(completion("count{job_name=\"train\"}"), timed);
    assert_eq!(completion("bucket{le=\"+Inf\",job_name=\"train\"}"), timed);
    let mean = timing["completion"]["mean_ns"].as_f64().unwrap() / 1e9;
    assert!((completion("sum{job_name=\"train\"}") / timed - mean).abs() < 1e-8, "{after}");
    let last = |rank: u32| {
        value(&after, &format!("netsum_rank_straggled_total{{job_name=\"train\",rank=\"{rank}\"}}"))
    };
    assert_eq!(last(0) + last(1), timed);
    let bytes = value(&after, "netsum_payload_received_bytes_total{job_name=\"train\"}");
    assert!((bytes / value(&after, fragments) - 1024.0).abs() < 1.0, "{after}");
    for (sample, expected) in [
        ("netsum_job_state{job_name=\"train\",state=\"active\"}", 1.0),
        ("netsum_job_state{job_name=\"idle\",state=\"active\"}", 0.0),
        ("netsum_port_up{port=\"port0\"}", 1.0),
        ("netsum_ring_info{job_name=\"train\",ring=\"1\"", 1.0),
        ("netsum_ring_slots_used{job_name=\"idle\",ring=\"0\"}", 0.0),
        ("netsum_refused_jobs_total{reason=\"exists\"}", 1.0),
        ("netsum_refused_jobs_total{reason=\"invalid\"}", 1.0),
        ("netsum_refused_jobs_total{reason=\"exhausted\"}", 1.0),
        ("netsum_refused_jobs_total{reason=\"failed\"}", 0.0),
        ("netsum_tenant_jobs{tenant=\"default\"}", 2.0),
        ("netsum_tenant_jobs_limit{tenant=\"default\"}", 9.0),
        ("netsum_tenant_rings{tenant=\"default\"}", 3.0),
        ("netsum_tenant_admitted_jobs_total{tenant=\"default\"}", 2.0),
    ] {
        assert_eq!(value(&after, sample), expected, "{sample}");
    }
    let tenant = &cluster.netsum_json(&["tenant", "show"]).unwrap()[0];
    for (what, unit) in [("rings", ""), ("slots", ""), ("memory", "_bytes")] {
        for (field, suffix) in [("used", ""), ("limit", "_limit")] {
            let sample = format!("netsum_tenant_{what}{suffix}{unit}{{tenant=\"default\"}}");
            assert_eq!(Some(value(&after, &sample)), tenant[what][field].as_f64(), "{sample}");
        }
    }
    // About one in 60,000 of these floats is that small beside its block's largest.
    let underflows = "netsum_job_underflows_total{job_name=\"train\"}";
    let before = value(&scrape(&cluster), underflows);
    group.all_reduce("f32", 1_000_000, 3).unwrap();
    // They leave, and so report what is new at once.
    (0..2).for_each(|rank| group.order_reconnect(rank).unwrap());
    group.answers(TIMEOUT).unwrap();
    let reported = value(&scrape(&cluster), underflows);
    assert!(reported > before, "{before}, later {reported}");
    let job = cluster.netsum_json(&["job", "show", "train", "--show-token"]).unwrap();
    for forbidden in ["slot=", "psn=", "qpn=", "token=", job["token"].as_str().unwrap()] {
        assert!(!after.contains(forbidden), "{forbidden}: {after}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_dashboard_asks_for_metrics_that_there_are() {
    let (cluster, _group) = busy();
    let there = samples(&scrape(&cluster));
    let text = std::fs::read_to_string(root().join("deploy/grafana-dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let mut asked = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            let expression = target["expr"].as_str().unwrap();
            // The variables are filled in as by Grafana.
            let filled = expression
                .replace("$__rate_interval", "1m")
                .replace("$job", ".*")
                .replace("$instance", ".*");
            let parsed = promql_parser::parser::parse(&filled)
                .unwrap_or_else(|e| panic!("{expression}: {e}"));
            assert!(!filled.contains('$'), "a variable that is not known: {filled}");
            for (name, labels) in selectors(&parsed) {
                let labels_there =
                    there.get(&name).unwrap_or_else(|| panic!("{expression}: no {name}"));
                for label in labels.iter().filter(|l| *l != "instance") {
                    assert!(
                        labels_there.contains(label),
                        "{expression}: {name} has no label {label}"
                    );
                }
                asked.insert(name);
            }
        }
    }
    assert!(asked.len() > 15, "{asked:?}");
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        if let Some(query) = variable["query"]["query"].as_str() {
            let (name, label) =
                query.trim_start_matches("label_values(").split_once([',', '{']).unwrap();
            let label = label.rsplit(", ").next().unwrap().trim().trim_end_matches(')');
            let labels = there.get(name).unwrap_or_else(|| panic!("{query}: no {name}"));
            assert!(label == "instance" || labels.contains(label), "{query}");
        }
    }
}

/// The metrics that an expression selects, with the labels that it uses for that.
fn selectors(expression: &promql_parser::parser::Expr) -> Vec<(String, Vec<String>)> {
    use promql_parser::parser::{Expr, VectorSelector};
    let selected = |s: &VectorSelector| {
        let labels = s.matchers.matchers.iter().map(|m| m.name.clone()).collect();
        vec![(s.name.clone().expect("a selector without a name"), labels)]
    };
    match expression {
        Expr::VectorSelector(s) => selected(s),
        Expr::MatrixSelector(s) => selected(&s.vs),
        Expr::Aggregate(a) => selectors(&a.expr),
        Expr::Unary(u) => selectors(&u.expr),
        Expr::Paren(p) => selectors(&p.expr),
        Expr::Subquery(s) => selectors(&s.expr),
        Expr::Binary(b) => [selectors(&b.lhs), selectors(&b.rhs)].concat(),
        Expr::Call(c) => c.args.args.iter().flat_map(|a| selectors(a)).collect(),
        Expr::NumberLiteral(_) | Expr::StringLiteral(_) | Expr::Extension(_) => Vec::new(),
    }
}

/// Waits until a condition holds.
fn wait_until(cluster: &Cluster, what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < TIMEOUT, "{what}: {}", cluster.daemon_log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ports_and_configuration_change_during_a_job() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(4)).unwrap();
    let late_port = cluster.lab().box_().port(2);
    let bridge = |cluster: &Cluster, words: &[&str]| {
        let mut ip = cluster.lab().box_().command("ip");
        output(ip.args(["link", "set", &late_port]).args(words)).unwrap();
    };
    bridge(&cluster, &["nomaster"]);
    let pool = |memory: &str| format!("[pool]\nmemory = \"{memory}\"\n");
    cluster
        .start_daemon_as(&DaemonOptions { listen: pool("2MiB"), ..DaemonOptions::default() })
        .unwrap();
    let train = JobSpec::new("train", 2);
    let token = cluster.create_job(&train).unwrap();
    let mut group = cluster.ranks(&train, &token, &one_on_each_host(2)).unwrap();
    let sums = |group: &mut Group| {
        for outcome in group.all_reduce("i32", 50_000, 1).unwrap() {
            assert_eq!((outcome.mode.as_str(), outcome.fallbacks), ("box", 0), "{outcome:?}");
        }
    };
    sums(&mut group);

    // A port is added, and a job runs over it.
    bridge(&cluster, &["master", "br0"]);
    let xdp = |cluster: &Cluster| {
        let ports = cluster.netsum_json(&["port", "show"]).unwrap();
        let port =
            ports.as_array().unwrap().iter().find(|p| p["name"] == late_port.as_str()).cloned();
        port.map(|p| p["xdp"].as_str().unwrap().to_owned())
    };
    wait_until(&cluster, "the port has come", || xdp(&cluster).as_deref() == Some("native"));
    let late = JobSpec::new("late", 2);
    let token = cluster.create_job(&late).unwrap();
    let mut late_group = cluster.ranks(&late, &token, &[(3, 0), (2, 0)]).unwrap();
    sums(&mut late_group);
    sums(&mut group);

    // The configuration is invalid, then too small, then large enough.
    let file = cluster.folder().join("netsum.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    let hang_up = |cluster: &Cluster, text: &str, expected: &str| {
        std::fs::write(&file, text).unwrap();
        let pid = nix::unistd::Pid::from_raw(cluster.daemon_pid() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGHUP).unwrap();
        wait_until(cluster, expected, || cluster.daemon_log().contains(expected));
    };
    let big = "job create big --ranks 8 --window 4 --message-size 512K";
    assert_eq!(netsum(&cluster, big).status.code(), Some(3), "2 MiB do not do");
    hang_up(&cluster, "bridge = 7", "reload failed");
    hang_up(&cluster, &text.replace("2MiB", "64KiB"), "the jobs take");
    hang_up(&cluster, &text.replace("br0", "lo"), "the bridge has no ports");
    sums(&mut group);
    hang_up(&cluster, &text.replace("2MiB", "64MiB"), "netsum.toml: reloaded");
    let out = netsum(&cluster, big);
    assert_eq!(out.status.code(), Some(0), "{out:?}");

    // A port is removed: its job ends with the reason, and the other job continues.
    bridge(&cluster, &["nomaster"]);
    wait_until(&cluster, "the port has gone", || xdp(&cluster).is_none());
    let shown = cluster.netsum_json(&["job", "show", "late"]).unwrap();
    assert_eq!(shown["error"], format!("rank 1: its port {late_port} was removed"), "{shown:#}");
    // If the port returns, packets that its host still sends are dropped until an administrator
    // says that the host has ended.
    let links = |cluster: &Cluster, which: &[&str]| {
        output(cluster.lab().box_().command("ip").args(["link", "show"]).args(which)).unwrap()
    };
    assert!(links(&cluster, &[&late_port]).contains("prog/xdp"));
    cluster.netsum(&["job", "delete", "--forget-connections", "late"]).unwrap();
    wait_until(&cluster, "nothing is kept out", || !links(&cluster, &[&late_port]).contains("xdp"));
    sums(&mut group);
    // This daemon has pinned nothing, so nothing outlives it.
    cluster.stop_daemon().unwrap();
    assert!(!links(&cluster, &[]).contains("xdp"));
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_check_finds_what_is_wrong_with_a_box_and_changes_nothing() {
    let cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    let look = || {
        let out = netsum(&cluster, "-j check --bridge br0");
        let report: Value =
            serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {out:?}"));
        assert!(validator("check.json").is_valid(&report), "{report:#}");
        assert_eq!(out.status.code() == Some(0), report["level"] != "error", "{report:#}");
        report
    };
    let found = |report: &Value, subject: &str| -> Vec<String> {
        let of = |f: &&Value| f["subject"].as_str().unwrap().starts_with(subject);
        let text = |f: &Value| format!("{}: {} -> {}", f["level"], f["found"], f["hint"]);
        report["findings"].as_array().unwrap().iter().filter(of).map(text).collect()
    };
    let before = output(cluster.lab().box_().command("ip").args(["-d", "link"])).unwrap();
    let report = look();
    assert!(found(&report, "programs")[0].contains("accepts netsum's programs"), "{report:#}");
    assert!(found(&report, "BPF compiler")[0].starts_with("\"ok\""), "{report:#}");
    // A kernel with br_netfilter passes frames of every bridge through iptables, unless that is
    // turned off.
    let filter = Path::new("/proc/sys/net/bridge/bridge-nf-call-iptables");
    if cluster.lab().box_().enter(|| filter.exists()) {
        assert!(found(&report, "bridge br0")[0].contains("pass iptables"), "{report:#}");
        cluster.lab().box_().enter(|| std::fs::write(filter, "0")).unwrap();
    }
    let report = look();
    assert!(found(&report, "bridge br0")[0].starts_with("\"ok\""), "{report:#}");
    assert!(found(&report, "port port").iter().all(|f| !f.starts_with("\"error\"")), "{report:#}");

    let port = cluster.lab().box_().port(1);
    let set = |words: &[&str]| {
        output(cluster.lab().box_().command("ip").args(["link", "set"]).args(words)).unwrap();
    };
    set(&[&port, "mtu", "300"]);
    set(&["br0", "type", "bridge", "stp_state", "1"]);
    let report = look();
    assert!(
        found(&report, &format!("port {port}"))[0].contains("MTU 300: too small"),
        "{report:#}"
    );
    assert!(found(&report, "bridge br0")[0].contains("spanning tree"), "{report:#}");
    set(&[&port, "mtu", "1500"]);
    set(&[&port, "down"]);
    let report = look();
    assert!(found(&report, &format!("port {port}"))[0].contains("down"), "{report:#}");

    let text = netsum(&cluster, "check --bridge no-such-bridge");
    let (text, code) = (String::from_utf8(text.stdout).unwrap(), text.status.code());
    assert!(code == Some(1) && text.contains("there is no such interface"), "{text}");
    set(&[&port, "up"]);
    set(&["br0", "type", "bridge", "stp_state", "0"]);
    let after = output(cluster.lab().box_().command("ip").args(["-d", "link"])).unwrap();
    assert_eq!(before.matches("xdp").count(), after.matches("xdp").count(), "nothing is attached");
}
