//! The benchmarks run, and their output is complete. The figures' quality is not checked.

use std::path::Path;
use std::process::Command;

use netsum_lab::cluster::program;
use netsum_lab::netns::output;
use serde_json::Value;

/// Runs a benchmark with little of everything; returns its tables and its JSON.
fn run(name: &str, arguments: &[&str]) -> (String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let mut command = Command::new(program(name).unwrap());
    command
        .args(["--quick", "--json"])
        .arg(file("json"))
        .arg("--svg")
        .arg(file("svg"))
        .args(arguments);
    let text = output(&mut command).unwrap();
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    let svg = read(&file("svg"));
    roxmltree::Document::parse(&svg).unwrap();
    (text, serde_json::from_str(&read(&file("json"))).unwrap())
}

fn rows<'a>(report: &'a Value, of: &str) -> &'a [Value] {
    report[of].as_array().unwrap_or_else(|| panic!("{of} in {report}"))
}

fn positive(row: &Value, fields: &[&str]) {
    for field in fields {
        assert!(row[field].as_f64().is_some_and(|x| x > 0.0), "{field} in {row}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_data_plane_is_measured_from_single_packets_to_live_frames() {
    let (text, report) = run("bench-dataplane", &[]);
    // Two path MTUs.
    let paths = rows(&report, "paths");
    for path in [
        "empty",
        "sum",
        "crc",
        "ingress",
        "absorb/ignore",
        "absorb/verify",
        "complete/verify",
        "egress",
    ] {
        assert_eq!(paths.iter().filter(|r| r["path"] == path).count(), 2, "{path}");
    }
    paths.iter().for_each(|row| positive(row, &["run_ns"]));
    rows(&report, "parts").iter().for_each(|row| positive(row, &["ratio", "ratio_without_icrc"]));

    // By two numbers of ranks, with and without ICRC.
    assert_eq!(rows(&report, "fragments").len(), 2 * 2 * 2);
    for row in rows(&report, "memory") {
        assert!((1.0..1.5).contains(&row["ratio"].as_f64().unwrap()), "{row}");
    }
    assert_eq!(rows(&report, "memory").len(), 4);
    assert_eq!(rows(&report, "programs").len(), 3);

    assert!(report["live_skipped"].is_null(), "live frames were not measured: {text}");
    let live = rows(&report, "live");
    // Two ranks at one path MTU and four at both, in eight ways.
    assert_eq!(live.len(), 3 * 8);
    live.iter().for_each(|row| positive(row, &["fragments", "busy_seconds", "gbps", "over_floor"]));
    let broadcast: Vec<_> = live.iter().filter(|r| r["setup"] == "broadcast").collect();
    assert!(broadcast.len() == 3 && broadcast.iter().all(|r| r["over_floor"] == 1.0), "{live:?}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_host_is_measured_alone_over_both_transports() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("json");
    let mut command = Command::new(program("bench-host").unwrap());
    let text = output(command.args(["--quick", "--json"]).arg(&file)).unwrap();
    let figures: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let rows = rows(&figures, "rows");
    let names: Vec<_> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["udp", "xdp"], "{text}");
    for row in rows {
        positive(row, &["gbps", "cpu_per_gb", "packets_per_sleep", "rank_busy", "reflector_busy"]);
        // The reflector's sums are taken for the box's.
        assert_eq!(row["fallbacks"], 0, "{row}");
    }
}

#[test]
#[ignore = "needs the program `netsum`: cargo xtask test"]
fn a_managers_cost_and_starts_of_operations_are_measured() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("json");
    let mut command = Command::new(program("bench-control").unwrap());
    command.args([
        "--leaves", "4", "--spines", "2", "--jobs", "2", "--ranks", "8", "--rings", "2",
        "--rounds", "1", "--json",
    ]);
    let text = output(command.arg(&file)).unwrap();
    let figures: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(rows(&figures, "manager").len(), 1, "{text}");
    positive(&figures["manager"][0], &["admit", "restart", "recover", "memory"]);
    let rows = rows(&figures, "start");
    let cases: Vec<String> = rows
        .iter()
        .map(|row| format!("{} {} {}", row["waiter"], row["late"], row["starts"]))
        .collect();
    assert_eq!(
        cases,
        ["false false 20", "true false 20", "false true 20", "true true 20"],
        "{text}"
    );
    rows.iter().for_each(|row| positive(row, &["p50_us", "p99_us", "most_us"]));
}
