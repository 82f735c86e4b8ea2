//! The plugin for NCCL, as four ranks on loopback: all versions of its interface.

use std::path::{Path, PathBuf};
use std::process::Command;

use object::{Object, ObjectSymbol};

mod library;
#[path = "../../nccl/tests/ranks.rs"]
mod ranks;

use ranks::{Built, Ranks};

const RANKS: usize = 4;
const VERSIONS: std::ops::RangeInclusive<u32> = 8..=12;

/// A rank on loopback, in a network that no other test of this machine has.
fn on_loopback(network: u32) -> impl Fn(&Path, usize) -> Command {
    let id = std::process::id() * 4 + network;
    let peers: Vec<_> = (1..=RANKS)
        .map(|rank| format!("127.{}.{}.{rank}", 128 + id % 128, id / 128 % 256))
        .collect();
    move |program, _| {
        let mut command = Command::new(program);
        command.env("NETSUM_PEERS", peers.join(",")).env("NETSUM_TIMEOUT", "2");
        command.env_remove("NETSUM_CONTROLLER").env_remove("NETSUM_TEST_NCCL");
        command
    }
}

fn start(built: &Built, case: (u32, &str), network: u32) -> Ranks {
    built.start(case, RANKS, &[], on_loopback(network))
}

#[test]
fn all_versions_sum_and_refuse_what_is_wrong() {
    let built = Built::new(&library::path());
    for version in VERSIONS {
        assert_eq!(start(&built, (version, "all"), 0).results(), ["done"; RANKS]);
    }
}

#[test]
fn all_versions_send_and_receive() {
    let built = Built::new(&library::path());
    for version in VERSIONS {
        assert_eq!(start(&built, (version, "sends"), 1).results(), ["done"; RANKS]);
    }
}

#[test]
fn a_killed_rank_ends_requests_with_an_error() {
    let built = Built::new(&library::path());
    let mut ranks = start(&built, (12, "dies"), 2);
    // The handles, the sums before, and requests of all in flight.
    for _ in 0..2 {
        let lines = ranks.lines();
        ranks.exchange(&lines);
    }
    let lines = ranks.lines();
    ranks.kill_last();
    ranks.exchange(&lines);
    for line in ranks.results() {
        assert!(line.starts_with("error 6: ") && line.contains("rank 3 died"), "{line}");
    }
    assert_eq!(start(&built, (12, "closes"), 2).results(), ["done"; RANKS]);
}

/// NCCL then uses its own transports.
#[test]
fn without_a_box_the_plugin_refuses_to_start() {
    let built = Built::new(&library::path());
    let ranks = built.start((12, "disabled"), 1, &[], |program, _| {
        let mut command = Command::new(program);
        command.env_remove("NETSUM_PEERS").env("NETSUM_CONTROLLER", "no-such-box.invalid:4790");
        command
    });
    assert_eq!(ranks.results(), ["disabled"]);
}

/// NCCL's own code opens the plugin, reads the tables of each version, and calls them. NCCL cannot
/// start without a GPU, but these functions can. They are not exported.
#[test]
#[ignore = "needs PyPI's nvidia-nccl: NETSUM_TEST_NCCL=.../libnccl.so.2"]
fn nccl_accepts_the_tables_and_uses_them() {
    let path = PathBuf::from(std::env::var_os("NETSUM_TEST_NCCL").expect("NETSUM_TEST_NCCL"));
    let bytes = std::fs::read(&path).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let place = |function: &str, argument: &str| {
        let name = format!("_Z{}{function}{argument}", function.len());
        let symbol = file.symbols().find(|symbol| symbol.name() == Ok(&name)).expect(&name);
        format!("{:x}", symbol.address())
    };
    let built = Built::new(&library::path());
    for version in VERSIONS {
        let places = [
            place("ncclOpenNetPluginLib", "PKc"),
            place(&format!("getNcclNet_v{version}"), "Pv"),
            place(&format!("getNcclCollNet_v{version}"), "Pv"),
        ];
        let log = |rank: usize| built.room.join(format!("nccl-{version}-{rank}.log"));
        for case in ["all", "sends"] {
            let mut ranks = built.start((version, case), RANKS, &places, |program, rank| {
                let mut command = on_loopback(3)(program, rank);
                command.env("NETSUM_TEST_NCCL", &path);
                command.env("NCCL_DEBUG", "INFO").env("NCCL_DEBUG_FILE", log(rank));
                command
            });
            let lines = ranks.lines();
            let loaded = format!("NCCL INFO NET/Plugin: Loaded collnet plugin netsum (v{version})");
            for rank in 0..RANKS {
                let printed = std::fs::read_to_string(log(rank)).unwrap();
                assert!(printed.contains(&loaded), "{printed}");
            }
            ranks.exchange(&lines);
            assert_eq!(ranks.results(), ["done"; RANKS]);
        }
    }
}
