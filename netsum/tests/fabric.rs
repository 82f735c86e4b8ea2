//! A fabric's manager over boxes whose data planes only record calls. No root, no BPF.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::authority::Authority;
use common::{Daemon, join, netsum_at};
use netsum_api::v1 as api;
use netsum_api::v1::manager_server::ManagerServer;
use netsum_api::v1::worker_client::WorkerClient;
use netsum_cli::failure::Kind;
use netsum_controller::limiter::Limits;
use netsum_controller::message::job_spec;
use netsum_controller::serve::{WorkerPort, serve};
use netsum_controller::socket::{self, Access};
use netsum_controller::store::Store;
use netsum_controller::tls::Tls;
use netsum_controller::tls::server_config;
use netsum_controller::waiters::JoinResult;
use netsum_core::membership::Join;
use netsum_core::saved::Saved;
use netsum_core::{Action, Connection, Controller, Rank, RankAddress, State};
use netsum_fabric::boxes::Boxes;
use netsum_fabric::config::Config;
use netsum_fabric::dispatch::Dispatcher;
use netsum_fabric::orders::{Orders, Shared};
use netsum_fabric::service::ManagerBackend;
use tokio::sync::oneshot;
use tonic::Code;
use tonic::service::Routes;
use tonic::transport::{ClientTlsConfig, Endpoint};

const LATE: Duration = Duration::from_secs(20);

/// A job of two ranks.
fn job(name: &str) -> api::CreateJobRequest {
    api::CreateJobRequest {
        name: name.into(),
        ranks: 2,
        mtu: 1024,
        message_size: 4096,
        window: 2,
        rings: 1,
        icrc: "verify".into(),
        order: "auto".into(),
        token: "sesame".into(),
        tenant: "default".into(),
        ..Default::default()
    }
}

/// A manager with a job of two ranks.
struct Manager {
    shared: Shared,
    boxes: Arc<Boxes>,
    task: tokio::task::JoinHandle<String>,
    rings: u32,
    /// The numbers of the ranks' ports.
    ports: [u32; 2],
    _folder: tempfile::TempDir,
}

impl Manager {
    /// A manager of one box.
    async fn of(daemon: &Daemon) -> Self {
        let socket = daemon.folder.path().join("netsum.sock");
        let text = format!("[[box]]\nname = \"a\"\naddress = \"unix:{}\"\n", socket.display());
        Self::with(&text, ["a/p0", "a/p1"], 1).await
    }

    /// A manager with this configuration; the job's ranks are at these ports.
    async fn with(text: &str, ports: [&str; 2], rings: u32) -> Self {
        Self::after(Saved::default(), text, ports, rings).await
    }

    /// The same, started from another manager's saved state.
    async fn after(saved: Saved, text: &str, ports: [&str; 2], rings: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("fabric.toml");
        std::fs::write(&file, text).unwrap();
        let boxes = Arc::new(Boxes::new(&Config::read(&file).unwrap()).unwrap());
        let mut controller = Controller::new(1 << 40, 2, LATE);
        boxes.restore_port_numbers(&saved.ports);
        let boxes_seen = boxes.poll().await;
        let seen: Vec<_> = boxes_seen.values().flat_map(|seen| seen.ports.clone()).collect();
        let ports = ports.map(|name| seen.iter().find(|port| port.name == name).unwrap().ifindex);
        controller.set_ports(seen);
        let is_first = saved.jobs.is_empty();
        controller.restore(saved, Instant::now(), |_| None).unwrap();
        if is_first {
            let job = api::CreateJobRequest { rings, ..job("train") };
            controller.create_job(job_spec(job).unwrap()).unwrap();
        }
        let (orders, changes) = Orders::new(boxes.clone());
        let shared = Shared::new(controller, orders, LATE);
        let dispatcher = Dispatcher::new(shared.clone(), boxes.clone(), &boxes_seen);
        let task = tokio::spawn(dispatcher.run(changes));
        Self { shared, boxes, task, rings, ports, _folder: folder }
    }

    /// Both ranks join; returns their answers.
    async fn join(&self) -> [JoinResult; 2] {
        self.join_job("train", self.rings).await
    }

    async fn join_job(&self, job: &str, rings: u32) -> [JoinResult; 2] {
        let answers = [0, 1].map(|rank| self.join_to(job, rings, rank));
        let [first, second] = answers;
        let both = async { [first.await.unwrap(), second.await.unwrap()] };
        tokio::time::timeout(LATE, both).await.unwrap()
    }

    fn join_as(&self, rank: u32) -> oneshot::Receiver<JoinResult> {
        self.join_to("train", self.rings, rank)
    }

    fn join_to(&self, job: &str, rings: u32, rank: u32) -> oneshot::Receiver<JoinResult> {
        let mut inner = self.shared.lock();
        let (waiter, answer) = inner.waiters.add();
        let a = join(rank, "sesame", 1000).address.unwrap();
        let connection = |c: netsum_api::v1::Connection| Connection {
            receive_qpn: c.receive_qpn,
            send_qpn: c.send_qpn,
            first_psn: c.first_psn,
        };
        let mac = [2, 0, 0, 0, 0, rank as u8 + 1];
        let now = Instant::now();
        let ring = |n: u32| Connection {
            receive_qpn: 0x1000 * (n + 1) + 0x100 * job.len() as u32 + 2 * rank,
            send_qpn: 0x1000 * (n + 1) + 0x100 * job.len() as u32 + 2 * rank + 1,
            first_psn: 7,
        };
        let (ip, rings) = (a.ip.parse().unwrap(), (0..rings).map(ring).collect());
        let bypass = connection(a.bypass.unwrap());
        let address = RankAddress {
            rank: Rank(rank),
            ip,
            mac,
            rings,
            bypass,
            any_ip_id: false,
            selective: true,
            largest_mtu: 0,
            ports: [4791; 2],
        };
        let (name, token, ifindex) = (job.to_owned(), "sesame".into(), self.ports[rank as usize]);
        let join = Join {
            job: name,
            token,
            address,
            ifindex,
            mac,
            ranks: 0,
            epoch: 0,
            deadline: now + LATE,
            waiter,
        };
        let actions = inner.controller.join(join, now).unwrap();
        inner.carry_out(Some(job), actions).unwrap();
        answer
    }

    /// How many of a job's rings each spine has, once the boxes have been polled.
    async fn trees(&self, job: &str) -> Vec<(String, u32)> {
        let of = || self.boxes.show().jobs.into_iter().find(|of| of.name == job);
        until("its trees are not known", async || of().is_some()).await;
        of().unwrap().trees.into_iter().map(|tree| (tree.root, tree.rings)).collect()
    }

    fn delete(&self, job: &str) {
        let mut inner = self.shared.lock();
        let actions = inner.controller.delete_job(job).unwrap();
        inner.carry_out(None, actions).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_box_refuses_no_rank() {
    let daemon = Daemon::start().await;
    let manager = Manager::of(&daemon).await;
    let (shared, (begun, is_busy)) = (daemon.shared.clone(), std::sync::mpsc::channel());
    let busy = std::thread::spawn(move || {
        let _inner = shared.lock();
        begun.send(()).unwrap();
        std::thread::sleep(Duration::from_secs(3));
    });
    is_busy.recv().unwrap();
    let (port, _) = manager.boxes.find(0, [2; 6], [10, 0, 0, 1].into(), LATE).await.unwrap();
    assert_eq!(manager.boxes.end(port).unwrap().to_string(), "a/p0");
    busy.join().unwrap();
    manager.task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_two_boxes_have_seen_is_refused_with_both() {
    let (a, b) = (Daemon::start().await, Daemon::start().await);
    let file = a.folder.path().join("fabric.toml");
    let boxes = [("a", &a), ("b", &b)].map(|(name, daemon)| {
        let socket = daemon.folder.path().join("netsum.sock");
        format!("[[box]]\nname = \"{name}\"\naddress = \"unix:{}\"\n", socket.display())
    });
    std::fs::write(&file, boxes.concat()).unwrap();
    let boxes = Boxes::new(&Config::read(&file).unwrap()).unwrap();
    let error = boxes.find(3, [2; 6], [10, 0, 0, 1].into(), LATE).await.unwrap_err();
    let why = "rank 3: MAC address 02:02:02:02:02:02 of 10.0.0.1 is behind a/p0 and b/p0: a host \
        must be behind one port";
    assert!(error.message().starts_with(why), "{error}");
}

async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !condition().await {
        assert!(begun.elapsed() < LATE, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_box_sums_once_ranks_are_answered_until_deletion() {
    let daemon = Daemon::start().await;
    let manager = Manager::of(&daemon).await;
    assert_eq!(manager.join().await, [Ok(1), Ok(1)]);
    assert!(daemon.netsum("-j job show train").await.unwrap().contains("\"state\":\"active\""));
    // A rank that joins again gets the same answer.
    assert_eq!(manager.join_as(1).await.unwrap(), Ok(1));
    let shown = manager.boxes.show();
    assert!(shown.boxes[0].answers);
    {
        let mut inner = manager.shared.lock();
        let actions = inner.controller.delete_job("train").unwrap();
        inner.carry_out(None, actions).unwrap();
    }
    until("the box still has it", async || daemon.netsum("job show train").await.is_err()).await;
    manager.task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn boxes_forget_only_connections_of_ranks_that_have_stopped() {
    let daemon = Daemon::start().await;
    let manager = Manager::of(&daemon).await;
    manager.shared.lock().controller.create_job(job_spec(job("second")).unwrap()).unwrap();
    assert_eq!(manager.join().await, [Ok(1), Ok(1)]);
    assert_eq!(manager.join_job("second", 1).await, [Ok(1), Ok(1)]);
    let of = |name: &str| manager.shared.lock().controller.job(name).unwrap().all_flow_keys();
    let (stopped, active) = (of("train"), of("second"));
    {
        // The dispatcher learns of both at once.
        let mut inner = manager.shared.lock();
        for (name, flows) in [("train", Some(stopped.clone())), ("second", None)] {
            let mut actions = inner.controller.delete_job(name).unwrap();
            actions.extend(flows.map(Action::ForgetEnded));
            inner.carry_out(None, actions).unwrap();
        }
    }
    let recorded = || daemon.recorded.lock().unwrap();
    let has_ended = async || recorded().rings.is_empty() && !recorded().forgotten.is_empty();
    until("a job is still there", has_ended).await;
    manager.task.abort();
    let forgotten = recorded().forgotten.clone();
    assert!(stopped.iter().all(|flow| forgotten.contains(flow)), "{forgotten:?}");
    assert!(!active.iter().any(|flow| forgotten.contains(flow)), "its ranks may still send");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_of_the_same_name_that_somebody_made_by_hand_stays() {
    let daemon = Daemon::start().await;
    daemon.netsum("job create train --ranks 2 --mtu 512").await.unwrap();
    let manager = Manager::of(&daemon).await;
    let why = manager.join().await.map(|answer| answer.unwrap_err().to_string());
    assert!(
        why.iter().all(
            |w| w.contains("box a: job `train` already exists: pick another name or delete it")
        ),
        "{why:?}"
    );
    // It also stays when a manager cleans up after another one.
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert!(daemon.netsum("-j job show train").await.unwrap().contains("\"mtu\":512"));
    manager.task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_box_keeps_only_rings_that_cannot_move() {
    let daemon = Daemon::start().await;
    let manager = Manager::of(&daemon).await;
    let file = daemon.folder.path().join("fabric.json");
    manager.shared.lock().store = Some(Store::new(file.clone()));
    let drain = |reason: Option<&str>| {
        manager.boxes.drain("a", reason.map(str::to_owned)).unwrap();
        manager.shared.lock().carry_out(None, Vec::new()).unwrap();
    };
    let shown = || manager.boxes.show().boxes.remove(0);
    assert_eq!(manager.join().await, [Ok(1), Ok(1)]);
    until("the manager has seen it", async || shown().jobs == ["train"]).await;
    drain(Some("new fan"));
    let saved: Saved = Store::new(file.clone()).read().unwrap().unwrap();
    assert_eq!(saved.drained["a"], "new fan");
    // After two more polls.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    assert_eq!((shown().drain.as_deref(), shown().drained), (Some("new fan"), false));
    let has_job = daemon.netsum("-j job show train").await.unwrap();
    assert!(has_job.contains("\"state\":\"active\""), "{has_job}");
    assert!(
        !manager.shared.lock().controller.job("train").unwrap().epoch.as_ref().unwrap().reconnect
    );
    let spec = {
        let mut inner = manager.shared.lock();
        let spec = inner.controller.job("train").unwrap().spec.clone();
        let actions = inner.controller.delete_job("train").unwrap();
        inner.carry_out(None, actions).unwrap();
        spec
    };
    until("it is drained", async || shown().drained).await;
    manager.shared.lock().controller.create_job(spec).unwrap();
    let why = manager.join().await.map(|answer| answer.unwrap_err().to_string());
    assert_eq!(why[0], "job `train`: box a, which has ranks 0-1, is drained: new fan");
    drain(None);
    assert!(shown().drain.is_none());
    let error = manager.boxes.drain("b", None).unwrap_err().to_string();
    assert_eq!(error, "box `b` does not exist: there are a");
    assert_eq!(manager.boxes.drain("a", None).unwrap_err().to_string(), "box `a` is not drained");
    manager.task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_box_that_is_not_there_is_left_out_until_it_is() {
    let [a, b, s, t] = [
        Daemon::start().await,
        Daemon::start().await,
        Daemon::start().await,
        Daemon::start().await,
    ];
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s.sock");
    let path = |daemon: &Daemon| daemon.folder.path().join("netsum.sock");
    let boxes = [("a", path(&a)), ("b", path(&b)), ("s", socket.clone()), ("t", path(&t))];
    let boxes = boxes.map(|(name, path)| {
        format!("[[box]]\nname = \"{name}\"\naddress = \"unix:{}\"\n", path.display())
    });
    let links = [("a/p2", "t/p0"), ("a/p1", "s/p0"), ("b/p2", "t/p1"), ("b/p1", "s/p1")];
    let links = links.map(|(below, above)| {
        let rate = if above.starts_with('s') { "2gbit" } else { "1gbit" };
        format!("[[link]]\nbelow = \"{below}\"\nabove = \"{above}\"\nrate = \"{rate}\"\n")
    });
    let manager = Manager::with(&(boxes.concat() + &links.concat()), ["a/p0", "b/p0"], 2).await;
    assert_eq!(manager.join().await, [Ok(1), Ok(1)]);
    let has_job = async |daemon: &Daemon| daemon.netsum("job show train").await.is_ok();
    assert!(has_job(&t).await && !has_job(&s).await);
    // Now it is above all boxes as well, and its links carry more.
    std::os::unix::fs::symlink(path(&s), &socket).unwrap();
    let reconnect =
        || manager.shared.lock().controller.job("train").unwrap().epoch.as_ref().unwrap().reconnect;
    until("the ranks are to reconnect", async || reconnect()).await;
    manager.task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn shares_use_residual_capacity_and_are_kept() {
    let [a, b, s, t] = [
        Daemon::start().await,
        Daemon::start().await,
        Daemon::start().await,
        Daemon::start().await,
    ];
    let path = |daemon: &Daemon| daemon.folder.path().join("netsum.sock");
    let boxes = [("a", path(&a)), ("b", path(&b)), ("s", path(&s)), ("t", path(&t))];
    let boxes = boxes.map(|(name, path)| {
        format!("[[box]]\nname = \"{name}\"\naddress = \"unix:{}\"\n", path.display())
    });
    let links = [("a/p1", "s/p0"), ("b/p1", "s/p1"), ("a/p2", "t/p0"), ("b/p2", "t/p1")];
    let links = links.map(|(below, above)| {
        format!("[[link]]\nbelow = \"{below}\"\nabove = \"{above}\"\nrate = \"1gbit\"\n")
    });
    let (text, ports) = (boxes.concat() + &links.concat(), ["a/p0", "b/p0"]);
    let at = |s: u32, t: u32| {
        [("s", s), ("t", t)].map(|(name, rings)| (name.to_owned(), rings)).to_vec()
    };
    let reconnects = |manager: &Manager, job: &str| {
        manager.shared.lock().controller.job(job).unwrap().epoch.as_ref().unwrap().reconnect
    };

    let manager = Manager::with(&text, ports, 1).await;
    assert_eq!(manager.join().await, [Ok(1), Ok(1)]);
    assert_eq!(manager.trees("train").await, [("s".to_owned(), 1)]);
    // The first job's only ring is at s. The next job must have a ring there, too.
    let next = api::CreateJobRequest { rings: 4, ..job("next") };
    manager.shared.lock().controller.create_job(job_spec(next).unwrap()).unwrap();
    assert_eq!(manager.join_job("next", 4).await, [Ok(1), Ok(1)]);
    assert_eq!(manager.trees("next").await, at(1, 3));
    manager.delete("train");
    tokio::time::sleep(Duration::from_millis(1200)).await;
    assert!(!reconnects(&manager, "next"), "another job has gone");

    let saved = manager.shared.lock().controller.save();
    manager.task.abort();
    let manager = Manager::after(saved, &text, ports, 1).await;
    tokio::time::sleep(Duration::from_millis(1200)).await;
    assert!(!reconnects(&manager, "next"), "the manager is another one");
    assert_eq!(manager.trees("next").await, at(1, 3));
    // A new layout gives it half of each.
    manager.delete("next");
    until("it is still there", async || a.netsum("job show next").await.is_err()).await;
    let next = api::CreateJobRequest { rings: 4, ..job("next") };
    manager.shared.lock().controller.create_job(job_spec(next).unwrap()).unwrap();
    assert_eq!(manager.join_job("next", 4).await, [Ok(1), Ok(1)]);
    until("its shares are the old ones", async || manager.trees("next").await == at(2, 2)).await;
    manager.task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_box_of_three_that_lies_does_not_end_the_manager() {
    let [a, b, c] = [Daemon::start().await, Daemon::start().await, Daemon::start().await];
    let of = |(name, daemon): (&str, &Daemon)| {
        let path = daemon.folder.path().join("netsum.sock");
        format!("[[box]]\nname = \"{name}\"\naddress = \"unix:{}\"\n", path.display())
    };
    let text = [("a", &a), ("b", &b), ("c", &c)].map(of).concat();
    let manager = Manager::with(&text, ["a/p0", "a/p1"], 1).await;
    elected(&manager, 7).await;
    b.shared.lock().election = u64::MAX;
    let is_closed = async || manager.boxes.paths().closed.contains_key("b");
    until("the box that lies is not asked", is_closed).await;
    assert_eq!(manager.join().await, [Ok(1), Ok(1)]);
    assert_eq!(manager.boxes.successor(), None);
    let closed = manager.boxes.paths().closed;
    assert!(
        closed["b"].starts_with("follows a manager of election 18446744073709551615"),
        "{closed:?}"
    );
    assert!(!manager.task.is_finished());
    manager.task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn leftover_jobs_of_a_manager_are_deleted_or_replaced() {
    let daemon = Daemon::start().await;
    let left = |name: &str| {
        let arguments = ["job", "create", name, "--ranks", "2", "--mtu", "256"].map(str::to_owned);
        let cli =
            ["netsum", "--socket", daemon.folder.path().join("netsum.sock").to_str().unwrap()]
                .map(str::to_owned)
                .into_iter()
                .chain(arguments)
                .chain(["--token".to_owned(), "fabric other".to_owned()]);
        let cli = <netsum_cli::Cli as clap::Parser>::try_parse_from(cli).unwrap();
        async {
            netsum_program::execute(cli, &mut anstream::StripStream::new(Vec::new())).await.unwrap()
        }
    };
    left("old").await;
    left("train").await;
    let manager = Manager::of(&daemon).await;
    assert_eq!(manager.join().await, [Ok(1), Ok(1)]);
    assert!(daemon.netsum("-j job show train").await.unwrap().contains("\"mtu\":1024"));
    until("it is still there", async || daemon.netsum("job show old").await.is_err()).await;
    manager.task.abort();
}

/// Makes a manager the winner of this election, and poll its boxes.
async fn elected(manager: &Manager, election: u64) {
    manager.boxes.set_election(election);
    manager.boxes.poll().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manager_that_another_has_followed_is_answered_and_gives_no_orders() {
    let daemon = Daemon::start().await;
    let file = daemon.folder.path().join("state.json");
    daemon.shared.lock().store = Some(Store::new(file.clone()));
    let (old, new) = (Manager::of(&daemon).await, Manager::of(&daemon).await);
    elected(&old, 7).await;
    let mut client = old.boxes.client("a").unwrap();
    let name = || "by-hand".to_owned();
    daemon.netsum("job create by-hand --ranks 2 --mtu 512").await.unwrap();
    client
        .jobs
        .reconnect_job(api::ReconnectJobRequest { name: name() })
        .await
        .expect_err("nobody has joined");
    elected(&new, 8).await;

    let flow = api::Flow {
        src: "10.0.0.1".into(),
        dst: "10.0.0.2".into(),
        port: "p0".into(),
        ..Default::default()
    };
    let refused = [
        client.jobs.create_job(job("other")).await.map(drop),
        client
            .jobs
            .delete_job(api::DeleteJobRequest { name: name(), forget_connections: true })
            .await
            .map(drop),
        client.jobs.restart_job(api::RestartJobRequest { name: name() }).await.map(drop),
        client.jobs.reconnect_job(api::ReconnectJobRequest { name: name() }).await.map(drop),
        client
            .agent
            .add_flow(api::AddFlowRequest { job: name(), flow: Some(flow.clone()) })
            .await
            .map(drop),
        client
            .agent
            .add_flows(api::AddFlowsRequest { job: name(), flows: vec![flow] })
            .await
            .map(drop),
    ];
    let why = "refused orders of the manager with election number 7: one with number 8 has \
               taken over";
    for result in refused {
        let status = result.unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::Aborted, why));
    }
    let request = api::ShowJobRequest { name: name(), show_token: false };
    assert_eq!(
        client.jobs.show_job(request).await.unwrap().into_inner().state(),
        api::JobState::Waiting
    );
    // A caller without an election number is an administrator.
    daemon.netsum("job delete by-hand").await.unwrap();
    let saved: Saved = Store::new(file).read().unwrap().unwrap();
    assert_eq!(saved.election, 8, "the box's next daemon knows it");
    old.task.abort();
    new.task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manager_that_another_has_followed_ends_and_leaves_its_jobs_alone() {
    let daemon = Daemon::start().await;
    let (old, new) = (Manager::of(&daemon).await, Manager::of(&daemon).await);
    elected(&old, 7).await;
    elected(&new, 8).await;
    // A rank that joins there gets no answer about a job that belongs to the other manager.
    let answers = [old.join_as(0), old.join_as(1)];
    let why = tokio::time::timeout(LATE, old.task).await.unwrap().unwrap();
    assert!(
        why.starts_with("box a") && why.contains("election 7") && why.contains("election 8"),
        "{why}"
    );
    for mut answer in answers {
        assert!(answer.try_recv().is_err());
    }
    let state = old.shared.lock().controller.job("train").unwrap().state.clone();
    assert_eq!(state, State::Active, "it has not failed");
    assert_eq!(new.join().await, [Ok(1), Ok(1)]);
    new.task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_join_at_a_manager_over_tls() {
    let daemon = Daemon::start().await;
    let manager = Manager::of(&daemon).await;
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let (cert, key) = ours.sign("manager", "127.0.0.1", false);
    let tls = server_config("workers-tls", &Tls { cert, key, client_ca: Some(ours.ca()) }).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("https://{}", listener.local_addr().unwrap());
    let admin = socket::listen(&folder.path().join("fabric.sock"), &Access::default()).unwrap();
    let admin = tokio::net::UnixListener::from_std(admin).unwrap();
    let workers = WorkerPort { listener, tls: Some(tls), limits: Limits::default() };
    let backend = ManagerBackend::new(manager.shared.clone(), manager.boxes.clone());
    let routes = Routes::new(ManagerServer::new(backend.clone()));
    let serving = tokio::spawn(serve(backend, routes, admin, Some(workers)));

    let rank = async |rank: u32, identity: Option<(std::path::PathBuf, std::path::PathBuf)>| {
        let mut config =
            ClientTlsConfig::new().ca_certificate(netsum_api::tls::authority(&ours.ca()).unwrap());
        if let Some((cert, key)) = identity {
            config = config.identity(netsum_api::tls::identity(&cert, &key).unwrap());
        }
        let endpoint = Endpoint::from_shared(address.clone()).unwrap().tls_config(config).unwrap();
        let channel = endpoint.connect().await.map_err(|e| format!("{e:?}"))?;
        let joined = WorkerClient::new(channel).join(join(rank, "sesame", 5000)).await;
        joined.map(|reply| reply.into_inner()).map_err(|status| format!("{status:?}"))
    };
    let without = rank(0, None).await.unwrap_err().to_lowercase();
    assert!(without.contains("transport"), "{without}");
    let [first, second] = ["rank0", "rank1"].map(|name| Some(ours.sign(name, "worker", false)));
    let (first, second) = tokio::join!(rank(0, first), rank(1, second));
    assert_eq!((first.unwrap().ranks.len(), second.unwrap().ranks.len()), (2, 2));
    assert!(daemon.netsum("-j job show train").await.unwrap().contains("\"state\":\"active\""));
    serving.abort();
    manager.task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_for_the_other_role_is_refused_with_the_role() {
    let daemon = Daemon::start().await;
    let manager = Manager::of(&daemon).await;
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("fabric.sock");
    let admin = socket::listen(&socket, &Access::default()).unwrap();
    let admin = tokio::net::UnixListener::from_std(admin).unwrap();
    let backend = ManagerBackend::new(manager.shared.clone(), manager.boxes.clone());
    let routes = Routes::new(ManagerServer::new(backend.clone()));
    let serving = tokio::spawn(serve(backend, routes, admin, None));
    let at_manager = async |line: &str| {
        let (_, result) = netsum_at(&socket, line).await;
        result.map_err(|failure| (failure.kind, failure.message.clone()))
    };
    let refused = |why: &str| Err((Kind::Refused, why.to_owned()));
    at_manager("job show train").await.unwrap();
    at_manager("diagnose train").await.unwrap();
    at_manager("fabric show").await.unwrap();
    for line in ["port show", "ring show", "slot show train", "prog show", "stats", "spread show"] {
        let why = "this socket is a manager's: use a box's --socket";
        assert_eq!(at_manager(line).await, refused(why), "{line}");
    }
    let flow = "flow add train --ring 0 --rank 0 --port p0 --src 10.0.0.1 --dst 10.0.0.2 --qpn 1 \
        --psn 0";
    let why = "flows can be added only at a box: use its --socket";
    assert_eq!(at_manager(flow).await, refused(why));
    let why = "the manager receives no packets: trace at a box";
    assert_eq!(at_manager("trace --count 1").await, refused(why));
    let why = "--in-band: set-up in band does not work over several boxes";
    assert_eq!(at_manager("job create b --ranks 2 --in-band").await, refused(why));
    let why = "--dtype f32: sums of several boxes would be rounded more than once; create the job \
               at one box";
    assert_eq!(at_manager("job create b --ranks 2 --dtype f32").await, refused(why));
    for line in ["fabric show", "fabric drain a --reason fan", "fabric accept a/p0"] {
        let error = daemon.netsum(line).await.unwrap_err();
        assert_eq!(error, "this socket is a box's: use the manager's --socket", "{line}");
    }
    serving.abort();
    manager.task.abort();
}

/// A process that is killed on drop.
struct Process(std::process::Child);

impl Process {
    fn new(program: &std::path::Path, arguments: &[&str]) -> Self {
        Self(std::process::Command::new(program).args(arguments).spawn().unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// etcd as installed, or as unpacked below cargo's target folder.
fn etcd() -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let unpacked = std::path::Path::new(env!("CARGO_BIN_EXE_netsum"))
        .ancestors()
        .nth(2)
        .unwrap()
        .join("etcd/usr/bin");
    std::env::split_paths(&path)
        .chain([unpacked])
        .map(|folder| folder.join("etcd"))
        .find(|path| path.is_file())
}

/// A port below those that the kernel gives to others.
fn free_port() -> u16 {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    loop {
        let n = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let port = (10_000 + (std::process::id() * 16 + n) % 20_000) as u16;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_takes_the_jobs_over_when_the_leader_is_killed() {
    takes_over(false, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_takes_over_by_etcd_with_certificates_and_a_dead_endpoint() {
    takes_over(true, 0).await;
}

/// Endpoints of etcd that do not answer: one accepts connections and never replies, the other does
/// not accept, because connections made before fill its queue.
struct Swallows {
    listeners: [std::net::TcpListener; 2],
    _waiting: Vec<std::net::TcpStream>,
}

impl Swallows {
    fn new() -> Self {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let full =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        full.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        full.listen(0).unwrap();
        let full = std::net::TcpListener::from(full);
        let (address, mut waiting) = (full.local_addr().unwrap(), Vec::new());
        let timeout = Duration::from_millis(300);
        while let Ok(stream) = std::net::TcpStream::connect_timeout(&address, timeout) {
            waiting.push(stream);
        }
        Self { listeners: [silent, full], _waiting: waiting }
    }
}

/// Takes over with this many unresponsive endpoints listed before the right one.
async fn takes_over(tls: bool, swallowing: usize) {
    let Some(program) = etcd() else {
        println!("SKIP: no program `etcd`, of Debian's package etcd-server");
        return;
    };
    let daemon = Daemon::start().await;
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let scheme = if tls { "https" } else { "http" };
    let client = format!("{scheme}://127.0.0.1:{}", free_port());
    let peer = format!("http://127.0.0.1:{}", free_port());
    let (mut endpoints, mut lines, mut wants) = (vec![client.clone()], String::new(), Vec::new());
    if tls {
        let authority = Authority::new(folder.path(), "authority");
        let files = |name: &str| {
            let (cert, key) = authority.sign(name, "127.0.0.1", false);
            [cert, key, authority.ca()].map(|path| path.to_str().unwrap().to_owned())
        };
        let [cert, key, ca] = files("etcd");
        wants.extend([format!("--cert-file={cert}"), format!("--key-file={key}")]);
        wants.extend([format!("--trusted-ca-file={ca}"), "--client-cert-auth".to_owned()]);
        let [cert, key, ca] = files("manager");
        lines = format!("[etcd.tls]\ncert = {cert:?}\nkey = {key:?}\nca = {ca:?}\n");
        endpoints.insert(0, format!("https://127.0.0.1:{}", free_port()));
    }
    let swallows = Swallows::new();
    for listener in &swallows.listeners[..swallowing] {
        endpoints.insert(0, format!("{scheme}://{}", listener.local_addr().unwrap()));
    }
    let data = path("data");
    let etcd =
        ["--data-dir", &data, "--listen-client-urls", &client, "--advertise-client-urls", &client];
    let etcd = [&etcd[..], &["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]]
        .concat();
    let cluster = format!("default={peer}");
    let mut etcd = [&etcd[..], &["--initial-cluster", &cluster]].concat();
    etcd.extend(wants.iter().map(String::as_str));
    // Both have the address that ranks call.
    let (port, socket) = (free_port(), daemon.folder.path().join("netsum.sock"));
    let manager = |name: &str| {
        let admin = path(&format!("{name}.sock"));
        let file = path(&format!("{name}.toml"));
        let text = format!(
            "workers = \"127.0.0.1:{port}\"\nadmin = {admin:?}\n[etcd]\nendpoints = \
             {endpoints:?}\nlease-s = 6\n{lines}[[box]]\nname = \"a\"\naddress = \"unix:{}\"\n",
            socket.display()
        );
        std::fs::write(&file, text).unwrap();
        Process::new(env!("CARGO_BIN_EXE_netsum").as_ref(), &["fabric", "run", "--config", &file])
    };
    let ask = |name: &str, question: &str| {
        let socket = path(&format!("{name}.sock"));
        let answer = std::process::Command::new(env!("CARGO_BIN_EXE_netsum"))
            .args(["--socket", &socket])
            .args(question.split(' '))
            .output()
            .unwrap();
        answer.status.success().then(|| String::from_utf8(answer.stdout).unwrap())
    };
    let is_open = async || tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_ok();
    // Without etcd, no manager leads.
    let mut first = manager("first");
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert!(first.0.try_wait().unwrap().is_none() && !is_open().await, "it does not wait for etcd");
    let store = Process::new(&program, &etcd);
    until("the first leads", async || is_open().await).await;
    ask("first", "job create train --ranks 2").unwrap();
    let mut second = manager("second");
    tokio::time::sleep(Duration::from_millis(3000)).await;
    assert!(ask("second", "job show train").is_none(), "two lead");
    assert!(second.0.try_wait().unwrap().is_none(), "the standby has ended");
    let killed = Instant::now();
    drop(first);
    until("the second serves", async || is_open().await).await;
    let served = killed.elapsed();
    println!("the second serves {:.1} s after the first was killed", served.as_secs_f64());
    assert!(served < Duration::from_secs(6 + 4), "long after the lease: {served:?}");
    until("it knows the job", async || ask("second", "job show train").is_some()).await;
    // A manager that is stopped does not make the next one wait.
    let mut third = manager("third");
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let ended = Instant::now();
    let pid = nix::unistd::Pid::from_raw(second.0.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    until("the third leads", async || ask("third", "job show train").is_some()).await;
    println!("the third leads {:.1} s after the second was stopped", ended.elapsed().as_secs_f64());
    assert!(ended.elapsed() < Duration::from_millis(5500), "no sooner than the lease");
    assert!(second.0.wait().unwrap().success());
    // Without etcd it continues until its lease ends, but no longer.
    let lost = Instant::now();
    drop(store);
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(ask("third", "job show train").is_some(), "it has ended at once");
    until("it goes on without a lease", async || third.0.try_wait().unwrap().is_some()).await;
    println!("it has ended {:.1} s after etcd was killed", lost.elapsed().as_secs_f64());
    assert!(lost.elapsed() < Duration::from_secs(10));
}
