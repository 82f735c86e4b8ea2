//! The agent: carries the controller's actions out in this machine's data plane.

use std::collections::HashMap;
use std::iter::{Peekable, from_fn};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use netsum_common::abi::{Address, Hop};
use netsum_controller::executor::{Executor, new_program_generation};
use netsum_controller::state;
use netsum_controller::waiters::Waiters;
use netsum_core::ended::Ended;
use netsum_core::plane::{FlowSpec, FlowStats, RingSpec};
use netsum_core::saved::Saved;
use netsum_core::watch::{RingTimeouts, Watch};
use netsum_core::{Action, Controller, JobSpec, Refusal, RoutedConnection};
use netsum_dataplane::{DataPlane, EndedRing};

use super::memory;
use super::spread::Spreader;
use super::tracers::Tracers;

/// A manager that has not called for this long counts as gone; it calls every two seconds.
pub const MANAGER_TIMEOUT: Duration = Duration::from_secs(10);

/// The state of a box: the controller, and its agent as executor.
pub type Shared = state::Shared<Agent>;
/// The state behind the lock.
pub type Inner = state::Inner<Agent>;

/// The data plane, and what is known of this machine.
pub struct Agent {
    pub plane: Box<dyn DataPlane>,
    pub reserved: Reserved,
    /// Next hops last known, by the packets' destination and the box's MAC address where they
    /// arrive.
    pub next_hops: HashMap<(IpAddr, [u8; 6]), Hop>,
    /// Spreads unsummed flows, if there are uplinks for that.
    pub spread: Option<Spreader>,
    /// The time when the programs were attached, which tells them from earlier ones of this daemon
    /// or another.
    pub program_generation: u64,
    /// Watches active rings.
    pub watch: Watch,
    /// Number of clients that watch for unknown connections.
    pub watchers: u32,
    /// Tracks flows that have ended.
    pub ended: Ended,
    /// The clients that trace packets.
    pub tracers: Tracers,
    /// The aggregation rate of one CPU, in bytes per second; `None` if unknown.
    pub aggregation_rate: Option<u64>,
}

/// Addresses that belong to a port without any flow, by source.
#[derive(Debug, Default)]
pub struct Reserved {
    pub the_box: HashMap<Address, u32>,
    /// Next hops of ranks, at the ports of these ranks.
    pub routers: HashMap<Address, u32>,
    /// Gateways of this machine's routes, at the ports that they are behind.
    pub gateways: HashMap<Address, u32>,
    /// As a fabric's manager reports: ranks behind other boxes, at the ports towards these, and the
    /// manager if it is behind a port of this box.
    pub fabric: HashMap<Address, u32>,
    /// A manager elsewhere, at the port towards it. Removed after it has not called for
    /// [`MANAGER_TIMEOUT`], because it may be behind another port by then, and could not report
    /// that.
    pub manager: HashMap<Address, u32>,
    /// The time of its last call.
    pub called: Option<Instant>,
}

impl Agent {
    pub fn new(plane: Box<dyn DataPlane>, timeouts: RingTimeouts) -> Self {
        Self {
            plane,
            reserved: Reserved::default(),
            next_hops: HashMap::new(),
            spread: None,
            program_generation: new_program_generation(),
            watch: Watch::new(timeouts),
            watchers: 0,
            ended: Ended::default(),
            tracers: Tracers::default(),
            aggregation_rate: None,
        }
    }

    /// Updates the data plane's reserved addresses.
    pub fn reserve(&mut self) -> anyhow::Result<()> {
        let Reserved { the_box, routers, gateways, fabric, manager, .. } = &self.reserved;
        let all = manager.iter().chain(fabric).chain(gateways).chain(routers).chain(the_box);
        self.plane.reserve(all.map(|(address, place)| (*address, *place)).collect())
    }

    /// The aggregation rate of all CPUs for rings, in bytes per second; `None` if unknown.
    pub fn aggregation_rate(&self, controller: &Controller) -> Option<u64> {
        Some(self.aggregation_rate? * controller.cpus() as u64)
    }

    /// Forgets flows that ended long ago, and a manager that has not called for long, and detaches
    /// from former ports.
    pub fn expire(&mut self, controller: &Controller, now: Instant) -> anyhow::Result<()> {
        let is_silent = self.reserved.called.is_some_and(|called| now > called + MANAGER_TIMEOUT);
        if is_silent && !self.reserved.manager.is_empty() {
            self.reserved.manager.clear();
            self.reserve()?;
        }
        let flows = self.plane.ended_flows()?;
        self.plane.forget_ended(&self.ended.observe(&flows, now))?;
        self.detach_if_done(controller)
    }

    /// Detaches from interfaces that are no longer ports, unless data of ended flows may come from
    /// them.
    fn detach_if_done(&mut self, controller: &Controller) -> anyhow::Result<()> {
        let flows = self.plane.ended_flows()?;
        let ports = controller.ports();
        let is_needed = |i: &u32| {
            ports.iter().any(|p| p.ifindex == *i) || flows.iter().any(|f| f.ifindex == *i)
        };
        let done: Vec<u32> = self.plane.attached().into_iter().filter(|i| !is_needed(i)).collect();
        done.into_iter().try_for_each(|ifindex| self.plane.detach(ifindex))
    }

    /// Carries out one action, together with following ones that fit into the same change.
    fn carry_out(
        &mut self,
        controller: &Controller,
        waiters: &mut Waiters,
        action: Action,
        rest: &mut Peekable<impl Iterator<Item = Action>>,
    ) -> anyhow::Result<()> {
        log::debug!("{action:?}");
        match action {
            Action::CreateRing(ring) => {
                let next = || match rest.next_if(|a| matches!(a, Action::CreateRing(_)))? {
                    Action::CreateRing(ring) => Some(ring),
                    _ => None,
                };
                let rings: Vec<RingSpec> = std::iter::once(ring).chain(from_fn(next)).collect();
                self.plane.create_rings(&rings)
            }
            Action::ResetCounters(ring) => self.plane.reset_counters(ring),
            Action::AddFlow(flow) => self.plane.add_flow(&flow),
            Action::AddInBandToken(token, job) => self.plane.add_in_band_token(token, job),
            Action::RemoveInBandToken(token) => self.plane.remove_in_band_token(token),
            Action::ActivateRing(ring, ports) => {
                let connections = controller
                    .routed_connections()
                    .filter(|c: &RoutedConnection| c.to.ring == ring.id);
                for connection in connections {
                    let known = self.next_hops.get(&(connection.dst, connection.own));
                    let unknown = Hop { own: connection.own, dst: [0; 6], src: [0; 6] };
                    self.plane.set_hop(connection.to, known.unwrap_or(&unknown))?;
                }
                self.plane.activate_ring(&ring, &ports)
            }
            Action::ForgetEnded(flows) => self.plane.forget_ended(&flows),
            Action::DeleteRing { ring: id, flows, ports } => {
                let next = || match rest.next_if(|a| matches!(a, Action::DeleteRing { .. }))? {
                    Action::DeleteRing { ring: id, flows, ports } => {
                        Some(EndedRing { id, flows, ports })
                    }
                    _ => None,
                };
                let ring = EndedRing { id, flows, ports };
                let rings: Vec<EndedRing> = std::iter::once(ring).chain(from_fn(next)).collect();
                self.plane.delete_rings(&rings)
            }
            Action::Reply { waiter, result } => {
                waiters.answer(waiter, result);
                Ok(())
            }
        }
    }
}

impl Executor for Agent {
    fn carry_out(
        &mut self,
        controller: &Controller,
        waiters: &mut Waiters,
        _: Option<&str>,
        actions: Vec<Action>,
    ) -> anyhow::Result<()> {
        let (mut actions, mut result) = (actions.into_iter().peekable(), Ok(()));
        while let Some(action) = actions.next() {
            result = result.and(self.carry_out(controller, waiters, action, &mut actions));
        }
        result
    }

    fn admit(&self, controller: &mut Controller, spec: &JobSpec) -> Result<(), Refusal> {
        if spec.host_ring_fallback {
            let why = "--host-ring-fallback: only a fabric's manager chooses boxes";
            return Err(Refusal::Invalid(why.into()));
        }
        memory::update(controller);
        Ok(())
    }

    fn program_generation(&self, _: &str) -> u64 {
        self.program_generation
    }

    fn flow_stats(&self, flow: &FlowSpec) -> Option<FlowStats> {
        self.plane.flow_stats(flow.key()).ok()
    }

    fn save(&self, saved: &mut Saved) {
        saved.aggregation_rate = self.aggregation_rate;
    }
}
