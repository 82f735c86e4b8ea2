//! The ranks' reports to the orchestrator, and the orchestrator's summary.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// The accuracy that a demo must exceed.
pub const LEAST_ACCURACY: f64 = 0.95;
/// With fewer epochs, [`LEAST_ACCURACY`] is not expected.
pub const ENOUGH_EPOCHS: usize = 10;
/// Ethernet, IPv4, UDP, BTH and ICRC in bytes.
pub(crate) const HEADERS: u64 = 14 + 20 + 8 + 12 + 4;

/// One line of JSON on a rank's standard output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Line {
    /// The connections are up; training begins.
    Connected,
    /// A step is done.
    Step {
        /// From 0.
        step: usize,
        /// Mean loss over all ranks' images.
        loss: f32,
        /// The time of its all-reduce, in seconds.
        took: f64,
        /// Whether the sum came from the box.
        by_box: bool,
    },
    /// Training is done; the connections are still up.
    Trained(Trained),
}

/// The result of a training.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trained {
    pub steps: usize,
    /// The fraction of the test images that the model gets right.
    pub accuracy: f64,
    /// A fingerprint of the weights, 16 hexadecimal digits.
    pub fingerprint: String,
    pub all_reduces: u64,
    /// All-reduces whose sums came from the box.
    pub by_box: u64,
    /// Messages whose check lanes were correct.
    pub sums_verified: u64,
    pub is_sealed: bool,
    /// Packets sent more than once.
    pub retransmissions: u64,
    /// Time of the training without connecting, in seconds.
    pub seconds: f64,
}

/// Bytes on a link of a host or of a rack: Ethernet frames without preamble and frame check
/// sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkBytes {
    /// From the host to the box, or from the rack's box to the spine.
    pub sent: u64,
    /// The other way.
    pub received: u64,
}

/// The training with the hosts' ring instead of the box.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ring {
    /// Measured while the ranks trained, in rank order.
    pub links: Vec<LinkBytes>,
    /// The same between racks and spine; empty with one box.
    pub uplinks: Vec<LinkBytes>,
    /// Time of the training without connecting, in seconds.
    pub seconds: f64,
    /// Whether all ranks' weights have the bits of the reference.
    pub identical: bool,
}

/// The training with sealed sums.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sealed {
    /// Time of the training without connecting, in seconds.
    pub seconds: f64,
    /// Whether all ranks' weights have the bits of the reference.
    pub identical: bool,
    /// Whether the box made all sums, and all were sealed.
    pub by_box: bool,
}

/// All results of the demo.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Hosts, one rank on each.
    pub hosts: usize,
    /// Number of times that all images were used.
    pub epochs: usize,
    /// Seed of the first weights, the order of the images, and the losses.
    pub seed: u64,
    /// The fraction of packets lost in each direction at each host.
    pub drop: f64,
    /// Packets lost on all links; `None` if losses were not asked for.
    pub lost: Option<u64>,
    /// Path MTU in bytes.
    pub mtu: u32,
    /// Floats summed in each step.
    pub floats: usize,
    /// The result of each rank, in rank order.
    pub ranks: Vec<Trained>,
    /// The same training in one process.
    pub reference: Trained,
    /// Whether all ranks' weights have the same bits.
    pub ranks_identical: bool,
    /// Whether these are the bits of the reference.
    pub reference_identical: bool,
    /// The box's counters, by their names in `netsum stats`.
    pub counters: BTreeMap<String, u64>,
    /// Measured while the ranks trained, in rank order.
    pub links: Vec<LinkBytes>,
    /// The same between racks and spine; empty with one box.
    pub uplinks: Vec<LinkBytes>,
    /// The same training, with the sums done by the hosts' ring.
    pub ring: Option<Ring>,
    /// The same training, with sealed sums.
    pub sealed: Option<Sealed>,
    /// The failure, if one was asked for.
    pub failure: Option<Failure>,
    /// Mean loss of each step.
    pub loss: Vec<f32>,
}

/// Bytes that one host sends, and also receives, if a ring adds up `floats` floats `steps` times in
/// the best case.
///
/// These are 2 (N-1) messages of ceil(floats / N) floats for each host and step, in packets of
/// `mtu` bytes with their headers, without acknowledgements and retransmissions.
pub fn ring_bytes(hosts: usize, floats: usize, mtu: u32, steps: usize) -> u64 {
    let chunk = 4 * floats.div_ceil(hosts) as u64;
    let packets = chunk.div_ceil(u64::from(mtu));
    (steps * 2 * (hosts - 1)) as u64 * (chunk + packets * HEADERS)
}

impl Summary {
    /// The promises that were not kept.
    pub fn complaints(&self) -> Vec<String> {
        let mut all = Vec::new();
        if !self.ranks_identical {
            let prints: Vec<_> = self.ranks.iter().map(|r| r.fingerprint.as_str()).collect();
            all.push(format!("the ranks' weights differ: {}", prints.join(" ")));
        }
        if !self.reference_identical {
            let (ranks, one) = (&self.ranks[0].fingerprint, &self.reference.fingerprint);
            all.push(format!("the weights ({ranks}) are not those of one process ({one})"));
        }
        if self.ring.as_ref().is_some_and(|ring| !ring.identical) {
            all.push("the weights of a ring's rank are not those of one process".to_owned());
        }
        if let Some(sealed) = &self.sealed {
            if !sealed.identical {
                all.push("the weights with sealed sums are not those of one process".to_owned());
            }
            if !sealed.by_box {
                all.push("the box did not make all sums that were to be sealed".to_owned());
            }
        }
        let (by_box, calls) = self.by_box();
        if let Some(failure) = &self.failure {
            all.extend(failure.complaint());
        } else if by_box != calls {
            all.push(format!(
                "THE BOX DID NOT SUM: {} of {} all-reduces were done by the hosts' ring",
                grouped(calls - by_box),
                grouped(calls)
            ));
        }
        for (rank, r) in self.ranks.iter().enumerate() {
            if r.accuracy <= LEAST_ACCURACY && self.epochs >= ENOUGH_EPOCHS {
                all.push(format!(
                    "rank {rank} gets {:.1} % of the test images right, but should exceed {:.0} %",
                    100.0 * r.accuracy,
                    100.0 * LEAST_ACCURACY
                ));
            }
        }
        all
    }

    /// The number of all-reduces that the box did, and that of all, counted at each rank.
    pub(crate) fn by_box(&self) -> (u64, u64) {
        self.ranks.iter().fold((0, 0), |(b, a), r| (b + r.by_box, a + r.all_reduces))
    }

    /// The component that did the sums, in a word.
    pub fn summed_by(&self) -> &'static str {
        let (by_box, all) = self.by_box();
        match by_box {
            _ if by_box == all => "box",
            0 => "ring",
            _ => "box and ring",
        }
    }

    /// The best case of a ring for the same number of steps: bytes that a host sends, and receives.
    pub fn ring_computed(&self) -> u64 {
        ring_bytes(self.hosts, self.floats, self.mtu, self.ranks[0].steps)
    }
}

/// A number with its digits in groups of three.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, d) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(d);
    }
    out
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::failure::tests::failure;

    pub(crate) fn summary() -> Summary {
        let trained = Trained {
            steps: 440,
            accuracy: 0.9749,
            fingerprint: "0123456789abcdef".to_owned(),
            all_reduces: 440,
            by_box: 440,
            sums_verified: 1320,
            is_sealed: false,
            retransmissions: 0,
            seconds: 1.5,
        };
        let link = LinkBytes { sent: 18_500_000, received: 18_600_000 };
        Summary {
            hosts: 4,
            epochs: 20,
            seed: 1,
            drop: 0.0,
            lost: None,
            mtu: 1024,
            floats: 9611,
            ranks: vec![trained.clone(); 4],
            reference: Trained { by_box: 0, seconds: 0.8, ..trained },
            ranks_identical: true,
            reference_identical: true,
            counters: [("contributions".to_owned(), 68_640), ("released".to_owned(), 17_160)]
                .into(),
            links: vec![link; 4],
            uplinks: Vec::new(),
            ring: None,
            sealed: None,
            failure: None,
            loss: (0..440).map(|i| 2.3 / (1.0 + i as f32 / 20.0)).collect(),
        }
    }

    #[test]
    fn a_ring_sends_the_bytes_of_the_formula() {
        // 4 hosts, 1024 floats: 6 messages of 1 KiB, one packet each.
        assert_eq!(ring_bytes(4, 1024, 1024, 1), 6 * (1024 + 58));
        assert_eq!(ring_bytes(4, 1025, 1024, 10), 60 * (1028 + 2 * 58));
        assert_eq!(ring_bytes(2, 512, 1024, 1), 2 * (1024 + 58));
    }

    #[test]
    fn success_has_no_complaints_and_each_broken_promise_has_one() {
        let good = summary();
        assert_eq!(good.complaints(), [""; 0]);
        assert_eq!(good.summed_by(), "box");
        let broken = |change: fn(&mut Summary)| {
            let mut s = summary();
            change(&mut s);
            s.complaints().join("; ")
        };
        assert!(broken(|s| s.ranks_identical = false).contains("weights differ"));
        assert!(broken(|s| s.reference_identical = false).contains("not those of one process"));
        assert!(broken(|s| s.ranks[2].accuracy = 0.95).contains("rank 2 gets 95.0 %"));
        let ring =
            |identical| Some(Ring { links: vec![], uplinks: vec![], seconds: 1.0, identical });
        assert_eq!(Summary { ring: ring(true), ..summary() }.complaints(), [""; 0]);
        assert_eq!(Summary { ring: ring(false), ..summary() }.complaints().len(), 1);
        let sealed = |identical, by_box| Some(Sealed { seconds: 1.0, identical, by_box });
        for (identical, by_box) in [(true, true), (true, false), (false, true)] {
            let complaints =
                Summary { sealed: sealed(identical, by_box), ..summary() }.complaints();
            assert_eq!(complaints.len(), usize::from(!(identical && by_box)));
        }
        let ring = broken(|s| s.ranks[3].by_box = 0);
        assert!(ring.contains("THE BOX DID NOT SUM: 440 of 1 760"), "{ring}");
        // During a failure, hosts may sum for a while.
        let failing = broken(|s| (s.ranks[3].by_box, s.failure) = (0, Some(failure())));
        assert_eq!(failing, "");
        // With one epoch the accuracy may be low.
        let one_epoch = broken(|s| {
            s.epochs = 1;
            s.ranks[0].accuracy = 0.7;
        });
        assert_eq!(one_epoch, "");
    }

    #[test]
    fn lines_survive_their_json() {
        let line = Line::Trained(summary().ranks[0].clone());
        let json = serde_json::to_string(&line).unwrap();
        assert!(json.starts_with(r#"{"event":"trained","steps":440"#), "{json}");
        assert_eq!(serde_json::from_str::<Line>(&json).unwrap(), line);
        let step = Line::Step { step: 3, loss: 0.1, took: 0.5, by_box: true };
        let step = serde_json::to_string(&step).unwrap();
        assert_eq!(step, r#"{"event":"step","step":3,"loss":0.1,"took":0.5,"by_box":true}"#);
    }

    #[test]
    fn digits_are_grouped() {
        assert_eq!(
            ["0", "999", "1 000", "12 345 678"],
            [0, 999, 1000, 12_345_678].map(grouped)[..]
        );
    }
}
