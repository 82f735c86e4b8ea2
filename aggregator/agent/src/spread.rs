//! Spreads unsummed flows over the uplinks that the configuration names. Attaches the program where
//! hosts' packets come to be routed, updates which uplinks have a carrier, and answers queries.
//! [`spread_uplinks`](super::spread_uplinks) calls it periodically.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::Result;
use netsum_api::v1 as api;
use netsum_dataplane::pins::Pins;
use netsum_dataplane::spread::{FlowEndpoints, Spread, Uplink};
use tonic::Status;

use super::link::Interface;
use super::port_selection::PortSelection;
use crate::config::Ports;

/// Interval at which the bytes of flows are summed.
const COUNTS: Duration = Duration::from_secs(1);

/// The uplinks of a box, and the flows on them.
pub struct Spreader {
    spread: Spread,
    names: Vec<String>,
    chosen: PortSelection,
    /// The state last given to the program, and when.
    reported: (Vec<Uplink>, Option<Instant>),
    /// The last error, which has been logged.
    problem: String,
}

impl Spreader {
    /// Loads the program if there are uplinks to spread flows over; otherwise removes what an
    /// earlier daemon has left.
    ///
    /// # Errors
    /// If the kernel does not accept the program.
    pub fn start(names: &[String], pins: Option<&Pins>) -> Result<Option<Self>> {
        if names.is_empty() {
            pins.map_or(Ok(()), Pins::remove_spread)?;
            return Ok(None);
        }
        let (spread, names) = (Spread::load(pins)?, names.to_vec());
        let chosen = PortSelection::of(Ports::List(names.clone()));
        Ok(Some(Self {
            spread,
            names,
            chosen,
            reported: Default::default(),
            problem: String::new(),
        }))
    }

    /// Updates the program from the interfaces, of which `ports` are the box's. Each error is
    /// logged once.
    pub fn update(&mut self, interfaces: Result<Vec<Interface>>, ports: &[u32], now: Instant) {
        let done = interfaces.and_then(|interfaces| self.try_update(&interfaces, ports, now));
        let problem = done.map_or_else(|e| format!("{e:#}"), |()| String::new());
        if !problem.is_empty() && problem != self.problem {
            log::error!("flows are not spread: {problem}");
        }
        self.problem = problem;
    }

    fn try_update(&mut self, interfaces: &[Interface], ports: &[u32], now: Instant) -> Result<()> {
        self.chosen.find(interfaces);
        // A missing uplink keeps its place.
        let is_up = |ifindex: u32| interfaces.iter().any(|l| l.ifindex == ifindex && l.up);
        let ifindexes = self.chosen.ifindexes();
        let uplinks: Vec<Uplink> =
            ifindexes.iter().map(|&ifindex| Uplink { ifindex, up: is_up(ifindex) }).collect();
        let counted = self.reported.1.is_some_and(|at| now.duration_since(at) < COUNTS);
        if !counted || self.reported.0 != uplinks {
            self.spread.set_uplinks(&uplinks, now)?;
            self.reported = (uplinks, Some(now));
        }
        let is_host =
            |l: &&Interface| ports.contains(&l.ifindex) && !ifindexes.contains(&l.ifindex);
        let hosts = interfaces.iter().filter(is_host);
        let attachments: HashSet<u32> = hosts.map(|l| l.bridge.unwrap_or(l.ifindex)).collect();
        self.spread.attach_exactly(&attachments)
    }

    /// Detaches the program.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn stop(mut self) -> Result<()> {
        self.spread.attach_exactly(&HashSet::new())
    }

    /// All uplinks and flows.
    ///
    /// # Errors
    /// If the maps cannot be read.
    pub fn show(&mut self) -> Result<api::Spread> {
        let name = |place: u32| self.names.get(place as usize).cloned().unwrap_or_default();
        let flow = |(key, flow): (_, netsum_common::abi::SpreadFlow)| {
            let FlowEndpoints { src, dst, src_port } = FlowEndpoints::from(key);
            let (src, dst, src_port) = (src.to_string(), dst.to_string(), src_port.into());
            let (uplink, pinned) = (name(flow.uplink), flow.given != 0);
            api::SpreadFlow { src, src_port, dst, uplink, pinned, bytes: flow.bytes }
        };
        let mut flows: Vec<api::SpreadFlow> = self.spread.flows()?.into_iter().map(flow).collect();
        flows.sort_by(|a, b| (&a.src, a.src_port, &a.dst).cmp(&(&b.src, b.src_port, &b.dst)));
        let uplink = |(uplink, name): (netsum_common::abi::SpreadUplink, &String)| {
            let own = || flows.iter().filter(|flow| flow.uplink == *name);
            let (flows, bytes) = (own().count() as u32, own().map(|flow| flow.bytes).sum());
            api::SpreadUplink { name: name.clone(), up: uplink.up != 0, flows, bytes }
        };
        let uplinks = self.spread.uplinks()?.into_iter().zip(&self.names).map(uplink).collect();
        Ok(api::Spread { uplinks, flows })
    }

    /// Pins a flow to an uplink, or leaves the choice to the box again.
    pub fn pin(&mut self, flow: FlowEndpoints, uplink: Option<&str>) -> Result<(), Status> {
        let done = match uplink {
            Some(name) => {
                let place = self.names.iter().position(|n| n == name).ok_or_else(|| {
                    let names = self.names.join(", ");
                    Status::not_found(format!("uplink `{name}`: flows are spread over {names}"))
                })?;
                self.spread.pin(flow, place as u32)
            }
            None => self.spread.unpin(flow),
        };
        done.map_err(|e| Status::resource_exhausted(format!("{e:#}")))
    }
}
