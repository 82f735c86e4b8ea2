//! The packets that a selective receiver is missing. The list follows the AETH of a NAK for a PSN
//! sequence error.
//!
//! Words in network byte order: the PSN of the packet that arrived last, as in IRN (SIGCOMM 2018,
//! section 3.1), then for each row of missing packets its first PSN and its length. Each NAK lists
//! all rows, so a lost NAK does no harm once another one arrives.

use netsum_common::serial;

use super::Psn;

/// Most rows in a NAK: the oldest ones.
const ROWS: usize = 32;

/// The packets that have arrived, and those that are missing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gaps {
    /// The packet that arrived last, perhaps a duplicate: packets that were sent before it and are
    /// missing are lost.
    pub newest: Psn,
    /// First PSN and length of each row of missing packets.
    pub missing: Vec<(Psn, u32)>,
}

impl Gaps {
    /// Encodes a NAK's payload.
    pub fn encode(&self) -> Vec<u8> {
        let rows = self.missing.iter().take(ROWS).flat_map(|(first, len)| [first.get(), *len]);
        std::iter::once(self.newest.get()).chain(rows).flat_map(u32::to_be_bytes).collect()
    }

    /// Decodes a NAK's payload; `None` if it is not valid. Overlapping rows are refused, because
    /// they would cost too much work.
    pub fn decode(payload: &[u8]) -> Option<Self> {
        let (lanes, rest) = payload.as_chunks::<4>();
        let (newest, rows) = lanes.split_first()?;
        if !rest.is_empty() || rows.len() % 2 != 0 || rows.len() > 2 * ROWS {
            return None;
        }
        let lane = |bytes: &[u8; 4]| u32::from_be_bytes(*bytes);
        let rows =
            rows.as_chunks::<2>().0.iter().map(|[first, len]| (Psn::new(lane(first)), lane(len)));
        let missing: Vec<_> = rows.collect();
        let mut end = 0;
        for &(first, len) in &missing {
            let at = u64::from(serial::sub(first.get(), missing[0].0.get()));
            if at < end {
                return None;
            }
            end = at + u64::from(len);
        }
        Some(Self { newest: Psn::new(lane(newest)), missing })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_survive_a_round_trip_and_invalid_ones_are_refused() {
        let gaps = Gaps {
            newest: Psn::new(0xff_ffff),
            missing: vec![(Psn::new(5), 1), (Psn::new(9), 300)],
        };
        assert_eq!(Gaps::decode(&gaps.encode()), Some(gaps.clone()));
        let many =
            Gaps { missing: (0..100).map(|n| (Psn::new(2 * n), 1)).collect(), ..gaps.clone() };
        assert_eq!(Gaps::decode(&many.encode()).unwrap().missing.len(), ROWS);
        let bytes = gaps.encode();
        for len in (0..bytes.len()).filter(|len| len % 8 != 4) {
            assert_eq!(Gaps::decode(&bytes[..len]), None, "{len}");
        }
        assert_eq!(Gaps::decode(&vec![0; 4 + 8 * (ROWS + 1)]), None);
        // Overlapping rows, also over the wrap.
        for rows in [[(9, 2), (10, 1)], [(0xff_fff0, 17), (0, 1)], [(5, u32::MAX), (9, 1)]] {
            let gaps = Gaps {
                missing: rows.map(|(first, len)| (Psn::new(first), len)).to_vec(),
                ..gaps.clone()
            };
            assert_eq!(Gaps::decode(&gaps.encode()), None, "{rows:?}");
        }
    }
}
