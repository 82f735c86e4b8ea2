//! A daemon whose services listen on real sockets, with a data plane that only records calls.
#![allow(dead_code, reason = "each test program uses a part of this")]

pub mod authority;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use clap::Parser as _;
use netsum_agent::agent::{Agent, Shared};
use netsum_agent::listen::serve;
use netsum_agent::metrics;
use netsum_agent::network::Network;
use netsum_api::v1 as api;
use netsum_api::v1::worker_client::WorkerClient;
use netsum_cli::Cli;
use netsum_cli::failure::{Failure, Kind};
use netsum_common::abi::{
    Address, ConnectionKey, FlowKey, Hop, HopKey, InBandJob, RingNumber, TraceFilter,
};
use netsum_common::counters::Counter;
use netsum_common::slot::{RingState, Slot};
use netsum_common::timing::{Part, Timing};
use netsum_common::wire::InBandToken;
use netsum_controller::limiter::Limits;
use netsum_controller::serve::WorkerPort;
use netsum_controller::socket::{self, Access};
use netsum_core::plane::{EndedFlow, FirstPacket, FlowSeen, FlowSpec, RingSpec};
use netsum_core::watch::RingTimeouts;
use netsum_core::{Controller, PortInfo};
use netsum_dataplane::{Attached, DataPlane, EndedRing, ProgramFacts, Traced};
use netsum_program::execute;
use tokio::net::TcpListener;
use tonic::transport::{Channel, ServerTlsConfig};

/// What the data plane was told.
#[derive(Default)]
pub struct Told {
    pub rings: HashMap<RingNumber, RingSpec>,
    /// How often rings were created or removed, several at once counted as one.
    pub changes: u32,
    /// How many rings were created, and how often rings were paused.
    pub made: u32,
    pub pauses: u32,
    pub flows: HashSet<FlowKey>,
    pub active: HashSet<RingNumber>,
    pub watching: bool,
    pub listening: HashSet<InBandToken>,
    pub first_packets: Vec<FirstPacket>,
    pub tracing: Option<TraceFilter>,
    pub traced: Vec<Traced>,
    pub lost: u64,
    pub reserved: HashMap<Address, u32>,
    pub hops: HashMap<HopKey, Hop>,
    /// Ports that take no frame; whether slots have their sums; the sums that were sent, by port.
    pub down: HashSet<u32>,
    pub complete: bool,
    pub sent: Vec<(u32, u32)>,
}

pub struct Remembers(pub Arc<Mutex<Told>>);

impl DataPlane for Remembers {
    fn attach(&mut self, _: u32) -> anyhow::Result<()> {
        Ok(())
    }
    fn detach(&mut self, _: u32) -> anyhow::Result<()> {
        Ok(())
    }
    fn create_rings(&mut self, rings: &[RingSpec]) -> anyhow::Result<()> {
        let mut told = self.0.lock().unwrap();
        told.rings.extend(rings.iter().map(|ring| (ring.id, ring.clone())));
        told.made += rings.len() as u32;
        told.changes += 1;
        Ok(())
    }
    fn reset_counters(&mut self, _: RingNumber) -> anyhow::Result<()> {
        Ok(())
    }
    fn add_flow(&mut self, flow: &FlowSpec) -> anyhow::Result<()> {
        anyhow::ensure!(flow.qpn.get() != 0xbad, "this data plane does not like 0xbad");
        self.0.lock().unwrap().flows.insert(flow.key());
        Ok(())
    }
    fn activate_ring(&mut self, ring: &RingSpec, _: &[u32]) -> anyhow::Result<()> {
        self.0.lock().unwrap().active.insert(ring.id);
        Ok(())
    }
    fn set_hop(&mut self, to: HopKey, hop: &Hop) -> anyhow::Result<()> {
        self.0.lock().unwrap().hops.insert(to, *hop);
        Ok(())
    }
    fn reserve(&mut self, places: HashMap<Address, u32>) -> anyhow::Result<()> {
        self.0.lock().unwrap().reserved = places;
        Ok(())
    }
    fn set_slaves(&mut self, _: HashMap<u32, u32>) -> anyhow::Result<()> {
        Ok(())
    }
    fn delete_rings(&mut self, rings: &[EndedRing]) -> anyhow::Result<()> {
        let mut told = self.0.lock().unwrap();
        told.changes += 1;
        for EndedRing { id, flows, .. } in rings {
            told.rings.remove(id);
            told.active.remove(id);
            told.flows.retain(|flow| !flows.contains(flow));
        }
        Ok(())
    }
    fn forget_ended(&mut self, _: &[FlowKey]) -> anyhow::Result<()> {
        Ok(())
    }
    fn ended_flows(&self) -> anyhow::Result<Vec<EndedFlow>> {
        Ok(Vec::new())
    }
    fn pause_rings(&mut self, rings: &[RingNumber]) -> anyhow::Result<()> {
        let mut told = self.0.lock().unwrap();
        told.active.retain(|ring| !rings.contains(ring));
        told.pauses += 1;
        Ok(())
    }
    fn resume_rings(&mut self, rings: &[RingNumber]) -> anyhow::Result<()> {
        self.0.lock().unwrap().active.extend(rings);
        Ok(())
    }
    fn attached(&self) -> Vec<u32> {
        Vec::new()
    }
    fn keep_cpus(&mut self) -> anyhow::Result<Vec<String>> {
        Ok(Vec::new())
    }
    fn unpin(&mut self) -> anyhow::Result<()> {
        Ok(())
    }
    fn counters(&self, ring: RingNumber) -> anyhow::Result<Vec<u64>> {
        Ok(vec![ring.0.into(); Counter::ALL.len()])
    }
    fn timing(&self, ring: RingNumber) -> anyhow::Result<Box<Timing>> {
        // One sum, for which all others have waited for rank 1.
        let mut timing = Box::new(Timing::EMPTY);
        timing.note(0, 0, Part::First, 1_000);
        timing.note(0, 1, Part::Last, 1_000 + 100 * u64::from(ring.0));
        Ok(timing)
    }
    fn slots(&self, _: RingNumber) -> anyhow::Result<Vec<Slot>> {
        Ok(vec![
            Slot { index: 5, flags: Slot::USED, contributors: 1, len: 1024, checksum: 0, crc: 0 },
            Slot::default(),
        ])
    }
    fn ring_state(&self, _: RingNumber) -> anyhow::Result<RingState> {
        Ok(RingState::default())
    }
    fn slot(&self, _: RingNumber, _: u32) -> anyhow::Result<Slot> {
        let complete = if self.0.lock().unwrap().complete { Slot::COMPLETE } else { 0 };
        let flags = Slot::USED | complete;
        Ok(Slot { index: 0, flags, contributors: 1, len: 1024, checksum: 0, crc: 0 })
    }
    fn flow_seen(&self, key: FlowKey) -> anyhow::Result<FlowSeen> {
        // One packet has arrived on each connection to 0x11.
        let sent = key.qpn == 0x11;
        Ok(FlowSeen {
            packets: sent.into(),
            last_psn: 5,
            last_outcome: sent.then_some(Counter::Fragments),
            ..FlowSeen::default()
        })
    }
    fn send_held(&mut self, _: &RingSpec, slot: u32, flow: &FlowSpec) -> anyhow::Result<()> {
        let mut told = self.0.lock().unwrap();
        anyhow::ensure!(told.complete, "nothing is held");
        anyhow::ensure!(!told.down.contains(&flow.ifindex), "port {} is down", flow.ifindex);
        told.sent.push((slot, flow.ifindex));
        Ok(())
    }
    fn watch_unknown_flows(&mut self, on: bool) -> anyhow::Result<()> {
        self.0.lock().unwrap().watching = on;
        Ok(())
    }
    fn unknown_flows(&self) -> anyhow::Result<Vec<(ConnectionKey, u64)>> {
        Ok(Vec::new())
    }
    fn listen_in_band(&mut self, token: InBandToken, _: InBandJob) -> anyhow::Result<()> {
        self.0.lock().unwrap().listening.insert(token);
        Ok(())
    }
    fn ignore_in_band(&mut self, token: InBandToken) -> anyhow::Result<()> {
        self.0.lock().unwrap().listening.remove(&token);
        Ok(())
    }
    fn first_packets(&mut self) -> anyhow::Result<Vec<FirstPacket>> {
        Ok(std::mem::take(&mut self.0.lock().unwrap().first_packets))
    }
    fn trace(&mut self, filter: Option<&TraceFilter>) -> anyhow::Result<()> {
        self.0.lock().unwrap().tracing = filter.copied();
        Ok(())
    }
    fn traced(&mut self, most: usize) -> anyhow::Result<Vec<Traced>> {
        let traced = &mut self.0.lock().unwrap().traced;
        Ok(traced.drain(..most.min(traced.len())).collect())
    }
    fn trace_lost(&self) -> anyhow::Result<u64> {
        Ok(self.0.lock().unwrap().lost)
    }
    fn cpu_number(&self, cpu: u32) -> u32 {
        4 + cpu
    }
    fn programs(&self) -> anyhow::Result<Vec<ProgramFacts>> {
        let program = |id: u32, name: &'static str, attached: Vec<Attached>| ProgramFacts {
            id,
            name,
            tag: 0xabc,
            loaded_at: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)),
            xlated_bytes: 4096,
            jited_bytes: 2048,
            memory: 8192,
            verified_instructions: 1234,
            runs: (0, 0),
            attached,
        };
        Ok(vec![
            program(7, "ingress", vec![Attached::Port(10), Attached::Port(11)]),
            program(8, "aggregate", vec![Attached::Cpu(4)]),
            program(9, "egress", vec![Attached::DeviceMap]),
        ])
    }
}

pub struct Daemon {
    pub folder: tempfile::TempDir,
    pub address: String,
    pub told: Arc<Mutex<Told>>,
    pub shared: Shared,
    pub metrics: std::net::SocketAddr,
    metrics_task: tokio::task::JoinHandle<()>,
    task: tokio::task::JoinHandle<anyhow::Result<()>>,
}

impl Daemon {
    pub async fn start() -> Self {
        Self::with(Limits::default(), None).await
    }

    pub async fn with(limits: Limits, tls: Option<ServerTlsConfig>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let told = Arc::new(Mutex::new(Told::default()));
        let mut controller = Controller::new(8 << 20, 2, Duration::from_millis(600));
        let port =
            |i: u32| PortInfo { name: format!("p{i}"), ifindex: 10 + i, mtu: 1500, router: None };
        controller.set_ports((0..3).map(port).collect());
        let timeouts =
            RingTimeouts { hold: Duration::from_millis(200), stall: Duration::from_millis(300) };
        let agent = Agent::new(Box::new(Remembers(told.clone())), timeouts);
        let shared = Shared::new(controller, agent, Duration::from_millis(200));
        let admin = socket::listen(&folder.path().join("netsum.sock"), &Access::default()).unwrap();
        let admin = tokio::net::UnixListener::from_std(admin).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", tcp.local_addr().unwrap());
        let workers = WorkerPort { listener: tcp, tls, limits };
        let network = Network::Fixed(Arc::new(|_| Some(10)));
        let task = tokio::spawn(serve(shared.clone(), network.clone(), admin, Some(workers)));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let metrics = listener.local_addr().unwrap();
        let metrics_task = tokio::spawn(metrics::serve(shared.clone(), network, listener));
        Self { folder, address, told, shared, metrics, metrics_task, task }
    }

    /// Runs a command line; returns its output, or its error.
    pub async fn netsum(&self, line: &str) -> Result<String, String> {
        let (out, result) = self.netsum_both(line).await;
        result.map(|()| out).map_err(|e| e.message)
    }

    /// Runs a command line; returns its output, and whether it failed.
    pub async fn netsum_both(&self, line: &str) -> (String, Result<(), Failure>) {
        netsum_at(&self.folder.path().join("netsum.sock"), line).await
    }

    pub async fn worker(&self) -> WorkerClient<Channel> {
        WorkerClient::connect(self.address.clone()).await.unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.task.abort();
        self.metrics_task.abort();
    }
}

/// Runs a command line at a socket; returns its output, and whether it failed.
pub async fn netsum_at(socket: &Path, line: &str) -> (String, Result<(), Failure>) {
    let words =
        ["netsum", "--socket", socket.to_str().unwrap()].into_iter().chain(line.split_whitespace());
    let cli = match Cli::try_parse_from(words) {
        Ok(cli) => cli,
        Err(e) => return (String::new(), Err(Failure::new(Kind::Usage, e.to_string()))),
    };
    let mut out = anstream::StripStream::new(Vec::new());
    let result = execute(cli, &mut out).await;
    (String::from_utf8(out.into_inner()).unwrap(), result)
}

pub fn join(rank: u32, token: &str, timeout_ms: u32) -> api::JoinRequest {
    let c = |n: u32| api::Connection {
        receive_qpn: 16 * rank + n,
        send_qpn: 16 * rank + n + 1,
        first_psn: 7,
    };
    let address = api::RankAddress {
        rank,
        ip: format!("10.0.0.{}", rank + 1),
        mac: format!("02:00:00:00:00:0{}", rank + 1),
        rings: vec![c(2)],
        bypass: Some(c(8)),
        any_ip_id: false,
        selective: true,
    };
    api::JoinRequest {
        job: "train".into(),
        token: token.into(),
        address: Some(address),
        epoch: 0,
        timeout_ms,
        protocol: netsum_api::PROTOCOL,
        release: netsum_api::RELEASE.into(),
    }
}
