//! Checks that the boxes stay programmed.

use std::collections::{HashMap, HashSet};

use netsum_api::v1 as api;
use netsum_core::{Job, State};

use super::{Dispatcher, GivenOrders, REJOIN_TIMEOUT, epoch, job_epoch};
use crate::boxes::{Seen, ports};
use crate::layout::{self, Layout, Order};
use crate::share::{self, Candidate, Share};

impl Dispatcher {
    /// Checks that the boxes do as ordered. If one does not, or a link is down, the ranks
    /// reconnect.
    pub(super) async fn poll(&mut self) {
        let seen = self.boxes.poll().await;
        // Links found during a measurement are measured after it.
        if self.boxes.measuring.try_lock().is_ok() {
            let (new, boxes) = (self.boxes.unmeasured(), self.boxes.clone());
            if !new.is_empty() {
                tokio::spawn(async move { boxes.measure_links(new).await });
            }
        }
        for (at, name) in self.over(&seen) {
            self.delete(&at, &name, false).await;
        }
        self.left.retain(|_, (since, _)| since.elapsed() < REJOIN_TIMEOUT);
        let come_back = |at: &str| self.left.keys().any(|name| self.is_at(name, at));
        self.boxes.update_drains(|at| {
            seen.get(at).is_some_and(|seen| seen.jobs.is_empty()) && !come_back(at)
        });
        let mut inner = self.shared.lock();
        let ports = ports(&seen, inner.controller.ports());
        inner.controller.set_ports(ports);
        let placed = inner.controller.jobs().filter(|job| job.state == State::Active);
        let placed = placed.flat_map(|job| job.flows.iter().map(|flow| flow.ifindex));
        self.boxes.set_host_ports(&placed.collect());
        if self.boxes.links_changed() {
            inner.carry_out_or_log(None, Vec::new());
        }
        // Boxes that were silent when the manager started.
        let known = self.taken_over.iter().filter_map(|(name, before)| {
            let job = inner.controller.job(name).ok().filter(|job| job_epoch(job) == *before);
            let layout = job.map(|job| self.layout_found(job, &seen).ok());
            (layout != Some(None)).then(|| {
                (name.clone(), layout.flatten().map(|layout| GivenOrders::new(before.1, layout)))
            })
        });
        for (name, given) in known.collect::<Vec<_>>() {
            self.taken_over.remove(&name);
            given.map(|given| self.given.insert(name, given));
        }
        let cannot = |job: &Job| {
            layout::lay_out(job, &self.boxes.paths(), Share::Links, |port| self.boxes.end(port))
                .is_err()
        };
        self.on_host_ring
            .retain(|name, of| inner.controller.job(name).is_ok_and(|job| job_epoch(job) == *of));
        let on_host_ring =
            self.on_host_ring.keys().filter(|name| inner.controller.job(name).is_ok_and(cannot));
        let (mut unplaced, mut changed) =
            (on_host_ring.cloned().collect::<HashSet<_>>(), Vec::new());
        for (name, given) in &self.given {
            let Ok(job) = inner.controller.job(name) else { continue };
            if job.epoch.as_ref().is_some_and(|epoch| epoch.on_host_ring) && cannot(job) {
                unplaced.insert(name.clone());
                continue;
            }
            // Boxes are about to receive orders for another epoch.
            if epoch(job) != given.epoch || job.epoch.as_ref().is_none_or(|epoch| epoch.reconnect) {
                continue;
            }
            let Layout { orders, placed, candidates, .. } = &given.layout;
            let lost = orders.iter().find(|order| is_lost(order, name, &seen));
            let now = self.layout_at_work(job, &placed.trees).ok();
            let why = match (lost, now) {
                (Some(order), _) => format!("box {} no longer sums the job", order.at),
                (None, Some(now)) if now.orders != *orders => {
                    let drained = self.boxes.drained();
                    let drained = given.boxes().find(|at| drained.contains_key(*at));
                    drained.map_or("its tree has changed".to_owned(), |at| {
                        format!("box {at} is being drained")
                    })
                }
                (None, Some(now)) => {
                    if share::has_changed(candidates, &now.candidates) {
                        changed.push((job.clone(), now.candidates));
                    }
                    continue;
                }
                (None, None) => continue,
            };
            log::warn!(NETSUM_JOB = name; "job {name}: {why}; its ranks reconnect");
            inner.controller.reconnect_job(name).unwrap_or_else(|e| log::warn!("{e}"));
        }
        // Orders of failed attempts are not repeated to boxes.
        let has_orders =
            |name: &str| self.given.contains_key(name) || self.on_host_ring.contains_key(name);
        self.boxes.set_unplaced_jobs(unplaced, has_orders);
        let tree = |(root, rings)| api::FabricTree { root, rings };
        let job = |(name, given): (&String, &GivenOrders)| api::FabricJob {
            name: name.clone(),
            trees: given.layout.placed.trees.iter().cloned().map(tree).collect(),
        };
        self.boxes.set_trees(self.given.iter().map(job).collect());
        drop(inner);
        self.reshare(changed);
    }

    /// Has jobs reconnect whose shares differ since boxes or links have changed.
    fn reshare(&mut self, changed: Vec<(Job, Vec<Candidate>)>) {
        for (job, candidates) in changed {
            let name = &job.spec.name;
            let new_layout = self.layout(&job);
            let Some(given) = self.given.get_mut(name) else { continue };
            given.layout.candidates = candidates;
            if new_layout.is_ok_and(|new_layout| new_layout.orders != given.layout.orders) {
                log::warn!(
                    NETSUM_JOB = name;
                    "job {name}: its shares changed with boxes or links; its ranks reconnect"
                );
                let mut inner = self.shared.lock();
                inner.controller.reconnect_job(name).unwrap_or_else(|e| log::warn!("{e}"));
            }
        }
    }

    /// Jobs to delete on boxes that answer: those whose deletion failed, those of another manager,
    /// and those whose creation was late.
    fn over(&mut self, seen: &HashMap<String, Seen>) -> Vec<(String, String)> {
        let mut over: Vec<_> =
            self.leftover.iter().filter(|(at, _)| seen.contains_key(at)).cloned().collect();
        for (at, seen) in seen {
            let is_new = self.unknown.remove(at);
            for name in seen.jobs.iter().map(|job| &job.name) {
                match self.given.get_mut(name) {
                    Some(given) if given.boxes().any(|of| of == at) => {}
                    Some(given) if is_new => drop(given.before.insert(at.clone())),
                    None if self.taken_over.contains_key(name) => {}
                    _ => over.push((at.clone(), name.clone())),
                }
            }
        }
        over
    }
}

/// Whether a box answers and does not follow its order.
fn is_lost(order: &Order, name: &str, seen: &HashMap<String, Seen>) -> bool {
    fn connection(f: &api::Flow) -> (u32, u32, u32, u32) {
        (f.ring, f.rank, f.qpn, f.psn)
    }
    let Some(seen) = seen.get(&order.at) else { return false };
    let is_it = |job: &&api::Job| job.name == name && job.state() == api::JobState::Active;
    let Some(job) = seen.jobs.iter().find(is_it) else { return true };
    let has: HashSet<_> = job.flows.iter().map(connection).collect();
    !order.flows.iter().all(|flow| has.contains(&connection(flow)))
}
