//! The channels over queue pairs of the RC endpoint `netsum-rc`.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::buffer::Buffer;
use crate::channels::{Channel, ChannelEvent, Channels};
use crate::frame::bypass_room;
use crate::shape::JobShape;
use netsum_common::wire::ROCE_PORT;
use netsum_rc::{Endpoint, Event, Psn, QpConfig, QpId, Qpn, SetupError};

/// Numbers of a rank's connections from the previous and to the next rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QpInfo {
    pub receive_qpn: Qpn,
    pub send_qpn: Qpn,
    pub first_psn: Psn,
}

/// The UDP ports that a rank sends from. Ranks that share an address distinguish packets by their
/// senders' addresses and ports, and one neighbour may be that of two of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SourcePorts {
    /// To the next rank.
    pub next: u16,
    /// To the previous rank.
    pub previous: u16,
}

impl SourcePorts {
    /// An adapter chooses its own.
    pub const UNKNOWN: Self = Self { next: 0, previous: 0 };
    pub const ROCE: Self = Self { next: ROCE_PORT, previous: ROCE_PORT };
}

/// A rank's address and numbers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankQpInfo {
    pub ip: IpAddr,
    pub rings: Vec<QpInfo>,
    /// Numbers of the bypass connections.
    pub bypass: QpInfo,
    /// Its packets' IPv4 identifications count up, as a kernel's or an adapter's do.
    pub any_ip_id: bool,
    /// It does selective retransmission.
    pub selective: bool,
    pub ports: SourcePorts,
}

/// An endpoint, with a queue pair for each channel.
#[derive(Debug)]
pub struct QueuePairChannels {
    pub endpoint: Endpoint,
    qps: HashMap<Channel, QpId>,
    channels: HashMap<QpId, Channel>,
}

/// The retransmission timeout. Scheduling on a busy host takes milliseconds, and a sum arrives only
/// after the last rank has sent its part.
const ACK_TIMEOUT: Duration = Duration::from_micros(67_109);
/// The retransmission timeout where the acknowledgement does not wait for other ranks. With less,
/// hosts that run ten processes on two cores retransmit without loss (8 ms: in each of four runs of
/// the lab's tests; 16 ms: in none of four).
pub const MIN_ACK_TIMEOUT: Duration = Duration::from_millis(16);

impl QueuePairChannels {
    /// Creates the queue pairs of rank `rank`. `capacity` is how many packets the socket holds at
    /// least.
    pub fn new(
        mut endpoint: Endpoint,
        shape: &JobShape,
        rank: u32,
        ranks: &[RankQpInfo],
        capacity: u32,
    ) -> Result<Self, SetupError> {
        let (mut qps, mut channels) = (HashMap::new(), HashMap::new());
        for (channel, config) in queue_pairs(shape, rank, ranks, capacity) {
            let id = endpoint.add_qp(config)?;
            qps.insert(channel, id);
            channels.insert(id, channel);
        }
        Ok(Self { endpoint, qps, channels })
    }

    /// Whether the previous rank is still in an earlier session, as far as its packets tell.
    pub fn previous_is_in_earlier(&self) -> bool {
        self.qps.get(&Channel::BypassIn).is_some_and(|qp| self.endpoint.is_of_earlier(*qp))
    }
}

/// The configuration of the queue pairs of rank `rank`.
fn queue_pairs(
    shape: &JobShape,
    rank: u32,
    ranks: &[RankQpInfo],
    capacity: u32,
) -> Vec<(Channel, QpConfig)> {
    let (count, rank) = (ranks.len(), rank as usize);
    let (own, next, previous) =
        (&ranks[rank], &ranks[(rank + 1) % count], &ranks[(rank + count - 1) % count]);
    let mtu = shape.mtu as usize;
    let out = |own: &QpInfo, n: &QpInfo| {
        QpConfig::new(own.send_qpn, next.ip, n.receive_qpn, own.first_psn, Psn::default(), mtu)
    };
    let into = |own: &QpInfo, p: &QpInfo| {
        QpConfig::new(own.receive_qpn, previous.ip, p.send_qpn, Psn::default(), p.first_psn, mtu)
    };
    let mut pairs = vec![
        (Channel::BypassOut, out(&own.bypass, &next.bypass)),
        (Channel::BypassIn, into(&own.bypass, &previous.bypass)),
    ];
    for (i, ((o, n), p)) in (0..).zip(own.rings.iter().zip(&next.rings).zip(&previous.rings)) {
        pairs.extend([(Channel::RingOut(i), out(o, n)), (Channel::RingIn(i), into(o, p))]);
    }
    let fragments = (shape.message_room() as u32).div_ceil(shape.mtu);
    let share = (capacity / (shape.layout.rings + 1)).max(8);
    for (channel, config) in &mut pairs {
        // A rank may compute for an hour before it sends its part. Keep-alives find dead ranks.
        config.retry_limit = None;
        config.source_port = match channel {
            Channel::BypassOut | Channel::RingOut(_) => own.ports.next,
            Channel::BypassIn | Channel::RingIn(_) => own.ports.previous,
        };
        config.ack_timeout = ACK_TIMEOUT;
        config.min_ack_timeout = Some(MIN_ACK_TIMEOUT);
        config.selective = match channel {
            Channel::BypassOut => own.selective && next.selective,
            Channel::BypassIn => own.selective && previous.selective,
            Channel::RingOut(_) | Channel::RingIn(_) => {
                shape.relaxed && ranks.iter().all(|r| r.selective)
            }
        };
        config.waits_for_others = matches!(channel, Channel::RingOut(_) | Channel::RingIn(_));
        // With a list of addresses, sessions reuse their numbers. Sums carry their session's
        // number.
        config.reused = config.selective && !config.waits_for_others;
        // The neighbour may have a larger share.
        (config.max_early, config.max_message) = match channel {
            Channel::BypassOut | Channel::BypassIn => (128, bypass_room(shape)),
            _ => (fragments.saturating_mul(shape.layout.window), shape.message_room()),
        };
        config.max_inflight = share.min(config.max_early);
    }
    pairs
}

impl Channels for QueuePairChannels {
    fn send(&mut self, channel: Channel, id: u64, data: Buffer) {
        if let Some(qp) = self.qps.get(&channel) {
            self.endpoint.post_send(*qp, id, data.into_vec(), None);
        }
    }

    fn expect(&mut self, now: Instant, channel: Channel, id: u64) {
        if let Some(qp) = self.qps.get(&channel) {
            self.endpoint.expect(now, *qp, id);
        }
    }

    fn receive_into(&mut self, channel: Channel, buffer: Buffer) {
        if let Some(qp) = self.qps.get(&channel) {
            self.endpoint.post_receive(*qp, buffer.into_vec());
        }
    }

    fn last_part(&self, channel: Channel) -> Option<Instant> {
        self.endpoint.last_taken(*self.qps.get(&channel)?)
    }

    fn poll(&mut self) -> Option<ChannelEvent> {
        loop {
            let event = self.endpoint.poll_event()?;
            let (Event::Sent { qp, .. } | Event::Received { qp, .. } | Event::Failed { qp, .. }) =
                &event;
            let Some(channel) = self.channels.get(qp).copied() else { continue };
            return Some(match event {
                Event::Sent { id, data, .. } => {
                    ChannelEvent::Sent { channel, id, data: data.into() }
                }
                Event::Received { data, .. } => {
                    ChannelEvent::Received { channel, data: data.into() }
                }
                Event::Failed { error, .. } => {
                    ChannelEvent::Failed { channel, reason: error.to_string() }
                }
            });
        }
    }

    fn close(&mut self, channel: Channel) -> Vec<(u64, Buffer)> {
        // `channels` keeps the entry: queued events may still return its messages.
        let messages = self.qps.remove(&channel).map(|qp| self.endpoint.remove_qp(qp));
        messages.into_iter().flatten().map(|(id, data)| (id, data.into())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::layout::Layout;

    const RANKS: u32 = 3;

    fn numbers(rank: u32, connection: u32) -> QpInfo {
        let qpn = 0x100 * rank + 2 * connection + 2;
        let first_psn = Psn::new(qpn * 1000);
        QpInfo { receive_qpn: Qpn::new(qpn), send_qpn: Qpn::new(qpn + 1), first_psn }
    }

    #[test]
    fn both_ends_of_a_connection_and_the_box_agree_whether_it_is_selective() {
        let layout = Layout { message_size: 65_536, window: 2, rings: 2 };
        for selective in
            (0..1 << RANKS).map(|bits: u32| [0, 1, 2].map(|rank| bits >> rank & 1 == 1))
        {
            let ranks = [0, 1, 2].map(|rank| RankQpInfo {
                ip: [10, 0, 0, rank as u8 + 1].into(),
                rings: (0..layout.rings).map(|ring| numbers(rank, ring)).collect(),
                bypass: numbers(rank, layout.rings),
                // Has no influence.
                any_ip_id: selective[rank as usize],
                selective: selective[rank as usize],
                ports: SourcePorts::ROCE,
            });
            // By default the box relaxes a ring if all ranks are selective; an administrator can
            // also choose it.
            let all = selective == [true; 3];
            for relaxed in [false, true] {
                let shape = JobShape {
                    ranks: RANKS,
                    mtu: 1024,
                    layout,
                    relaxed,
                    on_host_ring: false,
                    is_sealed: false,
                };
                let of = |rank| queue_pairs(&shape, rank, &ranks, [4096, 92, 0][rank as usize]);
                let ends: Vec<_> = (0..RANKS).map(of).collect();
                for (rank, (own, next)) in ends.iter().zip(ends.iter().cycle().skip(1)).enumerate()
                {
                    let bypass = selective[rank] && selective[(rank + 1) % 3];
                    let rings =
                        (0..layout.rings).map(|i| (Channel::RingOut(i), Channel::RingIn(i)));
                    for (out, into) in rings.chain([(Channel::BypassOut, Channel::BypassIn)]) {
                        let end = |of: &[(Channel, QpConfig)], channel| {
                            of.iter().find(|(c, _)| *c == channel).expect("a queue pair").1.clone()
                        };
                        let (from, to) = (end(own, out), end(next, into));
                        assert_eq!((from.remote_qpn, from.send_psn), (to.local_qpn, to.recv_psn));
                        assert_eq!((to.remote_qpn, to.remote), (from.local_qpn, ranks[rank].ip));
                        assert!(from.max_inflight <= to.max_early, "whatever its socket holds");
                        // The receiver tells the sender what its socket holds.
                        let share = [128, 30, 8][(rank + 1) % 3];
                        assert!(out != Channel::BypassOut || to.max_inflight == share);
                        let expected =
                            if out == Channel::BypassOut { bypass } else { relaxed && all };
                        assert_eq!(
                            [from.selective, to.selective],
                            [expected; 2],
                            "{selective:?} {relaxed} {out:?}"
                        );
                    }
                }
            }
        }
    }
}
