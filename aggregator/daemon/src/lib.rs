//! The daemon: the controller and, around it, the data plane, netlink, clocks and gRPC.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`config`] | the configuration file |
//! | [`state`] | controller and data plane behind one lock; carries out actions |
//! | [`admin`] | the administration service |
//! | [`device`] | what a driver says of a port: ethtool and netdev netlink |
//! | [`diagnose`] | the watch over active rings; evidence for `netsum diagnose` |
//! | `path` | why a job's packets do not arrive, by what came in and how ports are set |
//! | [`hops`] | next hops of members that this box routes to |
//! | [`spread`] | flows that are not summed, over uplinks; [`uplinks`]: looks at these |
//! | [`in_band`] | first packets of jobs that are set up in band |
//! | [`worker`] | the workers' service |
//! | [`memory`] | what the machine has left of it |
//! | [`message`] | what the controller knows, as the API says it |
//! | [`doorman`] | what strangers on the workers' TCP port may use up |
//! | [`socket`] | the administration socket: who may open it |
//! | [`tls`] | TLS for workers |
//! | [`trace`] | single packets, for `netsum trace`; [`tracers`]: who gets which |
//! | `frames` | to who is at the other end of a port |
//! | [`trains`] | frames in a row, which tell a link's rate |
//! | [`privileges`] | the capabilities that the daemon keeps |
//! | [`load`] | how full rings are, and what their jobs have counted |
//! | [`metrics`] | the same for Prometheus, over HTTP |
//! | [`netlink`] | interfaces, bridge ports, forwarding table; `rtnl`: how the kernel is asked, [`link`]: what it says of an interface |
//! | `chosen` | which interfaces a configuration means |
//! | `filters` | nftables' chains that see what the bridge forwards |
//! | [`own`] | the box's own addresses, which no port may carry |
//! | [`clock`] | clocks that processes agree on |
//! | [`persist`] | the state that outlives the daemon, and beginning with it |
//! | [`reload`] | SIGHUP, and ports that come and go |
//! | [`manager`] | what systemd is told |
//! | [`run`] | `netsum run` |

pub mod admin;
mod chosen;
pub mod clock;
pub mod config;
pub mod device;
pub mod diagnose;
pub mod doorman;
mod filters;
mod frames;
pub mod hops;
pub mod in_band;
pub mod link;
pub mod lldp;
pub mod load;
pub mod manager;
pub mod memory;
pub mod message;
pub mod metrics;
pub mod neighbours;
pub mod netlink;
pub mod own;
mod path;
pub mod persist;
pub mod privileges;
pub mod reload;
mod rtnl;
pub mod run;
pub mod socket;
pub mod spread;
pub mod state;
pub mod tls;
pub mod trace;
pub mod tracers;
pub mod trains;
mod uplinks;
pub mod worker;
