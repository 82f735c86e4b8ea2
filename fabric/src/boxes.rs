//! The boxes: connections to them, which ports they have, and behind which of these a host is.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use hyper_util::rt::TokioIo;
use netsum_api::tls::{authority, identity};
use netsum_api::v1 as api;
use netsum_api::v1::admin_client::AdminClient;
use netsum_core::{PortInfo, Refusal};
use netsum_daemon::message::{mac_from_text, mac_text};
use netsum_daemon::worker::FindPort;
use tokio::task::JoinSet;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint, Uri};
use tonic::{Code, Status};
use tower::service_fn;

use crate::config::{BoxConfig, Config, End, Link, Tls};
use crate::layout::Ways;

/// A box that has not answered for so long does not.
const PATIENCE: Duration = Duration::from_secs(2);
/// Orders take longer: so do a large job's rings.
const ORDERS: Duration = Duration::from_secs(30);

/// All boxes of the fabric.
pub struct Boxes {
    all: Vec<(String, AdminClient<Channel>)>,
    addresses: Vec<String>,
    links: Vec<Link>,
    known: Mutex<Known>,
}

/// What is known of them by now.
#[derive(Default)]
struct Known {
    /// Ports by their numbers here, from 1.
    ends: BTreeMap<u32, End>,
    numbers: HashMap<End, u32>,
    /// Ports that carry nothing.
    down: HashSet<End>,
    silent: HashSet<String>,
    /// What each sums.
    jobs: HashMap<String, Vec<String>>,
    /// Those that get no new rings.
    drains: BTreeMap<String, Drain>,
}

struct Drain {
    reason: String,
    /// There are no rings any more.
    done: bool,
}

impl Known {
    fn carries(&self, link: &Link) -> bool {
        !self.down.contains(&link.below) && !self.down.contains(&link.above)
    }

    fn number(&mut self, end: &End) -> u32 {
        *self.numbers.entry(end.clone()).or_insert_with(|| {
            let number = self.ends.last_key_value().map_or(1, |(last, _)| last + 1);
            self.ends.insert(number, end.clone());
            number
        })
    }
}

/// What a look at a box has shown.
pub struct Seen {
    pub jobs: Vec<api::Job>,
    pub ports: Vec<PortInfo>,
}

impl Boxes {
    /// Connects when it is needed.
    ///
    /// # Errors
    /// If a certificate, key or address cannot be used.
    pub fn new(config: &Config) -> Result<Self> {
        let client = |b: &BoxConfig| -> Result<_> {
            let channel = channel(b, config.tls.as_ref()).with_context(|| format!("box {}", b.name))?;
            Ok((b.name.clone(), AdminClient::new(channel)))
        };
        let all = config.boxes.iter().map(client).collect::<Result<_>>()?;
        let addresses = config.boxes.iter().map(|b| b.address.clone()).collect();
        Ok(Self { all, addresses, links: config.links.clone(), known: Mutex::default() })
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives ports the numbers that they had for an earlier manager.
    pub fn number_again(&self, ports: &[PortInfo]) {
        let mut known = self.known();
        for port in ports {
            let Ok(end) = End::try_from(port.name.clone()) else { continue };
            known.numbers.insert(end.clone(), port.ifindex);
            known.ends.insert(port.ifindex, end);
        }
    }

    /// A port by its number here.
    pub fn end(&self, number: u32) -> Option<End> {
        self.known().ends.get(&number).cloned()
    }

    /// What rings can use, as far as is known.
    pub fn ways(&self) -> Ways {
        let links = {
            let known = self.known();
            self.links.iter().filter(|link| known.carries(link)).cloned().collect()
        };
        Ways { links, drained: self.drained() }
    }

    /// Boxes that get no new rings, and why.
    pub fn drained(&self) -> BTreeMap<String, String> {
        self.known().drains.iter().map(|(name, drain)| (name.clone(), drain.reason.clone())).collect()
    }

    /// Has a box get no new rings, for this reason; without one it gets them again.
    ///
    /// # Errors
    /// If there is no such box, or nothing to take back.
    pub fn drain(&self, name: &str, reason: Option<String>) -> Result<(), Refusal> {
        if self.client(name).is_none() {
            let names: Vec<&str> = self.all.iter().map(|(name, _)| &**name).collect();
            return Err(Refusal::NotFound(format!("BOX `{name}`: there are {}", names.join(", "))));
        }
        let mut known = self.known();
        match reason {
            Some(reason) => {
                log::info!("box {name}: gets no new rings: {reason}");
                known.drains.insert(name.to_owned(), Drain { reason, done: false });
            }
            None if known.drains.remove(name).is_none() => {
                return Err(Refusal::NotNow(format!("BOX `{name}`: is not being drained")));
            }
            None => log::info!("box {name}: gets rings again"),
        }
        Ok(())
    }

    /// Takes note of which boxes have no rings. None may be on their way there.
    pub fn are_empty(&self, is_empty: impl Fn(&str) -> bool) {
        for (name, drain) in &mut self.known().drains {
            let done = is_empty(name);
            if done && !std::mem::replace(&mut drain.done, done) {
                log::info!("box {name}: is drained");
            }
            drain.done = done;
        }
    }

    /// What is known of them.
    pub fn show(&self) -> api::Fabric {
        let known = self.known();
        let of = |(name, address): (&String, &String)| api::FabricBox {
            name: name.clone(),
            address: address.clone(),
            answers: known.jobs.contains_key(name) && !known.silent.contains(name),
            jobs: known.jobs.get(name).cloned().unwrap_or_default(),
            drain: known.drains.get(name).map(|drain| drain.reason.clone()),
            drained: known.drains.get(name).is_some_and(|drain| drain.done),
        };
        let link = |link: &Link| api::FabricLink {
            below: link.below.to_string(),
            above: link.above.to_string(),
            up: known.carries(link),
        };
        let boxes = self.all.iter().map(|(name, _)| name).zip(&self.addresses).map(of);
        api::Fabric { boxes: boxes.collect(), links: self.links.iter().map(link).collect() }
    }

    pub fn client(&self, name: &str) -> Option<AdminClient<Channel>> {
        self.all.iter().find(|(n, _)| n == name).map(|(_, client)| client.clone())
    }

    /// Looks at all boxes; those that answer.
    pub async fn look(&self) -> HashMap<String, Seen> {
        let mut looks = JoinSet::new();
        for (name, client) in &self.all {
            let (name, mut client) = (name.clone(), client.clone());
            looks.spawn(async move {
                let both = async {
                    let ports = client.list_ports(api::ListPortsRequest {}).await?.into_inner().ports;
                    let jobs = client.list_jobs(api::ListJobsRequest {}).await?.into_inner().jobs;
                    Ok::<_, Status>((ports, jobs))
                };
                let late = |_| Err(Status::deadline_exceeded(format!("not within {PATIENCE:?}")));
                (name, tokio::time::timeout(PATIENCE, both).await.unwrap_or_else(late))
            });
        }
        let mut seen = HashMap::new();
        while let Some(Ok((name, answer))) = looks.join_next().await {
            let mut known = self.known();
            match answer {
                Ok((ports, jobs)) => {
                    if known.silent.remove(&name) {
                        log::info!("box {name}: answers again");
                    }
                    let names = jobs.iter().map(|job| job.name.clone()).collect();
                    known.jobs.insert(name.clone(), names);
                    let is_there = |end: &End| ports.iter().any(|p| p.name == end.port);
                    let ends = self.links.iter().flat_map(|l| [&l.below, &l.above]);
                    known.down.extend(ends.filter(|e| e.of == name && !is_there(e)).cloned());
                    let info = |p: api::Port| {
                        let end = End { of: name.clone(), port: p.name };
                        let ifindex = known.number(&end);
                        let port = PortInfo { name: end.to_string(), ifindex, mtu: p.mtu };
                        let changed = if p.up { known.down.remove(&end) } else { known.down.insert(end) };
                        if changed {
                            log::warn!("port {} is {}", port.name, if p.up { "up again" } else { "down" });
                        }
                        port
                    };
                    let ports = ports.into_iter().map(info).collect();
                    seen.insert(name, Seen { jobs, ports });
                }
                Err(status) => {
                    if known.silent.insert(name.clone()) {
                        log::warn!("box {name}: does not answer: {}", status.message());
                    }
                }
            }
        }
        seen
    }
}

#[tonic::async_trait]
impl FindPort for Boxes {
    async fn find(&self, rank: u32, mac: [u8; 6], ip: IpAddr) -> Result<(u32, [u8; 6]), Status> {
        let mut questions = JoinSet::new();
        for (name, client) in &self.all {
            let (name, mut client) = (name.clone(), client.clone());
            let request = api::FindPortRequest { mac: mac_text(mac), ip: ip.to_string() };
            questions.spawn(async move {
                let late = |_| Err(Status::deadline_exceeded(format!("no answer within {PATIENCE:?}")));
                let answer = tokio::time::timeout(PATIENCE, client.find_port(request)).await;
                (name, answer.unwrap_or_else(late))
            });
        }
        let mut why = String::new();
        while let Some(Ok((name, answer))) = questions.join_next().await {
            match answer.map(tonic::Response::into_inner) {
                Ok(found) => {
                    let end = End { of: name, port: found.port };
                    // Other racks' hosts are behind the links.
                    if self.links.iter().any(|l| l.below == end || l.above == end) {
                        continue;
                    }
                    let mac = mac_from_text(&found.mac).unwrap_or(mac);
                    return Ok((self.known().number(&end), mac));
                }
                Err(status) if status.code() == Code::NotFound => {}
                Err(status) => why += &format!("; box {name}: {}", status.message()),
            }
        }
        Err(Status::failed_precondition(format!(
            "rank {rank}: no box has seen MAC address {} of {ip} on a port towards hosts{why}",
            mac_text(mac)
        )))
    }
}

fn channel(b: &BoxConfig, tls: Option<&Tls>) -> Result<Channel> {
    if let Some(path) = b.address.strip_prefix("unix:") {
        let path = PathBuf::from(path);
        let connect = service_fn(move |_: Uri| {
            let path = path.clone();
            async move { Ok::<_, io::Error>(TokioIo::new(tokio::net::UnixStream::connect(path).await?)) }
        });
        let endpoint = Endpoint::from_static("http://netsum").timeout(ORDERS);
        return Ok(endpoint.connect_with_connector_lazy(connect));
    }
    let tls = tls.context("[tls] is missing")?;
    let config =
        ClientTlsConfig::new().identity(identity(&tls.cert, &tls.key)?).ca_certificate(authority(&tls.ca)?);
    let endpoint = Endpoint::from_shared(b.address.clone())?
        .timeout(ORDERS)
        .connect_timeout(PATIENCE)
        // A machine that lost its power says no goodbye.
        .http2_keep_alive_interval(PATIENCE)
        .keep_alive_timeout(PATIENCE)
        .keep_alive_while_idle(true);
    Ok(endpoint.tls_config(config)?.connect_lazy())
}
