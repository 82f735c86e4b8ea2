//! The metrics port over a real socket, with a data plane that only records calls.

mod common;

use std::time::Duration;

use common::{Daemon, join};
use openmetrics_parser::openmetrics::parse_openmetrics;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Sends a request, and reads until the other side closes.
async fn request(d: &Daemon, request: &str) -> String {
    let mut tcp = TcpStream::connect(d.metrics).await.unwrap();
    tcp.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let _ = tokio::time::timeout(Duration::from_secs(20), tcp.read_to_string(&mut answer))
        .await
        .unwrap();
    answer
}

async fn get(d: &Daemon, path: &str) -> String {
    request(d, &format!("GET {path} HTTP/1.1\r\nHost: box\r\nConnection: close\r\n\r\n")).await
}

#[tokio::test]
async fn a_scrape_is_open_metrics_and_holds_no_secret() {
    let d = Daemon::start().await;
    d.netsum("job create train --ranks 3 --token very-secret").await.unwrap();
    let answer = get(&d, "/metrics").await;
    let (head, text) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    assert!(
        head.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"),
        "{head}"
    );
    parse_openmetrics(text).unwrap_or_else(|e| panic!("{e:?}\n{text}"));
    assert!(text.contains("netsum_job_state{job_name=\"train\",state=\"waiting\"} 1.0"), "{text}");
    assert!(text.contains("netsum_ring_info{job_name=\"train\",ring=\"0\",cpu=\"4\"} 1"), "{text}");
    assert!(!answer.contains("very-secret"));

    // Ranks that have joined show the age of their last heartbeat.
    let replies = (0..3).map(|rank| {
        let worker = d.worker();
        async move { worker.await.join(join(rank, "very-secret", 5000)).await.unwrap() }
    });
    futures::future::join_all(replies).await;
    let answer = get(&d, "/metrics").await;
    assert!(
        answer.contains("netsum_rank_heartbeat_age_seconds{job_name=\"train\",rank=\"2\"}"),
        "{answer}"
    );
    for secret in ["very-secret", "10.0.0.1"] {
        assert!(!answer.contains(secret), "{secret}: {answer}");
    }
}

#[tokio::test]
async fn tenants_are_counted() {
    let d = Daemon::start().await;
    d.netsum("job create first --ranks 2").await.unwrap();
    d.netsum("job delete first").await.unwrap();
    d.netsum("job create second --ranks 2 --rings 2").await.unwrap();
    let text = get(&d, "/metrics").await;
    assert!(!text.contains("_limit"), "there is none: {text}");
    for sample in [
        "netsum_tenant_info{tenant=\"default\",configured=\"true\"} 1\n",
        "netsum_tenant_jobs{tenant=\"default\"} 1.0\n",
        "netsum_tenant_rings{tenant=\"default\"} 2.0\n",
        "netsum_tenant_admitted_jobs_total{tenant=\"default\"} 2\n",
    ] {
        assert!(text.contains(sample), "{sample}: {text}");
    }
}

#[tokio::test]
async fn the_metrics_port_takes_only_what_it_knows() {
    let d = Daemon::start().await;
    assert!(get(&d, "/").await.starts_with("HTTP/1.1 200 OK"));
    assert!(get(&d, "/../etc/passwd").await.starts_with("HTTP/1.1 404"));
    let post =
        "POST /metrics HTTP/1.1\r\nHost: box\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    assert!(request(&d, post).await.starts_with("HTTP/1.1 405"));
    assert!(request(&d, "\u{0}\u{1}nonsense\r\n\r\n").await.starts_with("HTTP/1.1 400"));
    let huge = format!("GET /metrics HTTP/1.1\r\nHost: {}\r\n\r\n", "x".repeat(64 << 10));
    assert!(!request(&d, &huge).await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn connections_to_the_metrics_port_are_bounded_and_do_not_last() {
    let d = Daemon::start().await;
    // Sixteen silent connections take all places: the next one is closed.
    let mut silent = Vec::new();
    for _ in 0..16 {
        silent.push(TcpStream::connect(d.metrics).await.unwrap());
    }
    assert_eq!(get(&d, "/metrics").await, "");
    // They are closed after five seconds, and the daemon answers again.
    for tcp in &mut silent {
        let end = tokio::time::timeout(Duration::from_secs(20), tcp.read(&mut [0; 256])).await;
        end.expect("a connection that says nothing is closed").ok();
    }
    drop(silent);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(get(&d, "/metrics").await.starts_with("HTTP/1.1 200 OK"));
}
