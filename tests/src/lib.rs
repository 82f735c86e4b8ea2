//! A lab of network namespaces: hosts, and between them a box with a Linux bridge, all over veth.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`lab`] | builds it |
//! | [`netns`] | programs and threads in one namespace |
//! | [`janitor`] | removes it, however its owner ends |
//! | [`evidence`] | what there is to see of a job that stands still |
//! | [`faults`] | cables that lose, duplicate, reorder, corrupt and mark packets |
//! | [`app`] | an application that is set up in band |
//! | [`application`] | a ring of reliable connections that knows nothing of netsum |
//! | [`attacker`] | a host that forges frames |
//! | [`cluster`] | the daemon on the box, and ranks on the hosts |
//! | [`cpu`] | which CPU a thread runs on |
//! | [`data`] | what ranks reduce |
//! | [`differential`] | the XDP programs against a model of them |
//! | [`frames`] | RoCEv2 frames, field by field |
//! | [`group`] | the ranks of a job, in processes of their own |
//! | [`plane`] | the XDP programs on the box, without a daemon |
//! | [`programs`] | the XDP programs, one packet at a time |
//! | [`process`] | programs that tests start |
//! | [`ring`] | an application over libibverbs, on virtual machines |
//! | [`tap`] | a host that is nothing but frames |
//! | [`topology`] | VLANs, and hosts behind a router |
//! | [`traffic`] | ping and TCP transfers |
//! | [`vm`] | hosts that are virtual machines |
//!
//! The tests in `tests/` are marked `#[ignore]`, because they need root and BPF; `cargo xtask test` runs them.

pub mod app;
pub mod application;
pub mod attacker;
pub mod cluster;
pub mod cpu;
pub mod data;
pub mod differential;
pub mod evidence;
pub mod faults;
pub mod frames;
pub mod group;
pub mod janitor;
pub mod lab;
pub mod machine;
pub mod netns;
pub mod plane;
pub mod process;
pub mod programs;
pub mod ring;
pub mod tap;
pub mod topology;
pub mod traffic;
pub mod vm;

pub use lab::{Host, Lab, LabSpec};
