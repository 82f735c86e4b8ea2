//! Trains a small classifier data-parallel, with the gradients summed by netsum or in one process.
//!
//! The folder's README has a map.

pub mod data;
pub mod failure;
pub mod model;
pub mod plot;
pub mod report;
mod table;
pub mod torch;
pub mod train;

use netsum_worker::numeric::layout::Layout;
use netsum_worker::numeric::reference::reference_sum;

/// Default number of times that all images are used.
pub const DEFAULT_EPOCHS: usize = 20;
/// Bytes of payload in a packet, for an MTU of 1500.
pub const PATH_MTU: u32 = 1024;

/// The job's messages: a gradient is cut into several messages of a few packets each, and five of
/// them are in flight at once.
pub const LAYOUT: Layout = Layout { message_size: 8192, window: 8, rings: 1 };

/// Adds up the ranks' vectors in this process, with the same bits as an all-reduce of the job.
pub fn sum_here(parts: &[Vec<f32>], total: &mut [f32]) {
    let parts: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
    total.copy_from_slice(&reference_sum(&parts, &LAYOUT));
}
