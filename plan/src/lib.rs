//! Which trees a job sums by, and which ways its other flows take. A network goes in as data;
//! nothing here does I/O.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`topology`] | hosts, boxes and links, read and checked; [`generate`]: those that are known by name |
//! | [`plan`](mod@plan) | jobs in, trees and rates out |
//! | [`beside`](mod@beside) | a job beside others that keep their trees |
//! | [`tree`] | a tree, what it takes, and how bytes are split over several |
//! | [`rings`] | whole rings for trees: CPUs and slots are had by the ring |
//! | [`levels`] | trees of two and three levels, exactly; [`model`]: the linear program |
//! | [`pack`](mod@pack) | trees in any network; [`arborescence`]: the cheapest one |
//! | [`draw`] | trees as pictures: DOT and SVG |
//! | [`flows`] | flows that are not summed, spread over uplinks; [`routes`]: the ways that they take |
//! | [`fluid`] | how long they take; [`collectives`]: all-reduces and all-to-all made of them |
//! | [`bound`](mod@bound) | what the links allow at most |

pub mod arborescence;
pub mod beside;
pub mod bound;
pub mod collectives;
pub mod draw;
pub mod flows;
pub mod fluid;
pub mod generate;
pub mod levels;
pub mod model;
pub mod pack;
pub mod plan;
pub mod rings;
pub mod routes;
pub mod topology;
pub mod tree;
