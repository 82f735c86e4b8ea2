//! Host library of netsum.

pub mod numeric;
