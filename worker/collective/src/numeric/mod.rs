//! Converts numbers to lanes and back. The box adds 32-bit integers, wrapping, so floats become
//! such integers.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`quant`] | floats to integers with a power-of-two scale, and back |
//! | [`block`] | many floats, with a scale for each block of them |
//! | [`limbs`] | few floats to integers of several lanes, and back |
//! | [`format`] | one or the other |
//! | [`element`] | the element types of an all-reduce |
//! | [`number`] | arithmetic of each type |
//! | [`operators`] | other operations and types, as sums of lanes |
//! | [`memory`] | the memory that operations use |
//! | [`sources`] | the elements of several ranks of one host as one contribution |
//! | [`signs`] | which lanes are signed |
//! | [`layout`] | how an all-reduce is cut into messages |
//! | [`reference`] | the same sum in one process, bit for bit |
//!
//! Pure: no I/O, no clock.

pub mod block;
pub mod collectives;
pub mod element;
pub mod format;
pub mod layout;
pub mod limbs;
pub mod memory;
pub mod number;
pub mod operators;
pub mod quant;
pub mod reference;
pub mod signs;
pub mod sources;
