//! Host library of netsum.

pub mod numeric;
pub mod rc;
pub mod udp;
