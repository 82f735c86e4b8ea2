//! Links of all rates, without loss: nothing is retransmitted, however long the queues are.

use std::time::Duration;

use super::job::{Call, NEVER, Sim, Spec};
use super::network::Speed;
use super::vector::Vector;
use crate::numeric::layout::Layout;
use crate::report::Mode;

/// Nanoseconds for a byte at 10 Mb/s, 100 Mb/s, 1 Gb/s and about 10 Gb/s.
const RATES: [u32; 4] = [800, 80, 8, 1];

/// A few small all-reduces, a long one, and again. Returns the packets sent again.
fn sent_again(ranks: u32, layout: Layout, per_byte: u32, bucket: u32, mode: Mode) -> u64 {
    let mut spec = Spec { mtu: 1024, ..Spec::new(ranks, layout, 1) };
    spec.speed = Speed { per_byte, latency: Duration::from_micros(10), bucket, others: 0 };
    (spec.timeout, spec.limit) = (Duration::from_secs(100), Duration::from_secs(1000));
    if mode == Mode::HostRing {
        spec.present = NEVER;
    }
    let long =
        (layout.message_size / 4 - 4) * layout.rings * (layout.window + layout.window / 2 + 2);
    let lengths = [5, 2000, long, 5, 5, 5, long / 2, 2000, 2000, long];
    let mut sim = Sim::new(&spec, |rank| {
        let calls = lengths.iter().enumerate().map(|(n, length)| {
            let data = if n % 2 == 0 {
                Vector::ints(rank, *length as usize, n as u64)
            } else {
                Vector::floats(rank, *length as usize, n as u64)
            };
            Call { data, not_before: Duration::ZERO }
        });
        calls.collect()
    });
    sim.run();
    sim.settle(Duration::from_secs(2));
    for host in &sim.hosts {
        assert!(host.results.iter().all(|r| r.0.as_ref().is_ok_and(|f| f.mode == mode)));
    }
    sim.hosts.iter().map(|h| h.stack.endpoint.stats().retransmissions).sum()
}

fn check(mode: Mode, bucket: u32, allowed: fn(u32, u32) -> u64) {
    let mut wrong = Vec::new();
    for per_byte in RATES {
        for ranks in [2, 3, 4, 8, 16] {
            for (message_size, window, rings) in
                [(16, 1, 1), (16, 8, 1), (16, 32, 1), (64, 1, 1), (64, 8, 1), (16, 2, 4)]
            {
                // The longest of them would take a minute.
                if message_size * window * ranks * rings > 2048 {
                    continue;
                }
                let layout = Layout { message_size: message_size << 10, window, rings };
                let again = sent_again(ranks, layout, per_byte, bucket, mode);
                if again > allowed(per_byte, ranks) {
                    wrong.push(format!(
                        "{per_byte} ns/B, {ranks} ranks, {layout:?}: {again} sent again"
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn nothing_is_sent_again_without_loss_at_any_rate() {
    check(Mode::Box, 0, |_, _| 0);
}

#[test]
fn the_hosts_ring_retransmits_nothing_without_loss() {
    check(Mode::HostRing, 0, |_, _| 0);
}

#[test]
fn nothing_is_sent_again_where_links_take_some_bytes_at_once() {
    check(Mode::Box, 16 << 10, |_, _| 0);
}

#[test]
fn the_hosts_ring_learns_the_rate_behind_a_token_bucket() {
    // Steps that fit into the bucket make a link of 10 Mb/s seem fast. A few probes of each rank
    // correct that, and at most one flight is sent again.
    check(
        Mode::HostRing,
        16 << 10,
        |per_byte, ranks| if per_byte == 800 { u64::from(3 * ranks) + 128 } else { 0 },
    );
}

/// Each takes more than two timeouts to arrive, and so do keep-alives behind it.
#[test]
fn a_message_may_take_longer_than_the_timeout() {
    for (ranks, mode) in [(2, Mode::Box), (2, Mode::HostRing), (3, Mode::Box), (3, Mode::HostRing)]
    {
        let layout = Layout { message_size: 2 << 20, window: 2, rings: 1 };
        let mut spec = Spec { mtu: 256, ..Spec::new(ranks, layout, 1) };
        spec.speed =
            Speed { per_byte: 320, latency: Duration::from_micros(10), bucket: 0, others: 0 };
        spec.timeout = Duration::from_millis(300);
        if mode == Mode::HostRing {
            spec.present = NEVER;
        }
        let data = |rank| Vector::ints(rank, 800_000, 1);
        let mut sim =
            Sim::new(&spec, |rank| vec![Call { data: data(rank), not_before: Duration::ZERO }]);
        sim.run();
        let sum = Vector::sum(&layout, &(0..ranks).map(data).collect::<Vec<_>>());
        for host in &sim.hosts {
            let (outcome, data, _) = &host.results[0];
            assert_eq!(outcome.as_ref().map(|f| f.mode), Ok(mode), "{ranks} ranks");
            assert!(data.bits() == sum);
        }
    }
}
