//! The shipped rules and the shipped dashboard in a real Prometheus. It scrapes a box on which
//! everything goes wrong that has an alert; each alert fires, and no panel is empty.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, DaemonOptions, Group, JobSpec, one_on_each_host};
use netsum_lab::faults::Faults;
use netsum_lab::frames::{FrameSpec, lanes};
use netsum_lab::netns::output;
use netsum_lab::prometheus::{Prometheus, program};
use netsum_lab::tap::Tap;
use serde_json::Value;

const METRICS: &str = "127.0.0.1:4792";
/// How often Prometheus scrapes and evaluates.
const EVERY: Duration = Duration::from_millis(250);
/// The time that stands for a minute of the shipped rules; see [`hurried`].
const MINUTE: Duration = Duration::from_millis(500);
/// How long an alert may take to fire.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Alerts that this test does not cause: the daemon attaches a program again within a second.
const LEFT_OUT: [&str; 1] = ["NetsumPortWithoutProgram"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn shipped(file: &str) -> String {
    std::fs::read_to_string(root().join("deploy").join(file)).unwrap()
}

/// The shipped rules for a short test: a minute in a window (`[5m]`) or behind `for:` becomes half
/// a second. Everything else is as shipped.
fn hurried(rules: &str) -> String {
    [1, 5].into_iter().fold(rules.to_owned(), |text, minutes| {
        let (long, short) = (format!("{minutes}m"), format!("{}ms", minutes * MINUTE.as_millis()));
        text.replace(&format!("[{long}]"), &format!("[{short}]"))
            .replace(&format!("for: {long}\n"), &format!("for: {short}\n"))
    })
}

#[test]
#[ignore = "needs Prometheus: cargo xtask test"]
fn the_rules_pass_promtool_and_no_alert_is_without_a_test() {
    let promtool = |arguments: &[&str]| {
        output(Command::new(program("promtool").unwrap()).current_dir(root()).args(arguments))
            .unwrap()
    };
    promtool(&["check", "rules", "--lint=all", "--lint-fatal", "deploy/prometheus-rules.yml"]);
    promtool(&["test", "rules", "tests/prometheus/rules.yml"]);
    let tests = std::fs::read_to_string(root().join("tests/prometheus/rules.yml")).unwrap();
    let book = std::fs::read_to_string(root().join("book/text/howto/watch.md")).unwrap();
    let rules = shipped("prometheus-rules.yml");
    let alerts: Vec<&str> =
        rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() > 5, "{alerts:?}");
    for alert in alerts {
        assert!(tests.contains(&format!("- name: {alert}\n")), "{alert} has no test");
        assert!(book.contains(&format!("| `{alert}` |")), "the book does not know {alert}");
    }
}

/// A box, and a Prometheus that scrapes it.
struct Watched {
    // It must be dropped, and so ended, before the lab.
    prometheus: Prometheus,
    cluster: Cluster,
}

impl Watched {
    fn start() -> Self {
        let spec = LabSpec { faulty_links: true, ips_per_host: 4, ..LabSpec::hosts(4) };
        let mut cluster = Cluster::without_daemon(spec).unwrap();
        // In a new namespace the loopback interface is down.
        cluster.lab().box_().set_link("lo", true).unwrap();
        let tenants = "[tenants.default]\njobs = 3\nmemory = \"8MiB\"\n[tenants.filler]\n";
        // The job of killed ranks fails soon.
        let tenants = format!("{tenants}[heartbeat]\ntimeout-ms = 5000\n");
        let listen =
            format!("[metrics]\nlisten = \"{METRICS}\"\n[pool]\nmemory = \"8MiB\"\n{tenants}");
        cluster.start_daemon_as(&DaemonOptions { listen, ..DaemonOptions::default() }).unwrap();
        let rules = cluster.folder().join("rules.yml");
        std::fs::write(&rules, hurried(&shipped("prometheus-rules.yml"))).unwrap();
        let box_ = cluster.lab().box_();
        let prometheus = Prometheus::start(box_, cluster.folder(), METRICS, &rules, EVERY).unwrap();
        Self { prometheus, cluster }
    }

    fn group(&self, job: &JobSpec, places: &[(usize, usize)]) -> Group {
        let token = self.cluster.create_job(job).unwrap();
        self.cluster.ranks(job, &token, places).unwrap()
    }

    /// Does `work` until all of these alerts have fired, each with these labels.
    fn until_fire(&self, alerts: &[(&str, &[(&str, &str)])], mut work: impl FnMut(u64)) {
        let start = Instant::now();
        let mut missing = alerts.to_vec();
        for round in 0.. {
            work(round);
            let firing = self.prometheus.firing().unwrap();
            missing.retain(|(name, labels)| {
                let is = |alert: &Value| {
                    alert["labels"]["alertname"] == *name
                        && labels.iter().all(|(label, value)| alert["labels"][label] == *value)
                };
                let found = firing.iter().find(|alert| is(alert));
                if let Some(alert) = found {
                    let text = alert["annotations"].to_string();
                    println!("after {:.1} s: {text}", start.elapsed().as_secs_f64());
                    assert!(
                        !text.contains("no value") && !text.contains("error expanding"),
                        "{alert:#}"
                    );
                }
                found.is_none()
            });
            if missing.is_empty() {
                return;
            }
            assert!(
                start.elapsed() < TIMEOUT,
                "{missing:?} do not fire, but {firing:#?}\n{:#?}\n{}",
                self.prometheus.query("{__name__=~\"netsum:.*\"}").unwrap(),
                self.prometheus.log()
            );
        }
    }
}

/// Creates a job whose rank 1 never sends anything, on the hosts' last addresses.
fn stuck(cluster: &Cluster) {
    let create =
        ["job", "create", "stuck", "--ranks", "2", "--message-size", "4096", "--window", "2"];
    cluster.netsum(&create).unwrap();
    let ip = |host: usize| cluster.lab().host(host).ip(3).to_string();
    for (rank, port, psn) in [(0, "port0", "4096"), (1, "port1", "8192")] {
        let (ring, rank_text) = (["--ring", "0"], rank.to_string());
        let ends =
            ["--rank", &rank_text, "--port", port, "--src", &ip(rank), "--dst", &ip(1 - rank)];
        let numbers = ["--qpn", "512", "--psn", psn];
        cluster.netsum(&[&["flow", "add", "stuck"][..], &ring, &ends, &numbers].concat()).unwrap();
    }
    let frame = FrameSpec {
        src: vec![10, 0, 3, 1],
        dst: vec![10, 0, 3, 2],
        ..FrameSpec::send(1, 2, 512, 4096, lanes(0, 256))
    };
    Tap::open(cluster.lab().host(0), "eth0").unwrap().send(&frame.build()).unwrap();
}

/// Fills most of the box's memory.
fn fill(cluster: &Cluster) {
    let create = |n: u32| {
        let name = format!("filler{n}");
        cluster.create(&name, &[("--ranks", 2), ("--window", 4)], &["--tenant", "filler"])
    };
    assert!((0..100).any(|n| create(n).is_err()), "a pool of 8 MiB has no end");
}

#[test]
#[ignore = "needs root, BPF and Prometheus: cargo xtask test"]
fn every_alert_fires_when_it_should_and_no_panel_is_empty() {
    let mut watched = Watched::start();
    let train = JobSpec { rings: 2, ..JobSpec::new("train", 3) };
    let mut group = watched.group(&train, &one_on_each_host(3));

    // Everything works.
    group.start_together();
    let start = Instant::now();
    while start.elapsed() < 14 * MINUTE {
        group.all_reduce("i32", 20_000, 1).unwrap();
    }
    let recorded = watched.prometheus.query("{__name__=~\"netsum:.*\"}").unwrap();
    assert_eq!(watched.prometheus.firing().unwrap(), Vec::<Value>::new(), "{recorded:#?}");
    let panels = panels(&watched.prometheus);
    let empty: Vec<_> = panels.iter().filter(|p| p.queries.iter().all(|(_, full)| !full)).collect();
    assert!(empty.is_empty(), "{empty:#?}");

    // A stalled job; a job whose ranks 0 and 1 are on one host, which keeps their data away from
    // the box; and a rank that is late.
    stuck(&watched.cluster);
    let past = JobSpec { timeout: Duration::from_secs(3), ..JobSpec::new("past", 3) };
    let mut past_box = watched.group(&past, &[(0, 1), (0, 2), (1, 1)]);
    group.start_as_told();
    watched.until_fire(
        &[
            ("NetsumStraggler", &[("job_name", "train"), ("rank", "2")]),
            ("NetsumJobOnHostRing", &[("job_name", "past")]),
            ("NetsumTenantNearlyFull", &[("tenant", "default"), ("of", "jobs")]),
        ],
        |round| {
            group.work(2).unwrap();
            past_box.all_reduce("i32", 50_000, round).unwrap();
        },
    );

    // A burst of loss on a link, which also flips bits; and a host that sends with another's
    // address.
    group.start_together();
    let lossy = Faults { corrupt: 0.02, ..Faults::loss(0.05) };
    watched.cluster.lab().host(1).set_faults(lossy, Faults::loss(0.05), 1).unwrap();
    let attacker = Tap::open(watched.cluster.lab().host(3), "eth0").unwrap();
    let spoofed = FrameSpec::send(1, 2, 0x777, 1, lanes(9, 256)).build();
    watched.until_fire(
        &[
            ("NetsumRetransmissions", &[("job_name", "train")]),
            ("NetsumDataRefused", &[("job_name", "train"), ("reason", "rx_icrc_encapsulated")]),
            ("NetsumDataRefused", &[("reason", "spoofed")]),
        ],
        |round| {
            for outcome in group.all_reduce("i32", 50_000, round).unwrap() {
                assert_eq!((outcome.mode.as_str(), outcome.wrong), ("box", 0), "{outcome:?}");
            }
            (0..20).for_each(|_| attacker.send(&spoofed).unwrap());
        },
    );
    watched.cluster.lab().host(1).set_faults(Faults::NONE, Faults::NONE, 1).unwrap();

    // A port without a host, a killed rank, and a full pool.
    watched.cluster.lab().box_().set_link("port3", false).unwrap();
    past_box.kill(2).unwrap();
    fill(&watched.cluster);
    let mut ordered = false;
    watched.until_fire(
        &[
            ("NetsumPortDown", &[("port", "port3")]),
            ("NetsumJobFailed", &[("job_name", "past")]),
            ("NetsumPoolNearlyFull", &[]),
            ("NetsumRingStalled", &[("job_name", "stuck"), ("ring", "0")]),
        ],
        |_| {
            if !std::mem::replace(&mut ordered, true) {
                past_box.order_all_reduce("i32", 20_000, 1).unwrap();
            }
            std::thread::sleep(EVERY);
        },
    );
    dashboard_has_data(&watched.prometheus);

    watched.cluster.stop_daemon().unwrap();
    watched.until_fire(&[("NetsumDaemonGone", &[])], |_| std::thread::sleep(EVERY));
    rules_are_well(&watched.prometheus);
}

/// Checks that each rule could be evaluated, and that each alert has fired, except those left out.
fn rules_are_well(prometheus: &Prometheus) {
    // `count_over_time` instead of a range query, which has steps: the last alert has just fired.
    let fired = prometheus.query("count_over_time(ALERTS{alertstate=\"firing\"}[10m])").unwrap();
    let fired: BTreeSet<&str> =
        fired.iter().filter_map(|a| a["metric"]["alertname"].as_str()).collect();
    let rules = prometheus.rules().unwrap();
    for rule in &rules {
        assert_eq!(rule["health"], "ok", "{rule:#}");
        assert!(
            rule["duration"].as_f64().unwrap_or(0.0) < 5.0
                && !rule["query"].as_str().unwrap().contains("m]"),
            "not hurried: {rule:#}"
        );
        let name = rule["name"].as_str().unwrap();
        match rule["type"].as_str().unwrap() {
            "alerting" => {
                assert!(fired.contains(name) || LEFT_OUT.contains(&name), "{name}: {fired:?}")
            }
            _ => assert!(!prometheus.history(name).unwrap().is_empty(), "{name} records nothing"),
        }
    }
    assert!(prometheus.log().is_empty(), "{}", prometheus.log());
}

/// A panel of the dashboard, and its queries, each with whether it has had a value since the start.
#[derive(Debug)]
struct Panel {
    #[expect(dead_code, reason = "for messages")]
    title: String,
    queries: Vec<(String, bool)>,
}

/// Fills in a query's variables as Grafana does.
fn filled(text: &str) -> String {
    text.replace("$__rate_interval", "2s").replace("$job", ".*").replace("$instance", ".*")
}

fn panels(prometheus: &Prometheus) -> Vec<Panel> {
    let dashboard: Value = serde_json::from_str(&shipped("grafana-dashboard.json")).unwrap();
    let has_value = |series: &Value| {
        series["values"].as_array().unwrap().iter().any(|value| value[1].as_str().unwrap() != "NaN")
    };
    let query = |target: &Value| {
        let expression = filled(target["expr"].as_str().unwrap());
        let full = prometheus.history(&expression).unwrap().iter().any(has_value);
        (expression, full)
    };
    let panel = |panel: &Value| Panel {
        title: panel["title"].to_string(),
        queries: panel["targets"].as_array().unwrap().iter().map(query).collect(),
    };
    dashboard["panels"].as_array().unwrap().iter().map(panel).collect()
}

/// Checks that each query of each panel has had a value at some time, and so has each variable.
fn dashboard_has_data(prometheus: &Prometheus) {
    let panels = panels(prometheus);
    let queries = || panels.iter().flat_map(|panel| &panel.queries);
    println!("{} panels, {} queries", panels.len(), queries().count());
    assert!(queries().count() > 20 && queries().all(|(_, full)| *full), "{panels:#?}");
    let dashboard: Value = serde_json::from_str(&shipped("grafana-dashboard.json")).unwrap();
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    for query in variables.iter().filter_map(|variable| variable["query"]["query"].as_str()) {
        let inside = query.strip_prefix("label_values(").and_then(|q| q.strip_suffix(')')).unwrap();
        let (selector, label) = inside.rsplit_once(", ").unwrap();
        assert!(!prometheus.label_values(label, &filled(selector)).unwrap().is_empty(), "{query}");
    }
}
