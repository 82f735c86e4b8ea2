//! The fabric manager: several boxes as one. Ranks join here as they join a box. When all have
//! joined, the manager lays the job out over the boxes, programs these by the API that their
//! administrators use, and answers the ranks.
//!
//! Boxes sum without it: it is on no packet's way.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`cables`] | links between boxes: typed, and heard: pure |
//! | [`config`] | the configuration file: boxes, and links between them |
//! | [`layout`] | which box adds up what: pure |
//! | [`share`] | how many of its rings go by which parent: pure |
//! | [`measured`] | what a link's rate is taken for: pure; [`measure`]: how it is found out |
//! | [`nowhere`] | the data plane of a machine that has no ports |
//! | [`diagnosis`] | what boxes say of a job, as one answer: pure |
//! | [`client`] | connections to the boxes |
//! | [`boxes`] | what is known of the boxes, which ports they have |
//! | [`hosts`] | behind which of these a host is |
//! | [`program`] | brings the boxes to what the controller wants |
//! | [`etcd`] | which of several managers leads, and its state |
//! | [`run`] | `netsum fabric run` |

pub mod boxes;
pub mod cables;
pub mod client;
pub mod config;
pub mod diagnosis;
pub mod etcd;
pub mod hosts;
pub mod layout;
pub mod measure;
pub mod measured;
pub mod nowhere;
pub mod program;
pub mod run;
pub mod share;
