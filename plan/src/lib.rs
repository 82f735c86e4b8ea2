//! Plans the trees by which jobs sum, and the paths of flows that are not summed. A network comes
//! in as data; nothing here does I/O.
//!
//! | module | content |
//! | --- | --- |
//! | [`topology`] | hosts, boxes and links, read and checked; [`generate`]: well-known ones |
//! | [`plan`](mod@plan) | jobs in, trees and rates out |
//! | [`incremental`](mod@incremental) | a job among others that keep their trees |
//! | [`tree`] | a tree, the resources that it uses, and how bytes are split over several |
//! | [`rings`] | whole rings for trees: CPUs and slots are allocated by the ring |
//! | [`levels`] | trees of two and three levels, optimal; [`model`]: the linear program |
//! | [`pack`](mod@pack) | trees in any network; [`arborescence`]: the cheapest one |
//! | [`draw`] | trees as pictures: DOT and SVG |
//! | [`flows`] | flows that are not summed, spread over uplinks |
//! | [`bound`](mod@bound) | an upper bound from the links |

pub mod arborescence;
pub mod bound;
pub mod draw;
pub mod flows;
pub mod generate;
pub mod incremental;
pub mod levels;
pub mod model;
pub mod pack;
pub mod plan;
pub mod rings;
pub mod topology;
pub mod tree;
