//! The channels over queue pairs of the RC endpoint `netsum-rc`.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::buffer::Buffer;
use crate::channels::{Channel, ChannelEvent, Channels};
use crate::frame::plain_room;
use crate::shape::JobShape;
use netsum_rc::{Endpoint, Event, Psn, QpConfig, QpId, Qpn, SetupError};

/// Numbers of one connection pair of a rank: from the previous and to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Numbers {
    pub receive_qpn: Qpn,
    pub send_qpn: Qpn,
    pub first_psn: Psn,
}

/// A rank's address and numbers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankNumbers {
    pub ip: IpAddr,
    pub rings: Vec<Numbers>,
    pub plain: Numbers,
    /// Its packets' IPv4 identifications count up, as a kernel's or an adapter's do.
    pub any_ip_id: bool,
}

/// An endpoint, with a queue pair for each channel.
#[derive(Debug)]
pub struct QueuePairChannels {
    pub endpoint: Endpoint,
    qps: HashMap<Channel, QpId>,
    channels: HashMap<QpId, Channel>,
}

/// Time without an acknowledgement after which packets are sent again. Scheduling on a busy host takes milliseconds, and
/// a sum comes only when the last rank has sent its part.
const ACK_TIMEOUT: Duration = Duration::from_micros(67_109);
/// The same where the acknowledgement waits for nobody. Below that, hosts that run ten processes on two cores send packets again
/// in runs without loss (8 ms: in each of four runs of the lab's tests; 16 ms: in none of four).
pub const MIN_ACK_TIMEOUT: Duration = Duration::from_millis(16);

impl QueuePairChannels {
    /// Makes the queue pairs of rank `rank`. `capacity` is how many packets the socket holds for certain.
    pub fn new(
        mut endpoint: Endpoint,
        shape: &JobShape,
        rank: u32,
        ranks: &[RankNumbers],
        capacity: u32,
    ) -> Result<Self, SetupError> {
        let count = ranks.len() as u32;
        let own = &ranks[rank as usize];
        let next = &ranks[((rank + 1) % count) as usize];
        let previous = &ranks[((rank + count - 1) % count) as usize];
        let own_any_ip_id = own.any_ip_id;
        let (mut qps, mut channels) = (HashMap::new(), HashMap::new());
        let fragments = shape.layout.message_size.div_ceil(shape.mtu);
        let share = (capacity / (shape.layout.rings + 1)).max(8);
        let all_are_ours = ranks.iter().all(|rank| !rank.any_ip_id);
        let mut connect =
            |out: Channel, into: Channel, own: Numbers, next_n: Numbers, previous_n: Numbers| {
                let mut pair = [
                    (
                        out,
                        QpConfig::new(
                            own.send_qpn,
                            next.ip,
                            next_n.receive_qpn,
                            own.first_psn,
                            Psn::default(),
                            shape.mtu as usize,
                        ),
                    ),
                    (
                        into,
                        QpConfig::new(
                            own.receive_qpn,
                            previous.ip,
                            previous_n.send_qpn,
                            Psn::default(),
                            previous_n.first_psn,
                            shape.mtu as usize,
                        ),
                    ),
                ];
                for (channel, config) in &mut pair {
                    // A rank may compute for an hour before it sends its part. Who is dead is found by keep-alives.
                    config.retry_limit = None;
                    config.ack_timeout = ACK_TIMEOUT;
                    config.min_ack_timeout = Some(MIN_ACK_TIMEOUT);
                    // Adapters and kernels go back.
                    config.selective = match channel {
                        Channel::PlainOut => !own_any_ip_id && !next.any_ip_id,
                        Channel::PlainIn => !own_any_ip_id && !previous.any_ip_id,
                        Channel::RingOut(_) | Channel::RingIn(_) => shape.relaxed && all_are_ours,
                    };
                    config.waits_for_others = matches!(channel, Channel::RingOut(_) | Channel::RingIn(_));
                    (config.max_inflight, config.max_message) = match channel {
                        Channel::PlainOut | Channel::PlainIn => (share.min(128), plain_room(shape)),
                        _ => (
                            share.min(fragments.saturating_mul(shape.layout.window)),
                            shape.layout.message_size as usize,
                        ),
                    };
                    let id = endpoint.add_qp(config.clone())?;
                    qps.insert(*channel, id);
                    channels.insert(id, *channel);
                }
                Ok(())
            };
        connect(Channel::PlainOut, Channel::PlainIn, own.plain, next.plain, previous.plain)?;
        for (i, ((o, n), p)) in own.rings.iter().zip(&next.rings).zip(&previous.rings).enumerate() {
            connect(Channel::RingOut(i as u32), Channel::RingIn(i as u32), *o, *n, *p)?;
        }
        Ok(Self { endpoint, qps, channels })
    }
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

    fn poll(&mut self) -> Option<ChannelEvent> {
        loop {
            let event = self.endpoint.poll_event()?;
            let (Event::Sent { qp, .. } | Event::Received { qp, .. } | Event::Failed { qp, .. }) = &event;
            let Some(channel) = self.channels.get(qp).copied() else { continue };
            return Some(match event {
                Event::Sent { id, data, .. } => ChannelEvent::Sent { channel, id, data: data.into() },
                Event::Received { data, .. } => ChannelEvent::Received { channel, data: data.into() },
                Event::Failed { error, .. } => ChannelEvent::Failed { channel, reason: error.to_string() },
            });
        }
    }

    fn close(&mut self, channel: Channel) -> Vec<(u64, Buffer)> {
        // The channel stays known: events that wait may still give back its messages.
        let messages = self.qps.remove(&channel).map(|qp| self.endpoint.remove_qp(qp));
        messages.into_iter().flatten().map(|(id, data)| (id, data.into())).collect()
    }
}
