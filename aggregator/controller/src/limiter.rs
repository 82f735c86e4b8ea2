//! The connection limiter of the workers' TCP port. A foreign host that reaches the port can open
//! only a few connections, for a short time, until one of its requests shows a job's token. Each
//! wrong token uses up one of the address's few tries.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Sleep;
use tonic::Status;
use tonic::transport::server::Connected;

/// Limits for connections.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections open at once.
    pub connections: usize,
    /// Connections open at once from one address that have not shown a token.
    pub per_address: usize,
    /// The same for those that have: each rank has one or two, and as many in each of its groups.
    pub with_token: usize,
    /// Time to show a token before a connection is closed.
    pub timeout: Duration,
    /// Wrong tokens from one address within `penalty`.
    pub tries: usize,
    /// Time until a wrong token's try is returned.
    pub penalty: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 4096,
            per_address: 192,
            with_token: 1024,
            timeout: Duration::from_secs(10),
            tries: 16,
            penalty: Duration::from_secs(1),
        }
    }
}

/// Admits connections.
#[derive(Clone, Debug)]
pub struct ConnectionLimiter {
    limits: Limits,
    addresses: Arc<Mutex<HashMap<IpAddr, Address>>>,
    wrong: Arc<Mutex<LogInterval>>,
    /// Where to report ranks whose connections they have closed.
    disconnected: Option<UnboundedSender<(RankEpoch, Instant)>>,
}

/// A rank in an epoch of its job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankEpoch {
    pub job: String,
    pub rank: u32,
    pub epoch: u32,
}

/// Rate limit for log lines about one thing: one per [`LogInterval::INTERVAL`].
#[derive(Debug, Default)]
struct LogInterval {
    last: Option<Instant>,
    unlogged: u64,
}

impl LogInterval {
    const INTERVAL: Duration = Duration::from_secs(10);

    /// Counts an event. Returns how many went unlogged if a line is due.
    fn record(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < Self::INTERVAL) {
            self.unlogged += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.unlogged))
    }
}

#[derive(Debug)]
struct Address {
    /// Connections that have not shown a token, and those that have.
    without_token: usize,
    with_token: usize,
    tries: Arc<Semaphore>,
}

impl Address {
    fn connections(&self) -> usize {
        self.without_token + self.with_token
    }
}

impl ConnectionLimiter {
    /// Without any connection.
    pub fn new(limits: Limits) -> Self {
        let (addresses, wrong) = (Arc::default(), Arc::default());
        Self { limits, addresses, wrong, disconnected: None }
    }

    /// Reports ranks that close the connection of their heartbeats.
    pub fn reporting(self, disconnected: UnboundedSender<(RankEpoch, Instant)>) -> Self {
        Self { disconnected: Some(disconnected), ..self }
    }

    fn addresses(&self) -> std::sync::MutexGuard<'_, HashMap<IpAddr, Address>> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a connection, or closes it.
    pub fn admit(&self, tcp: TcpStream) -> Option<Connection> {
        let ip = tcp.peer_addr().ok()?.ip().to_canonical();
        // Answers are small, and ranks wait for them.
        tcp.set_nodelay(true).ok()?;
        let mut addresses = self.addresses();
        if addresses.values().map(Address::connections).sum::<usize>() >= self.limits.connections {
            log::debug!(
                "connection from {ip} closed: there are {} already",
                self.limits.connections
            );
            return None;
        }
        // Addresses without connections and with all tries left are forgotten.
        addresses
            .retain(|_, a| a.connections() > 0 || a.tries.available_permits() < self.limits.tries);
        let address = addresses.entry(ip).or_insert_with(|| Address {
            without_token: 0,
            with_token: 0,
            tries: Arc::new(Semaphore::new(self.limits.tries)),
        });
        if address.without_token >= self.limits.per_address {
            log::debug!(
                "connection from {ip} closed: it has {} without a token already",
                address.without_token
            );
            return None;
        }
        address.without_token += 1;
        let (proved, member, tries) = (Arc::default(), Arc::default(), address.tries.clone());
        let peer = Peer { ip, proved, member, tries, limiter: self.clone() };
        let deadline = Some(Box::pin(tokio::time::sleep(self.limits.timeout)));
        Some(Connection { tcp, deadline, peer, is_closed: false })
    }
}

/// The other end of a connection; each of its requests carries it.
#[derive(Clone, Debug)]
pub struct Peer {
    ip: IpAddr,
    /// The job whose token it has shown.
    proved: Arc<OnceLock<String>>,
    /// The rank that its last heartbeat was of.
    member: Arc<Mutex<Option<RankEpoch>>>,
    tries: Arc<Semaphore>,
    limiter: ConnectionLimiter,
}

impl Peer {
    /// Its address.
    pub fn ip(&self) -> IpAddr {
        self.ip
    }

    /// Records a rank's heartbeat, with a right token.
    pub fn record_heartbeat(&self, member: RankEpoch) {
        *self.member.lock().unwrap_or_else(PoisonError::into_inner) = Some(member);
    }

    /// Checks a token with `check` once this address has a try left. A connection that has shown a
    /// job's token needs no try for that job, so guesses from the same address do not delay a rank.
    pub async fn authorise(
        &self,
        job: &str,
        check: impl Fn() -> Result<(), Status>,
    ) -> Result<(), Status> {
        // The job may since have been replaced by another of the same name.
        if self.proved.get().is_some_and(|known| known == job) && check().is_ok() {
            return Ok(());
        }
        let one_try: SemaphorePermit<'_> =
            self.tries.acquire().await.map_err(|_| {
                Status::resource_exhausted("too many wrong tokens from this address")
            })?;
        match check() {
            Ok(()) => self.prove(job),
            Err(why) => {
                let wrong = &self.limiter.wrong;
                let due =
                    wrong.lock().unwrap_or_else(PoisonError::into_inner).record(Instant::now());
                match due {
                    Some(0) => log::warn!("{}: a wrong token, or no such job", self.ip),
                    Some(more) => log::warn!(
                        "{}: a wrong token, or no such job; {more} more since the last such line",
                        self.ip
                    ),
                    None => {}
                }
                one_try.forget();
                // In a task of its own, so hanging up does not return a try earlier.
                let (tries, penalty) = (self.tries.clone(), self.limiter.limits.penalty);
                tokio::spawn(async move {
                    tokio::time::sleep(penalty).await;
                    tries.add_permits(1);
                });
                Err(why)
            }
        }
    }

    /// The connection has shown this job's token.
    fn prove(&self, job: &str) -> Result<(), Status> {
        let mut addresses = self.limiter.addresses();
        let Some(address) = addresses.get_mut(&self.ip) else { return Ok(()) };
        if self.proved.get().is_some() {
            return Ok(());
        }
        if address.with_token >= self.limiter.limits.with_token {
            return Err(Status::resource_exhausted(format!(
                "{} has {} connections here already, which is the most: run fewer ranks there, or \
                 ranks with fewer groups",
                self.ip, address.with_token
            )));
        }
        address.without_token -= 1;
        address.with_token += 1;
        drop(self.proved.set(job.to_owned()));
        Ok(())
    }

    /// The connection is closed.
    fn leave(&self) {
        if let Some(address) = self.limiter.addresses().get_mut(&self.ip) {
            // A request may still be about to show a token: it no longer counts.
            match self.proved.set(String::new()) {
                Ok(()) => address.without_token -= 1,
                Err(_) => address.with_token -= 1,
            }
        }
    }
}

/// An admitted connection.
#[derive(Debug)]
pub struct Connection {
    tcp: TcpStream,
    deadline: Option<Pin<Box<Sleep>>>,
    peer: Peer,
    /// Whether the other end has closed it.
    is_closed: bool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.peer.leave();
        let member = self.peer.member.lock().unwrap_or_else(PoisonError::into_inner).take();
        let disconnected = &self.peer.limiter.disconnected;
        if let (true, Some(member), Some(to)) = (self.is_closed, member, disconnected) {
            let _ = to.send((member, Instant::now()));
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;
    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl Connection {
    /// Fails once the time to show a token is over.
    fn in_time(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.peer.proved.get().is_some() {
            self.deadline = None;
        }
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "no token was shown in time"));
        }
        Ok(())
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.in_time(cx)?;
        let before = buf.filled().len();
        let result = Pin::new(&mut self.tcp).poll_read(cx, buf);
        self.is_closed |= match &result {
            Poll::Ready(Ok(())) => buf.filled().len() == before && buf.remaining() > 0,
            Poll::Ready(Err(e)) => e.kind() == io::ErrorKind::ConnectionReset,
            Poll::Pending => false,
        };
        result
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        // A client that does not read answers has to show a token in time, too.
        self.in_time(cx)?;
        Pin::new(&mut self.tcp).poll_write(cx, buf)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.in_time(cx)?;
        Pin::new(&mut self.tcp).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.in_time(cx)?;
        Pin::new(&mut self.tcp).poll_write_vectored(cx, bufs)
    }
    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_tokens_make_one_line_in_an_interval_with_their_number() {
        let (mut lines, begin) = (LogInterval::default(), Instant::now());
        let after = |ms: u32| begin + ms * Duration::from_millis(1);
        let logged: Vec<u64> = (0..9_000).filter_map(|ms| lines.record(after(ms))).collect();
        assert_eq!(logged, [0]);
        assert_eq!(lines.record(after(10_000)), Some(8_999));
        assert_eq!(lines.record(after(10_001)), None);
        assert_eq!(lines.record(after(20_000)), Some(1));
    }
}
