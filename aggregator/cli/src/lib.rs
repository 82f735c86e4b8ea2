//! The command line of `netsum`, in bpftool's grammar: an object, then a command. It uses the
//! daemon only through its API.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`args`] | the grammar |
//! | [`failure`] | why a command failed, and its exit code |
//! | [`client`] | the connection to the daemon |
//! | [`command`] | the commands that send the daemon one request |
//! | [`view`] | what is printed as JSON; [`schema`]: its schemas |
//! | [`format`](mod@format) | text or JSON |
//! | [`print`](mod@print) | the text of each object; [`layout`]: aligned lines |
//! | [`fabric`] | `netsum fabric show`; [`topology`]: `netsum fabric topology` |
//! | [`trees`] | `netsum fabric job show` |
//! | [`spread`] | `netsum spread show` |
//! | [`tenants`] | `netsum tenant show` |
//! | [`timing`] | how long sums take and who is last; [`rates`]: `netsum stats --interval` |
//! | [`top`] | `netsum top` |
//! | [`diagnosis`] | `netsum diagnose` |
//! | [`path_test`] | `netsum path` |
//! | [`trace`] | `netsum trace`; [`capture`]: frames in pcapng and pcap files |
//! | [`plan`] | `netsum plan` |
//! | [`peers`] | `netsum flow peers` |
//! | [`check`], [`simulation`] | what `netsum check` and `netsum simulate` print |

pub mod args;
pub mod capture;
pub mod check;
pub mod client;
pub mod command;
pub mod diagnosis;
pub mod fabric;
pub mod failure;
pub mod format;
pub mod layout;
pub mod path_test;
pub mod peers;
pub mod plan;
pub mod print;
pub mod rates;
pub mod schema;
pub mod simulation;
pub mod spread;
pub mod tenants;
pub mod timing;
pub mod top;
pub mod topology;
pub mod trace;
pub mod trees;
pub mod view;

pub use args::{Cli, Command};
