//! All-reduce over a ring of reliable connections, with a box that sums or without: a state machine
//! without sockets, threads or clocks.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`engine`] | the collective as a state machine |
//! | [`call`] | what a rank calls for |
//! | [`channels`] | what the engine needs below itself |
//! | [`queue_pairs`] | the same by queue pairs of the RC endpoint `netsum-rc` |
//! | [`frame`] | what the ranks tell each other past the box |
//! | [`reduction`] | an ordinary ring all-reduce of one message |
//! | [`buffer`] | memory of a message |
//! | [`numeric`] | floats as integers; how data is cut into messages |
//! | [`shape`] | what all ranks of a job must agree on |
//! | [`report`] | what operations came to |
//! | [`way_back`] | when ranks that sum by themselves try the box again |
//! | [`error`] | what can go wrong |
//! | `sim` | whole jobs in virtual time; with the feature `simulator` |

pub mod buffer;
pub mod call;
pub mod channels;
pub mod engine;
pub mod error;
pub mod frame;
pub mod numeric;
pub mod queue_pairs;
pub mod reduction;
pub mod report;
pub mod shape;
#[cfg(any(test, feature = "simulator"))]
pub mod sim;
pub mod way_back;
