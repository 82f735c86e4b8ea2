//! The agent of a box: carries a controller's actions out in the data plane, and knows this
//! machine. With the controller (`netsum-controller`) in one process it is `netsum run`.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`run`] | `netsum run`; [`startup`]: the start, where a daemon was killed |
//! | [`config`] | the configuration file |
//! | [`agent`] | the controller's executor: its actions, in the data plane |
//! | [`backend`] | answers queries of the controller's services about this machine |
//! | [`listen`] | serves workers, administrators and the fabric's manager |
//! | [`service`] | the service for data plane and ports |
//! | [`network`] | interfaces and hosts, by [`netlink`] or, in tests, without |
//! | [`netlink`] | interfaces and forwarding table; `rtnl` queries, [`link`] parses interfaces |
//! | `port_selection` | the interfaces that a configuration names |
//! | `filters` | nftables chains that see what the bridge forwards |
//! | [`device`] | what a driver reports about a port, over ethtool and netdev netlink |
//! | [`own_addresses`] | the box's own addresses, which no port may carry |
//! | [`hops`] | next hops of members that this box routes to |
//! | [`lldp`] | which port is linked to which; [`neighbours`]: the neighbours that ports see |
//! | [`bandwidth_probes`] | frames that measure a link's rate; `frames` sends them |
//! | [`spread`] | spreads unsummed flows over uplinks; `spread_uplinks` polls these |
//! | [`in_band`] | first packets of jobs that are set up in band |
//! | [`diagnose`] | evidence for `netsum diagnose` |
//! | `watch` | watches active rings, and sends held-back sums |
//! | `path_evidence`, `missing_packets` | why a job's packets do not arrive |
//! | [`trace`] | single packets, for `netsum trace`; [`tracers`]: which client gets which |
//! | [`packet`] | these as messages of the API |
//! | [`load`] | how full rings are, and their jobs' counters |
//! | [`metrics`] | metrics for Prometheus, over HTTP |
//! | [`memory`] | memory that the machine has left for rings |
//! | [`privileges`] | the capabilities that the daemon keeps |
//! | [`reload`] | SIGHUP, and ports that are added or removed |
//! | [`systemd`] | notifies systemd |
//! | [`clock`] | clocks that processes share |

pub mod agent;
pub mod backend;
pub mod bandwidth_probes;
pub mod clock;
pub mod config;
pub mod device;
pub mod diagnose;
mod filters;
mod frames;
pub mod hops;
pub mod in_band;
pub mod link;
pub mod listen;
pub mod lldp;
pub mod load;
pub mod memory;
pub mod metrics;
mod missing_packets;
pub mod neighbours;
pub mod netlink;
pub mod network;
pub mod own_addresses;
pub mod packet;
mod path_evidence;
mod port_selection;
pub mod privileges;
pub mod reload;
mod rtnl;
pub mod run;
pub mod service;
pub mod spread;
mod spread_uplinks;
pub mod startup;
pub mod systemd;
pub mod trace;
pub mod tracers;
mod watch;
