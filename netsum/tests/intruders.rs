//! Foreign hosts on the workers' TCP port: bounds on what they use, and facts that they never
//! learn. No root, no BPF.

mod common;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use common::{Daemon, join};
use netsum_api::v1 as api;
use netsum_api::v1::worker_client::WorkerClient;
use netsum_controller::limiter::Limits;
use netsum_controller::serve::{MAX_FRAME, MAX_HEADERS, MAX_MESSAGE, MAX_STREAMS, MAX_WINDOW};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::Code;

const LONG: Duration = Duration::from_secs(20);

async fn tcp(d: &Daemon) -> TcpStream {
    TcpStream::connect(d.address.trim_start_matches("http://")).await.unwrap()
}

/// Waits until the other side has closed a connection.
async fn closed(mut tcp: TcpStream) {
    let mut buffer = [0; 1024];
    let end = async { while matches!(tcp.read(&mut buffer).await, Ok(n) if n > 0) {} };
    tokio::time::timeout(LONG, end).await.expect("the connection is still open");
}

fn describe(token: &str) -> api::DescribeRequest {
    api::DescribeRequest { job: "train".into(), token: token.into() }
}

#[tokio::test]
async fn tokens_are_shown_only_on_request() {
    let d = Daemon::start().await;
    let made = d.netsum("job create train --ranks 2 --token sesame").await.unwrap();
    assert!(made.contains("token sesame"), "{made}");
    for line in [
        "job show train",
        "-j job show train",
        "job list",
        "-j job list",
        "-j flow list train",
        "stats train",
    ] {
        let shown = d.netsum(line).await.unwrap();
        assert!(!shown.contains("sesame"), "{line}: {shown}");
    }
    assert!(d.netsum("job show train --show-token").await.unwrap().contains("token sesame"));
    assert!(
        d.netsum("-j job show train --show-token").await.unwrap().contains(r#""token":"sesame""#)
    );
    let described = d.worker().await.describe(describe("sesame")).await.unwrap().into_inner();
    assert_eq!(described.token, "");
}

#[tokio::test]
async fn wrong_tokens_do_not_delay_a_joined_rank() {
    let penalty = Duration::from_secs(1);
    let d = Daemon::with(Limits { tries: 4, penalty, ..Limits::default() }, None).await;
    d.netsum("job create train --ranks 2 --token sesame").await.unwrap();
    let mut rank = d.worker().await;
    rank.describe(describe("sesame")).await.unwrap();
    let start = Instant::now();
    let guesses = (0..12).map(|i| {
        let address = d.address.clone();
        async move {
            let mut worker = WorkerClient::connect(address).await.unwrap();
            worker.describe(describe(&format!("guess{i}"))).await.unwrap_err().code()
        }
    });
    let guesses = tokio::spawn(futures::future::join_all(guesses.collect::<Vec<_>>()));
    // Meanwhile a rank at the same address is served at once.
    while !guesses.is_finished() {
        let asked = Instant::now();
        rank.describe(describe("sesame")).await.unwrap();
        assert!(asked.elapsed() < penalty / 2, "{:?}", asked.elapsed());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(guesses.await.unwrap().iter().all(|code| *code == Code::Unauthenticated));
    assert!(
        start.elapsed() >= 2 * penalty,
        "12 guesses with 4 tries a second took {:?}",
        start.elapsed()
    );
    // Tries are returned: a client with the right token is admitted.
    let late =
        tokio::time::timeout(LONG, async { d.worker().await.describe(describe("sesame")).await });
    late.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_deleted_jobs_token_gives_no_extra_guesses() {
    let penalty = Duration::from_secs(1);
    let d = Daemon::with(Limits { tries: 2, penalty, ..Limits::default() }, None).await;
    d.netsum("job create train --ranks 2 --token sesame").await.unwrap();
    let mut worker = d.worker().await;
    worker.describe(describe("sesame")).await.unwrap();
    d.netsum("job delete train").await.unwrap();
    d.netsum("job create train --ranks 2 --token mellon").await.unwrap();
    let start = Instant::now();
    for i in 0..6 {
        worker.describe(describe(&format!("guess{i}"))).await.unwrap_err();
    }
    assert!(start.elapsed() >= 2 * penalty, "{:?}", start.elapsed());
}

#[tokio::test]
async fn guesses_cost_a_try_even_if_the_guesser_hangs_up() {
    let penalty = Duration::from_secs(1);
    let d = Daemon::with(Limits { tries: 2, penalty, ..Limits::default() }, None).await;
    d.netsum("job create train --ranks 2 --token sesame").await.unwrap();
    let start = Instant::now();
    for i in 0..6 {
        // A connection for each guess, closed immediately afterwards.
        d.worker().await.describe(describe(&format!("guess{i}"))).await.unwrap_err();
    }
    assert!(start.elapsed() >= 2 * penalty, "{:?}", start.elapsed());
}

#[tokio::test]
async fn connections_that_show_no_token_are_closed() {
    let timeout = Duration::from_millis(500);
    let d = Daemon::with(Limits { timeout, ..Limits::default() }, None).await;
    d.netsum("job create train --ranks 2 --token sesame").await.unwrap();
    let mut rank = d.worker().await;
    rank.describe(describe("sesame")).await.unwrap();
    let start = Instant::now();
    let silent = tcp(&d).await;
    let mut slow = tcp(&d).await;
    slow.write_all(b"PRI * HTT").await.unwrap();
    // A complete preface and settings, and then nothing.
    let mut idle = tcp(&d).await;
    idle.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    for foreign in [silent, slow, idle] {
        closed(foreign).await;
    }
    assert!(start.elapsed() >= timeout);
    tokio::time::sleep(timeout).await;
    rank.describe(describe("sesame")).await.expect("the connection of a rank stays");
}

#[tokio::test]
async fn connections_are_bounded_by_address_and_in_all() {
    let limits = Limits { per_address: 3, with_token: 5, ..Limits::default() };
    let d = Daemon::with(limits, None).await;
    d.netsum("job create train --ranks 2 --token sesame").await.unwrap();
    let mut first = Vec::new();
    for _ in 0..5 {
        let mut worker = d.worker().await;
        worker.describe(describe("sesame")).await.unwrap();
        // Again, which does not count.
        worker.describe(describe("sesame")).await.unwrap();
        first.push(worker);
    }
    let error = d.worker().await.describe(describe("sesame")).await.unwrap_err();
    let why = "127.0.0.1 has 5 connections here already, which is the most";
    assert!(error.code() == Code::ResourceExhausted && error.message().starts_with(why), "{error}");
    // Those without a token have a limit of their own.
    let foreign = futures::future::join_all((0..3).map(|_| tcp(&d))).await;
    closed(tcp(&d).await).await;
    drop((first.pop(), foreign));
    // One has disconnected; its place is free as soon as the daemon has noticed.
    let again = async {
        loop {
            if let Ok(mut worker) = WorkerClient::connect(d.address.clone()).await
                && worker.describe(describe("sesame")).await.is_ok()
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LONG, again).await.expect("its place is free again");

    let d = Daemon::with(Limits { connections: 1, ..Limits::default() }, None).await;
    let _one = tcp(&d).await;
    closed(tcp(&d).await).await;
}

/// Reads a server's first frames: its settings (RFC 9113, 6.5), and how much it widens the
/// connection's window.
async fn offers(mut tcp: TcpStream) -> (HashMap<u16, u32>, u32) {
    tcp.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    // The ping's answer ends them.
    tcp.write_all(b"\0\0\x08\x06\0\0\0\0\0pingpong").await.unwrap();
    let (mut settings, mut wider) = (HashMap::new(), 0);
    loop {
        let mut head = [0; 9];
        tcp.read_exact(&mut head).await.unwrap();
        let mut body = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        tcp.read_exact(&mut body).await.unwrap();
        match (head[3], head[4] & 1) {
            (4, 0) => settings.extend(body.chunks_exact(6).map(|s| {
                (u16::from_be_bytes([s[0], s[1]]), u32::from_be_bytes([s[2], s[3], s[4], s[5]]))
            })),
            (8, _) => wider += u32::from_be_bytes(body.try_into().unwrap()),
            (6, 1) if body == b"pingpong" => return (settings, wider),
            _ => {}
        }
    }
}

#[tokio::test]
async fn the_buffers_of_a_connection_without_a_token_are_bounded() {
    let d = Daemon::start().await;
    let (settings, wider) = tokio::time::timeout(LONG, offers(tcp(&d).await)).await.unwrap();
    let of = |number: u16| settings[&number];
    assert_eq!(of(3), MAX_STREAMS, "requests at a time");
    // Settings not sent have the defaults of RFC 9113: 65535 for windows, 16384 for frames.
    let window = settings.get(&4).copied().unwrap_or(65_535);
    let frame = settings.get(&5).copied().unwrap_or(16_384);
    assert!((window, frame) == (MAX_WINDOW, MAX_FRAME) && of(6) == MAX_HEADERS, "{settings:?}");
    assert_eq!(wider, 0, "the window of the connection stays at 65535");
    // SECURITY.md states this bound.
    let whole = MAX_WINDOW + MAX_STREAMS * (MAX_MESSAGE as u32 + MAX_HEADERS);
    assert!(whole <= 320 << 10, "{whole} bytes of a connection");
}

#[tokio::test]
async fn huge_messages_and_names_are_refused() {
    let d = Daemon::start().await;
    d.netsum("job create train --ranks 2 --token sesame").await.unwrap();
    let mut worker = d.worker().await;
    let mut request = join(0, "sesame", 100);
    let ring =
        api::Connection { receive_qpn: 0xff_fff0, send_qpn: 0xff_fff1, first_psn: 0xff_ffff };
    request.address.as_mut().unwrap().rings = vec![ring; 100_000];
    let error = worker.join(request).await.unwrap_err();
    assert_eq!(error.code(), Code::OutOfRange, "{error}");
    let name = "x".repeat(5_000);
    let error =
        worker.describe(api::DescribeRequest { job: name.clone(), token: name }).await.unwrap_err();
    assert_eq!(error.code(), Code::Unauthenticated);
    assert!(error.message().len() < 100, "{} bytes", error.message().len());
    worker.describe(describe("sesame")).await.expect("the connection works");
}

#[tokio::test]
async fn refused_and_repeated_joins_leave_nothing() {
    let d = Daemon::start().await;
    d.netsum("job create train --ranks 2 --token sesame").await.unwrap();
    for _ in 0..100 {
        let error = d.worker().await.join(join(7, "sesame", 60_000)).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    }
    assert_eq!(d.shared.lock().waiters.count(), 0);
    // A rank that joins repeatedly, and disconnects, takes one place.
    for _ in 0..20 {
        let mut worker = d.worker().await;
        let mut asked = Box::pin(worker.join(join(0, "sesame", 60_000)));
        while d.shared.lock().waiters.count() == 0 {
            let _ = tokio::time::timeout(Duration::from_millis(5), &mut asked).await;
        }
    }
    assert_eq!(d.shared.lock().waiters.count(), 1);
    d.netsum("job delete train").await.unwrap();
    assert_eq!(d.shared.lock().waiters.count(), 0);
}

#[tokio::test]
async fn a_rank_of_a_release_that_does_not_fit_is_told_both() {
    let d = Daemon::start().await;
    d.netsum("job create train --ranks 2 --token sesame").await.unwrap();
    let protocol = netsum_api::PROTOCOL + 1;
    let newer =
        api::JoinRequest { protocol, release: "9.1\x1b[2J".into(), ..join(0, "sesame", 60_000) };
    let error = d.worker().await.join(newer).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    let (ours, release) = (netsum_api::PROTOCOL, netsum_api::RELEASE);
    for part in [
        format!("rank 0 runs netsum 9.1 [2J (protocol {protocol})"),
        format!("netsum {release} (protocol {ours})"),
    ] {
        assert!(error.message().contains(&part), "{error}");
    }
    assert_eq!(d.shared.lock().waiters.count(), 0);
}

#[tokio::test]
async fn a_ranks_reason_reaches_others_as_plain_short_text() {
    let d = Daemon::start().await;
    d.netsum("job create train --ranks 2 --token sesame").await.unwrap();
    let joins = (0..2).map(|rank| {
        let worker = d.worker();
        async move { worker.await.join(join(rank, "sesame", 5000)).await.unwrap() }
    });
    futures::future::join_all(joins).await;
    let reason = format!("\x1b[2J\r\nall is well{}", "!".repeat(10_000));
    let abort = api::AbortRequest {
        job: "train".into(),
        token: "sesame".into(),
        rank: 1,
        reason,
        epoch: 1,
    };
    d.worker().await.abort(abort).await.unwrap();
    let shown = d.netsum("job show train").await.unwrap();
    assert!(shown.contains("rank 1 gave up:") && shown.contains("all is well"), "{shown}");
    assert!(!shown.contains('\x1b') && shown.len() < 1500, "{shown}");
}
