//! The hosts' ring: the sum of one message in 2 (N - 1) steps, each of which a rank starts when it
//! has received the one before.
//!
//! **An all-reduce** is a reduce-scatter, then an all-gather. The lanes are cut in N parts. In step
//! s a rank sends to the next rank the part that it received in step s - 1. In the first N - 1
//! steps it adds its own lanes before that. Then part p is complete at rank p - 1, and goes around
//! the ring once more. A rank sends 2 (N - 1) / N of the lanes.
//!
//! **A [`Chain`]** is a range of lanes that not all ranks need, or that only one rank contributes.
//! It goes around the ring at most once, from a first rank over some hops; each rank adds its own
//! lanes. It is cut in N pieces. Piece q makes hop h in step q + h, so that the pieces follow each
//! other, all within the same steps, and no step has more than 1 / N of the lanes. The lanes before
//! the first chain, which all ranks need, are an all-reduce.

use std::collections::HashMap;
use std::ops::Range;

use crate::buffer::Buffer;
use crate::numeric::reference::add_lanes;

/// Lanes that go around the ring at most once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chain {
    /// Their place in the message.
    bytes: Range<usize>,
    /// The place of the first rank that sends them.
    first: u32,
    /// How often they are sent.
    hops: u32,
    /// All other ranks than the first contribute zeros. So the lanes are the sum wherever they are.
    moves: bool,
}

impl Chain {
    /// Lanes whose sum only the rank at place `to` needs.
    pub fn to(to: u32, ranks: u32, bytes: Range<usize>) -> Self {
        Self { bytes, first: (to + 1) % ranks, hops: ranks - 1, moves: false }
    }

    /// Lanes of the rank at place `from` for all ranks up to place `to`, around the ring.
    pub fn between(from: u32, to: u32, ranks: u32, bytes: Range<usize>) -> Self {
        Self { bytes, first: from, hops: (to + ranks - from) % ranks, moves: true }
    }

    /// Hops before a rank has the lanes.
    fn distance(&self, of: RingPosition) -> u32 {
        (of.rank + of.ranks - self.first) % of.ranks
    }

    /// Whether a rank has the sum in the end.
    fn ends_at(&self, member: RingPosition) -> bool {
        let distance = self.distance(member);
        if self.moves { distance <= self.hops } else { distance == self.hops }
    }

    /// The piece that a rank sends in a step.
    fn sent(&self, sender: RingPosition, step: u32) -> Option<Range<usize>> {
        let distance = self.distance(sender);
        let piece = step.checked_sub(distance)?;
        if distance >= self.hops || piece >= sender.ranks {
            return None;
        }
        let Range { start, end } = sender.part(piece, self.bytes.len());
        Some(self.bytes.start + start..self.bytes.start + end)
    }
}

/// The reduction of one message.
#[derive(Debug, Default)]
pub struct Reduction {
    /// This rank's own lanes, which become the sum; `None` until this rank takes part.
    lanes: Option<Buffer>,
    /// Behind each other, at the end of the message.
    chains: Vec<Chain>,
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

    fn previous(self) -> Self {
        Self { rank: (self.rank + self.ranks - 1) % self.ranks, ..self }
    }

    /// What this rank sends of a message in a step, as bytes.
    fn sent(
        self,
        step: u32,
        chains: &[Chain],
        len: usize,
    ) -> impl Iterator<Item = Range<usize>> + use<'_> {
        let head = chains.first().map_or(len, |chain| chain.bytes.start);
        let part = self.part((self.rank + 2 * self.ranks - step) % self.ranks, head);
        std::iter::once(part).chain(chains.iter().filter_map(move |chain| chain.sent(self, step)))
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
    /// Adds this rank's lanes, which end with `chains`. Calls `send(step, pieces)` for what is to
    /// be sent in a step.
    pub fn contribute(
        &mut self,
        member: RingPosition,
        lanes: Buffer,
        chains: Vec<Chain>,
        mut send: impl FnMut(u32, &mut dyn Iterator<Item = &[u8]>),
    ) -> Result<(), StepMismatch> {
        send(0, &mut member.sent(0, &chains, lanes.len()).map(|piece| &lanes[piece]));
        (self.lanes, self.chains) = (Some(lanes), chains);
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
        mut received: &[u8],
        mut send: impl FnMut(u32, &mut dyn Iterator<Item = &[u8]>),
    ) -> Result<(), StepMismatch> {
        let Some(lanes) = &mut self.lanes else {
            // Steps arrive in order.
            if step >= member.steps() || step as usize != self.early.steps.len() {
                return Err(StepMismatch);
            }
            self.early.push(step, received);
            return Ok(());
        };
        if step != self.received || step >= member.steps() {
            return Err(StepMismatch);
        }
        let (chains, len) = (&self.chains, lanes.len());
        let pieces = || member.previous().sent(step, chains, len);
        if pieces().map(|piece| piece.len()).sum::<usize>() != received.len() {
            return Err(StepMismatch);
        }
        for (i, piece) in pieces().enumerate() {
            let (own, sum);
            (sum, received) = received.split_at(piece.len());
            own = &mut lanes[piece];
            if i == 0 && step >= member.ranks - 1 {
                own.copy_from_slice(sum)
            } else {
                add_lanes(own, sum)
            }
        }
        self.received += 1;
        if self.received < member.steps() {
            let pieces = member.sent(self.received, chains, len);
            send(self.received, &mut pieces.map(|piece| &lanes[piece]));
        }
        Ok(())
    }

    /// Whether the lanes of all chains are the sum at this rank, once it is done.
    fn is_whole(&self, member: RingPosition) -> bool {
        self.chains.iter().all(|chain| chain.ends_at(member))
    }

    /// Whether the lanes are the sum, except those of chains that do not end at this rank.
    pub fn is_done(&self, member: RingPosition) -> bool {
        self.lanes.is_some() && self.received == member.steps()
    }

    /// Returns the lanes, and resets the reduction.
    fn finish(&mut self) -> Buffer {
        self.received = 0;
        self.early.clear();
        self.chains.clear();
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

    /// The sum of a message, if it is complete, and whether this rank has that of all lanes.
    pub fn take_done(
        &mut self,
        member: RingPosition,
        ring: u32,
        number: u64,
    ) -> Option<(Buffer, bool)> {
        let key = (ring, number);
        self.open.get(&key).filter(|reduction| reduction.is_done(member))?;
        let mut reduction = self.open.remove(&key)?;
        let is_whole = reduction.is_whole(member);
        let sum = reduction.finish();
        self.spare.push(reduction);
        Some((sum, is_whole))
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

    /// Sums the messages of all ranks, of which one is late. Returns each rank's lanes, whether it
    /// has all of them, and the bytes that it has sent.
    fn reduce(messages: &[Vec<u8>], chains: &[Chain], late: usize) -> Vec<(Vec<u8>, bool, usize)> {
        let ranks = messages.len();
        let position = |r: usize| RingPosition { rank: r as u32, ranks: ranks as u32 };
        let mut reductions: Vec<_> = messages.iter().map(|_| Reduction::default()).collect();
        let mut queues: Vec<VecDeque<(u32, Vec<u8>)>> = vec![VecDeque::new(); ranks];
        let mut sent = vec![0; ranks];
        let most = messages[0].len().div_ceil(4 * ranks) * 4 + 4 * ranks;
        let mut send = |queues: &mut [VecDeque<_>],
                        r: usize,
                        step,
                        pieces: &mut dyn Iterator<Item = &[u8]>| {
            let part: Vec<u8> = pieces.flatten().copied().collect();
            assert!(part.len() <= most, "{} of {most} bytes", part.len());
            sent[r] += part.len();
            queues[(r + 1) % ranks].push_back((step, part));
        };
        for r in (0..ranks).filter(|r| *r != late).chain([late]) {
            let (lanes, chains) = (messages[r].clone().into(), chains.to_vec());
            let send_own =
                |step, pieces: &mut dyn Iterator<Item = &[u8]>| send(&mut queues, r, step, pieces);
            reductions[r].contribute(position(r), lanes, chains, send_own).unwrap();
            // All ranks process what has arrived.
            while let Some(r) = (0..ranks).find(|r| !queues[*r].is_empty()) {
                let (step, part) = queues[r].pop_front().unwrap();
                let send_on = |step, pieces: &mut dyn Iterator<Item = &[u8]>| {
                    send(&mut queues, r, step, pieces)
                };
                reductions[r].step(position(r), step, &part, send_on).unwrap();
            }
        }
        let results = reductions.into_iter().enumerate().map(|(r, mut reduction)| {
            assert!(reduction.is_done(position(r)), "rank {r} of {ranks}");
            let is_whole = reduction.is_whole(position(r));
            (reduction.finish().to_vec(), is_whole, sent[r])
        });
        results.collect()
    }

    fn lanes(count: usize, rank: u32) -> Vec<u8> {
        (0..count as u32).flat_map(|i| (i * 1000 + rank * rank + 1).to_le_bytes()).collect()
    }

    fn sum(messages: &[Vec<u8>]) -> Vec<u8> {
        let mut sum = vec![0; messages[0].len()];
        messages.iter().for_each(|message| add_lanes(&mut sum, message));
        sum
    }

    #[test]
    fn all_ranks_get_the_sum_whichever_is_late() {
        for ranks in 2..=9u32 {
            for count in [0usize, 1, 4, 5, 37, 64] {
                let messages: Vec<_> = (0..ranks).map(|rank| lanes(count, rank)).collect();
                for late in 0..ranks as usize {
                    for (lanes, is_whole, _) in reduce(&messages, &[], late) {
                        assert_eq!(lanes, sum(&messages), "{ranks} ranks, {count} lanes");
                        assert!(is_whole);
                    }
                }
            }
        }
    }

    #[test]
    fn one_rank_gets_the_sum_at_half_the_price() {
        for ranks in 2..=9u32 {
            for (head, count) in [(0usize, 1usize), (19, 0), (5, 4), (19, 37), (20, 64 * 9)] {
                let messages: Vec<_> = (0..ranks).map(|rank| lanes(head + count, rank)).collect();
                let sum = sum(&messages);
                for (late, to) in (0..ranks).flat_map(|late| (0..ranks).map(move |to| (late, to))) {
                    let chain = Chain::to(to, ranks, head * 4..(head + count) * 4);
                    let results = reduce(&messages, &[chain], late as usize);
                    for (rank, (lanes, is_whole, sent)) in (0u32..).zip(results) {
                        assert_eq!(lanes[..head * 4], sum[..head * 4], "rank {rank} of {ranks}");
                        assert_eq!(is_whole, rank == to);
                        assert!(!is_whole || lanes == sum, "rank {rank} of {ranks}");
                        let data = if rank == to { 0 } else { count };
                        let head = (2 * head).div_ceil(ranks as usize) * (ranks as usize - 1);
                        assert!(sent <= (data + head) * 4, "{sent} of {data} and {head} lanes");
                    }
                }
            }
        }
    }

    #[test]
    fn lanes_go_from_one_rank_as_far_as_they_must() {
        for ranks in 2..=9u32 {
            for (from, to) in (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))) {
                let (head, count) = (19, 50);
                let mut messages: Vec<_> = (0..ranks).map(|rank| lanes(69, rank)).collect();
                for (_, message) in (0..).zip(&mut messages).filter(|(rank, _)| *rank != from) {
                    message[head * 4..].fill(0);
                }
                let sum = sum(&messages);
                let chain = Chain::between(from, to, ranks, head * 4..(head + count) * 4);
                let late = (from + to) % ranks;
                let results = reduce(&messages, &[chain], late as usize);
                let hops = (to + ranks - from) % ranks;
                for (rank, (lanes, is_whole, sent)) in (0u32..).zip(results) {
                    let distance = (rank + ranks - from) % ranks;
                    assert_eq!(is_whole, distance <= hops, "{from} to {to}, at {rank} of {ranks}");
                    assert!(!is_whole || lanes == sum);
                    assert_eq!(lanes[..head * 4], sum[..head * 4]);
                    assert_eq!(sent >= count * 4, distance < hops, "{from} to {to}, at {rank}");
                }
            }
        }
    }

    #[test]
    fn a_message_may_have_a_chain_of_each_rank() {
        for ranks in 2..=9u32 {
            for (head, each) in [(0, 1), (19, 1), (19, 5), (3, 64)] {
                let len = head + each * ranks as usize;
                let place = |rank: u32| (head + each * rank as usize) * 4;
                let mut messages: Vec<_> = (0..ranks).map(|rank| lanes(len, rank)).collect();
                for (rank, message) in (0..).zip(&mut messages) {
                    message[head * 4..place(rank)].fill(0);
                    message[place(rank + 1)..].fill(0);
                }
                let chain = |from: u32| {
                    let last = (from + ranks - 1) % ranks;
                    Chain::between(from, last, ranks, place(from)..place(from + 1))
                };
                let chains: Vec<_> = (0..ranks).map(chain).collect();
                for (lanes, is_whole, sent) in reduce(&messages, &chains, ranks as usize / 2) {
                    assert!(is_whole && lanes == sum(&messages), "{ranks} ranks, {each} lanes");
                    let head = (2 * head).div_ceil(ranks as usize);
                    assert!(sent <= (each + head) * (ranks as usize - 1) * 4);
                }
            }
        }
    }

    #[test]
    fn steps_that_do_not_fit_are_refused() {
        let member = RingPosition { rank: 0, ranks: 3 };
        let mut r = Reduction::default();
        r.contribute(member, vec![0; 24].into(), Vec::new(), |_, _| ()).unwrap();
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
