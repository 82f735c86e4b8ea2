//! The fabric manager: several boxes as one. Ranks join here as they join a box. When all have
//! joined, the manager lays the job out over the boxes, orders these by the API that their
//! administrators use, and answers the ranks.
//!
//! Boxes sum without it: it is not in the path of packets.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`link_table`] | links between boxes: configured or discovered: pure |
//! | [`config`] | the configuration file: boxes, and links between them |
//! | [`layout`] | which box adds up what: pure |
//! | [`share`] | how many of its rings use which parent: pure |
//! | [`probe_results`] | evaluation of a link's bandwidth probes: pure; [`measure`]: sends them |
//! | [`orders`] | the controller's executor: actions become orders to boxes |
//! | [`diagnosis`] | merges boxes' diagnoses of a job: pure |
//! | [`client`] | connections to the boxes |
//! | [`boxes`] | the known state of the boxes, and their ports |
//! | [`hosts`] | finds the ports that hosts are behind |
//! | `own_addresses` | addresses that boxes reserve for these ports |
//! | [`dispatch`] | gives the boxes their orders, as the controller decides |
//! | [`etcd`] | leader election of managers, and their state |
//! | [`service`] | the service for boxes and links |
//! | [`run`] | `netsum fabric run` |

pub mod boxes;
pub mod client;
pub mod config;
pub mod diagnosis;
pub mod dispatch;
pub mod etcd;
pub mod hosts;
pub mod layout;
pub mod link_table;
pub mod measure;
pub mod orders;
pub mod own_addresses;
pub mod probe_results;
pub mod run;
pub mod service;
pub mod share;
