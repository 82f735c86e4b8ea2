//! How far the ranks of one host are, in memory that they share, and why they cannot continue.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use netsum_collective::buffer::Buffer;
use netsum_collective::error::Error;
use netsum_collective::frame::Frame;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::futex;

use super::memory::{Shared, SharedMemory};

/// Most ranks of a host.
pub(crate) const MAX_LOCAL: usize = 64;
/// How often a rank that waits checks whether the others live.
const CHECK: Duration = Duration::from_millis(200);
/// Bytes of an encoded failure.
const FAILURE: usize = 1024;

/// What a rank tells the others. Each has cache lines of its own.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Steps {
    /// Chunks of which it has copied its data in.
    pub copied_in: AtomicU64,
    /// Chunks of which its rings have the sums.
    pub summed: AtomicU64,
    /// Chunks of which it has copied the sums out.
    pub copied_out: AtomicU64,
    /// By the chunk's number modulo two: the first block with an infinity or a NaN, as elements of
    /// the chunk. Empty if there is none.
    pub non_finite: [[AtomicU64; 2]; 2],
}

/// The start of the shared memory.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Control {
    /// Counts all changes; waiting ranks sleep on it.
    changes: AtomicU32,
    /// [`NONE`], [`WRITING`] or the failure's length.
    failed: AtomicU32,
    failure: [AtomicU8; FAILURE],
    steps: [Steps; MAX_LOCAL],
}

const NONE: u32 = 0;
const WRITING: u32 = u32::MAX;

// SAFETY: All fields are atomic integers.
unsafe impl Shared for Control {}

/// The ranks of this host.
#[derive(Debug)]
pub(crate) struct LocalRanks {
    memory: Arc<SharedMemory>,
    /// This rank's place among them.
    own: usize,
    /// Their numbers.
    ranks: Vec<u32>,
    /// Their processes.
    processes: Vec<OwnedFd>,
}

impl LocalRanks {
    /// `ranks` and the processes that they run in; `own` is this rank's place among them.
    pub fn new(
        memory: Arc<SharedMemory>,
        own: usize,
        ranks: Vec<u32>,
        processes: &[u32],
    ) -> io::Result<Self> {
        assert!(ranks.len() <= MAX_LOCAL);
        let open = |pid: &u32| {
            let pid = Pid::from_raw(*pid as i32).ok_or(io::ErrorKind::NotFound)?;
            Ok(pidfd_open(pid, PidfdFlags::empty())?)
        };
        let processes = processes.iter().map(open).collect::<io::Result<_>>()?;
        Ok(Self { memory, own, ranks, processes })
    }

    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// This rank's place.
    pub fn own_place(&self) -> usize {
        self.own
    }

    pub fn len(&self) -> usize {
        self.ranks.len()
    }

    fn control(&self) -> &Control {
        self.memory.head()
    }

    /// What this rank tells the others; [`announce`](Self::announce) wakes them.
    pub fn own(&self) -> &Steps {
        &self.control().steps[self.own]
    }

    /// What each rank has told.
    pub fn all(&self) -> &[Steps] {
        &self.control().steps[..self.ranks.len()]
    }

    /// Sets one of this rank's counts, and wakes the others.
    pub fn announce(&self, count: &AtomicU64, value: u64) {
        count.store(value, Release);
        self.wake();
    }

    fn wake(&self) {
        let changes = &self.control().changes;
        changes.fetch_add(1, Release);
        // An error would mean that the word is not mapped.
        let _ = futex::wake(changes, futex::Flags::empty(), i32::MAX as u32);
    }

    /// Waits until `count` is at least `value` for all ranks, or `give_up` returns why not.
    ///
    /// # Errors
    /// [`Error::RankDied`] names a rank that has died; others' failures.
    pub fn wait(
        &self,
        value: u64,
        count: impl Fn(&Steps) -> &AtomicU64,
        give_up: impl Fn() -> Option<Error>,
    ) -> Result<(), Error> {
        let mut next = Instant::now() + CHECK;
        loop {
            let changes = self.control().changes.load(Acquire);
            if self.all().iter().all(|steps| count(steps).load(Acquire) >= value) {
                return Ok(());
            }
            if let Some(failure) = self.failure() {
                return Err(failure);
            }
            if Instant::now() >= next {
                next += CHECK;
                if let Some(error) = give_up() {
                    return Err(error);
                }
            }
            self.sleep(changes);
            let behind = |place: usize| count(&self.all()[place]).load(Acquire) < value;
            if let Some(dead) =
                (0..self.len()).find(|place| behind(*place) && self.has_died(*place))
            {
                return Err(self.death(dead));
            }
        }
    }

    /// Sleeps for a moment, unless something has changed.
    fn sleep(&self, changes: u32) {
        let timeout = futex::Timespec { tv_sec: 0, tv_nsec: CHECK.as_nanos() as _ };
        // It returns early for changes and signals.
        let _ =
            futex::wait(&self.control().changes, futex::Flags::empty(), changes, Some(&timeout));
    }

    fn has_died(&self, place: usize) -> bool {
        let mut fds = [PollFd::new(self.processes[place].as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// Waits until the process of one of these places ends, and returns the place; `None` once the
    /// alarm's other end has been closed.
    pub fn next_death(&self, places: &[usize], alarm: &UnixStream) -> Option<usize> {
        let processes = places.iter().map(|place| self.processes[*place].as_fd());
        let mut fds: Vec<_> =
            processes.chain([alarm.as_fd()]).map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        loop {
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) => {}
                Err(nix::errno::Errno::EINTR) => continue,
                Err(_) => return None,
            }
            let ready: Vec<bool> = fds.iter().map(|fd| fd.any() == Some(true)).collect();
            if ready[places.len()] {
                return None;
            }
            if let Some(at) = ready.iter().position(|ready| *ready) {
                return Some(places[at]);
            }
        }
    }

    /// The number of the rank at a place.
    pub fn rank(&self, place: usize) -> u32 {
        self.ranks[place]
    }

    /// The error of a rank whose process has ended.
    pub fn death(&self, place: usize) -> Error {
        let reason = "its process on this host has ended".to_owned();
        Error::RankDied { rank: self.ranks[place], reason }
    }

    /// Why the ranks of this host cannot continue, if one has reported it or has died.
    pub fn check(&self) -> Result<(), Error> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        match (0..self.len()).find(|place| self.has_died(*place)) {
            Some(dead) => Err(self.death(dead)),
            None => Ok(()),
        }
    }

    /// Tells the ranks of this host that they cannot continue. Returns the first such error.
    pub fn fail(&self, error: Error) -> Error {
        let control = self.control();
        let mut frame = Buffer::heap(FAILURE);
        frame.resize(0);
        let origin = self.ranks[self.own];
        let message = match &error {
            Error::Closed => Error::RankLeft { rank: origin },
            error => error.for_others(origin),
        };
        Frame::Failure { origin, error: message }.encode_to(&mut frame);
        let bytes = &frame[..frame.len().min(FAILURE)];
        if control.failed.compare_exchange(NONE, WRITING, AcqRel, Acquire).is_ok() {
            for (out, byte) in control.failure.iter().zip(bytes) {
                out.store(*byte, Release);
            }
            control.failed.store(bytes.len() as u32, Release);
            self.wake();
            return error;
        }
        self.failure().unwrap_or(error)
    }

    fn failure(&self) -> Option<Error> {
        let control = self.control();
        let len = match control.failed.load(Acquire) {
            NONE | WRITING => return None,
            len => len as usize,
        };
        let bytes: Vec<u8> =
            control.failure.iter().take(len).map(|byte| byte.load(Acquire)).collect();
        match Frame::decode(&bytes) {
            Some(Frame::Failure { error, .. }) => Some(error),
            _ => Some(Error::Protocol("a rank of this host has failed".to_owned())),
        }
    }
}

/// Bytes at the start of the shared memory.
pub(crate) const CONTROL_BYTES: usize = size_of::<Control>().next_multiple_of(4096);

/// As all ranks of a host do it.
pub(crate) fn map(file: &File, bytes: usize) -> io::Result<Arc<SharedMemory>> {
    let len = (CONTROL_BYTES + bytes).try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
    Ok(Arc::new(SharedMemory::map(file, len)?))
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::thread;

    use super::*;
    use crate::local::memory::create;

    /// Ranks 10, 11, ... in these processes, each with a mapping of its own.
    fn local_ranks(processes: &[u32]) -> Vec<LocalRanks> {
        let file = File::from(create().unwrap());
        let ranks: Vec<u32> = (10..).take(processes.len()).collect();
        let of =
            |own| LocalRanks::new(map(&file, 100).unwrap(), own, ranks.clone(), processes).unwrap();
        (0..processes.len()).map(of).collect()
    }

    #[test]
    fn ranks_wait_for_each_other() {
        let all = local_ranks(&[std::process::id(); 3]);
        let sum = Arc::new(AtomicU64::new(0));
        thread::scope(|s| {
            for own in all {
                let sum = Arc::clone(&sum);
                s.spawn(move || {
                    for step in 1..=2000 {
                        sum.fetch_add(1, Release);
                        own.announce(&own.own().copied_in, step);
                        own.wait(step, |s| &s.copied_in, || None).unwrap();
                        assert!(sum.load(Acquire) >= step * 3);
                        own.announce(&own.own().summed, step);
                        own.wait(step, |s| &s.summed, || None).unwrap();
                    }
                });
            }
        });
        assert_eq!(sum.load(Acquire), 6000);
    }

    #[test]
    fn a_rank_that_dies_is_named() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let [own, other, _dead] =
            local_ranks(&[std::process::id(), std::process::id(), child.id()]).try_into().unwrap();
        for all in [&own, &other] {
            all.announce(&all.own().copied_in, 1);
            assert_eq!(all.check(), Ok(()));
        }
        let waiting = thread::spawn(move || own.wait(1, |s| &s.copied_in, || None));
        thread::sleep(CHECK / 2);
        assert!(!waiting.is_finished());
        child.kill().unwrap();
        let begun = Instant::now();
        child.wait().unwrap();
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::RankDied { rank: 12, .. }), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(1));
        // A rank that does not wait finds out, too.
        assert_eq!(other.check().unwrap_err(), error);
    }

    #[test]
    fn the_first_failure_is_told_to_all() {
        let [a, b] = local_ranks(&[std::process::id(); 2]).try_into().unwrap();
        let first = Error::Mismatch("operation 1".to_owned());
        assert_eq!(a.fail(first.clone()), first);
        assert_eq!(b.wait(1, |s| &s.summed, || None).unwrap_err(), first);
        assert_eq!(b.fail(Error::Closed), first);
        let [a, _b] = local_ranks(&[std::process::id(); 2]).try_into().unwrap();
        assert_eq!(a.wait(1, |s| &s.summed, || Some(Error::Closed)), Err(Error::Closed));
        // The others get another error for some.
        a.fail(Error::Closed);
        assert_eq!(a.check(), Err(Error::RankLeft { rank: 10 }));
    }
}
