//! Trains a small classifier data-parallel, with the gradients summed by netsum or in one process.
//!
//! See the folder's README for a map.

pub mod data;
pub mod failure;
pub mod model;
pub mod plot;
pub mod report;
pub mod rng;
mod table;
pub mod torch;
pub mod train;

use netsum_worker::numeric::layout::Layout;
use netsum_worker::numeric::reference::reference_sum;

/// How often all images are seen, unless asked otherwise.
pub const DEFAULT_EPOCHS: usize = 20;
/// Bytes of payload in a packet: what fits the usual MTU of 1500.
pub const PATH_MTU: u32 = 1024;

/// How the job cuts a gradient into messages: five of them in flight at once, and a few packets in
/// each.
pub const LAYOUT: Layout = Layout { message_size: 8192, window: 8, rings: 1 };

/// Adds up the ranks' vectors in this process, to the bits that an all-reduce of the job gives.
pub fn sum_here(parts: &[Vec<f32>], total: &mut [f32]) {
    let parts: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
    total.copy_from_slice(&reference_sum(&parts, &LAYOUT));
}
