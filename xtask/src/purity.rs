//! Checks the dependencies of crates, to keep the pure ones pure.

use std::process::Command;

/// Crates without I/O: they are given datagrams, requests and times, and return what to do.
const PURE: [&str; 6] = [
    "netsum-collective",
    "netsum-common",
    "netsum-core",
    "netsum-papers",
    "netsum-plan",
    "netsum-rc",
];
/// Crates that do I/O or read a clock.
const IO: [&str; 14] = [
    "aya",
    "hyper",
    "libc",
    "libloading",
    "mio",
    "netlink-sys",
    "nix",
    "quinn-udp",
    "rtnetlink",
    "rustix",
    "rustls",
    "socket2",
    "tokio",
    "tonic",
];

/// Pairs that must stay apart: a crate, and crates that it must not depend on.
const APART: [(&str, &[&str]); 5] = [
    ("netsum-dataplane", &["tokio", "tonic", "prost", "hyper", "rtnetlink", "netsum-api", "clap"]),
    ("netsum-cli", &["aya", "aya-obj", "rtnetlink", "netsum-dataplane", "netsum-controller"]),
    ("netsum-controller", &["aya", "aya-obj", "rtnetlink", "netsum-dataplane", "clap"]),
    ("netsum-fabric", &["aya", "aya-obj", "rtnetlink", "netsum-dataplane", "netsum-agent"]),
    ("netsum-agent", &["ratatui", "schemars", "clap", "netsum-cli", "netsum-fabric"]),
];

/// All dependencies of a crate, without those of its tests and its build, with default features.
/// The feature `user` of `netsum-common` has aya's traits for the ABI, for programs that load BPF.
fn crates_of(package: &str) -> Vec<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
    let arguments =
        ["tree", "--offline", "-e", "normal,no-proc-macro", "--prefix", "none", "-f", "{p}", "-p"];
    let out = Command::new(cargo).args(arguments).arg(package).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8(out.stdout).unwrap();
    text.lines().filter_map(|line| Some(line.split(' ').next()?.to_owned())).collect()
}

#[test]
fn crates_without_io_do_not_depend_on_crates_with_io() {
    for package in PURE {
        let crates = crates_of(package);
        assert_eq!(crates[0], package);
        let wrong: Vec<_> = crates.iter().filter(|c| IO.contains(&c.as_str())).collect();
        assert!(wrong.is_empty(), "{package} depends on {wrong:?}");
    }
    // The list is not empty by mistake.
    assert!(crates_of("netsum-worker").iter().any(|c| c == "tokio"));
}

#[test]
fn each_crate_of_the_box_depends_only_on_what_its_job_needs() {
    let of_netsum = crates_of("netsum");
    for (package, others) in APART {
        let crates = crates_of(package);
        assert_eq!(crates[0], package);
        let wrong: Vec<_> = crates.iter().filter(|c| others.contains(&c.as_str())).collect();
        assert!(wrong.is_empty(), "{package} depends on {wrong:?}");
        // A name that does not exist would forbid nothing.
        let unknown: Vec<_> =
            others.iter().filter(|o| !of_netsum.iter().any(|c| c == *o)).collect();
        assert!(unknown.is_empty(), "the program does not depend on {unknown:?}");
    }
}

/// A newcomer first waits for this program.
#[test]
fn xtask_depends_on_none_of_our_crates() {
    let ours: Vec<_> =
        crates_of("xtask").into_iter().skip(1).filter(|c| c.starts_with("netsum")).collect();
    assert!(ours.is_empty(), "{ours:?}");
}
