//! Groups: child jobs of some of a job's ranks, which the ranks open and close by themselves.
//!
//! A group is named `JOB/GROUP` and has its job's token. It ends when its last rank leaves, when no
//! rank joins it for a while, and with its job.

use std::time::{Duration, Instant};

use super::job::is_name;
use super::{Action, Controller, Job, JobSpec, Refusal, State};

/// Most groups of a job at one time.
pub const MAX_GROUPS: usize = 256;
/// Most of them with rings, so that no job's ranks can take the whole pool.
pub const MAX_WITH_RINGS: usize = 32;
/// How long a group without ranks waits for some.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a failed group stays, so that its ranks are told why.
const FAILED_TIMEOUT: Duration = Duration::from_secs(10);

/// The result of [`Controller::open_group`].
#[derive(Debug, Default)]
pub struct OpenedGroup {
    /// Its name.
    pub name: String,
    pub actions: Vec<Action>,
    /// Why it has no rings, if it was just created without: its ranks sum over the hosts' ring.
    pub without_rings: Option<Refusal>,
}

/// The job of a group, from the group's name; `None` for a job's name.
pub fn job_of(name: &str) -> Option<&str> {
    name.split_once('/').map(|(job, _)| job)
}

impl Controller {
    /// Opens a group of `ranks` of a job's ranks, or finds it if it is open. It gets as many rings
    /// as its job, or one, or none if there is no room for one.
    ///
    /// # Errors
    /// If the token or an argument is wrong, or the job has too many groups.
    pub fn open_group(
        &mut self,
        job: &str,
        token: &str,
        group: &str,
        ranks: u32,
        now: Instant,
    ) -> Result<OpenedGroup, Refusal> {
        let parent = self.job_for(job, token)?.spec.clone();
        check(&parent, group, ranks)?;
        let name = format!("{job}/{group}");
        if let Some(open) = self.jobs.get_mut(&name) {
            if open.spec.ranks != ranks {
                return Err(Refusal::Exists(format!(
                    "group {name}: is open already, with {} ranks instead of {ranks}",
                    open.spec.ranks
                )));
            }
            open.idle_since = Some(now);
            return Ok(OpenedGroup { name, ..OpenedGroup::default() });
        }
        if self.groups_of(job).count() >= MAX_GROUPS {
            return Err(Refusal::Exhausted(format!(
                "group {name}: job {job} has {MAX_GROUPS} groups already, which is the most"
            )));
        }
        let spec = JobSpec {
            name: name.clone(),
            ranks,
            elastic: None,
            // Boxes of a fabric may have no room for it.
            host_ring_fallback: true,
            is_group: true,
            ..parent
        };
        let one = JobSpec { rings: 1, ..spec.clone() };
        let with_rings = self.groups_of(job).filter(|group| !self.jobs[*group].rings.is_empty());
        let created = if with_rings.count() < MAX_WITH_RINGS {
            self.add_job(spec).or_else(|_| self.add_job(one.clone()))
        } else {
            Err(Refusal::Exhausted(format!(
                "group {name}: job {job} has {MAX_WITH_RINGS} groups with rings already, which is \
                 the most"
            )))
        };
        let (actions, without_rings) = match created {
            Ok(actions) => (actions, None),
            Err(why) => (self.add_job(without_rings(one))?, Some(why)),
        };
        let last_epoch = self.last_group_epoch;
        if let Some(open) = self.jobs.get_mut(&name) {
            (open.idle_since, open.last_epoch) = (Some(now), last_epoch);
        }
        Ok(OpenedGroup { name, actions, without_rings })
    }

    /// Removes the rings of a group, whose ranks then sum over the hosts' ring.
    pub fn remove_rings(&mut self, name: &str) -> Vec<Action> {
        let Some(job) = self.jobs.get_mut(name) else { return Vec::new() };
        let actions = job.teardown();
        self.pool.release(&job.spec, job.slots, &job.rings);
        job.rings.clear();
        job.spec = without_rings(job.spec.clone());
        actions
    }

    /// The names of a job's groups.
    pub(super) fn groups_of(&self, job: &str) -> impl Iterator<Item = &String> {
        let prefix = format!("{job}/");
        let from = self.jobs.range(prefix.clone()..);
        from.take_while(move |(name, _)| name.starts_with(&prefix))
            .filter(|(_, job)| job.spec.is_group)
            .map(|(name, _)| name)
    }

    /// Ends the epochs of a job's groups: its own has failed.
    pub(super) fn end_groups(&mut self, job: &str, reason: &str) -> Vec<Action> {
        let names: Vec<String> = self.groups_of(job).cloned().collect();
        let mut actions = Vec::new();
        for name in names {
            if let Some(group) = self.jobs.get_mut(&name).filter(|group| group.epoch.is_some()) {
                actions.extend(group.end_epoch(format!("job {job} has ended: {reason}")));
            }
        }
        actions
    }

    /// Deletes groups that no ranks have joined for too long.
    pub(super) fn delete_idle_groups(&mut self, now: Instant) -> Vec<Action> {
        let late = |job: &mut Job| job.spec.is_group && job.is_idle(now);
        let names: Vec<String> = self
            .jobs
            .iter_mut()
            .filter_map(|(name, job)| late(job).then(|| name.clone()))
            .collect();
        names.iter().filter_map(|name| self.delete_job(name).ok()).flatten().collect()
    }
}

impl Job {
    /// Whether no ranks have joined for too long.
    fn is_idle(&mut self, now: Instant) -> bool {
        if self.epoch.is_some() || self.has_waiters() {
            return false;
        }
        let since = *self.idle_since.get_or_insert(now);
        let timeout = match self.state {
            State::Failed(_) => FAILED_TIMEOUT,
            _ => IDLE_TIMEOUT,
        };
        now.saturating_duration_since(since) > timeout
    }
}

/// The properties of a group that no box sums.
fn without_rings(spec: JobSpec) -> JobSpec {
    JobSpec { rings: 0, largest_mtu: None, ..spec }
}

/// Checks that a job can have such a group.
fn check(job: &JobSpec, group: &str, ranks: u32) -> Result<(), Refusal> {
    let JobSpec { name, ranks: most, .. } = job;
    if job.is_group {
        let message = format!("job `{name}`: is a group itself: open groups of its job");
        return Err(Refusal::Invalid(message));
    }
    if job.in_band || job.members.is_part() {
        let message = format!("job `{name}`: its ranks do not join, and cannot open groups");
        return Err(Refusal::NotNow(message));
    }
    if !is_name(group) {
        return Err(Refusal::Invalid(format!(
            "group `{group}`: must be 1 to 64 of a-z, 0-9, `.`, `_`, `-`"
        )));
    }
    if !(2..=*most).contains(&ranks) {
        return Err(Refusal::Invalid(format!(
            "group {name}/{group}: {ranks} ranks: must be 2 to {most}, as many as job {name} has"
        )));
    }
    Ok(())
}
