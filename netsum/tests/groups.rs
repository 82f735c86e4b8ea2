//! Groups of a job over the daemon's services.

mod common;

use common::{Daemon, join};
use netsum_api::v1 as api;

fn open(token: &str, group: &str, ranks: u32) -> api::OpenGroupRequest {
    let (job, token, group) = ("train".into(), token.into(), group.into());
    api::OpenGroupRequest { job, token, group, ranks }
}

#[tokio::test]
async fn a_group_is_opened_joined_shown_and_left() {
    let d = Daemon::start().await;
    let create =
        "job create train --ranks 3 --mtu 1024 --message-size 4K --window 2 --token sesame";
    d.netsum(create).await.unwrap();
    let group = d.worker().await.open_group(open("sesame", "row", 2)).await.unwrap().into_inner();
    assert_eq!((&*group.name, group.ranks, group.rings, group.mtu), ("train/row", 2, 1, 1024));
    assert_eq!(group.token, "");
    let enter = |rank| {
        let d = &d;
        async move {
            let request =
                api::JoinRequest { job: "train/row".into(), ..join(rank, "sesame", 5000) };
            d.worker().await.join(request).await.unwrap().into_inner()
        }
    };
    let (first, second) = tokio::join!(enter(0), enter(1));
    assert!(!first.on_host_ring && first.ranks == second.ranks);
    let epoch = first.job.unwrap().epoch;
    assert_eq!(d.netsum("job list").await.unwrap().matches("train/row: active").count(), 1);
    assert!(d.netsum("job show train/row").await.unwrap().contains("train/row"));
    assert!(d.netsum("ring show").await.unwrap().contains("train/row ring 0: active"));
    d.netsum("diagnose train/row --watch 20ms").await.unwrap();
    d.netsum("stats train/row").await.unwrap();
    for rank in [0, 1] {
        let (job, token) = ("train/row".into(), "sesame".into());
        let leave = api::LeaveRequest { job, token, rank, epoch };
        d.worker().await.leave(leave).await.unwrap();
    }
    assert!(!d.netsum("job list").await.unwrap().contains("train/row"));
    assert_eq!(d.recorded.lock().unwrap().rings.len(), 1, "the job's own");
    // As after a boot: the ranks reconnect when the programs are others.
    let heartbeat = api::HeartbeatRequest {
        job: "train/row".into(),
        token: "sesame".into(),
        epoch,
        ..Default::default()
    };
    let reply = d.worker().await.heartbeat(heartbeat).await.unwrap().into_inner();
    assert_eq!((reply.state(), reply.epoch), (api::JobState::Waiting, 0));
    assert_ne!(reply.program_generation, 0);
    d.worker().await.open_group(open("sesame", "row", 2)).await.unwrap();
    tokio::join!(enter(0), enter(1));
    let flows = d.recorded.lock().unwrap().flows.clone();
    d.recorded.lock().unwrap().forgotten.clear();
    d.netsum("job delete --forget-connections train").await.unwrap();
    let recorded = d.recorded.lock().unwrap();
    assert!(recorded.rings.is_empty(), "a job's groups end with it");
    assert!(flows.len() == 2 && recorded.forgotten.is_superset(&flows), "{:?}", recorded.forgotten);
}

#[tokio::test]
async fn groups_are_for_ranks_that_know_their_jobs_token() {
    let d = Daemon::start().await;
    d.netsum("job create train --ranks 3 --token sesame").await.unwrap();
    for (request, words) in [
        (open("wrong", "row", 2), "no such job, or the token is wrong"),
        (open("sesame", "a/b", 2), "must be 1 to 64 of"),
        (open("sesame", "row", 4), "4 ranks: must be 2 to 3"),
    ] {
        let error = d.worker().await.open_group(request).await.unwrap_err();
        assert!(error.message().contains(words), "{error}");
    }
    let error = d.netsum("job create train/row --ranks 2").await.unwrap_err();
    assert!(error.contains("only ranks open groups"), "{error}");
}

#[tokio::test]
async fn a_group_without_room_has_no_rings() {
    let d = Daemon::start().await;
    let shape = "--ranks 2 --mtu 1024 --message-size 64K --window 16 --token sesame";
    d.netsum(&format!("job create train {shape}")).await.unwrap();
    let mut n = 0;
    let group = loop {
        n += 1;
        assert!(n < 256);
        let request = open("sesame", &format!("g{n}"), 2);
        let group = d.worker().await.open_group(request).await.unwrap().into_inner();
        if group.ring_ids.is_empty() {
            break group.name;
        }
    };
    let enter = |rank| {
        let (d, job) = (&d, group.clone());
        async move {
            let request = api::JoinRequest { job, ..join(rank, "sesame", 5000) };
            d.worker().await.join(request).await.unwrap().into_inner()
        }
    };
    let (first, second) = tokio::join!(enter(0), enter(1));
    assert!(first.on_host_ring && second.on_host_ring);
    assert_eq!(first.job.unwrap().rings, 1, "as the ranks' connections");
    assert!(d.netsum(&format!("job show {group}")).await.unwrap().contains("active"));
}
