//! The cost of a whole fragment on its ring's CPU with few and with many ranks: a contribution that
//! claims the slot, those that are absorbed, the one that completes it, and each clone's egress.
//! The kernel's steering, cloning and sending are not included; see [`super::live`].

use anyhow::{Context, Result};
use serde::Serialize;

use super::paths::{Point, Runs, note, run};
use super::{Settings, gbps};
use netsum_lab::programs::Bench;

/// A fragment of a ring.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub ranks: u32,
    pub mtu: u32,
    /// Whether contributions' ICRC is verified.
    pub icrc: bool,
    /// ns of the first contribution.
    pub claim_ns: f64,
    /// ns of one that is neither the first nor the last; two ranks have none.
    pub absorb_ns: Option<f64>,
    /// ns of the last contribution.
    pub complete_ns: f64,
    /// ns of one clone's egress.
    pub egress_ns: f64,
    /// ns of the whole fragment.
    pub fragment_ns: f64,
    /// Fragments per second of one core, in thousands.
    pub kfragments: f64,
    /// Payload of contributions at that rate, in Gb/s.
    pub gbps: f64,
}

impl Row {
    /// Makes a row from the ns of its packets.
    fn new(ranks: u32, mtu: u32, icrc: bool, [claim, absorb, complete, egress]: [f64; 4]) -> Self {
        let fragment = claim + f64::from(ranks - 2) * absorb + complete + f64::from(ranks) * egress;
        Self {
            ranks,
            mtu,
            icrc,
            claim_ns: claim,
            absorb_ns: (ranks > 2).then_some(absorb),
            complete_ns: complete,
            egress_ns: egress,
            fragment_ns: fragment,
            kfragments: 1e6 / fragment,
            gbps: gbps(f64::from(ranks * mtu), fragment),
        }
    }
}

/// Measures fragments with every number of ranks and path MTU.
pub(super) fn measure(bench: &mut Bench, settings: &Settings) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &mtu in &settings.mtus {
        for &ranks in &settings.ranks {
            let at = Point { ranks, mtu, repeat: settings.repeat };
            let (ignored, verified) = (
                ["claim/ignore", "absorb/ignore", "complete/ignore"],
                [
                    "empty",
                    "reset",
                    "restore",
                    "claim/verify",
                    "absorb/verify",
                    "complete/verify",
                    "egress",
                ],
            );
            let mut runs = Runs::new();
            // The first round warms up; few rounds suffice, as there are many points.
            for round in 0..settings.rounds.div_ceil(2).max(2) {
                for path in ignored.into_iter().chain(verified) {
                    if ranks == 2 && path.starts_with("absorb") {
                        runs.insert(path, 0.0);
                        continue;
                    }
                    let ns = run(bench, path, &at)
                        .with_context(|| format!("{path}, {ranks} ranks, path MTU {mtu}"))?;
                    note(&mut runs, path, ns, round);
                }
            }
            for (icrc, claim, absorb, complete) in [
                (false, "claim/ignore", "absorb/ignore", "complete/ignore"),
                (true, "claim/verify", "absorb/verify", "complete/verify"),
            ] {
                let ns = [
                    runs[claim] - runs["reset"],
                    runs[absorb] - runs["reset"],
                    runs[complete] - runs["restore"],
                    runs["egress"] - runs["empty"],
                ];
                rows.push(Row::new(ranks, mtu, icrc, ns));
            }
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fragment_is_the_sum_of_its_packets() {
        let row = Row::new(4, 1000, true, [100.0, 200.0, 300.0, 50.0]);
        assert_eq!((row.fragment_ns, row.kfragments), (1000.0, 1000.0));
        // 4,000 bytes in a microsecond.
        assert_eq!((row.gbps, row.absorb_ns), (32.0, Some(200.0)));
        let two = Row::new(2, 1000, true, [100.0, f64::NAN, 300.0, 50.0]);
        assert_eq!(two.absorb_ns, None);
    }
}
