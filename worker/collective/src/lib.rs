//! All-reduce over a ring of reliable connections, with a box that sums or without: a state machine
//! without sockets, threads or clocks.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`engine`] | the collective as a state machine |
//! | [`call`] | a rank's call |
//! | [`channels`] | the interface below the engine |
//! | [`queue_pairs`] | its implementation by queue pairs of the RC endpoint `netsum-rc` |
//! | [`frame`] | messages between ranks on bypass connections |
//! | [`reduction`] | the hosts' ring, of one message |
//! | [`buffer`] | memory of a message |
//! | [`numeric`] | floats as integers; how data is cut into messages |
//! | [`seal`] | pads and tags of sealed sums |
//! | [`shape`] | what all ranks of a job must agree on |
//! | [`report`] | results of operations, statistics |
//! | [`failback`] | when ranks that have fallen back try the box again |
//! | [`error`] | errors |
//! | `sim` | whole jobs in virtual time; with the feature `simulator` |

pub mod buffer;
pub mod call;
pub mod channels;
pub mod engine;
pub mod error;
pub mod failback;
pub mod frame;
pub mod numeric;
pub mod queue_pairs;
pub mod reduction;
pub mod report;
pub mod seal;
pub mod shape;
#[cfg(any(test, feature = "simulator"))]
pub mod sim;
