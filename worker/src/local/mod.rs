//! What the ranks of one host share: memory, and how far each of them is.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`place`] | which ranks run on one host |
//! | [`memory`] | memory of several processes |
//! | [`progress`] | steps of the ranks, and their failures |

pub(crate) mod memory;
pub(crate) mod place;
pub(crate) mod progress;
