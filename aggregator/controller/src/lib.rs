//! The controller of a box or of a fabric: jobs, their ranks and tenants, and everything that
//! serves them. Its executor carries out what it decides: the agent of a box (`netsum-agent`), or a
//! fabric's manager (`netsum-fabric`), which gives orders to boxes.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`executor`] | the seam: carries the controller's actions out |
//! | [`backend`] | what the services ask of a box or of a fabric, which takes time |
//! | [`state`] | controller and executor behind one lock |
//! | [`waiters`] | ranks that wait in `Join` |
//! | [`jobs`] | the service for jobs |
//! | [`worker`] | the workers' service |
//! | [`message`] | the controller's state as messages of the API |
//! | [`serve`] | serves both |
//! | [`limiter`] | the connection limiter: what foreign hosts can use up on the workers' port |
//! | [`socket`] | the administration socket, and who may open it |
//! | [`tls`] | TLS on TCP ports |
//! | [`store`] | the files in which the state outlives the daemon |

pub mod backend;
pub mod executor;
pub mod jobs;
pub mod limiter;
pub mod message;
pub mod serve;
pub mod socket;
pub mod state;
pub mod store;
pub mod tls;
pub mod waiters;
pub mod worker;
