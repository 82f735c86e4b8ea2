//! Who owns which address: what belongs to a rank on one port, no other may have on another port.

use super::{Controller, Refusal};
use crate::plane::FlowSpec;

impl Controller {
    /// That the senders of these flows of a job have their addresses to themselves.
    pub(super) fn check_owners(&self, job: &str, flows: &[FlowSpec]) -> Result<(), Refusal> {
        let of_others = self.jobs.values().filter(|j| j.spec.name != job).flat_map(|j| &j.flows);
        let known: Vec<&FlowSpec> = of_others.chain(flows).collect();
        for flow in flows {
            for other in known.iter().filter(|o| o.ifindex != flow.ifindex) {
                let what = if other.src == flow.src {
                    format!("address {}", flow.src)
                } else if flow.src_mac.is_some() && other.src_mac == flow.src_mac {
                    format!("the MAC address of {}", flow.src)
                } else {
                    continue;
                };
                return Err(Refusal::Exists(format!(
                    "rank {}: {what} belongs to a rank behind another port already",
                    flow.rank
                )));
            }
        }
        Ok(())
    }
}
