//! Brings the boxes to what the controller wants, one change after the other, and looks whether they stay so.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use netsum_api::v1 as api;
use netsum_core::{Refusal, State};
use netsum_daemon::state::{Shared, Waiting, programs_of_now};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tonic::{Code, Status};

use crate::boxes::{Boxes, Seen};
use crate::layout::{self, Order};

/// How often boxes are looked at.
const LOOK: Duration = Duration::from_millis(500);

/// Flows of a job have changed, or of any.
pub struct Change {
    job: Option<String>,
    waiting: Vec<Waiting>,
}

/// Hands changes on to [`Programmer`].
pub struct Changes {
    pub to: UnboundedSender<Change>,
    pub boxes: Arc<Boxes>,
}

impl netsum_daemon::state::Boxes for Changes {
    fn changed(&mut self, job: Option<&str>, waiting: Vec<Waiting>) {
        // Nobody is there any more when the manager ends.
        let _ = self.to.send(Change { job: job.map(str::to_owned), waiting });
    }

    fn show(&self) -> api::Fabric {
        self.boxes.show()
    }
}

/// Knows what boxes have been told.
pub struct Programmer {
    shared: Shared,
    boxes: Arc<Boxes>,
    told: HashMap<String, Vec<Order>>,
}

impl Programmer {
    /// The boxes do already what the controller wants of them: it took over from another, or has no jobs.
    pub fn new(shared: Shared, boxes: Arc<Boxes>) -> Self {
        let mut programmer = Self { shared, boxes, told: HashMap::new() };
        let names: Vec<String> = programmer.names().into_iter().collect();
        for name in names {
            if let (Ok(orders), _) = programmer.wanted(&name)
                && !orders.is_empty()
            {
                programmer.told.insert(name, orders);
            }
        }
        programmer
    }

    /// Carries changes out, until there can be none any more.
    pub async fn run(mut self, mut changes: UnboundedReceiver<Change>) {
        let mut ticks = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                change = changes.recv() => match change {
                    Some(change) => self.carry_out(change).await,
                    None => return,
                },
                _ = ticks.tick() => self.look().await,
            }
        }
    }

    fn names(&self) -> BTreeSet<String> {
        let inner = self.shared.lock();
        inner.controller.jobs().map(|job| job.spec.name.clone()).chain(self.told.keys().cloned()).collect()
    }

    /// What the boxes are to do for a job, and whether its ranks are known to be gone.
    fn wanted(&self, name: &str) -> (Result<Vec<Order>, String>, bool) {
        let inner = self.shared.lock();
        match inner.controller.job(name) {
            Ok(job) if job.state == State::Active => {
                (layout::orders(job, &self.boxes.links(), |port| self.boxes.end(port)), false)
            }
            Ok(job) => (Ok(Vec::new()), job.state == State::Waiting),
            Err(_) => (Ok(Vec::new()), false),
        }
    }

    async fn carry_out(&mut self, Change { job, waiting }: Change) {
        let names = job.map_or_else(|| self.names(), |name| BTreeSet::from([name]));
        let mut refusal = None;
        for name in names {
            let (wanted, gone) = self.wanted(&name);
            let done = match wanted {
                Ok(orders) => self.tell(&name, orders, gone).await.map_err(|e| format!("{e:#}")),
                Err(why) => {
                    // What they do for connections that are none any more ends.
                    self.tell(&name, Vec::new(), false).await.unwrap_or_else(|e| log::warn!("{e:#}"));
                    Err(why)
                }
            };
            if let Err(why) = done {
                log::error!(NETSUM_JOB = name; "job {name}: {why}");
                let mut inner = self.shared.lock();
                let actions = inner.controller.data_plane_failed(&name, &why);
                inner.carry_out(Some(&name), actions).unwrap_or_else(|e| log::error!("{}", e.message()));
                refusal = Some(Refusal::NotNow(format!("job `{name}`: {why}")));
            }
        }
        for Waiting { rank, epoch } in waiting {
            // A rank that has gone away needs no answer.
            let _ = rank.send(refusal.clone().map_or(Ok(epoch), Err));
        }
    }

    /// Has the boxes do this for a job, and nothing else.
    async fn tell(&mut self, name: &str, orders: Vec<Order>, gone: bool) -> Result<()> {
        if self.told.get(name).is_some_and(|told| *told == orders) {
            return Ok(());
        }
        for order in self.told.remove(name).unwrap_or_default() {
            self.delete(&order.at, name, gone).await.unwrap_or_else(|e| log::warn!("{e:#}"));
        }
        if orders.is_empty() {
            return Ok(());
        }
        let mut told = Vec::new();
        let mut failed = None;
        for order in orders {
            let result = self.create(&order).await;
            // Also where it failed in the middle.
            let exists = !matches!(&result, Err((Code::AlreadyExists, _)));
            if exists {
                told.push(order);
            }
            if let Err((_, why)) = result {
                failed = Some(why);
                break;
            }
        }
        if let Some(why) = failed {
            for order in told {
                self.delete(&order.at, name, false).await.unwrap_or_else(|e| log::warn!("{e:#}"));
            }
            return Err(why);
        }
        let at: Vec<&str> = told.iter().map(|order| &*order.at).collect();
        log::info!(NETSUM_JOB = name; "job {name}: summed by {}", at.join(", "));
        self.told.insert(name.to_owned(), told);
        Ok(())
    }

    async fn create(&self, order: &Order) -> Result<(), (Code, anyhow::Error)> {
        let at = &order.at;
        let failed = |status: Status| (status.code(), anyhow!("box {at}: {}", status.message()));
        let Some(mut client) = self.boxes.client(at) else {
            return Err((Code::NotFound, anyhow!("box {at}: there is none")));
        };
        client.create_job(order.job.clone()).await.map_err(failed)?;
        for flow in &order.flows {
            let request = api::AddFlowRequest { job: order.job.name.clone(), flow: Some(flow.clone()) };
            // A flow that exists already is no job of that name.
            client.add_flow(request).await.map_err(|s| (Code::Aborted, failed(s).1))?;
        }
        Ok(())
    }

    async fn delete(&self, at: &str, name: &str, gone: bool) -> Result<()> {
        let mut client = self.boxes.client(at).with_context(|| format!("box {at}: there is none"))?;
        match client.delete_job(api::DeleteJobRequest { name: name.to_owned(), gone }).await {
            Err(status) if status.code() != Code::NotFound => Err(anyhow!("box {at}: {}", status.message())),
            _ => Ok(()),
        }
    }

    /// Looks whether the boxes do as they were told. Where one does not, or a link is down, the ranks connect anew.
    async fn look(&mut self) {
        let seen = self.boxes.look().await;
        let mut ports: Vec<_> = seen.values().flat_map(|s| s.ports.clone()).collect();
        let mut inner = self.shared.lock();
        // Those of silent boxes are as they were.
        let present: BTreeSet<u32> = ports.iter().map(|p| p.ifindex).collect();
        ports.extend(inner.controller.ports().iter().filter(|p| !present.contains(&p.ifindex)).cloned());
        ports.sort_unstable_by_key(|p| p.ifindex);
        inner.controller.set_ports(ports);
        let links = self.boxes.links();
        for (name, orders) in &self.told {
            let Ok(job) = inner.controller.job(name) else { continue };
            if job.epoch.as_ref().is_none_or(|epoch| epoch.renew) {
                continue;
            }
            let lost = orders.iter().find(|order| is_lost(order, name, &seen));
            let moved =
                layout::orders(job, &links, |port| self.boxes.end(port)).is_ok_and(|now| now != *orders);
            let why = match lost {
                Some(order) => format!("box {} does not sum any more", order.at),
                None if moved => "its tree has changed".to_owned(),
                None => continue,
            };
            log::warn!(NETSUM_JOB = name; "job {name}: {why}; its ranks connect anew");
            inner.controller.renew_job(name).unwrap_or_else(|e| log::warn!("{e}"));
            inner.programs = programs_of_now();
        }
    }
}

/// Whether a box answers, and does not do what it was told.
fn is_lost(order: &Order, name: &str, seen: &HashMap<String, Seen>) -> bool {
    let active = |job: &api::Job| job.name == name && job.state() == api::JobState::Active;
    seen.get(&order.at).is_some_and(|seen| !seen.jobs.iter().any(active))
}
