//! A link's rate, from a bandwidth probe, a burst of frames: frames that queue
//! before a link leave it at its rate.

/// Most bytes of a probe.
pub const MAX_PROBE_BYTES: usize = 2 << 20;
/// Least frames for a measurement.
pub const MIN_PROBE_FRAMES: usize = 64;
/// Parts of a probe, each with its own rate.
const PARTS: usize = 16;

/// Bits per second of the link that a probe came over, from the arrival time of each frame in
/// nanoseconds, and its bytes; `None` if there are too few frames.
///
/// The first half is ignored: a token bucket passes its saved tokens at once. The result is the
/// median rate of the parts of the second half, which is robust against a sender that stalls and
/// then catches up.
pub fn rate(arrivals: &[(u64, u32)]) -> Option<u64> {
    if arrivals.len() < MIN_PROBE_FRAMES {
        return None;
    }
    let mut rates = parts(&arrivals[arrivals.len() / 2..]);
    rates.sort_unstable();
    Some(rates[PARTS / 2].midpoint(rates[PARTS / 2 - 1]))
}

/// Bits per second that a sender can reach, from the time at which it sent each frame: the rate of
/// the fastest part. In others it may have been delayed.
pub fn fastest(sent: &[(u64, u32)]) -> Option<u64> {
    if sent.len() < MIN_PROBE_FRAMES { None } else { parts(sent).into_iter().max() }
}

/// Rates of consecutive parts.
fn parts(frames: &[(u64, u32)]) -> Vec<u64> {
    let part = |n: usize| {
        let (from, to) = (n * (frames.len() - 1) / PARTS, (n + 1) * (frames.len() - 1) / PARTS);
        let bytes: u64 = frames[from + 1..=to].iter().map(|(_, bytes)| u64::from(*bytes)).sum();
        let time = frames[to].0.saturating_sub(frames[from].0).max(1);
        (u128::from(bytes) * 8_000_000_000 / u128::from(time)) as u64
    };
    (0..PARTS).map(part).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A probe after a link: `free` bytes pass at once, the rest at the link's rate, each
    /// delayed by a value of `late` in ns.
    fn arrivals(bits: u64, frames: usize, free: u64, late: &[u64]) -> Vec<(u64, u32)> {
        let mut sent = 0u64;
        let mut last = 0;
        let mut all = Vec::new();
        for n in 0..frames {
            sent += 1514;
            let due = sent.saturating_sub(free) * 8_000_000_000 / bits;
            last = last.max(due + late[n % late.len()]);
            all.push((last, 1514));
        }
        all
    }

    #[test]
    fn few_frames_say_nothing() {
        assert_eq!(rate(&arrivals(1_000_000_000, MIN_PROBE_FRAMES - 1, 0, &[0])), None);
        assert!(rate(&arrivals(1_000_000_000, MIN_PROBE_FRAMES, 0, &[0])).is_some());
    }

    #[test]
    fn a_pause_of_the_sender_is_no_rate() {
        let mut probe = arrivals(1_000_000_000, 1000, 0, &[0]);
        // The probe pauses for 20 ms, and the delayed frames arrive at once.
        let at = probe[800].0 + 20_000_000;
        probe[800..].iter_mut().for_each(|(time, _)| *time = (*time).max(at));
        let measured = rate(&probe).unwrap();
        assert!(measured.abs_diff(1_000_000_000) < 10_000_000, "{measured}");
    }

    proptest! {
        #[test]
        fn the_rate_is_robust_against_bursts_and_delays(
            bits in 5_000_000u64..10_000_000_000,
            frames in 400usize..1400,
            free in 0u64..200_000,
            late in proptest::collection::vec(0u64..2000, 1..50),
        ) {
            let measured = rate(&arrivals(bits, frames, free, &late)).unwrap() as f64;
            // A part of the second half has at least 12 frames, with an error of 2 us.
            let error = 2e-6 / (12.0 * 1514.0 * 8.0 / bits as f64) + 0.001;
            prop_assert!((measured / bits as f64 - 1.0).abs() <= error.max(0.001), "{measured} of \
                {bits}");
        }

        #[test]
        fn any_times_are_accepted(
            probe in proptest::collection::vec((any::<u64>(), any::<u32>()), 0..300)
        ) {
            rate(&probe);
            fastest(&probe);
        }
    }
}
