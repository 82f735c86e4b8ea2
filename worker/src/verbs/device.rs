//! An adapter: its queue pairs, and one completion queue for all of them.

use std::ffi::CStr;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::bindings::{self as ibv, Verbs};
use super::gid::{self, GidEntry};
use super::library::library;
use super::memory::{Block, Register};
use netsum_collective::buffer::Registered as _;
use netsum_rc::{Psn, Qpn};

/// How long a sender waits after "receiver not ready": 0.64 ms (IBTA table 46).
const RNR_TIMER: u8 = 12;
/// Retries after "receiver not ready": without limit (IBTA 9.7.5.2.8).
const RNR_RETRY: u8 = 7;
/// Most routers between two ranks.
const HOP_LIMIT: u8 = 64;
/// Completions to take at a time.
const BATCH: usize = 32;

/// How queue pairs retry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Retry {
    /// Timeout: 4.096 us x 2^code.
    pub timeout: u8,
    /// Timeouts in a row, less one, after which the adapter gives up.
    pub count: u8,
}

/// One direction of a connection: a queue pair that only sends, with its timeout doubled so often,
/// or only receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    Send { first_psn: Psn, doublings: u8 },
    Receive { first_psn: Psn },
}

/// The other end of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Remote {
    pub ip: IpAddr,
    pub qpn: Qpn,
}

/// The completion of a work request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Completion {
    /// The id, as posted.
    pub work: u64,
    /// Bytes received, or the error.
    pub result: Result<usize, WorkError>,
}

/// The error of a work request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum WorkError {
    /// No acknowledgement, or no receive at the other side, after all retries.
    GaveUp,
    /// The queue pair had stopped before.
    Flushed,
    /// A permanent error.
    Broken(String),
}

/// The functions of an adapter that connections need. Queue pairs are numbered from 0, in the order
/// in which they are made.
pub(crate) trait Adapter: Send {
    fn post_send(&mut self, queue_pair: usize, work: u64, block: &Block) -> io::Result<()>;
    /// Receives into a block.
    fn post_receive(&mut self, queue_pair: usize, work: u64, block: &Block) -> io::Result<()>;
    fn connect(
        &mut self,
        queue_pair: usize,
        direction: Direction,
        remote: Remote,
    ) -> io::Result<()>;
    /// Resets a queue pair, which can then be connected again.
    fn reset(&mut self, queue_pair: usize) -> io::Result<()>;
    /// Ends a queue pair: from now on the adapter does not touch its blocks.
    fn destroy(&mut self, queue_pair: usize);
    /// Takes completions. Returns whether there may be more.
    fn poll(&mut self, completions: &mut Vec<Completion>) -> io::Result<bool>;
    /// Makes [`fd`](Self::fd) readable with the next completion.
    fn arm(&mut self) -> io::Result<()>;
    /// Takes the events that made it readable.
    fn disarm(&mut self) -> io::Result<()>;
    /// Readable after a completion, if it was armed.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// `errno` of a call that returned NULL.
fn last_error(what: &str) -> io::Error {
    let e = io::Error::last_os_error();
    io::Error::new(e.kind(), format!("{what}: {e}"))
}

/// The result of a call that returns 0 or an error number of either sign.
/// Refuses path MTUs that `enum ibv_mtu` does not have.
fn check_ibta(mtu: u32) -> io::Result<()> {
    if mtu.is_power_of_two() {
        return Ok(());
    }
    let text = format!(
        "path MTU {mtu}: adapters take 256, 512, 1024, 2048 or 4096: create the job with `--mtu {}`",
        1 << mtu.ilog2()
    );
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

fn check(what: &str, result: i32) -> io::Result<()> {
    if result == 0 {
        return Ok(());
    }
    let errno = if result == -1 {
        io::Error::last_os_error().raw_os_error().unwrap_or(0)
    } else {
        result.abs()
    };
    let e = io::Error::from_raw_os_error(errno);
    Err(io::Error::new(e.kind(), format!("{what}: {e}")))
}

/// An open adapter.
struct Context {
    verbs: &'static Verbs,
    context: NonNull<ibv::ibv_context>,
}

// SAFETY: libibverbs locks what it shares (ibv_* man pages, "thread safe").
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    fn open(verbs: &'static Verbs, name: &str) -> io::Result<Self> {
        let mut count = 0;
        // SAFETY: returns an array of `count` pointers, followed by NULL, until it is freed.
        let list = unsafe { verbs.ibv_get_device_list(&raw mut count) };
        if list.is_null() {
            return Err(last_error("cannot list adapters (check that ib_uverbs is loaded)"));
        }
        let mut opened = None;
        for i in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: within the array; names live as long as the list.
            let (device, its_name) = unsafe {
                let device = *list.add(i);
                (device, CStr::from_ptr(verbs.ibv_get_device_name(device)))
            };
            if its_name.to_bytes() == name.as_bytes() {
                // SAFETY: a device of the list; the context outlives the list (ibv_get_device_list
                // man page).
                opened = Some(unsafe { verbs.ibv_open_device(device) });
            }
        }
        let error = match opened {
            Some(_) => last_error(&format!("cannot open {name}")),
            None => io::Error::other(format!(
                "libibverbs does not know {name}: check that its provider is installed (Debian: \
                 ibverbs-providers) and that {} exists",
                "/dev/infiniband"
            )),
        };
        // SAFETY: it came from `ibv_get_device_list`.
        unsafe { verbs.ibv_free_device_list(list) };
        let context = opened.and_then(NonNull::new).ok_or(error)?;
        Ok(Self { verbs, context })
    }

    fn ops(&self) -> &ibv::ibv_context_ops {
        // SAFETY: the context is open, and its table does not change.
        unsafe { &self.context.as_ref().ops }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything made of it keeps it alive, so nothing is left.
        let closed = unsafe { self.verbs.ibv_close_device(self.context.as_ptr()) };
        log_failure("close an adapter", closed);
    }
}

fn log_failure(what: &str, result: i32) {
    if let Err(e) = check(what, result) {
        log::debug!("cannot {e}");
    }
}

/// The protection domain of memory and queue pairs.
struct Domain {
    context: Arc<Context>,
    pd: NonNull<ibv::ibv_pd>,
}

// SAFETY: as for the context.
unsafe impl Send for Domain {}
// SAFETY: as for the context.
unsafe impl Sync for Domain {}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: queue pairs and registrations keep it alive, so none is left.
        log_failure("free a protection domain", unsafe {
            self.context.verbs.ibv_dealloc_pd(self.pd.as_ptr())
        });
    }
}

struct Registration {
    domain: Arc<Domain>,
    mr: NonNull<ibv::ibv_mr>,
}

// SAFETY: as for the context.
unsafe impl Send for Registration {}
// SAFETY: as for the context.
unsafe impl Sync for Registration {}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: no queue pair has a block of it.
        log_failure("end a registration", unsafe {
            self.domain.context.verbs.ibv_dereg_mr(self.mr.as_ptr())
        });
    }
}

struct QueuePair {
    domain: Arc<Domain>,
    qp: NonNull<ibv::ibv_qp>,
}

// SAFETY: as for the context.
unsafe impl Send for QueuePair {}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made by `ibv_create_qp`, and not destroyed before.
        log_failure("destroy a queue pair", unsafe {
            self.domain.context.verbs.ibv_destroy_qp(self.qp.as_ptr())
        });
    }
}

struct CompletionQueue {
    context: Arc<Context>,
    channel: NonNull<ibv::ibv_comp_channel>,
    cq: NonNull<ibv::ibv_cq>,
}

// SAFETY: as for the context.
unsafe impl Send for CompletionQueue {}

impl CompletionQueue {
    fn new(context: &Arc<Context>, depth: usize) -> io::Result<Self> {
        let verbs = context.verbs;
        // SAFETY: the context is open.
        let channel = unsafe { verbs.ibv_create_comp_channel(context.context.as_ptr()) };
        let channel = NonNull::new(channel).ok_or_else(|| last_error("no completion channel"))?;
        // SAFETY: context and channel are open; no further argument is a pointer to anything.
        let cq = unsafe {
            let depth = i32::try_from(depth).unwrap_or(i32::MAX);
            verbs.ibv_create_cq(
                context.context.as_ptr(),
                depth,
                ptr::null_mut(),
                channel.as_ptr(),
                0,
            )
        };
        let Some(cq) = NonNull::new(cq) else {
            let e = last_error(&format!("no completion queue for {depth} entries"));
            // SAFETY: nothing uses the channel.
            log_failure("close a completion channel", unsafe {
                verbs.ibv_destroy_comp_channel(channel.as_ptr())
            });
            return Err(e);
        };
        let queue = Self { context: Arc::clone(context), channel, cq };
        let flags = nix::fcntl::fcntl(queue.as_fd(), nix::fcntl::FcntlArg::F_GETFL)?;
        let flags = nix::fcntl::OFlag::from_bits_retain(flags) | nix::fcntl::OFlag::O_NONBLOCK;
        nix::fcntl::fcntl(queue.as_fd(), nix::fcntl::FcntlArg::F_SETFL(flags))?;
        Ok(queue)
    }
}

impl AsFd for CompletionQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel's descriptor is open as long as the channel.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: the queue pairs are gone, and all events have been acknowledged: this waits for
        // nothing.
        unsafe {
            log_failure(
                "destroy a completion queue",
                self.context.verbs.ibv_destroy_cq(self.cq.as_ptr()),
            );
            let closed = self.context.verbs.ibv_destroy_comp_channel(self.channel.as_ptr());
            log_failure("close a completion channel", closed);
        }
    }
}

/// Capacity of the two kinds of queue pairs, in messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Depths {
    pub send: usize,
    pub receive: usize,
}

/// An adapter that is not connected yet.
pub(crate) struct Device {
    // Dropped in this order.
    pairs: Vec<Option<QueuePair>>,
    queue: Option<CompletionQueue>,
    domain: Arc<Domain>,
    context: Arc<Context>,
    gid: GidEntry,
    limits: ibv::ibv_device_attr,
    /// The addresses to connect with.
    mtu: u32,
    retry: Retry,
}

impl Device {
    /// Opens the adapter of an address.
    pub fn open(gid: GidEntry, retry: Retry) -> io::Result<Self> {
        let verbs = library().map_err(io::Error::other)?;
        let context = Arc::new(Context::open(verbs, &gid.device)?);
        // SAFETY: all fields are numbers, for which zero is a value.
        let mut limits: ibv::ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open and `limits` is of the right type.
        check("its limits", unsafe {
            verbs.ibv_query_device(context.context.as_ptr(), &raw mut limits)
        })?;
        // SAFETY: the context is open.
        let pd = unsafe { verbs.ibv_alloc_pd(context.context.as_ptr()) };
        let pd = NonNull::new(pd).ok_or_else(|| last_error("no protection domain"))?;
        let domain = Arc::new(Domain { context: Arc::clone(&context), pd });
        Ok(Self { context, domain, gid, limits, queue: None, pairs: Vec::new(), mtu: 0, retry })
    }

    /// Name, port and GID index, for people.
    pub fn transport_name(&self) -> String {
        let GidEntry { device, port, gid_index } = &self.gid;
        format!("{device} port {port} GID {gid_index}")
    }

    /// Creates `pairs` queue pairs, ready to be connected with path MTU `mtu`. Returns their
    /// numbers.
    pub fn make_queue_pairs(&mut self, pairs: &[Depths], mtu: u32) -> io::Result<Vec<Qpn>> {
        self.check_mtu(mtu)?;
        self.mtu = mtu;
        let most = |what: &str, wanted: usize, limit: i32| {
            if wanted <= usize::try_from(limit).unwrap_or(0) {
                return Ok(());
            }
            let text = format!(
                "{what}: the job needs {wanted}, but the adapter has {limit}: use fewer rings or \
                 a smaller window"
            );
            Err(io::Error::new(io::ErrorKind::InvalidInput, text))
        };
        most("queue pairs", pairs.len(), self.limits.max_qp)?;
        let deepest = pairs.iter().map(|d| d.send.max(d.receive)).max().unwrap_or(0);
        most("entries of a queue pair", deepest, self.limits.max_qp_wr)?;
        // Completions of a queue pair's earlier generation may still be there.
        let entries = pairs.iter().map(|d| d.send * 2 + d.receive).sum();
        most("entries of a completion queue", entries, self.limits.max_cqe)?;
        let queue = self.queue.insert(CompletionQueue::new(&self.context, entries)?);
        let mut numbers = Vec::new();
        for depths in pairs {
            let pair = QueuePair::new(&self.domain, queue.cq, *depths)?;
            // SAFETY: the queue pair is there.
            let number = Qpn::checked(unsafe { pair.qp.as_ref().qp_num });
            numbers.push(
                number
                    .ok_or_else(|| io::Error::other("a queue pair number of more than 24 bits"))?,
            );
            pair.initialise(self.gid.port)?;
            self.pairs.push(Some(pair));
        }
        Ok(numbers)
    }

    fn check_mtu(&self, mtu: u32) -> io::Result<()> {
        check_ibta(mtu)?;
        // SAFETY: all fields are numbers, for which zero is a value.
        let mut port: ibv::ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the library fills the first part of the structure, as it was when its symbol got
        // its version.
        let result = unsafe {
            let attributes = (&raw mut port).cast();
            self.context.verbs.ibv_query_port(
                self.context.context.as_ptr(),
                self.gid.port,
                attributes,
            )
        };
        check("its port", result)?;
        let active = 128u32.checked_shl(port.active_mtu).unwrap_or(0);
        if mtu > active {
            let text = format!(
                "path MTU {mtu}: port {} supports at most {active}, because its interface's MTU \
                 must include the headers: raise that",
                self.gid.port
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(())
    }

    /// Registers memory with this adapter.
    pub fn register(&self) -> Box<Register> {
        let domain = Arc::clone(&self.domain);
        Box::new(move |start, len| {
            let (verbs, access) = (domain.context.verbs, ibv::IBV_ACCESS_LOCAL_WRITE as i32);
            // SAFETY: the memory stays until the registration is dropped.
            let mr =
                unsafe { verbs.ibv_reg_mr(domain.pd.as_ptr(), start.as_ptr().cast(), len, access) };
            let Some(mr) = NonNull::new(mr) else {
                let e = last_error(&format!("cannot register {len} bytes of memory"));
                let hint =
                    if e.kind() == io::ErrorKind::OutOfMemory { ": raise `ulimit -l`" } else { "" };
                return Err(io::Error::new(e.kind(), format!("{e}{hint}")));
            };
            // SAFETY: the registration is there.
            let key = unsafe { mr.as_ref().lkey };
            Ok((key, Box::new(Registration { domain: Arc::clone(&domain), mr })))
        })
    }

    fn pair(&self, queue_pair: usize) -> io::Result<&QueuePair> {
        let pair = self.pairs.get(queue_pair).and_then(Option::as_ref);
        pair.ok_or_else(|| io::Error::other("the queue pair was destroyed"))
    }
}

impl QueuePair {
    fn new(domain: &Arc<Domain>, cq: NonNull<ibv::ibv_cq>, depths: Depths) -> io::Result<Self> {
        let entries = |n: usize| u32::try_from(n.max(1)).unwrap_or(u32::MAX);
        // SAFETY: zero is a value of every field.
        let mut attributes: ibv::ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        attributes.send_cq = cq.as_ptr();
        attributes.recv_cq = cq.as_ptr();
        attributes.qp_type = ibv::IBV_QPT_RC;
        attributes.sq_sig_all = 1;
        attributes.cap.max_send_wr = entries(depths.send);
        attributes.cap.max_recv_wr = entries(depths.receive);
        attributes.cap.max_send_sge = 1;
        attributes.cap.max_recv_sge = 1;
        // SAFETY: domain and completion queue exist; the latter outlives queue pairs by the order
        // of `Device`'s fields.
        let qp =
            unsafe { domain.context.verbs.ibv_create_qp(domain.pd.as_ptr(), &raw mut attributes) };
        let qp = NonNull::new(qp).ok_or_else(|| last_error("no queue pair"))?;
        Ok(Self { domain: Arc::clone(domain), qp })
    }

    fn modify(&self, what: &str, mut attributes: ibv::ibv_qp_attr, mask: u32) -> io::Result<()> {
        let mask = (mask | ibv::IBV_QP_STATE) as i32;
        // SAFETY: the queue pair is there, and the attributes that the mask names are set.
        let result = unsafe {
            self.domain.context.verbs.ibv_modify_qp(self.qp.as_ptr(), &raw mut attributes, mask)
        };
        check(what, result)
    }

    fn initialise(&self, port: u8) -> io::Result<()> {
        let mut a = attributes(ibv::IBV_QPS_INIT);
        a.port_num = port;
        let mask = ibv::IBV_QP_PKEY_INDEX | ibv::IBV_QP_PORT | ibv::IBV_QP_ACCESS_FLAGS;
        self.modify("cannot initialise a queue pair", a, mask)
    }
}

fn attributes(state: ibv::ibv_qp_state) -> ibv::ibv_qp_attr {
    // SAFETY: zero is a value of every field.
    let mut attributes: ibv::ibv_qp_attr = unsafe { std::mem::zeroed() };
    attributes.qp_state = state;
    attributes
}

impl Adapter for Device {
    fn post_send(&mut self, queue_pair: usize, work: u64, block: &Block) -> io::Result<()> {
        let pair = self.pair(queue_pair)?;
        let mut piece =
            ibv::ibv_sge { addr: block.address(), length: block.len() as u32, lkey: block.key() };
        // SAFETY: zero is a value of every field.
        let mut request: ibv::ibv_send_wr = unsafe { std::mem::zeroed() };
        request.wr_id = work;
        request.sg_list = &raw mut piece;
        request.num_sge = 1;
        request.opcode = ibv::IBV_WR_SEND;
        let post = self.context.ops().post_send.ok_or(io::ErrorKind::Unsupported)?;
        let mut bad = ptr::null_mut();
        // SAFETY: the request is copied; the block is neither moved nor touched until it is
        // completed.
        check("cannot send", unsafe { post(pair.qp.as_ptr(), &raw mut request, &raw mut bad) })
    }

    fn post_receive(&mut self, queue_pair: usize, work: u64, block: &Block) -> io::Result<()> {
        let pair = self.pair(queue_pair)?;
        let mut piece =
            ibv::ibv_sge { addr: block.address(), length: block.room() as u32, lkey: block.key() };
        // SAFETY: zero is a value of every field.
        let mut request: ibv::ibv_recv_wr = unsafe { std::mem::zeroed() };
        request.wr_id = work;
        request.sg_list = &raw mut piece;
        request.num_sge = 1;
        let post = self.context.ops().post_recv.ok_or(io::ErrorKind::Unsupported)?;
        let mut bad = ptr::null_mut();
        // SAFETY: as above.
        check("cannot receive", unsafe { post(pair.qp.as_ptr(), &raw mut request, &raw mut bad) })
    }

    fn connect(
        &mut self,
        queue_pair: usize,
        direction: Direction,
        remote: Remote,
    ) -> io::Result<()> {
        let pair = self.pair(queue_pair)?;
        let mut a = attributes(ibv::IBV_QPS_RTR);
        // 256 is 1, 512 is 2, and so on (IBTA 11.2.5.2, "path MTU").
        a.path_mtu = self.mtu.ilog2() - 7;
        a.dest_qp_num = remote.qpn.get();
        a.rq_psn = match direction {
            Direction::Send { .. } => 0,
            Direction::Receive { first_psn } => first_psn.get(),
        };
        a.max_dest_rd_atomic = 1;
        a.min_rnr_timer = RNR_TIMER;
        a.ah_attr.is_global = 1;
        a.ah_attr.port_num = self.gid.port;
        a.ah_attr.grh.dgid.raw = gid::gid_of(remote.ip);
        a.ah_attr.grh.sgid_index = self.gid.gid_index;
        a.ah_attr.grh.hop_limit = HOP_LIMIT;
        let mask = ibv::IBV_QP_AV
            | ibv::IBV_QP_PATH_MTU
            | ibv::IBV_QP_DEST_QPN
            | ibv::IBV_QP_RQ_PSN
            | ibv::IBV_QP_MAX_DEST_RD_ATOMIC
            | ibv::IBV_QP_MIN_RNR_TIMER;
        pair.modify(&format!("cannot connect to {}", remote.ip), a, mask)?;
        let Direction::Send { first_psn, doublings } = direction else { return Ok(()) };
        let mut a = attributes(ibv::IBV_QPS_RTS);
        a.sq_psn = first_psn.get();
        // Five bits.
        a.timeout = (self.retry.timeout + doublings).min(31);
        a.retry_cnt = self.retry.count;
        a.rnr_retry = RNR_RETRY;
        a.max_rd_atomic = 1;
        let mask = ibv::IBV_QP_SQ_PSN
            | ibv::IBV_QP_TIMEOUT
            | ibv::IBV_QP_RETRY_CNT
            | ibv::IBV_QP_RNR_RETRY
            | ibv::IBV_QP_MAX_QP_RD_ATOMIC;
        pair.modify(&format!("cannot send to {}", remote.ip), a, mask)
    }

    fn reset(&mut self, queue_pair: usize) -> io::Result<()> {
        let pair = self.pair(queue_pair)?;
        pair.modify("cannot reset a queue pair", attributes(ibv::IBV_QPS_RESET), 0)?;
        pair.initialise(self.gid.port)
    }

    fn destroy(&mut self, queue_pair: usize) {
        if let Some(pair) = self.pairs.get_mut(queue_pair) {
            *pair = None;
        }
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) -> io::Result<bool> {
        let queue = self.queue.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let poll = self.context.ops().poll_cq.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: zero is a value of every field.
        let mut done: [ibv::ibv_wc; BATCH] = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is there, and there is room for them.
        let count = unsafe { poll(queue.cq.as_ptr(), BATCH as i32, done.as_mut_ptr()) };
        let count = usize::try_from(count)
            .map_err(|_| io::Error::other(format!("the completion queue is broken ({count})")))?;
        completions.extend(done[..count].iter().map(|wc| Completion {
            work: wc.wr_id,
            result: match wc.status {
                ibv::IBV_WC_SUCCESS => Ok(wc.byte_len as usize),
                ibv::IBV_WC_RETRY_EXC_ERR | ibv::IBV_WC_RNR_RETRY_EXC_ERR => Err(WorkError::GaveUp),
                ibv::IBV_WC_WR_FLUSH_ERR => Err(WorkError::Flushed),
                status => Err(WorkError::Broken(self.status_text(status))),
            },
        }));
        Ok(count == BATCH)
    }

    fn arm(&mut self) -> io::Result<()> {
        let queue = self.queue.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let arm = self.context.ops().req_notify_cq.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: the queue is there.
        check("cannot wait for completions", unsafe { arm(queue.cq.as_ptr(), 0) })
    }

    fn disarm(&mut self) -> io::Result<()> {
        let queue = self.queue.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let (mut cq, mut cookie) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is open; it does not block.
        let got = unsafe {
            self.context.verbs.ibv_get_cq_event(
                queue.channel.as_ptr(),
                &raw mut cq,
                &raw mut cookie,
            )
        };
        if got == 0 {
            // SAFETY: the event was this queue's, the only one of the channel.
            unsafe { self.context.verbs.ibv_ack_cq_events(queue.cq.as_ptr(), 1) };
            return Ok(());
        }
        match io::Error::last_os_error() {
            e if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Ok(())
            }
            e => Err(e),
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.queue.as_ref().expect("made with the queue pairs").as_fd()
    }
}

impl Device {
    fn status_text(&self, status: ibv::ibv_wc_status) -> String {
        // SAFETY: returns a text that lives as long as the library, for every number.
        let text = unsafe { CStr::from_ptr(self.context.verbs.ibv_wc_status_str(status)) };
        text.to_string_lossy().into_owned()
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("gid", &self.gid).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_mtu_that_is_not_ibtas_is_refused_with_the_next_smaller_one() {
        let refused = check_ibta(1408).unwrap_err().to_string();
        assert!(refused.starts_with("path MTU 1408: adapters take 256, 512, 1024"), "{refused}");
        assert!(refused.ends_with("`--mtu 1024`"), "{refused}");
        for mtu in [256, 512, 1024, 2048, 4096] {
            assert!(check_ibta(mtu).is_ok(), "{mtu}");
        }
    }
}
