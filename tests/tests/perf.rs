//! `netsum-perf` and the command line of `netsum`, called as by their users.

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec, TIMEOUT, WORKER_PORT, program};
use netsum_lab::process::Running;
use serde_json::Value;

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn netsum_perf_prints_a_row_for_each_size_and_finds_no_sum_wrong() {
    let cluster = Cluster::start(LabSpec::hosts(4)).unwrap();
    let job = JobSpec { message_size: 65536, window: 2, ..JobSpec::new("perf", 4) };
    let token = cluster.create_job(&job).unwrap();
    for more in ["--iters 2", "--iters 7 --inflight 3", "--iters 2 --tensors 5"] {
        let arguments = format!("all_reduce -b 8 -e 4M -f 8 --dtype f32 --check -j {more}");
        let rows = measure(&cluster, &job, &token, &arguments);
        assert_eq!(sizes(&rows), [8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20]);
        println!(
            "{more}: {:?} us",
            rows.iter().map(|row| row["time_us"].as_f64().unwrap()).collect::<Vec<_>>()
        );
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn netsum_perf_finds_no_result_of_any_collective_wrong() {
    let cluster = Cluster::start(LabSpec::hosts(3)).unwrap();
    let job = JobSpec { message_size: 16384, window: 2, ..JobSpec::new("every", 3) };
    let token = cluster.create_job(&job).unwrap();
    let (any, whole, parts) =
        ("-f 100 -e 300K -n 3 -w 1 -c -j", [8, 800, 80_000], [12, 1200, 120_000]);
    for (command, expected, redop, root) in [
        ("all_reduce -o avg", whole, Some("avg"), None),
        ("reduce -r 2 -d i32", whole, Some("sum"), Some(2)),
        ("broadcast -r 1", whole, None, Some(1)),
        ("all_gather --inflight 2", parts, None, None),
        ("reduce_scatter", parts, Some("sum"), None),
        ("reduce_scatter -o bxor -d u8", [6, 798, 79_998], Some("bxor"), None),
        ("all_reduce -o max -d f64", whole, Some("max"), None),
        ("alltoall", parts, None, None),
    ] {
        let rows = measure(&cluster, &job, &token, &format!("{command} {any}"));
        assert_eq!(sizes(&rows), expected, "{command}");
        for row in &rows {
            assert_eq!((row["redop"].as_str(), row["root"].as_u64()), (redop, root), "{row}");
            assert!(row["busbw"].as_f64().unwrap() > 0.0, "{row}");
        }
    }
    cluster.netsum(&["job", "delete", &job.name]).unwrap();
    let sealed = JobSpec { secret: "a secret of all ranks", ..job.clone() };
    let token = cluster.create_job(&sealed).unwrap();
    let printed = &run(&cluster, &sealed, &token, "all_reduce -e 300K -n 3")[0];
    assert!(
        printed.contains(", sealed; rank 0 over") && printed.contains("# wrong elements: 0"),
        "{printed}"
    );
    let rows = measure(&cluster, &job, &token, "barrier -n 5 -j");
    assert!(rows.len() == 1 && rows[0]["time_us"].as_f64().unwrap() > 0.0, "{rows:?}");
}

fn sizes(rows: &[Value]) -> Vec<u64> {
    rows.iter().map(|row| row["size"].as_u64().unwrap()).collect()
}

/// All ranks measure. Returns what they print.
fn run(cluster: &Cluster, job: &JobSpec, token: &str, arguments: &str) -> Vec<String> {
    let mut ranks = Vec::new();
    for rank in 0..job.ranks {
        let host = cluster.lab().host(rank as usize);
        let mut perf = host.command(program("netsum-perf").unwrap());
        perf.args(arguments.split_whitespace())
            .env("NETSUM_CONTROLLER", format!("{}:{WORKER_PORT}", cluster.lab().box_().ip()))
            .env("NETSUM_JOB", &job.name)
            .env("NETSUM_TOKEN", token)
            .env("NETSUM_RANK", rank.to_string())
            .env("NETSUM_RANKS", job.ranks.to_string())
            .env("NETSUM_IP", host.ip(0).to_string())
            .env("NETSUM_SECRET", job.secret);
        ranks.push(Running::start(&format!("netsum-perf of rank {rank}"), &mut perf).unwrap());
    }
    ranks.into_iter().map(|rank| rank.success(2 * TIMEOUT).unwrap()).collect()
}

/// All ranks measure. Returns the rows, in which nothing is wrong.
fn measure(cluster: &Cluster, job: &JobSpec, token: &str, arguments: &str) -> Vec<Value> {
    let printed = run(cluster, job, token, arguments);
    let rows: Vec<Value> =
        serde_json::from_str(&printed[0]).unwrap_or_else(|e| panic!("{e}: {}", printed[0]));
    for row in &rows {
        assert_eq!(row["by"], "box", "{row}");
        assert!(arguments.starts_with("barrier") || row["wrong"] == 0, "{row}");
    }
    rows
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn refusals_name_the_argument_and_what_would_be_right() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    cluster.create_job(&JobSpec::new("there", 2)).unwrap();
    let create = |rest: &str| format!("job create new --message-size 4096 --window 2 {rest}");
    let add = |rest: &str| format!("flow add there --src 10.0.0.1 --dst 10.0.0.2 --psn 0 {rest}");
    for (command, words) in [
        (create("--ranks 1"), &["ranks", "1", "2 to 64"][..]),
        (create("--ranks 2 --mtu 1500"), &["mtu", "1500", "64", "3328"]),
        (create("--ranks 2 --order any"), &["order", "any", "in-order"]),
        ("job create there --ranks 2 --message-size 4096 --window 2".into(), &["there"]),
        ("job create huge --ranks 2 --message-size 64M --window 1000".into(), &["slots"]),
        ("job delete nowhere".into(), &["nowhere"]),
        ("stats nowhere".into(), &["nowhere"]),
        (add("--ring 0 --rank 0 --port eth9 --qpn 7"), &["port", "eth9"]),
        (add("--ring 1 --rank 0 --port port0 --qpn 7"), &["ring", "1"]),
        (add("--ring 0 --rank 2 --port port0 --qpn 7"), &["rank", "2"]),
        (add("--ring 0 --rank 0 --port port0 --qpn 0x1000000"), &["qpn"]),
    ] {
        let error = match cluster.netsum(&command.split(' ').collect::<Vec<_>>()) {
            Ok(printed) => panic!("`netsum {command}` is not refused: {printed}"),
            Err(error) => error.to_string(),
        };
        // Only the text behind the command is searched: the command itself contains the words.
        let cause = error.split_once("exit status").map_or(&*error, |(_, cause)| cause);
        for word in words {
            assert!(cause.contains(word), "`netsum {command}` does not say {word}: {cause}");
        }
    }
    // The refused commands leave nothing behind.
    let jobs = cluster.netsum_json(&["job", "list"]).unwrap();
    assert!(!jobs.to_string().contains("new") && jobs.to_string().contains("there"), "{jobs}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn reports_of_the_daemon_are_json_too() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    cluster.create_job(&JobSpec::new("shown", 2)).unwrap();
    for (command, words) in [
        ("job list", &["shown"][..]),
        ("job show shown", &["shown", "memory", "slots"]),
        ("port show", &["port0", "port1", "native"]),
        ("slot show shown", &["ring"]),
        ("stats", &["contributions", "not_roce"]),
        ("stats shown", &["contributions"]),
    ] {
        let json =
            cluster.netsum_json(&command.split(' ').collect::<Vec<_>>()).unwrap().to_string();
        let text = cluster.netsum(&command.split(' ').collect::<Vec<_>>()).unwrap();
        for word in words {
            assert!(json.contains(word), "`netsum -j {command}` lacks {word}: {json}");
        }
        assert!(serde_json::from_str::<Value>(&text).is_err() && !text.is_empty(), "{text}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_daemon_detaches_when_it_is_told_to_end() {
    let mut cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let attached = |cluster: &Cluster| {
        let mut ip = cluster.lab().box_().command("ip");
        netsum_lab::netns::output(ip.args(["-details", "link", "show"])).unwrap().contains("xdp")
    };
    assert!(attached(&cluster));
    cluster.stop_daemon().unwrap();
    assert!(!attached(&cluster));
    cluster.start_daemon().unwrap();
    assert!(attached(&cluster));
}
