//! Programs the boxes as the controller decides, one change after the other, and checks that they
//! stay so.

mod check;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use netsum_api::v1 as api;
use netsum_common::abi::FlowKey;
use netsum_core::plane::mapped;
use netsum_core::{Job, Refusal, State};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::MissedTickBehavior;
use tonic::{Code, Status};

use crate::boxes::{Boxes, Seen};
use crate::layout::{self, Layout, Order, Paths, TOKEN_PREFIX};
use crate::orders::{Change, Joined, Pending, Shared};
use crate::own_addresses::{ManagerAddresses, RETRY_INTERVAL, reservations};
use crate::share::{PlacedJob, Share};

/// Time within which ranks that left to reconnect join again.
const REJOIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Poll interval of the boxes.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The orders of a job that boxes have received.
struct GivenOrders {
    /// The epoch of the ranks that the orders are for.
    epoch: u32,
    layout: Layout,
    /// Other boxes that summed it for an earlier manager: its ranks may use them until they
    /// reconnect.
    before: BTreeSet<String>,
}

impl GivenOrders {
    fn new(epoch: u32, layout: Layout) -> Self {
        Self { epoch, layout, before: BTreeSet::new() }
    }

    /// Whether these orders were for this job, not for an earlier one of the same name.
    fn is_of(&self, job: &Job) -> bool {
        self.layout.orders.first().is_some_and(|order| order.job.token == layout::token(job))
    }

    /// Whether these are all its flows, or more.
    fn is_within(&self, flows: &HashSet<FlowKey>) -> bool {
        let key = |flow: &api::Flow| {
            let dst = flow.dst.parse().ok()?;
            Some(FlowKey { dst_ip: mapped(dst), qpn: flow.qpn })
        };
        let mut own = self.layout.orders.iter().flat_map(|order| &order.flows);
        own.all(|flow| key(flow).is_some_and(|key| flows.contains(&key)))
    }

    fn boxes(&self) -> impl Iterator<Item = &String> {
        self.layout.orders.iter().map(|order| &order.at).chain(&self.before)
    }
}

/// Keeps the orders that boxes have received.
pub struct Dispatcher {
    shared: Shared,
    boxes: Arc<Boxes>,
    pending: Pending,
    given: BTreeMap<String, GivenOrders>,
    /// Jobs that no boxes could sum when their ranks joined, and that started nevertheless.
    on_host_ring: HashMap<String, JobEpoch>,
    /// Jobs of an earlier manager whose boxes are not known yet.
    taken_over: HashMap<String, JobEpoch>,
    /// Jobs whose ranks have left, with the time and the boxes that summed them: ranks leave before
    /// they reconnect.
    left: HashMap<String, (Instant, Vec<String>)>,
    /// Boxes that may still have a job that has ended, and the job.
    leftover: BTreeSet<(String, String)>,
    /// Boxes whose jobs of an earlier manager are not known yet.
    unknown: BTreeSet<String>,
    /// Reservations of each box, with the time of the last order.
    reserved: HashMap<String, (Vec<api::Reservation>, Instant)>,
    own: Option<ManagerAddresses>,
}

/// The required state of a job.
enum RequiredState {
    /// As ordered before.
    Same,
    /// These orders, for the ranks of this epoch.
    Orders(u32, Result<Layout, String>),
    /// Nothing; `ranks_ended` if its ranks are known to have ended.
    Nothing { ranks_ended: bool },
}

impl Dispatcher {
    /// Starts with boxes that are already programmed as the controller wants: it took over from
    /// another manager, or has no jobs.
    pub fn new(shared: Shared, boxes: Arc<Boxes>, seen: &HashMap<String, Seen>) -> Self {
        let pending = shared.lock().executor.pending();
        let unknown = boxes.show().boxes.into_iter().map(|b| b.name).collect();
        let (given, left, leftover) = (BTreeMap::new(), HashMap::new(), BTreeSet::new());
        let (on_host_ring, taken_over) = (HashMap::new(), HashMap::new());
        let mut dispatcher = Self {
            shared,
            boxes,
            pending,
            given,
            on_host_ring,
            taken_over,
            left,
            leftover,
            unknown,
            reserved: HashMap::new(),
            own: None,
        };
        // A box that is being drained may still sum any of them.
        let at: Vec<String> = dispatcher.unknown.iter().cloned().collect();
        for name in dispatcher.names() {
            dispatcher.left.insert(name.clone(), (Instant::now(), at.clone()));
            let (of, layout) = {
                let inner = dispatcher.shared.lock();
                let job = inner.controller.job(&name).ok().filter(|job| job.state == State::Active);
                let Some(job) = job else { continue };
                (job_epoch(job), dispatcher.layout_found(job, seen))
            };
            match layout {
                Ok(layout) => drop(dispatcher.given.insert(name, GivenOrders::new(of.1, layout))),
                // The same as for a box that does not answer.
                Err(_) => drop(dispatcher.taken_over.insert(name, of)),
            }
        }
        dispatcher
    }

    /// Makes boxes reserve this machine's addresses for the ports by which it calls.
    #[must_use]
    pub fn reserving_own_addresses(self) -> Self {
        Self { own: Some(ManagerAddresses::default()), ..self }
    }

    /// Carries changes out, until their senders end or boxes follow another manager; returns why.
    pub async fn run(mut self, mut changes: UnboundedReceiver<Change>) -> String {
        let mut ticks = tokio::time::interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                change = changes.recv() => match change {
                    Some(change) => {
                        self.carry_out(change).await;
                        self.pending.done();
                    }
                    None => return "all senders of orders have ended".into(),
                },
                _ = ticks.tick() => {
                    self.poll().await;
                    self.reserve(None).await;
                }
            }
            if let Some(why) = self.boxes.successor() {
                return why;
            }
        }
    }

    fn names(&self) -> BTreeSet<String> {
        let inner = self.shared.lock();
        inner
            .controller
            .jobs()
            .map(|job| job.spec.name.clone())
            .chain(self.given.keys().cloned())
            .collect()
    }

    /// `stopped`: flows whose ranks are known to have stopped, if their job is deleted.
    fn required_state(&self, name: &str, stopped: &HashSet<FlowKey>) -> RequiredState {
        let job = {
            let inner = self.shared.lock();
            let Ok(job) = inner.controller.job(name) else {
                let given = self.given.get(name);
                let ranks_ended = given.is_some_and(|given| given.is_within(stopped));
                return RequiredState::Nothing { ranks_ended };
            };
            let given = self.given.get(name).filter(|given| given.is_of(job));
            match job.state {
                // A group without rings: its ranks sum over the hosts' ring.
                State::Active if job.rings.is_empty() => {
                    return RequiredState::Nothing { ranks_ended: false };
                }
                // The orders of active ranks stay as they are until the ranks reconnect.
                State::Active if given.is_some_and(|given| given.epoch == epoch(job)) => {
                    return RequiredState::Same;
                }
                State::Active
                    if [&self.on_host_ring, &self.taken_over]
                        .iter()
                        .any(|of| of.get(name) == Some(&job_epoch(job))) =>
                {
                    return RequiredState::Same;
                }
                State::Active => job.clone(),
                // No ranks have joined since, as after a restart by hand: the ranks have left.
                _ => {
                    let ranks_ended = given.is_some_and(|given| given.epoch == job.last_epoch);
                    return RequiredState::Nothing {
                        ranks_ended: ranks_ended && job.state == State::Waiting,
                    };
                }
            }
        };
        RequiredState::Orders(epoch(&job), self.layout(&job))
    }

    /// Lays the job out next to the others, as they are now. With many jobs this is slow.
    fn layout(&self, job: &Job) -> Result<Layout, String> {
        let begin = Instant::now();
        let others = self.given.iter().filter(|(of, _)| **of != job.spec.name);
        let others: Vec<PlacedJob> = others.map(|(_, given)| given.layout.placed.clone()).collect();
        let share = Share::Incremental(&others, &*self.boxes);
        let layout = block_in_place(|| self.layout_by(job, self.boxes.paths(), share));
        log::debug!(
            "job {}: planned next to {} in {:.1?}",
            job.spec.name,
            others.len(),
            begin.elapsed()
        );
        layout
    }

    /// Lays out an active job with its current shares; boxes that do not answer may still sum.
    fn layout_at_work(&self, job: &Job, trees: &[(String, u32)]) -> Result<Layout, String> {
        let mut paths = self.boxes.paths();
        let name = &job.spec.name;
        paths.closed.retain(|at, _| !(self.boxes.is_silent(at) && self.is_at(name, at)));
        self.layout_by(job, paths, Share::Kept(trees))
    }

    /// Reconstructs an earlier manager's layout from the boxes' answers.
    fn layout_found(&self, job: &Job, seen: &HashMap<String, Seen>) -> Result<Layout, String> {
        let place = |port| Some(self.boxes.end(port)?.of);
        let leaves: BTreeSet<_> = job.flows.iter().filter_map(|f| place(f.ifindex)).collect();
        let links = self.boxes.links();
        let trees = |at: &String| {
            let of = seen.get(at)?.jobs.iter().find(|of| of.name == job.spec.name)?;
            layout::trees_by(at, of, &links)
        };
        match leaves.iter().find_map(trees) {
            Some(trees) => self.layout_at_work(job, &trees),
            None if leaves.len() > 1 && leaves.iter().any(|at| !seen.contains_key(at)) => {
                Err("no leaf has reported how its rings are shared out".into())
            }
            None => self.layout_at_work(job, &[]),
        }
    }

    fn layout_by(&self, job: &Job, mut paths: Paths, share: Share<'_>) -> Result<Layout, String> {
        let place = |port| self.boxes.end(port);
        let layout = layout::lay_out(job, &paths, share, place);
        // If no layout avoids the closed boxes, the job keeps its leaves that are closed, then any
        // closed box that sums it or may answer soon.
        let leaves: BTreeSet<_> =
            job.flows.iter().filter_map(|f| Some(place(f.ifindex)?.of)).collect();
        for leaves_alone in [true, false] {
            if layout.is_ok() || paths.closed.is_empty() {
                break;
            }
            let may_do = |at: &String| {
                (!leaves_alone || leaves.contains(at))
                    && (self.boxes.is_late(at)
                        || !self.boxes.is_silent(at) && self.is_at(&job.spec.name, at))
            };
            paths.closed.retain(|at, _| !may_do(at));
            if let Ok(layout) = layout::lay_out(job, &paths, share, place) {
                return Ok(layout);
            }
        }
        layout
    }

    /// Whether a box sums a job, or did before its ranks left to reconnect.
    fn is_at(&self, name: &str, at: &str) -> bool {
        self.given.get(name).is_some_and(|given| given.boxes().any(|of| of == at))
            || self.left.get(name).is_some_and(|(since, boxes)| {
                since.elapsed() < REJOIN_TIMEOUT && boxes.iter().any(|of| of == at)
            })
    }

    async fn carry_out(&mut self, Change { job, joined, stopped }: Change) {
        let names = job.map_or_else(|| self.names(), |name| BTreeSet::from([name]));
        let mut refusal = None;
        for name in names {
            let (now, done) = match self.required_state(&name, &stopped) {
                RequiredState::Same => continue,
                RequiredState::Orders(now, Ok(layout)) => {
                    (now, self.order_with_retries(&name, now, layout).await)
                }
                RequiredState::Orders(now, Err(why)) => {
                    self.forget(&name, false).await;
                    (now, Err(anyhow!(why)))
                }
                RequiredState::Nothing { ranks_ended } => {
                    self.forget(&name, ranks_ended).await;
                    continue;
                }
            };
            // Another manager may own the job and its ranks by now.
            if done.is_err() && self.boxes.is_superseded() {
                self.boxes.poll().await;
            }
            if self.boxes.successor().is_some() {
                return;
            }
            let Err(why) = done else { continue };
            let mut inner = self.shared.lock();
            if inner.controller.set_on_host_ring(&name, now) {
                log::warn!(
                    NETSUM_JOB = name;
                    "job {name}: no boxes sum it, its ranks sum over the hosts' ring: {why:#}"
                );
                let of = inner.controller.job(&name).map(job_epoch);
                inner.carry_out_or_log(Some(&name), Vec::new());
                of.map(|of| self.on_host_ring.insert(name, of)).ok();
                continue;
            }
            log::error!(NETSUM_JOB = name; "job {name}: {why:#}");
            refusal = Some(Refusal::NotNow(format!("job `{name}`: {why:#}")));
            if inner.controller.job(&name).is_ok_and(|job| epoch(job) == now) {
                let actions = inner.controller.execution_failed(&name, &format!("{why:#}"));
                inner.carry_out_or_log(Some(&name), actions);
            }
        }
        for Joined { rank, epoch } in joined {
            // The rank's caller may have ended.
            let _ = rank.send(refusal.clone().map_or(Ok(epoch), Err));
        }
    }

    /// Removes a job from the boxes.
    async fn forget(&mut self, name: &str, ranks_ended: bool) {
        let Some(given) = self.given.remove(name) else { return };
        let boxes: Vec<String> = given.boxes().cloned().collect();
        for at in &boxes {
            self.delete(at, name, ranks_ended).await;
        }
        if ranks_ended {
            self.left.insert(name.to_owned(), (Instant::now(), boxes));
        }
    }

    /// Tries again with other boxes if some do not answer.
    async fn order_with_retries(
        &mut self,
        name: &str,
        epoch: u32,
        mut layout: Layout,
    ) -> Result<()> {
        loop {
            let before = self.boxes.unreachable();
            let result = self.order(name, epoch, layout).await;
            if result.is_ok() || self.boxes.unreachable() == before {
                return result;
            }
            match self.required_state(name, &HashSet::new()) {
                RequiredState::Orders(now, again) if now == epoch => {
                    layout = again.map_err(|why| anyhow!(why))?
                }
                _ => return result,
            }
        }
    }

    /// Orders the boxes to do this for a job, and nothing else.
    async fn order(&mut self, name: &str, epoch: u32, layout: Layout) -> Result<()> {
        self.forget(name, false).await;
        // Reserves before the ranks start, and frees what they had at other ports.
        self.reserve(Some(&layout)).await;
        for (n, order) in layout.orders.iter().enumerate() {
            if let Err(why) = self.create(order).await {
                // This also deletes incomplete orders, but not jobs that are not a manager's.
                for order in &layout.orders[..=n] {
                    self.delete(&order.at, name, false).await;
                }
                return Err(why);
            }
        }
        let at: Vec<&str> = layout.orders.iter().map(|order| &*order.at).collect();
        log::info!(NETSUM_JOB = name; "job {name}: summed by {}", at.join(", "));
        self.given.insert(name.to_owned(), GivenOrders::new(epoch, layout));
        self.left.remove(name);
        Ok(())
    }

    /// Reserves the addresses of all ranks that are behind other boxes, including those of a job
    /// that is about to start: nobody can take them over there.
    async fn reserve(&mut self, new: Option<&Layout>) {
        if let Some(own) = &mut self.own {
            own.update(&self.boxes).await;
        }
        let own = self.own.as_ref().map(ManagerAddresses::places);
        let paths = self.boxes.paths();
        let layouts: Vec<&Layout> =
            self.given.values().map(|given| &given.layout).chain(new).collect();
        let mut answers = JoinSet::new();
        for api::FabricBox { name, .. } in self.boxes.show().boxes {
            let ranks = layouts.iter().flat_map(|layout| &layout.addresses);
            let all = reservations(&name, &paths, ranks, own);
            let is_recent =
                |(before, at): &(Vec<_>, Instant)| *before == all && at.elapsed() < RETRY_INTERVAL;
            if self.boxes.is_silent(&name) || self.reserved.get(&name).is_some_and(is_recent) {
                continue;
            }
            let Some(mut client) = self.boxes.client(&name) else { continue };
            let boxes = self.boxes.clone();
            answers.spawn(async move {
                let request = api::ReserveRequest { reservations: all.clone() };
                let done = boxes.order(&name, client.agent.reserve(request)).await;
                (name, all, done.map(drop))
            });
        }
        while let Some(Ok((name, all, done))) = answers.join_next().await {
            match done {
                Ok(()) => drop(self.reserved.insert(name, (all, Instant::now()))),
                Err(status) => {
                    self.reserved.remove(&name);
                    log::debug!("box {name}: reserves no addresses: {}", status.message());
                }
            }
        }
    }

    async fn create(&mut self, order: &Order) -> Result<()> {
        let (at, name) = (&order.at, &order.job.name);
        let boxes = self.boxes.clone();
        let failed = |status: Status| {
            match status.code() {
                Code::Unavailable => boxes.record_no_answer(at, &status),
                Code::Aborted => boxes.record_refusal(at, &status),
                _ => {}
            }
            anyhow!("box {at}: {}", status.message())
        };
        let mut client =
            self.boxes.client(at).with_context(|| format!("box {at} does not exist"))?;
        if let Err(status) = self.boxes.order(at, client.jobs.create_job(order.job.clone())).await {
            let is_there = status.code() == Code::AlreadyExists;
            if !is_there || !self.try_delete(at, name, false).await.unwrap_or(false) {
                return Err(failed(status));
            }
            self.boxes
                .order(at, client.jobs.create_job(order.job.clone()))
                .await
                .map_err(failed)?;
        }
        self.leftover.remove(&(at.clone(), name.clone()));
        let request = api::AddFlowsRequest { job: name.clone(), flows: order.flows.clone() };
        self.boxes.order(at, client.agent.add_flows(request)).await.map_err(failed)?;
        Ok(())
    }

    /// Deletes a job on a box, if it is a manager's. Retries later without a confirmation.
    async fn delete(&mut self, at: &str, name: &str, ranks_ended: bool) {
        let place = (at.to_owned(), name.to_owned());
        // An unreachable box is not waited for.
        if self.boxes.is_silent(at) {
            self.leftover.insert(place);
            return;
        }
        match self.try_delete(at, name, ranks_ended).await {
            Ok(_) => drop(self.leftover.remove(&place)),
            Err(e) => {
                if self.leftover.insert(place) {
                    log::warn!(
                        NETSUM_JOB = name;
                        "job {name}: {e:#}; its deletion there is retried"
                    );
                }
            }
        }
    }

    /// Whether the box has no job of that name left.
    async fn try_delete(&self, at: &str, name: &str, ranks_ended: bool) -> Result<bool> {
        let mut client =
            self.boxes.client(at).with_context(|| format!("box {at} does not exist"))?;
        let question = api::ShowJobRequest { name: name.to_owned(), show_token: true };
        let there = self.boxes.order(at, client.jobs.show_job(question)).await;
        match there.map(tonic::Response::into_inner) {
            Ok(job) if !job.token.starts_with(TOKEN_PREFIX) => return Ok(false),
            Ok(_) => {}
            Err(status) if status.code() == Code::NotFound => return Ok(true),
            Err(status) => bail!("box {at}: {}", status.message()),
        }
        let request =
            api::DeleteJobRequest { name: name.to_owned(), forget_connections: ranks_ended };
        match self.boxes.order(at, client.jobs.delete_job(request)).await {
            Err(status) if status.code() != Code::NotFound => {
                bail!("box {at}: {}", status.message())
            }
            _ => Ok(true),
        }
    }
}

/// A job and its ranks; distinguishes jobs of the same name, and ranks that join later.
type JobEpoch = (String, u32);

fn job_epoch(job: &Job) -> JobEpoch {
    (layout::token(job), epoch(job))
}

fn epoch(job: &Job) -> u32 {
    job.epoch.as_ref().map_or(0, |epoch| epoch.number)
}
