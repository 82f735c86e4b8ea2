//! Requests to the boxes, and what becomes known by the answers.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use netsum_api::v1 as api;
use netsum_controller::message::{mac_from_text, mac_text};
use netsum_core::PortInfo;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::{Code, Response, Status};

use super::{Boxes, ManagerLocation, Seen};
use crate::client::{Client, ORDERS, TIMEOUT};
use crate::config::End;
use crate::diagnosis::{self, BoxDiagnosis};
use crate::hosts::SECOND_QUERY_DELAY;
use crate::link_table::BoxReport;

/// Limit of remembered hosts.
const MOST_HOSTS: usize = 1 << 16;

impl Boxes {
    /// Awaits a box's answer to an order, with a shorter timeout if the box has been silent.
    ///
    /// # Errors
    /// The box's error, or a timeout.
    pub async fn order<T>(
        &self,
        name: &str,
        answer: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<Response<T>, Status> {
        let patience = if self.is_silent(name) { TIMEOUT } else { ORDERS };
        tokio::time::timeout(patience, answer).await.unwrap_or_else(|_| {
            let late = Status::deadline_exceeded(format!("no answer within {patience:?}"));
            self.record_no_answer(name, &late);
            Err(late)
        })
    }

    /// Where a machine is that has this MAC address.
    pub async fn place_of(&self, mac: [u8; 6]) -> Option<ManagerLocation> {
        let links = {
            let link_table = &self.state().link_table;
            if let Some(of) = link_table.with_mac(&mac_text(mac)) {
                return Some(ManagerLocation::On(of));
            }
            link_table.ends()
        };
        let ends = self.finder.behind(mac_text(mac), None, links).await;
        // At two boxes: a link between these is not known yet.
        let mut ends = ends.into_iter();
        ends.next().filter(|_| ends.next().is_none()).map(ManagerLocation::Behind)
    }

    fn is_link(&self, of: &str, port: &str) -> bool {
        self.state().link_table.ends().contains(&End { of: of.to_owned(), port: port.to_owned() })
    }

    /// Sends a request to all boxes at once.
    fn request_all<
        T: Send + 'static,
        F: Future<Output = Result<Response<T>, Status>> + Send + 'static,
    >(
        &self,
        patience: Duration,
        request: impl Fn(Client) -> F,
    ) -> JoinSet<(String, Result<T, Status>)> {
        let mut answers = JoinSet::new();
        for (name, client) in &self.all {
            let (name, answer) = (name.clone(), request(client.clone()));
            answers.spawn(async move {
                let late =
                    |_| Err(Status::deadline_exceeded(format!("no answer within {patience:?}")));
                let answer = tokio::time::timeout(patience, answer).await.unwrap_or_else(late);
                (name, answer.map(Response::into_inner))
            });
        }
        answers
    }

    /// Finds the ports of a host that no bridge has seen yet, or that is behind a router; also its
    /// packets' MAC address there, and the errors of boxes that do not know.
    async fn find_slowly(
        &self,
        mac: [u8; 6],
        ip: IpAddr,
        patience: Duration,
    ) -> (BTreeMap<End, [u8; 6]>, String) {
        let request = api::FindPortRequest { mac: mac_text(mac), ip: ip.to_string() };
        // A box that is busy with a large job answers late.
        let mut answers = self.request_all(patience, move |mut c| {
            let request = request.clone();
            async move { c.agent.find_port(request).await }
        });
        let (mut why, mut found) = (String::new(), BTreeMap::new());
        let mut until = Instant::now() + patience;
        while let Ok(Some(Ok((name, answer)))) =
            tokio::time::timeout_at(until, answers.join_next()).await
        {
            match answer {
                // Other racks' hosts are behind the links.
                Ok(reply) if self.is_link(&name, &reply.port) => {}
                Ok(reply) => {
                    let there = mac_from_text(&reply.mac).unwrap_or(mac);
                    found.insert(End { of: name, port: reply.port }, there);
                    until = Instant::now() + SECOND_QUERY_DELAY;
                }
                Err(status) if status.code() == Code::NotFound => {}
                Err(status) => why += &format!("; box {name}: {}", status.message()),
            }
        }
        (found, why)
    }

    /// Polls all boxes; returns those that answer.
    pub async fn poll(&self) -> HashMap<String, Seen> {
        let mut looks = JoinSet::new();
        for (name, client) in &self.all {
            let (name, mut client) = (name.clone(), client.clone());
            looks.spawn(async move {
                let both = async {
                    let ports = client
                        .agent
                        .list_ports(api::ListPortsRequest::default())
                        .await?
                        .into_inner();
                    let jobs =
                        client.jobs.list_jobs(api::ListJobsRequest {}).await?.into_inner().jobs;
                    Ok::<_, Status>((ports, jobs))
                };
                let late = |_| Err(Status::deadline_exceeded(format!("not within {TIMEOUT:?}")));
                (name, tokio::time::timeout(TIMEOUT, both).await.unwrap_or_else(late))
            });
        }
        let (mut seen, mut reports) = (HashMap::new(), HashMap::new());
        while let Some(Ok((name, answer))) = looks.join_next().await {
            match answer {
                Ok((reply, jobs)) => {
                    let api::ListPortsReply {
                        ports,
                        protocol,
                        release,
                        election,
                        lldp,
                        aggregation_rate,
                        cpus,
                        chassis_id,
                        macs,
                    } = reply;
                    let mut state = self.state();
                    let report = BoxReport { ports: ports.clone(), lldp, chassis_id, macs };
                    reports.insert(name.clone(), report);
                    state.check_version(&name, protocol, &release);
                    let ours = self.election.get();
                    if ours > 0 && election > ours {
                        let why = format!(
                            "follows a manager of election {election}, later than election {ours} \
                             of this one"
                        );
                        if state.follows_other_manager.insert(name.clone(), why.clone()).is_none() {
                            log::error!("box {name}: {why}: it gets no rings");
                        }
                    } else {
                        state.follows_other_manager.remove(&name);
                    }
                    if state.silent.remove(&name).is_some() {
                        log::info!("box {name}: answers again");
                    }
                    let cpus = cpus.unwrap_or(1).max(1);
                    aggregation_rate
                        .map(|rate| state.aggregation_rate.insert(name.clone(), (rate, cpus)));
                    let names = jobs.iter().map(|job| job.name.clone()).collect();
                    state.jobs.insert(name.clone(), names);
                    let is_there = |end: &End| ports.iter().any(|p| p.name == end.port);
                    let ends = state.links().into_iter().flat_map(|l| [l.below, l.above]);
                    state.down.extend(ends.filter(|e| e.of == name && !is_there(e)));
                    let info = |p: api::Port| {
                        let end = End { of: name.clone(), port: p.name };
                        let ifindex = state.number(&end);
                        let port =
                            PortInfo { name: end.to_string(), ifindex, mtu: p.mtu, router: None };
                        // Without its program a port sums nothing: the daemon attaches the program
                        // shortly after a port comes up.
                        let sums = p.up && !p.xdp.is_empty();
                        let changed =
                            if sums { state.down.remove(&end) } else { state.down.insert(end) };
                        if changed {
                            log::warn!(
                                "port {} is {}",
                                port.name,
                                if sums { "up again" } else { "down" }
                            );
                        }
                        port
                    };
                    let ports = ports.into_iter().map(info).collect();
                    seen.insert(name, Seen { jobs, ports });
                }
                Err(status) => {
                    if status.code() == Code::Unimplemented {
                        // A box before protocol 5 has no service of this name.
                        self.state().check_version(&name, 0, "");
                    }
                    self.record_no_answer(&name, &status);
                }
            }
        }
        self.state().link_table.update(reports, Instant::now().into_std());
        seen
    }

    /// The port that a host is behind, and the MAC address that its packets have there. `patience`
    /// bounds the time that boxes take to answer.
    ///
    /// # Errors
    /// If it is behind no port, or behind several.
    pub async fn find(
        &self,
        rank: u32,
        mac: [u8; 6],
        ip: IpAddr,
        patience: Duration,
    ) -> Result<(u32, [u8; 6]), Status> {
        let (was, links) = {
            let state = self.state();
            (
                state.hosts.get(&mac).and_then(|port| state.ends.get(port)).cloned(),
                state.link_table.ends(),
            )
        };
        let ends = self.finder.behind(mac_text(mac), was, links).await;
        let mut found: BTreeMap<End, [u8; 6]> = ends.into_iter().map(|end| (end, mac)).collect();
        let mut why = String::new();
        if found.is_empty() {
            (found, why) = self.find_slowly(mac, ip, patience).await;
        }
        let refused = |why: String| Err(Status::failed_precondition(format!("rank {rank}: {why}")));
        let mac_of = format!("MAC address {} of {ip}", mac_text(mac));
        let mut ends = found.iter();
        match (ends.next(), ends.next()) {
            (None, _) => refused(format!("no box has seen {mac_of} on a port towards hosts{why}")),
            (Some((end, there)), None) => {
                let mut state = self.state();
                let number = state.number(end);
                if state.hosts.len() == MOST_HOSTS {
                    state.hosts.clear();
                }
                state.hosts.insert(mac, number);
                Ok((number, *there))
            }
            (Some((one, _)), Some((other, _))) => refused(format!(
                "{mac_of} is behind {one} and {other}: a host must be behind one port; list links \
                 between boxes in the manager's file",
            )),
        }
    }

    /// The boxes and the hosts below them.
    pub async fn topology(&self) -> api::Fabric {
        self.poll().await;
        let mut fabric = self.show();
        let request = api::ListPortsRequest { hosts: true };
        let mut answers = self
            .request_all(TIMEOUT, move |mut c| async move { c.agent.list_ports(request).await });
        while let Some(Ok((name, answer))) = answers.join_next().await {
            let ports = answer.map(|reply| reply.ports).unwrap_or_default().into_iter();
            let hosts = ports.filter(|port| !self.is_link(&name, &port.name)).flat_map(|p| {
                let port = p.name;
                p.hosts.into_iter().map(move |mac| api::FabricHost { mac, port: port.clone() })
            });
            let hosts = hosts.collect();
            fabric
                .boxes
                .iter_mut()
                .filter(|b| b.name == name)
                .for_each(|b| b.hosts.clone_from(&hosts));
        }
        fabric
    }

    /// Measures the links that no job's rings use.
    pub async fn measure(&self) {
        let links = {
            let state = self.state();
            let carry =
                state.link_table.all().into_iter().filter(|link_state| state.carries(link_state));
            carry.map(|link_state| link_state.link).collect()
        };
        self.measure_links(links).await;
    }

    /// Why an active job has stalled; `ages` are the times since the ranks' last heartbeats.
    pub async fn diagnose(
        &self,
        request: api::DiagnoseRequest,
        ages: Vec<Option<Duration>>,
    ) -> api::Diagnosis {
        let (job, ranks) = (request.job.clone(), ages.len() as u32);
        let at: HashSet<String> = {
            let state = self.state();
            let has = |(_, jobs): &(&String, &Vec<String>)| jobs.contains(&job);
            state.jobs.iter().filter(has).map(|(name, _)| name.clone()).collect()
        };
        let patience = TIMEOUT + Duration::from_millis(request.watch_ms.into());
        let mut answers = self.request_all(patience, move |mut c| {
            let request = request.clone();
            async move { c.jobs.diagnose(request).await }
        });
        let mut reports: Vec<BoxDiagnosis> = Vec::new();
        while let Some(Ok((name, answer))) = answers.join_next().await {
            if at.contains(&name) {
                reports.push((name, answer.map_err(|status| status.message().to_owned())));
            }
        }
        let age = |rank: u32| ages.get(rank as usize).copied().flatten();
        let state = api::JobState::Active.into();
        api::Diagnosis {
            job,
            ranks,
            state,
            ..diagnosis::merge(&reports, &self.state().links(), age)
        }
    }
}
