//! The programs attached to ports: `ingress`, and behind it `guard`.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context as _, Result};
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::tc::{SchedClassifierLink, SchedClassifierLinkId, TcAttachOptions};
use aya::programs::xdp::{XdpLink, XdpLinkId, XdpMode};
use aya::programs::{LinkOrder, TcAttachType};
use netsum_common::abi::{maps, programs};

use super::bpf::{Attachment, BpfDataPlane, Port, guard, ignore_missing, program};

impl BpfDataPlane {
    /// Attaches the programs. If `ingress` was detached, it is attached again, and `guard` stays
    /// meanwhile.
    pub(super) fn attach_port(&mut self, ifindex: u32) -> Result<()> {
        let gone = self.ports.get_mut(&ifindex).and_then(|port| port.ingress.take());
        self.detach_ingress(gone)?;
        let program = program(&mut self.ebpf, programs::INGRESS)?;
        // Only in the driver: in generic mode the clones of a broadcast share their data, and the
        // first one's headers would be in all of them.
        let id = program.attach_to_if_index(ifindex, XdpMode::Driver)?;
        let ingress = match &self.pins {
            Some(pins) => {
                let link = FdLink::try_from(program.take_link(id)?)?;
                Attachment::Pinned(link.pin(pins.link(ifindex))?)
            }
            None => Attachment::Owned(id),
        };
        let guard =
            self.ports.remove(&ifindex).and_then(|port| port.guard).or_else(|| self.guard(ifindex));
        self.ports.insert(ifindex, Port { ingress: Some(ingress), guard });
        Ok(())
    }

    /// `None` if it cannot be attached; the port is used without it.
    fn guard(&mut self, ifindex: u32) -> Option<Attachment<SchedClassifierLinkId>> {
        match self.attach_guard(ifindex) {
            Ok(attachment) => Some(attachment),
            Err(e) => {
                log::warn!(
                    "interface {ifindex} has no guard (Linux 6.6): if it loses its XDP program, \
                     contributions pass unsummed: {e:#}"
                );
                None
            }
        }
    }

    fn attach_guard(&mut self, ifindex: u32) -> Result<Attachment<SchedClassifierLinkId>> {
        let name = nix::net::if_::if_indextoname(ifindex)?.into_string()?;
        let guard = guard(&mut self.ebpf)?;
        let order = TcAttachOptions::TcxOrder(LinkOrder::first());
        let id = guard.attach_with_options(&name, TcAttachType::Ingress, order)?;
        Ok(match &self.pins {
            Some(pins) => {
                let path = pins.guard(ifindex);
                // The file of an attachment that was detached.
                if path.exists() {
                    std::fs::remove_file(&path)?;
                }
                Attachment::Pinned(FdLink::try_from(guard.take_link(id)?)?.pin(path)?)
            }
            None => Attachment::Owned(id),
        })
    }

    pub(super) fn detach_port(&mut self, ifindex: u32) -> Result<()> {
        let Some(port) = self.ports.remove(&ifindex) else { return Ok(()) };
        let detached = self.detach_ingress(port.ingress);
        match port.guard {
            Some(Attachment::Owned(link)) => guard(&mut self.ebpf)?.detach(link)?,
            Some(Attachment::Pinned(link)) => drop(link.unpin()?),
            None => {}
        }
        detached
    }

    /// Replaces the slaves of bonds; adds new ones first, so their packets are never taken for
    /// foreign ones meanwhile.
    pub(super) fn map_slaves(&mut self, slaves: HashMap<u32, u32>) -> Result<()> {
        let mut map = self.hash::<u32, u32>(maps::SLAVES)?;
        for (slave, bond) in &slaves {
            map.insert(slave, bond, 0)?;
        }
        let old: Vec<u32> = map.keys().collect::<Result<_, _>>()?;
        for slave in old.iter().filter(|slave| !slaves.contains_key(slave)) {
            ignore_missing(map.remove(slave))?;
        }
        self.slaves = slaves;
        Ok(())
    }

    /// The interfaces at which a port's packets arrive: the port itself, or the slaves if it is a
    /// bond.
    pub(super) fn receivers(&self, port: u32) -> Vec<u32> {
        let slaves = self.slaves.iter().filter(|(_, bond)| **bond == port).map(|(slave, _)| *slave);
        let slaves: Vec<u32> = slaves.collect();
        if slaves.is_empty() { vec![port] } else { slaves }
    }

    fn detach_ingress(&mut self, attachment: Option<Attachment<XdpLinkId>>) -> Result<()> {
        match attachment {
            Some(Attachment::Owned(link)) => {
                program(&mut self.ebpf, programs::INGRESS)?.detach(link)?
            }
            // Without its file the link ends when its last descriptor is closed, which is here.
            Some(Attachment::Pinned(link)) => drop(link.unpin()?),
            None => {}
        }
        Ok(())
    }

    /// Replaces the programs of pinned attachments by those of this process, in one step each and
    /// without missing a packet. Returns the interfaces.
    pub fn take_over_links(&mut self) -> Result<Vec<u32>> {
        let mut attached = Vec::new();
        let found = self.pins.as_ref().map_or(Vec::new(), |pins| pins.links());
        if let Some(pins) = &self.pins {
            // An earlier daemon was killed while it detached from these ports.
            for ifindex in pins.guards().into_iter().filter(|i| !found.contains(i)) {
                std::fs::remove_file(pins.guard(ifindex))?;
            }
        }
        for ifindex in found {
            let Some(pins) = &self.pins else { break };
            let (link, guarded) = (pins.link(ifindex), pins.guard(ifindex));
            let ingress = program(&mut self.ebpf, programs::INGRESS)?;
            let updated = taken_over(&link, |old| {
                let id = ingress.attach_to_link(XdpLink::try_from(old)?)?;
                // The file keeps the link, too; it is unpinned when the port is detached.
                ingress.take_link(id)?;
                Ok(())
            });
            let Some(attachment) = unless_gone(ifindex, &link, updated)? else {
                if guarded.exists() {
                    std::fs::remove_file(&guarded)?;
                }
                continue;
            };
            let guard = guard(&mut self.ebpf)?;
            let updated = taken_over(&guarded, |old| {
                let id = guard.attach_to_link(SchedClassifierLink::try_from(old)?)?;
                guard.take_link(id)?;
                Ok(())
            });
            let guard = match updated {
                Ok(link) => Some(Attachment::Pinned(link)),
                Err(_) => self.guard(ifindex),
            };
            self.ports
                .insert(ifindex, Port { ingress: Some(Attachment::Pinned(attachment)), guard });
            attached.push(ifindex);
        }
        Ok(attached)
    }
}

fn taken_over(path: &Path, update: impl FnOnce(FdLink) -> Result<()>) -> Result<PinnedLink> {
    let link = PinnedLink::from_pin(path).with_context(|| path.display().to_string())?;
    update(FdLink::from(link))?;
    Ok(PinnedLink::from_pin(path)?)
}

/// `None` if the interface was deleted; another interface may have its number now.
fn unless_gone(ifindex: u32, path: &Path, link: Result<PinnedLink>) -> Result<Option<PinnedLink>> {
    match link {
        Ok(link) => Ok(Some(link)),
        Err(e) => {
            log::warn!("dropped a stale attachment to interface {ifindex}: {e:#}");
            std::fs::remove_file(path)?;
            Ok(None)
        }
    }
}
