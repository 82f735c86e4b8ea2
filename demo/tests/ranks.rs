//! Ranks in processes of their own over loopback, without root and box: the hosts' ring sums.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use netsum_demo::report::{Line, Trained};

const EPOCHS: &str = "2";

fn netsum_demo(command: &str, ranks: usize, weights: &Path) -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_netsum-demo"));
    program
        .args([command, "--ranks", &ranks.to_string(), "--epochs", EPOCHS, "--weights"])
        .arg(weights);
    program.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    program
}

fn lines(output: &Output) -> Vec<Line> {
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}\n{printed}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    printed
        .lines()
        .map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}")))
        .collect()
}

fn trained(lines: &[Line]) -> &Trained {
    let Some(Line::Trained(trained)) = lines.last() else {
        panic!("no result: {:?}", lines.last())
    };
    trained
}

/// Loopback addresses that simultaneous tests do not use.
fn addresses(ranks: usize) -> Vec<String> {
    let [high, low] = (std::process::id() as u16).to_be_bytes();
    (0..ranks as u8)
        .map(|r| Ipv4Addr::new(127, high | 0x80, low, 10 * ranks as u8 + r).to_string())
        .collect()
}

fn same_weights_as_in_one_process(ranks: usize) {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let reference = netsum_demo("reference", ranks, &file("reference")).output().unwrap();
    let reference = trained(&lines(&reference)).clone();
    let expected = std::fs::read(file("reference")).unwrap();

    let peers = addresses(ranks);
    let started: Vec<Child> = (0..ranks)
        .map(|rank| {
            netsum_demo("rank", ranks, &file(&format!("{rank}")))
                .args([
                    "--rank",
                    &rank.to_string(),
                    "--ip",
                    &peers[rank],
                    "--peers",
                    &peers.join(","),
                ])
                .spawn()
                .unwrap()
        })
        .collect();
    // Wait for all before the first assertion: a failure must not leave processes behind.
    let outputs: Vec<Output> = started.into_iter().map(|c| c.wait_with_output().unwrap()).collect();
    for (rank, output) in outputs.iter().enumerate() {
        let lines = lines(output);
        let t = trained(&lines);
        assert_eq!(lines[0], Line::Connected);
        assert_eq!(lines.len(), t.steps + 2, "a line for each step");
        assert_eq!((t.all_reduces, t.by_box), (t.steps as u64, 0));
        assert!(t.sums_verified >= t.all_reduces, "{t:?}");
        assert_eq!((t.steps, &t.fingerprint), (reference.steps, &reference.fingerprint));
        assert_eq!(t.accuracy.to_bits(), reference.accuracy.to_bits());
        assert!(
            std::fs::read(file(&format!("{rank}"))).unwrap() == expected,
            "rank {rank} has other weights"
        );
    }
}

#[test]
fn two_ranks_get_the_weights_of_one_process() {
    same_weights_as_in_one_process(2);
}

#[test]
fn three_ranks_get_the_weights_of_one_process() {
    same_weights_as_in_one_process(3);
}

#[test]
fn errors_name_the_wrong_arguments() {
    let refused = |args: &[&str], what: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_netsum-demo")).args(args).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && printed.contains(what), "{args:?}: {printed}");
    };
    refused(&["reference", "--ranks", "0"], "0 ranks");
    refused(&["reference", "--ranks", "4", "--epochs", "0"], "epochs 0");
    refused(&["rank", "--ranks", "2", "--rank", "0", "--ip", "127.0.0.1"], "--controller");
    let rank = [
        "rank",
        "--ranks",
        "2",
        "--rank",
        "5",
        "--ip",
        "127.0.0.1",
        "--peers",
        "127.0.0.1,127.0.0.2",
    ];
    refused(&rank, "rank 5");
}
