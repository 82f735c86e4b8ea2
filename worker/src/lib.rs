//! Host library of netsum.
