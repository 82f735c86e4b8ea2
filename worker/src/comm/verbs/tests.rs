//! The connections over an adapter that a test controls.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::*;
use crate::verbs::memory::tests::counting;
use netsum_rc::Qpn;

/// Records calls, and returns the test's completions.
struct Fake {
    /// Queue pair, work, length.
    sends: Vec<(usize, u64, usize)>,
    /// Address of the last message that was sent.
    last: u64,
    receives: Vec<(usize, u64, usize)>,
    connected: Vec<(usize, Direction)>,
    resets: Vec<usize>,
    destroyed: Vec<usize>,
    done: VecDeque<Completion>,
    refuse: bool,
    armed: u32,
    /// Never readable.
    pipe: (OwnedFd, OwnedFd),
}

impl Adapter for Fake {
    fn post_send(&mut self, queue_pair: usize, work: u64, block: &Block) -> io::Result<()> {
        if self.refuse {
            return Err(io::Error::other("no"));
        }
        self.sends.push((queue_pair, work, block.len()));
        self.last = block.address();
        Ok(())
    }
    fn post_receive(&mut self, queue_pair: usize, work: u64, block: &Block) -> io::Result<()> {
        self.receives.push((queue_pair, work, block.room()));
        Ok(())
    }
    fn connect(&mut self, queue_pair: usize, direction: Direction, _: Remote) -> io::Result<()> {
        self.connected.push((queue_pair, direction));
        Ok(())
    }
    fn reset(&mut self, queue_pair: usize) -> io::Result<()> {
        self.resets.push(queue_pair);
        Ok(())
    }
    fn destroy(&mut self, queue_pair: usize) {
        self.destroyed.push(queue_pair);
    }
    fn poll(&mut self, completions: &mut Vec<Completion>) -> io::Result<bool> {
        completions.extend(self.done.pop_front());
        Ok(!self.done.is_empty())
    }
    fn arm(&mut self) -> io::Result<()> {
        self.armed += 1;
        Ok(())
    }
    fn disarm(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn fd(&self) -> BorrowedFd<'_> {
        self.pipe.0.as_fd()
    }
}

const OUT: usize = 0;
const INTO: usize = 1;

/// One connection pair, with at most two posted messages of 1024 bytes a packet in the send queue.
fn verbs(registered: &Arc<AtomicUsize>) -> Verbs<Fake> {
    let adapter = Fake {
        sends: Vec::new(),
        last: 0,
        receives: Vec::new(),
        connected: Vec::new(),
        resets: Vec::new(),
        destroyed: Vec::new(),
        done: VecDeque::new(),
        refuse: false,
        armed: 0,
        pipe: nix::unistd::pipe().unwrap(),
    };
    let remote = Remote { ip: [10, 0, 0, 2].into(), qpn: Qpn::new(17) };
    let side = Side::Send(SendQueue::new(Psn::new(0xff_ffff), 1024, 2));
    let out = Queue { channel: Channel::RingOut(0), remote, side, failed: false };
    let side = Side::Receive { first_psn: Psn::new(5), next: 0, posted: VecDeque::new() };
    let into = Queue { channel: Channel::RingIn(0), remote, side, failed: false };
    let arena = Arena::new(counting(registered));
    Verbs::new(adapter, arena, vec![out, into], "fake".into(), "fake".into())
}

fn message(v: &mut Verbs<Fake>, len: usize) -> Buffer {
    let mut buffer = v.buffer(4096);
    buffer.resize(len);
    buffer
}

/// Completes a work request, and drives.
fn complete(v: &mut Verbs<Fake>, work: u64, result: Result<usize, WorkError>) -> Vec<String> {
    v.adapter.done.push_back(Completion { work, result });
    drive(v)
}

fn drive(v: &mut Verbs<Fake>) -> Vec<String> {
    Connections::drive(v, Instant::now()).unwrap();
    std::iter::from_fn(|| Channels::poll(v))
        .map(|event| match event {
            ChannelEvent::Sent { channel, id, .. } => format!("{channel:?} sent {id}"),
            ChannelEvent::Received { channel, data } => {
                format!("{channel:?} received {}", data.len())
            }
            ChannelEvent::Failed { channel, reason } => format!("{channel:?} failed: {reason}"),
        })
        .collect()
}

#[test]
fn nothing_is_sent_before_start_and_the_queue_is_never_too_full() {
    let mut v = verbs(&Arc::default());
    let buffer = v.buffer(2000);
    v.receive_into(Channel::RingIn(0), buffer);
    for id in 0..3 {
        let buffer = message(&mut v, 1500);
        v.send(Channel::RingOut(0), id, buffer);
    }
    assert_eq!(v.adapter.sends, []);
    assert_eq!(v.adapter.receives, [(INTO, 1 << 48, 2048)]);
    v.start().unwrap();
    let flows = [
        (OUT, Direction::Send { first_psn: Psn::new(0xff_ffff), doublings: 0 }),
        (INTO, Direction::Receive { first_psn: Psn::new(5) }),
    ];
    assert_eq!(v.adapter.connected, flows);
    assert_eq!(v.adapter.sends.len(), 2);
    let first = v.adapter.sends[0].1;
    assert_eq!(complete(&mut v, first, Ok(0)), ["RingOut(0) sent 0"]);
    assert_eq!(v.adapter.sends.len(), 3);
    assert_eq!(complete(&mut v, 1 << 48, Ok(700)), ["RingIn(0) received 700"]);
    assert_eq!(complete(&mut v, first, Ok(0)), [""; 0], "twice");
}

#[test]
fn a_queue_pair_that_gives_up_is_restarted_where_it_stopped() {
    let mut v = verbs(&Arc::default());
    v.start().unwrap();
    for id in 0..4 {
        let buffer = message(&mut v, 2049);
        v.send(Channel::RingOut(0), id, buffer);
    }
    let posted: Vec<u64> = v.adapter.sends.iter().map(|s| s.1).collect();
    assert_eq!(complete(&mut v, posted[0], Ok(0)), ["RingOut(0) sent 0"]);
    let posted: Vec<u64> = v.adapter.sends[1..].iter().map(|s| s.1).collect();
    assert_eq!(posted.len(), 2);
    assert_eq!(complete(&mut v, posted[0], Err(WorkError::GaveUp)), [""; 0]);
    assert!(v.adapter.resets.is_empty(), "not before all messages have returned");
    assert_eq!(complete(&mut v, posted[1], Err(WorkError::Flushed)), [""; 0]);
    assert_eq!(v.adapter.resets, [OUT]);
    // Three packets after 0xff_ffff.
    assert_eq!(
        v.adapter.connected.last(),
        Some(&(OUT, Direction::Send { first_psn: Psn::new(2), doublings: 1 }))
    );
    let again: Vec<u64> = v.adapter.sends[3..].iter().map(|s| s.1).collect();
    assert_eq!(again.len(), 2);
    assert_eq!(
        complete(&mut v, posted[1], Err(WorkError::Flushed)),
        [""; 0],
        "of its earlier generation"
    );
    assert_eq!(v.adapter.resets.len(), 1);
    assert_eq!(complete(&mut v, again[0], Ok(0)), ["RingOut(0) sent 1"]);
    assert_eq!(complete(&mut v, again[1], Ok(0)), ["RingOut(0) sent 2"]);
    let last = v.adapter.sends.last().unwrap().1;
    assert_eq!(complete(&mut v, last, Ok(0)), ["RingOut(0) sent 3"]);
}

#[test]
fn a_permanent_error_is_reported_once_and_close_returns_all_messages() {
    let registered = Arc::default();
    let mut v = verbs(&registered);
    v.start().unwrap();
    for id in 0..3 {
        let mut buffer = message(&mut v, 100);
        buffer.fill(id as u8);
        v.send(Channel::RingOut(0), id, buffer);
    }
    let works: Vec<u64> = v.adapter.sends.iter().map(|s| s.1).collect();
    let reported = complete(&mut v, works[0], Err(WorkError::Broken("remote access error".into())));
    assert_eq!(reported, ["RingOut(0) failed: fake: remote access error"]);
    assert_eq!(complete(&mut v, works[1], Err(WorkError::Flushed)), [""; 0]);
    // Messages sent from now on wait for `close`.
    let buffer = message(&mut v, 100);
    v.send(Channel::RingOut(0), 3, buffer);
    assert_eq!(v.adapter.sends.len(), 2);
    let back = v.close(Channel::RingOut(0));
    assert_eq!(v.adapter.destroyed, [OUT]);
    assert_eq!(
        back.iter().map(|(id, data)| (*id, data[0])).collect::<Vec<_>>(),
        [(0, 0), (1, 1), (2, 2), (3, 0)]
    );
    assert_eq!(complete(&mut v, works[1], Ok(0)), [""; 0], "a late completion");
    assert!(v.close(Channel::RingOut(0)).is_empty());
    // Buffers outlive the connections; memory is freed with the last of them.
    drop(v);
    assert_ne!(registered.load(Ordering::Relaxed), 0);
    drop(back);
    assert_eq!(registered.load(Ordering::Relaxed), 0);
}

#[test]
fn an_adapters_refusal_ends_the_connection_with_its_error() {
    let mut v = verbs(&Arc::default());
    v.start().unwrap();
    v.adapter.refuse = true;
    let buffer = message(&mut v, 1);
    v.send(Channel::RingOut(0), 0, buffer);
    assert_eq!(drive(&mut v), ["RingOut(0) failed: no"]);
}

#[test]
fn messages_are_sent_and_received_without_a_copy() {
    let mut v = verbs(&Arc::default());
    v.start().unwrap();
    let buffer = message(&mut v, 3000);
    let address = buffer.as_ptr() as u64;
    v.send(Channel::RingOut(0), 0, buffer);
    assert_eq!(v.adapter.last, address);
    let buffer = v.buffer(4096);
    let address = buffer.as_ptr();
    v.receive_into(Channel::RingIn(0), buffer);
    v.adapter.done.push_back(Completion { work: 1 << 48, result: Ok(5) });
    assert!(Connections::drive(&mut v, Instant::now()).unwrap());
    match Channels::poll(&mut v) {
        Some(ChannelEvent::Received { data, .. }) => {
            assert_eq!((data.as_ptr(), data.len()), (address, 5))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn messages_on_the_heap_are_registered_or_wait_for_memory() {
    let mut v = verbs(&Arc::default());
    v.start().unwrap();
    v.send(Channel::RingOut(0), 0, vec![7; 3000].into());
    assert_eq!(v.adapter.sends.last().map(|s| s.2), Some(3000));
    v.arena = Arena::new(Box::new(|_, _| Err(io::Error::other("no memory"))));
    v.send(Channel::RingOut(0), 1, vec![7; 3000].into());
    assert_eq!(drive(&mut v), [""; 0], "the memory of another posted message will be free");
    let work = v.adapter.sends[0].1;
    let reported = complete(&mut v, work, Ok(0));
    assert_eq!(reported, ["RingOut(0) sent 0", "RingOut(0) failed: no memory"]);
}

#[test]
fn waiting_ends_in_time_and_errors_are_reported_at_once() {
    let mut v = verbs(&Arc::default());
    v.start().unwrap();
    let start = Instant::now();
    assert!(!Connections::drive(&mut v, start + Duration::from_millis(30)).unwrap());
    assert!(start.elapsed() >= Duration::from_millis(30) && v.adapter.armed == 1);
    v.adapter.refuse = true;
    v.send(Channel::RingOut(0), 0, vec![1].into());
    assert!(Connections::drive(&mut v, start + Duration::from_secs(60)).unwrap());
}
