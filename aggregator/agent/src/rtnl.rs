//! Queries to the kernel over netlink. Messages are kept raw, so one that cannot be parsed does not
//! affect the others.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::channel::mpsc::UnboundedReceiver;
use futures::{Stream, StreamExt as _};
use rtnetlink::MulticastGroup;
use rtnetlink::packet_core::{
    NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader,
    NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::proto::{Connection, ConnectionHandle, new_connection};
use rtnetlink::sys::protocols::NETLINK_ROUTE;
use rtnetlink::sys::{AsyncSocket as _, SocketAddr};
use tokio::sync::Mutex;

/// Attempts for a list that is interrupted, and the pause between them.
const TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(10);

/// A message: its type, and the bytes after its header.
#[derive(Clone, Debug)]
pub struct Raw {
    pub kind: u16,
    pub bytes: Vec<u8>,
}

impl NetlinkDeserializable for Raw {
    type Error = Infallible;

    fn deserialize(header: &NetlinkHeader, bytes: &[u8]) -> Result<Self, Infallible> {
        Ok(Self { kind: header.message_type, bytes: bytes.to_vec() })
    }
}

impl NetlinkSerializable for Raw {
    fn message_type(&self) -> u16 {
        self.kind
    }

    fn buffer_len(&self) -> usize {
        self.bytes.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.bytes);
    }
}

impl From<RouteNetlinkMessage> for Raw {
    fn from(message: RouteNetlinkMessage) -> Self {
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        Self { kind: message.message_type(), bytes }
    }
}

impl Raw {
    /// Parses it; `None` if that fails.
    pub fn decode(&self) -> Option<RouteNetlinkMessage> {
        let mut header = NetlinkHeader::default();
        header.message_type = self.kind;
        let decoded = RouteNetlinkMessage::deserialize(&header, &self.bytes);
        decoded.inspect_err(|e| log::debug!("netlink: a message is passed over: {e}")).ok()
    }
}

/// A connection.
#[derive(Clone)]
pub struct Rtnl {
    handle: ConnectionHandle<Raw>,
    /// The kernel answers EBUSY if a list is requested while another one is sent on the same socket
    /// (`__netlink_dump_start` in net/netlink/af_netlink.c).
    one_list: Arc<Mutex<()>>,
}

impl Rtnl {
    /// Connects to one of netlink's protocols, within a tokio runtime.
    pub fn open(protocol: isize) -> io::Result<Self> {
        let (mut connection, handle, _): (Connection<Raw>, _, _) = new_connection(protocol)?;
        // The final message may report an interruption or an error.
        connection.set_forward_done(true);
        tokio::spawn(connection);
        Ok(Self { handle, one_list: Arc::default() })
    }

    /// Returns the answer to a query that is not for a list.
    ///
    /// # Errors
    /// The kernel's error, by its number.
    pub async fn get(&self, request: impl Into<Raw>) -> io::Result<Vec<Raw>> {
        query(&self.handle, request.into(), 0).await
    }

    /// Returns a whole list. The list is read to its end even if the caller is cancelled, for
    /// example because a manager has hung up: otherwise the next list would be refused. A list that
    /// changes while the kernel generates it may lack entries, and is requested again.
    ///
    /// # Errors
    /// The kernel's error, or that the list keeps changing.
    pub async fn dump(&self, request: impl Into<Raw>) -> io::Result<Vec<Raw>> {
        let (Self { handle, one_list }, request) = (self.clone(), request.into());
        let whole = tokio::spawn(async move {
            let _one_list = one_list.lock().await;
            until_whole(|| query(&handle, request.clone(), NLM_F_DUMP)).await
        });
        whole.await?
    }
}

async fn query(handle: &ConnectionHandle<Raw>, request: Raw, list: u16) -> io::Result<Vec<Raw>> {
    let mut message =
        NetlinkMessage::new(NetlinkHeader::default(), NetlinkPayload::InnerMessage(request));
    message.header.flags = NLM_F_REQUEST | list;
    let answer = handle.request(message, SocketAddr::new(0, 0)).map_err(io::Error::other)?;
    whole(answer, list != 0).await
}

/// Repeats the query while the list changes.
async fn until_whole<F: Future<Output = io::Result<Vec<Raw>>>>(
    mut query: impl FnMut() -> F,
) -> io::Result<Vec<Raw>> {
    for _ in 1..TRIES {
        match query().await {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => tokio::time::sleep(PAUSE).await,
            done => return done,
        }
    }
    query().await
}

/// The messages of an answer, if it is complete.
async fn whole(
    answer: impl Stream<Item = NetlinkMessage<Raw>>,
    is_list: bool,
) -> io::Result<Vec<Raw>> {
    let (mut all, mut is_whole, mut interrupted) = (Vec::new(), !is_list, false);
    let mut answer = std::pin::pin!(answer);
    while let Some(message) = answer.next().await {
        interrupted |= message.header.flags & NLM_F_DUMP_INTR != 0;
        match message.payload {
            NetlinkPayload::InnerMessage(raw) => all.push(raw),
            NetlinkPayload::Done(done) if done.code < 0 => {
                return Err(io::Error::from_raw_os_error(-done.code));
            }
            NetlinkPayload::Done(_) => is_whole = true,
            NetlinkPayload::Error(e) => return Err(e.to_io()),
            _ => {}
        }
    }
    match (is_whole, interrupted) {
        (true, false) => Ok(all),
        (true, true) => {
            Err(io::Error::new(io::ErrorKind::Interrupted, "it changes while the kernel makes it"))
        }
        (false, _) => Err(io::Error::other("the answer has no end")),
    }
}

/// Notices of changes.
pub struct Changes(UnboundedReceiver<(NetlinkMessage<Raw>, SocketAddr)>);

impl Changes {
    /// Subscribes to these groups.
    pub fn open(groups: &[MulticastGroup]) -> io::Result<Self> {
        let (mut connection, _, changes): (Connection<Raw>, _, _) = new_connection(NETLINK_ROUTE)?;
        let groups = groups.iter().fold(0, |all, group| all | 1 << (*group as u32 - 1));
        connection.socket_mut().socket_mut().bind(&SocketAddr::new(0, groups))?;
        tokio::spawn(connection);
        Ok(Self(changes))
    }

    /// Waits for the next notice, and drains all that have arrived; false if the socket is closed.
    /// Lost notices count as one.
    pub async fn next(&mut self) -> bool {
        let some = self.0.next().await.is_some();
        while self.0.try_recv().is_ok() {}
        some
    }
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_core::{DoneMessage, NLM_F_MULTIPART};

    use super::*;

    /// A list of this many messages, with the interrupted flag on those whose numbers are in
    /// `marked`; the last one ends the list.
    fn list(messages: u16, marked: &[u16]) -> impl Stream<Item = NetlinkMessage<Raw>> + use<> {
        let marked = marked.to_vec();
        let message = move |kind: u16| {
            let mut header = NetlinkHeader::default();
            header.flags =
                NLM_F_MULTIPART | if marked.contains(&kind) { NLM_F_DUMP_INTR } else { 0 };
            let end = NetlinkPayload::Done(DoneMessage::default());
            let payload = NetlinkPayload::InnerMessage(Raw { kind, bytes: Vec::new() });
            NetlinkMessage::new(header, if kind == messages { end } else { payload })
        };
        futures::stream::iter((0..=messages).map(message))
    }

    #[tokio::test]
    async fn incomplete_dumps_are_refused() {
        assert_eq!(whole(list(3, &[]), true).await.unwrap().len(), 3);
        for marked in 0..=3 {
            let error = whole(list(3, &[marked]), true).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Interrupted);
        }
        whole(list(3, &[]).take(3), true).await.unwrap_err();
        assert_eq!(whole(list(3, &[]).take(1), false).await.unwrap().len(), 1, "no list");
    }

    #[tokio::test]
    async fn an_interrupted_list_is_requested_again() {
        let mut marked = vec![vec![], vec![2], vec![0]];
        let found = until_whole(|| whole(list(3, &marked.pop().unwrap()), true)).await.unwrap();
        assert!(found.len() == 3 && marked.is_empty());
        let error = until_whole(|| whole(list(3, &[1]), true)).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted, "all the time");
    }
}
