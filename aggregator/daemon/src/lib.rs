//! The daemon: the controller, and the data plane, netlink, clocks and gRPC around it.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`config`] | the configuration file |
//! | [`state`] | controller and data plane behind one lock; carries out actions |
//! | [`jobs`] | the service for jobs |
//! | [`device`] | what a driver reports about a port, over ethtool and netdev netlink |
//! | [`diagnose`] | the watch over active rings; evidence for `netsum diagnose` |
//! | `path` | why a job's packets do not arrive: evidence from traffic and port settings |
//! | [`hops`] | next hops of members that this box routes to |
//! | [`spread`] | spreads unsummed flows over uplinks; [`uplinks`] polls these |
//! | [`in_band`] | first packets of jobs that are set up in band |
//! | [`worker`] | the workers' service |
//! | [`memory`] | memory that the machine has left for rings |
//! | [`message`] | the controller's state as messages of the API |
//! | [`doorman`] | the connection limiter: what foreign hosts can use up on the workers' port |
//! | [`socket`] | the administration socket, and who may open it |
//! | [`tls`] | TLS for workers |
//! | [`trace`] | single packets, for `netsum trace`; [`tracers`]: which client gets which |
//! | `frames` | frames to the neighbour at a port's other end |
//! | [`trains`] | bandwidth probes, which measure a link's rate |
//! | [`privileges`] | the capabilities that the daemon keeps |
//! | [`load`] | how full rings are, and their jobs' counters |
//! | [`metrics`] | metrics for Prometheus, over HTTP |
//! | [`netlink`] | interfaces and forwarding table; `rtnl` queries, [`link`] parses interfaces |
//! | `chosen` | the interfaces that a configuration names |
//! | `filters` | nftables chains that see what the bridge forwards |
//! | [`own`] | the box's own addresses, which no port may carry |
//! | [`clock`] | clocks that processes share |
//! | [`persist`] | the state that outlives the daemon, and the start from it |
//! | [`reload`] | SIGHUP, and ports that are added or removed |
//! | [`manager`] | notifies systemd |
//! | [`run`] | `netsum run` |

pub mod agent;
pub mod backend;
mod cause;
mod chosen;
pub mod clock;
pub mod config;
pub mod device;
pub mod diagnose;
pub mod doorman;
pub mod executor;
mod filters;
mod frames;
pub mod hops;
pub mod in_band;
pub mod jobs;
pub mod link;
pub mod listen;
pub mod lldp;
pub mod load;
pub mod manager;
pub mod memory;
pub mod message;
pub mod metrics;
pub mod neighbours;
pub mod netlink;
pub mod network;
pub mod own;
mod path;
pub mod persist;
pub mod privileges;
pub mod reload;
mod rtnl;
pub mod run;
pub mod serve;
pub mod service;
pub mod socket;
pub mod spread;
pub mod state;
pub mod tls;
pub mod trace;
pub mod tracers;
pub mod trains;
mod uplinks;
pub mod waiters;
pub mod worker;
