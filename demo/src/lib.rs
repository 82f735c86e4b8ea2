//! Trains a small classifier data-parallel, with the gradients summed by netsum or in one process.
//!
//! See the folder's README for a map.

pub mod data;
pub mod model;
pub mod plot;
pub mod report;
pub mod rng;
pub mod train;

/// How often all images are seen, unless asked otherwise.
pub const DEFAULT_EPOCHS: usize = 20;
