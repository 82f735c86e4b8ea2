//! A network of fluid flows, in which collectives can be compared. Nothing here does I/O.
//!
//! | module | content |
//! | --- | --- |
//! | [`fluid`] | the network: when flows end |
//! | [`routes`] | the paths of flows |
//! | [`collectives`] | all-reduces and all-to-all made of flows |
//!
//! `netsum-papers` computes the results of papers with it.

pub mod collectives;
pub mod fluid;
pub mod routes;
