//! Limits the packets that a queue pair has in flight, so it shares links with others.
//!
//! A congestion notification (IBTA A17.9) reduces the window to 0.7 of the packets in flight, at
//! most once a round trip. With acknowledgements the window grows again: by half a packet a round
//! trip, and by a whole one after it has reached its old size. TCP does the same at a marked packet
//! (CUBIC where it is friendly to Reno: RFC 9438, 4.3 and 4.6), so both have similar windows on a
//! link that marks. The book has measurements with TCP (book/text/inside/endpoints.md).
//!
//! All ranks of a ring slow down together: the box copies each mark to all results, and all
//! receivers send notifications.

/// The fraction of the window that remains after a notification.
const DECREASE_FACTOR: f64 = 0.7;
/// Packets a round trip, until the window has its old size: 3 * (1 - f) / (1 + f), where f is
/// [`DECREASE_FACTOR`].
const REGROWTH: f64 = 0.53;
/// Least packets in flight.
const LEAST: f64 = 2.0;
/// With fewer packets in flight, where more would be allowed, a mark says nothing about the link: a
/// message of one packet was marked because of another flow's congestion.
const MIN_TELLING_FLIGHT: u64 = 64;

/// A window of packets.
#[derive(Debug)]
pub(super) struct Congestion {
    most: u64,
    window: f64,
    /// Its size before the last reduction.
    before: f64,
    /// A round trip is over when everything before this packet is acknowledged.
    round: u64,
    /// Most packets in flight in this round trip.
    flight: u64,
    /// Notifications are for packets from before the last reduction, until everything before this
    /// packet is acknowledged.
    recovered: u64,
}

impl Congestion {
    /// No notification yet: the largest window.
    pub fn new(most: u64) -> Self {
        Self { most, window: most as f64, before: most as f64, round: 0, flight: 0, recovered: 0 }
    }

    /// Most packets in flight.
    pub fn window(&self) -> u64 {
        self.window as u64
    }

    /// Whether the window is smaller than without congestion.
    pub fn is_limited(&self) -> bool {
        self.window() < self.most
    }

    /// The receiver holds at most `most` packets.
    pub fn limit(&mut self, most: u64) {
        self.most = self.most.min(most.max(1));
        self.window = self.window.min(self.most as f64);
    }

    /// Notes how many packets are in flight.
    pub fn on_sent(&mut self, flight: u64) {
        self.flight = self.flight.max(flight);
    }

    /// The other side has received a marked packet. All before `acked` is acknowledged; `sent` is
    /// one after the last packet that was sent.
    pub fn on_notification(&mut self, acked: u64, sent: u64) {
        if acked < self.recovered || acked == sent {
            return;
        }
        self.recovered = sent;
        // Reduces the packets in flight: a window that is not used says nothing about the link.
        self.before = self.window.min(self.flight.max(MIN_TELLING_FLIGHT) as f64);
        self.window = (self.before * DECREASE_FACTOR).max(LEAST).min(self.window);
    }

    /// `packets` more are acknowledged, all before `acked`; `sent` is one after the last packet
    /// sent.
    pub fn on_acknowledged(&mut self, packets: u64, acked: u64, sent: u64) {
        // An unused window does not grow.
        if self.is_limited() && self.flight >= self.window() {
            let growth = if self.window < self.before { REGROWTH } else { 1.0 };
            self.window =
                (self.window + growth * packets as f64 / self.window).min(self.most as f64);
        }
        if acked >= self.round {
            (self.round, self.flight) = (sent, sent - acked);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Senders whose packets alternate on a link for `rounds` round trips; the link marks packets
    /// while its queue is longer than `depth`. Returns what each has sent in the second half.
    fn share(windows: &mut [Congestion], link: u64, depth: u64, rounds: u64) -> Vec<u64> {
        let mut sent = vec![0; windows.len()];
        let mut late = vec![0; windows.len()];
        for round in 0..rounds {
            let all: u64 = windows.iter().map(Congestion::window).sum();
            for (i, w) in windows.iter_mut().enumerate() {
                let packets = w.window();
                w.on_sent(packets);
                sent[i] += packets;
                if all > link + depth {
                    w.on_notification(sent[i] - packets, sent[i]);
                }
                w.on_acknowledged(packets, sent[i], sent[i]);
                if round >= rounds / 2 {
                    // Waiting in a queue does not make a packet arrive earlier.
                    late[i] += packets * link / all.max(link);
                }
            }
        }
        late
    }

    #[test]
    fn without_notifications_nothing_is_held_back() {
        let mut c = Congestion::new(1000);
        for n in 1..100 {
            c.on_sent(1000);
            c.on_acknowledged(1000, n * 1000, n * 1000 + 1000);
            assert_eq!((c.window(), c.is_limited()), (1000, false));
        }
    }

    #[test]
    fn a_round_trip_reduces_once_and_never_below_two() {
        let mut c = Congestion::new(1000);
        c.on_sent(100);
        c.on_notification(100, 100);
        assert_eq!(c.window(), 1000, "nothing was in flight");
        c.on_notification(0, 100);
        c.on_acknowledged(60, 60, 160);
        c.on_notification(60, 160);
        assert_eq!(c.window(), 70, "of the packets in flight, not of the window");
        for n in 1..100 {
            c.on_sent(c.window());
            c.on_acknowledged(1, n * 2000, n * 2000);
            c.on_notification(n * 2000, n * 2000 + 1);
        }
        assert_eq!(c.window(), 2);
    }

    #[test]
    fn a_message_of_one_packet_leaves_room_for_a_long_one() {
        let mut c = Congestion::new(1000);
        c.on_sent(1);
        c.on_notification(0, 1);
        assert_eq!(c.window(), 44);
    }

    #[test]
    fn an_unused_window_does_not_grow() {
        let mut c = Congestion::new(1000);
        c.on_sent(100);
        c.on_notification(0, 100);
        c.on_acknowledged(100, 100, 100);
        for n in 2..1000 {
            c.on_sent(10);
            c.on_acknowledged(10, n * 100, n * 100);
        }
        assert!(c.window() < 75, "{}", c.window());
    }

    #[test]
    fn senders_share_a_link_and_fill_it() {
        // One has the link to itself, the other one starts later.
        let mut windows = [Congestion::new(2048), Congestion::new(2048)];
        share(&mut windows[..1], 100, 40, 400);
        let sent = share(&mut windows, 100, 40, 4000);
        let all: u64 = sent.iter().sum();
        assert!(all > 2000 * 100 * 95 / 100, "{sent:?}");
        assert!(sent.iter().all(|s| (40..=60).contains(&(100 * s / all))), "{sent:?}");
        // Alone again, it uses the whole link.
        let sent = share(&mut windows[1..], 100, 40, 2000);
        assert!(sent[0] > 1000 * 95, "{sent:?}");
    }
}
