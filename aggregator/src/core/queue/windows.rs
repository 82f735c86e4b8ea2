//! Windows that change while a job is at work: narrower where somebody waits who would fit then, wider by what nobody waits for.
//!
//! A function, as [`plan`](super::plan) is, from who has what and who waits to the window that each job is to have. What it
//! wishes is taken back as easily: a job gets it only when all its ranks connect anew, and until then it keeps what it has. So
//! nothing needs to be kept free for a job that is about to grow; the wishes are thought over after everything that happens.
//!
//! **Narrower.** Were all of these jobs at their least, [`Market::plan`] would admit some of those that wait. Those get their least
//! windows; then the jobs at work have back as much of what they had as still fits, in the order of their turns. Whoever cannot have
//! all of it is asked to do with less. Where nobody would be admitted even so, nobody is asked.
//!
//! **Wider.** As on admission: when nobody waits for the pool, in the order of their turns, as much as is left, unless one of
//! the job's own tenant waits. Nobody gets wider by making somebody else narrower, so windows come to rest.

use std::collections::BTreeSet;

use super::super::JobSpec;
use super::plan::{Candidate, Market, Obstacle};

/// The widest window that ranks which join by themselves know what to do with.
const MOST_OF_HOSTS: u32 = 1024;

impl<'a> Market<'a> {
    /// The window that each of these jobs is to have, in their order. All are at work with the window that their properties
    /// have, and may have any of their range; the tickets tell who is older.
    pub fn windows(&self, elastic: &[(u64, &'a JobSpec)], queue: &[Candidate<'a>]) -> Vec<u32> {
        let mut squeezed = self.clone();
        for (_, spec) in elastic {
            squeezed.exchange(spec, spec.window, spec.least_window());
        }
        let plan = squeezed.clone().plan(queue.iter().copied());
        if !plan.admitted.is_empty() {
            let mut tenants = BTreeSet::new();
            for c in queue.iter().filter(|c| plan.admitted.iter().any(|(ticket, _)| *ticket == c.ticket)) {
                if let Some(amount) = Self::amount(c.spec, c.spec.least_window()) {
                    squeezed.take(c.spec, amount);
                }
                tenants.insert(c.spec.tenant.as_str());
            }
            return squeezed.in_turn(elastic, JobSpec::least_window, |market, spec| {
                let limited = tenants.contains(spec.tenant.as_str());
                market.widest_again(spec, limited)
            });
        }
        if plan.waiting.iter().any(|(_, obstacle, _)| !obstacle.is_of_tenant()) {
            return elastic.iter().map(|(_, spec)| spec.window).collect();
        }
        let waiting: BTreeSet<&str> = queue.iter().map(|c| c.spec.tenant.as_str()).collect();
        self.clone().in_turn(
            elastic,
            |spec| spec.window,
            |market, spec| {
                if waiting.contains(spec.tenant.as_str()) {
                    return spec.window;
                }
                let most = spec.window_range.map_or(spec.window, |range| range.most.min(MOST_OF_HOSTS));
                market.largest_window(spec, most).map_or(spec.window, |widest| widest.max(spec.window))
            },
        )
    }

    /// Lets each choose, one after the other in the order of their turns, beside what it has in this market.
    fn in_turn(
        mut self,
        elastic: &[(u64, &'a JobSpec)],
        has: impl Fn(&JobSpec) -> u32,
        choose: impl Fn(&Self, &JobSpec) -> u32,
    ) -> Vec<u32> {
        let mut windows: Vec<u32> = elastic.iter().map(|(_, spec)| has(spec)).collect();
        let mut left: Vec<usize> = (0..elastic.len()).collect();
        let place = |market: &Self, i: usize| {
            let (ticket, spec) = elastic[i];
            market.place(&Candidate { ticket, spec, overtaken: 0 })
        };
        while let Some(next) = left.iter().copied().min_by_key(|&i| place(&self, i)) {
            left.retain(|&i| i != next);
            let spec = elastic[next].1;
            if let Some(amount) = Self::amount(spec, windows[next]) {
                self.give_back(spec, amount);
                windows[next] = choose(&self, spec);
            }
            if let Some(amount) = Self::amount(spec, windows[next]) {
                self.take(spec, amount);
            }
        }
        windows
    }

    /// The largest window, up to the one that it has, for which there is still room. Its tenant's limits count only where one
    /// that waits needs them: lowering them takes nothing away.
    fn widest_again(&self, spec: &JobSpec, limited: bool) -> u32 {
        let fits = |window: u32| match Self::amount(spec, window) {
            Some(_) if limited => self.obstacle_now(spec, window) == Obstacle::Nothing,
            Some(amount) => amount.memory <= self.free.memory,
            None => false,
        };
        let least = spec.least_window();
        (least..=spec.window).rev().find(|&window| fits(window)).unwrap_or(least)
    }

    fn exchange(&mut self, spec: &'a JobSpec, from: u32, to: u32) {
        if let (Some(from), Some(to)) = (Self::amount(spec, from), Self::amount(spec, to)) {
            self.give_back(spec, from);
            self.take(spec, to);
        }
    }
}
