//! Checks what crates are built of, so that each stays what it is.

use std::process::Command;

/// Crates that take datagrams, requests and times, and give back what is to be done.
const PURE: [&str; 5] =
    ["netsum-collective", "netsum-common", "netsum-core", "netsum-plan", "netsum-rc"];
/// What does I/O, or knows the time.
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

/// Where cargo keeps what apart: a crate, and what it is not built of.
const APART: [(&str, &[&str]); 3] = [
    ("netsum-dataplane", &["tokio", "tonic", "prost", "hyper", "rtnetlink", "netsum-api", "clap"]),
    ("netsum-cli", &["aya", "aya-obj", "rtnetlink", "netsum-dataplane", "netsum-daemon"]),
    ("netsum-daemon", &["plotters", "ratatui", "schemars", "clap", "netsum-cli"]),
];

/// All crates that one is built of, without those that its tests and its build take. By default:
/// `user` of `netsum-common` has aya's traits for the ABI, for those who load programs.
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
fn crates_without_io_are_built_of_none_that_do_any() {
    for package in PURE {
        let crates = crates_of(package);
        assert_eq!(crates[0], package);
        let wrong: Vec<_> = crates.iter().filter(|c| IO.contains(&c.as_str())).collect();
        assert!(wrong.is_empty(), "{package} is built of {wrong:?}");
    }
    // The test sees what there is.
    assert!(crates_of("netsum-worker").iter().any(|c| c == "tokio"));
}

#[test]
fn each_crate_of_the_box_is_built_of_its_own_job_alone() {
    let of_netsum = crates_of("netsum-aggregator");
    for (package, others) in APART {
        let crates = crates_of(package);
        assert_eq!(crates[0], package);
        let wrong: Vec<_> = crates.iter().filter(|c| others.contains(&c.as_str())).collect();
        assert!(wrong.is_empty(), "{package} is built of {wrong:?}");
        // A name that nobody has any more would forbid nothing.
        let unknown: Vec<_> =
            others.iter().filter(|o| !of_netsum.iter().any(|c| c == *o)).collect();
        assert!(unknown.is_empty(), "the program is not built of {unknown:?}");
    }
}

/// This program is what a newcomer waits for first.
#[test]
fn xtask_is_built_of_no_crate_of_ours() {
    let ours: Vec<_> =
        crates_of("xtask").into_iter().skip(1).filter(|c| c.starts_with("netsum")).collect();
    assert!(ours.is_empty(), "{ours:?}");
}
