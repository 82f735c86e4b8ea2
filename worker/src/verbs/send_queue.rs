//! Messages posted to a send queue, by PSN. A queue pair that has given up is restarted at the
//! message where it stopped.
//!
//! An adapter gives a connection up after `retry_cnt` timeouts in a row, at most eight (IBTA
//! 9.9.2.4.1). A sum waits for the slowest rank, which may take longer than that, and a link may be
//! down for longer. The receiving queue pair does not notice: it still expects the same PSN. So the
//! sending one is reset, gets the PSN of the oldest unacknowledged message as its first, and the
//! messages from there on are posted again. The receiver treats those that it has as duplicates.
//! This is go-back-N by whole messages; boxes and receivers cannot tell the difference.
//!
//! Each generation that ends without an acknowledgement doubles the next one's timeout, up to
//! sixteen times: a timeout shorter than a round trip on a busy machine must not block all traffic.

use std::collections::VecDeque;

use netsum_rc::Psn;

/// Most doublings of the timeout.
const MOST_DOUBLINGS: u8 = 4;

/// A message in the queue.
#[derive(Debug)]
struct Posted<B> {
    sequence: u32,
    id: u64,
    psn: Psn,
    message: B,
}

/// One send queue's messages, oldest first.
#[derive(Debug)]
pub(crate) struct SendQueue<B> {
    mtu: usize,
    depth: usize,
    next_psn: Psn,
    next_sequence: u32,
    /// Generation of the queue pair; completions of earlier ones are ignored.
    generation: u16,
    posted: VecDeque<Posted<B>>,
    waiting: VecDeque<(u64, B)>,
    /// Generations that have ended since the last acknowledgement.
    in_vain: u8,
    /// The queue pair has stopped: all posted messages return in order with an error.
    stopped: bool,
}

/// Identifies a posted message in its completion: generation and number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ticket {
    pub generation: u16,
    pub sequence: u32,
}

/// The result of a completion.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome<B> {
    /// Messages that have been acknowledged, oldest first.
    Sent(Vec<(u64, B)>),
    /// The queue pair has stopped, and has returned all messages: call [`SendQueue::restart`].
    Stopped,
    Nothing,
}

impl<B: AsRef<[u8]>> SendQueue<B> {
    /// An empty queue for `depth` posted messages.
    pub fn new(first_psn: Psn, mtu: usize, depth: usize) -> Self {
        Self {
            mtu,
            depth,
            next_psn: first_psn,
            next_sequence: 0,
            generation: 0,
            posted: VecDeque::new(),
            waiting: VecDeque::new(),
            in_vain: 0,
            stopped: false,
        }
    }

    pub fn push(&mut self, id: u64, message: B) {
        self.waiting.push_back((id, message));
    }

    /// The next message to post, if there is room in the queue. `ready` prepares it, or returns it
    /// if it must wait.
    pub fn post(&mut self, ready: impl FnOnce(B) -> Result<B, B>) -> Option<(Ticket, &B)> {
        if self.stopped || self.posted.len() >= self.depth {
            return None;
        }
        let (id, message) = self.waiting.pop_front()?;
        let message = match ready(message) {
            Ok(message) => message,
            Err(message) => {
                self.waiting.push_front((id, message));
                return None;
            }
        };
        let packets = message.as_ref().len().div_ceil(self.mtu).max(1);
        let (sequence, psn) = (self.next_sequence, self.next_psn);
        self.next_sequence = sequence.wrapping_add(1);
        self.next_psn = psn.plus(packets as u32);
        self.posted.push_back(Posted { sequence, id, psn, message });
        let message = &self.posted.back()?.message;
        Some((Ticket { generation: self.generation, sequence }, message))
    }

    /// A message has been acknowledged, and all before it.
    pub fn on_success(&mut self, ticket: Ticket) -> Outcome<B> {
        let Some(behind) = self.position_of(ticket).map(|at| at + 1) else {
            return Outcome::Nothing;
        };
        self.in_vain = 0;
        Outcome::Sent(self.posted.drain(..behind).map(|p| (p.id, p.message)).collect())
    }

    /// A message has returned with an error: the queue pair has stopped.
    pub fn on_stop(&mut self, ticket: Ticket) -> Outcome<B> {
        let Some(at) = self.position_of(ticket) else { return Outcome::Nothing };
        self.stopped = true;
        // Later messages return after it.
        if at + 1 < self.posted.len() {
            return Outcome::Nothing;
        }
        self.in_vain = (self.in_vain + 1).min(MOST_DOUBLINGS);
        Outcome::Stopped
    }

    fn position_of(&self, ticket: Ticket) -> Option<usize> {
        let current = ticket.generation == self.generation;
        self.posted.iter().position(|p| current && p.sequence == ticket.sequence)
    }

    /// Starts a new generation: all messages without an acknowledgement will be posted again.
    /// Returns its first PSN.
    pub fn restart(&mut self) -> Psn {
        self.generation = self.generation.wrapping_add(1);
        self.stopped = false;
        if let Some(oldest) = self.posted.front() {
            self.next_psn = oldest.psn;
        }
        while let Some(Posted { id, message, .. }) = self.posted.pop_back() {
            self.waiting.push_front((id, message));
        }
        self.next_psn
    }

    /// How often the timeout should be doubled.
    pub fn doublings(&self) -> u8 {
        self.in_vain
    }

    /// Whether no message is posted.
    pub fn is_idle(&self) -> bool {
        self.posted.is_empty()
    }

    /// All messages that have not been acknowledged, oldest first.
    pub fn into_messages(self) -> impl Iterator<Item = (u64, B)> {
        self.posted.into_iter().map(|p| (p.id, p.message)).chain(self.waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Queue = SendQueue<Vec<u8>>;

    fn post(q: &mut Queue) -> Option<(Ticket, usize)> {
        q.post(Ok).map(|(ticket, message)| (ticket, message.len()))
    }

    fn ids(outcome: Outcome<Vec<u8>>) -> Vec<u64> {
        match outcome {
            Outcome::Sent(messages) => messages.into_iter().map(|(id, _)| id).collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn messages_that_do_not_fit_wait_and_order_is_kept() {
        let mut q = Queue::new(Psn::new(0xff_fffe), 1024, 2);
        (0..4).for_each(|id| q.push(id, vec![0; 1500]));
        let first = post(&mut q).unwrap().0;
        let second = post(&mut q).unwrap().0;
        assert_eq!(post(&mut q), None);
        assert_eq!(ids(q.on_success(first)), [0]);
        assert!(post(&mut q).is_some());
        assert_eq!(post(&mut q), None);
        assert_eq!(q.on_success(first), Outcome::Nothing, "known already");
        assert_eq!(ids(q.on_success(second)), [1]);
        assert_eq!(q.into_messages().map(|(id, _)| id).collect::<Vec<_>>(), [2, 3]);
    }

    #[test]
    fn a_new_generation_begins_with_the_oldest_unacknowledged_message() {
        let mut q = Queue::new(Psn::new(0xff_fffe), 1024, 8);
        // 3 packets, none, 1, 2.
        for (id, len) in [(0, 2049), (1, 0), (2, 1024), (3, 1025)] {
            q.push(id, vec![0; len]);
        }
        let tickets: Vec<Ticket> = std::iter::from_fn(|| post(&mut q)).map(|t| t.0).collect();
        assert_eq!(
            ids(q.on_success(tickets[1])),
            [0, 1],
            "an acknowledgement covers those before it"
        );
        assert_eq!(q.on_stop(tickets[2]), Outcome::Nothing);
        q.push(4, vec![1]);
        assert_eq!(post(&mut q), None, "nothing is posted to a queue pair that has stopped");
        assert_eq!(q.on_stop(tickets[3]), Outcome::Stopped);
        // 0xff_fffe + 3 + 1: an empty message takes a packet.
        assert_eq!(q.restart(), Psn::new(2));
        assert!(q.is_idle());
        assert_eq!(q.doublings(), 1);
        assert_eq!(q.on_success(tickets[2]), Outcome::Nothing, "of an earlier generation");
        assert_eq!(q.on_stop(tickets[3]), Outcome::Nothing, "of an earlier generation");
        let again: Vec<(Ticket, usize)> = std::iter::from_fn(|| post(&mut q)).collect();
        assert_eq!(again.iter().map(|a| a.1).collect::<Vec<_>>(), [1024, 1025, 1]);
        assert_eq!(ids(q.on_success(again[2].0)), [2, 3, 4]);
        assert_eq!(q.doublings(), 0);
        // 2 + 1 + 2 + 1
        assert_eq!(q.restart(), Psn::new(6));
    }

    #[test]
    fn unanswered_generations_double_the_timeout_up_to_a_bound() {
        let mut q = Queue::new(Psn::new(0), 1024, 1);
        q.push(0, vec![0]);
        for doublings in [1, 2, 3, 4, 4] {
            let ticket = post(&mut q).unwrap().0;
            assert_eq!(q.on_stop(ticket), Outcome::Stopped);
            assert_eq!((q.restart(), q.doublings()), (Psn::new(0), doublings));
        }
    }

    #[test]
    fn a_message_that_is_not_ready_keeps_its_place() {
        let mut q = Queue::new(Psn::new(0), 256, 8);
        q.push(0, vec![1]);
        q.push(1, vec![2]);
        assert_eq!(q.post(Err).map(|p| p.0), None);
        assert_eq!(q.post(|m| Ok([m, vec![9]].concat())).unwrap().1, &[1, 9]);
        assert_eq!(post(&mut q).unwrap().1, 1);
    }
}
