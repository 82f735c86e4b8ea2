//! Inputs out of a number: fresh bytes, or committed inputs with a few changes. No coverage is
//! looked at; the targets make something sensible of any bytes.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use crate::{Target, files};

/// A small generator (splitmix64), so that a number replays.
pub struct Rng(pub u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number below `n`; 0 where there is none.
    pub fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { (self.next() % n as u64) as usize }
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

/// Input `number` of a target.
pub fn input(number: u64, longest: usize, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut rng = Rng(number);
    if corpus.is_empty() || rng.below(3) == 0 {
        let len = rng.below(longest + 1);
        return rng.bytes(len);
    }
    let mut bytes = corpus[rng.below(corpus.len())].clone();
    for _ in 0..1 + rng.below(6) {
        let at = rng.below(bytes.len());
        match rng.below(6) {
            0 | 1 if !bytes.is_empty() => bytes[at] ^= 1 << rng.below(8),
            2 if !bytes.is_empty() => bytes[at] = rng.next() as u8,
            3 => {
                let end = (at + rng.below(8)).min(bytes.len());
                bytes.drain(at..end);
            }
            4 => {
                let n = rng.below(8);
                let new = rng.bytes(n);
                bytes.splice(at..at, new);
            }
            // The end of another one.
            _ => {
                let other = &corpus[rng.below(corpus.len())];
                bytes.truncate(at);
                bytes.extend_from_slice(&other[rng.below(other.len())..]);
            }
        }
    }
    bytes.truncate(longest);
    bytes
}

/// Runs all committed inputs of a target, then made ones for a time; how many.
///
/// # Panics
/// As the target does, after saying which input it was.
pub fn run(target: &Target, time: Duration) -> u64 {
    let mut one = crate::start(target.name).unwrap_or_else(|e| panic!("{}: {e:?}", target.name));
    let mut checked = |name: &dyn Fn() -> String, bytes: &[u8]| {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| one(bytes))) {
            let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
            eprintln!("target {}, {}: {hex}", target.name, name());
            resume_unwind(panic);
        }
    };
    let committed = files::committed(target.name);
    for (path, bytes) in &committed {
        checked(&|| path.display().to_string(), bytes);
    }
    let corpus: Vec<Vec<u8>> = committed.into_iter().map(|(_, bytes)| bytes).collect();
    let (start, mut number) = (Instant::now(), 0);
    while number < 100 || start.elapsed() < time {
        checked(&|| format!("input {number}"), &input(number, target.longest, &corpus));
        number += 1;
    }
    corpus.len() as u64 + number
}
