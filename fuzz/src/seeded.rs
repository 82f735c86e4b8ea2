//! Makes inputs from a number: fresh bytes, or committed inputs with a few changes. It does not
//! measure coverage; the targets interpret any bytes as something sensible.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::{Target, files};

/// A number below `n`; 0 if `n` is 0.
fn below(rng: &mut Rng, n: usize) -> usize {
    if n == 0 { 0 } else { rng.usize(..n) }
}

fn bytes_of(rng: &mut Rng, n: usize) -> Vec<u8> {
    std::iter::repeat_with(|| rng.u8(..)).take(n).collect()
}

/// Input `number` of a target.
pub fn input(number: u64, longest: usize, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut rng = Rng::with_seed(number);
    if corpus.is_empty() || below(&mut rng, 3) == 0 {
        let len = below(&mut rng, longest + 1);
        return bytes_of(&mut rng, len);
    }
    let mut bytes = corpus[below(&mut rng, corpus.len())].clone();
    for _ in 0..1 + below(&mut rng, 6) {
        let at = below(&mut rng, bytes.len());
        match below(&mut rng, 6) {
            0 | 1 if !bytes.is_empty() => bytes[at] ^= 1 << below(&mut rng, 8),
            2 if !bytes.is_empty() => bytes[at] = rng.u8(..),
            3 => {
                let end = (at + below(&mut rng, 8)).min(bytes.len());
                bytes.drain(at..end);
            }
            4 => {
                let n = below(&mut rng, 8);
                let new = bytes_of(&mut rng, n);
                bytes.splice(at..at, new);
            }
            // The end of another input.
            _ => {
                let other = &corpus[below(&mut rng, corpus.len())];
                bytes.truncate(at);
                bytes.extend_from_slice(&other[below(&mut rng, other.len())..]);
            }
        }
    }
    bytes.truncate(longest);
    bytes
}

/// Runs all committed inputs of a target, then generated ones for a time; returns their number.
///
/// # Panics
/// As the target does, after printing the input.
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
