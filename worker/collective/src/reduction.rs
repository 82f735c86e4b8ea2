//! The hosts' ring: an all-reduce of one message by reduce-scatter, then all-gather, in 2 (N - 1)
//! steps.
//!
//! The lanes are cut in N parts. In step s a rank sends to the next rank the part that it received
//! in step s - 1. In the first N - 1 steps it adds its own lanes before that. Then part p is
//! complete at rank p - 1, and goes around the ring once more.

use std::collections::HashMap;
use std::ops::Range;

use crate::buffer::Buffer;
use crate::numeric::reference::add_lanes;

/// The reduction of one message.
#[derive(Debug, Default)]
pub struct Reduction {
    /// This rank's own lanes, which become the sum; `None` until this rank takes part.
    lanes: Option<Buffer>,
    /// Steps received.
    received: u32,
    /// Steps that arrived before this rank took part.
    early: Early,
}

/// Steps that wait, concatenated in memory that is reused.
#[derive(Debug, Default)]
struct Early {
    /// Their numbers, and where they end.
    steps: Vec<(u32, usize)>,
    parts: Vec<u8>,
}

impl Early {
    fn push(&mut self, step: u32, part: &[u8]) {
        self.parts.extend_from_slice(part);
        self.steps.push((step, self.parts.len()));
    }

    fn clear(&mut self) {
        self.steps.clear();
        self.parts.clear();
    }
}

/// A rank, and how many there are.
#[derive(Clone, Copy, Debug)]
pub struct RingPosition {
    pub rank: u32,
    pub ranks: u32,
}

impl RingPosition {
    fn steps(self) -> u32 {
        2 * (self.ranks - 1)
    }

    /// The part that is sent in a step, as bytes.
    fn sent(self, step: u32, len: usize) -> Range<usize> {
        self.part((self.rank + 2 * self.ranks - step) % self.ranks, len)
    }

    /// The part that is received in a step from the previous rank.
    fn received(self, step: u32, len: usize) -> Range<usize> {
        self.part((self.rank + 3 * self.ranks - 1 - step) % self.ranks, len)
    }

    fn part(self, part: u32, len: usize) -> Range<usize> {
        let (lanes, part, parts) = (len / 4, part as usize, self.ranks as usize);
        lanes * part / parts * 4..lanes * (part + 1) / parts * 4
    }
}

/// A step does not fit: the ranks disagree about the message.
#[derive(Debug, PartialEq, Eq)]
pub struct StepMismatch;

impl Reduction {
    /// Adds this rank's lanes. Calls `send(step, lanes)` for each part to be sent.
    pub fn contribute(
        &mut self,
        member: RingPosition,
        lanes: Buffer,
        mut send: impl FnMut(u32, &[u8]),
    ) -> Result<(), StepMismatch> {
        send(0, &lanes[member.sent(0, lanes.len())]);
        self.lanes = Some(lanes);
        let mut early = std::mem::take(&mut self.early);
        let mut start = 0;
        for &(step, end) in &early.steps {
            self.step(member, step, &early.parts[start..end], &mut send)?;
            start = end;
        }
        early.clear();
        self.early = early;
        Ok(())
    }

    /// Processes a step from the previous rank.
    pub fn step(
        &mut self,
        member: RingPosition,
        step: u32,
        part: &[u8],
        mut send: impl FnMut(u32, &[u8]),
    ) -> Result<(), StepMismatch> {
        let Some(lanes) = &mut self.lanes else {
            // Steps arrive in order.
            if step >= member.steps() || step as usize != self.early.steps.len() {
                return Err(StepMismatch);
            }
            self.early.push(step, part);
            return Ok(());
        };
        if step != self.received || step >= member.steps() {
            return Err(StepMismatch);
        }
        let range = member.received(step, lanes.len());
        if part.len() != range.len() {
            return Err(StepMismatch);
        }
        let own = &mut lanes[range];
        if step < member.ranks - 1 {
            add_lanes(own, part)
        } else {
            own.copy_from_slice(part)
        }
        self.received += 1;
        if self.received < member.steps() {
            send(self.received, own);
        }
        Ok(())
    }

    /// Whether the lanes are the sum.
    pub fn is_done(&self, member: RingPosition) -> bool {
        self.lanes.is_some() && self.received == member.steps()
    }

    /// Returns the lanes, and resets the reduction.
    fn finish(&mut self) -> Buffer {
        self.received = 0;
        self.early.clear();
        self.lanes.take().unwrap_or_default()
    }
}

/// Reductions by ring and message number.
#[derive(Debug, Default)]
pub struct Reductions {
    open: HashMap<(u32, u64), Reduction>,
    /// Completed ones; kept to reuse their memory.
    spare: Vec<Reduction>,
}

impl Reductions {
    /// The reduction of a message; a new one if there is none.
    pub fn of(&mut self, ring: u32, number: u64) -> &mut Reduction {
        self.open.entry((ring, number)).or_insert_with(|| self.spare.pop().unwrap_or_default())
    }

    /// The sum of a message, if it is complete.
    pub fn take_done(&mut self, member: RingPosition, ring: u32, number: u64) -> Option<Buffer> {
        let key = (ring, number);
        self.open.get(&key).filter(|reduction| reduction.is_done(member))?;
        let mut reduction = self.open.remove(&key)?;
        let sum = reduction.finish();
        self.spare.push(reduction);
        Some(sum)
    }

    /// Forgets complete sums of a ring before message `before`, and all reductions before `oldest`,
    /// which no rank can still need.
    pub fn forget_done(&mut self, member: RingPosition, ring: u32, before: u64, oldest: u64) {
        self.open.retain(|(r, n), reduction| {
            *r != ring || *n >= before || *n >= oldest && !reduction.is_done(member)
        });
    }

    pub fn clear(&mut self) {
        self.open.clear();
    }

    /// Open reductions.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Whether there is no open reduction.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    #[test]
    fn all_ranks_get_the_sum_whichever_is_late() {
        for ranks in 2..=9u32 {
            for lanes in [0usize, 1, 4, 5, 37, 64] {
                for late in 0..ranks as usize {
                    let own = |r: u32| -> Vec<u8> {
                        (0..lanes as u32)
                            .flat_map(|i| (i * 1000 + r * r + 1).to_le_bytes())
                            .collect()
                    };
                    let mut sum = vec![0; lanes * 4];
                    (0..ranks).for_each(|r| add_lanes(&mut sum, &own(r)));
                    let mut reductions: Vec<_> = (0..ranks).map(|_| Reduction::default()).collect();
                    let mut queues: Vec<VecDeque<(u32, Vec<u8>)>> =
                        vec![VecDeque::new(); ranks as usize];
                    let order = (0..ranks as usize).filter(|r| *r != late).chain([late]);
                    for r in order {
                        let member = RingPosition { rank: r as u32, ranks };
                        let next = (r + 1) % ranks as usize;
                        reductions[r]
                            .contribute(member, own(r as u32).into(), |s, l| {
                                queues[next].push_back((s, l.to_vec()))
                            })
                            .unwrap();
                        // All ranks process what has arrived.
                        while let Some(r) = (0..ranks as usize).find(|r| !queues[*r].is_empty()) {
                            let (step, part) = queues[r].pop_front().unwrap();
                            let member = RingPosition { rank: r as u32, ranks };
                            let next = (r + 1) % ranks as usize;
                            reductions[r]
                                .step(member, step, &part, |s, l| {
                                    queues[next].push_back((s, l.to_vec()))
                                })
                                .unwrap();
                        }
                    }
                    for (r, mut reduction) in reductions.into_iter().enumerate() {
                        assert!(
                            reduction.is_done(RingPosition { rank: r as u32, ranks }),
                            "{ranks} {lanes} {late}"
                        );
                        assert_eq!(*reduction.finish(), *sum, "rank {r} of {ranks}, {lanes} lanes");
                    }
                }
            }
        }
    }

    #[test]
    fn steps_that_do_not_fit_are_refused() {
        let member = RingPosition { rank: 0, ranks: 3 };
        let mut r = Reduction::default();
        r.contribute(member, vec![0; 24].into(), |_, _| ()).unwrap();
        assert_eq!(r.step(member, 1, &[0; 8], |_, _| ()), Err(StepMismatch), "not the next step");
        assert_eq!(r.step(member, 0, &[0; 4], |_, _| ()), Err(StepMismatch), "another length");
        assert_eq!(r.step(member, 0, &[0; 8], |_, _| ()), Ok(()));
        assert_eq!(
            r.step(member, u32::MAX, &[0; 8], |_, _| ()),
            Err(StepMismatch),
            "after the last step"
        );
    }

    #[test]
    fn early_steps_are_those_of_one_round_in_their_order() {
        let member = RingPosition { rank: 0, ranks: 3 };
        let mut r = Reduction::default();
        assert_eq!(r.step(member, u32::MAX, &[0; 8], |_, _| ()), Err(StepMismatch));
        for step in 0..4 {
            assert_eq!(r.step(member, step + 1, &[0; 8], |_, _| ()), Err(StepMismatch));
            assert_eq!(r.step(member, step, &[0; 8], |_, _| ()), Ok(()));
        }
        assert_eq!(r.step(member, 4, &[0; 8], |_, _| ()), Err(StepMismatch));
    }
}
