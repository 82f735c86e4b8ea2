//! A lab of network namespaces: hosts, and between them a box with a Linux bridge, all over veth.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`lab`] | builds the lab |
//! | [`netns`] | programs and threads in one namespace |
//! | [`cleaner`] | removes the lab, however its owner ends |
//! | [`evidence`] | data about a stalled job |
//! | [`faults`] | links that lose, duplicate, reorder, corrupt and mark packets |
//! | [`attacker`] | a host that forges frames |
//! | [`boxes`] | tests of boxes that are virtual machines |
//! | [`cluster`] | the daemon on the box, and ranks on the hosts; [`manager`]: of several boxes |
//! | [`machine`] | a node with files of its own |
//! | [`cpu`] | pins threads to a CPU |
//! | [`data`] | data that ranks reduce |
//! | [`differential`] | the XDP programs against a model of them |
//! | [`frames`] | RoCEv2 frames, field by field |
//! | [`guide`] | the guide's commands, and the packages |
//! | [`job`] | a job's properties |
//! | [`plane`] | the XDP programs on the box, without a daemon |
//! | [`programs`] | the XDP programs, one packet at a time |
//! | [`process`] | programs that tests start |
//! | [`prometheus`] | Prometheus on the box |
//! | [`racks`] | the XDP programs on leaves and a spine, without daemons |
//! | [`recorder`] | a data plane that only records calls |
//! | [`tap`] | sends and receives raw frames as a host |
//! | [`topology`] | bandwidths, racks, VLANs, and hosts behind a router |
//! | [`traffic`] | ping and TCP transfers |
//! | [`train`] | ranks that train with PyTorch |
//! | [`mpi`] | programs of Open MPI and MPICH on the hosts |
//! | [`vm`] | hosts that are virtual machines |
//!
//! Four kinds of ranks:
//!
//! | module | what runs |
//! | --- | --- |
//! | [`group`] | netsum's library, in processes: the program `netsum-rank` |
//! | [`verbs_ring`] | an application over libibverbs, on virtual machines: `verbs/ring.c` |
//! | [`udp_ring`] | connections of the library's endpoint, registered by hand |
//! | [`in_band`] | the same, set up in band |
//!
//! The tests that run in it are in `tests/`.

pub mod attacker;
pub mod boxes;
pub mod cleaner;
pub mod cluster;
pub mod cpu;
pub mod data;
pub mod differential;
pub mod evidence;
pub mod faults;
pub mod frames;
pub mod group;
pub mod guide;
pub mod in_band;
pub mod job;
pub mod lab;
pub mod machine;
pub mod manager;
pub mod mpi;
pub mod netns;
pub mod plane;
pub mod process;
pub mod programs;
pub mod prometheus;
pub mod racks;
pub mod recorder;
pub mod tap;
pub mod topology;
pub mod traffic;
pub mod train;
pub mod udp_ring;
pub mod verbs_ring;
pub mod vm;

pub use lab::{Host, Lab, LabSpec};
pub use topology::Rate;
