//! Follows `deploy/GUIDE.md` word by word: installs the package on machines of a lab and runs an
//! all-reduce. `vm_systemd.rs` follows the guide where there is systemd.

use std::path::Path;
use std::time::{Duration, Instant};

use netsum_lab::guide::{self, Block, blocks};
use netsum_lab::machine::Machine;
use netsum_lab::netns::{Netns, output};
use netsum_lab::process::Running;
use netsum_lab::{Lab, LabSpec};
use nix::sys::signal::Signal;

const TIMEOUT: Duration = Duration::from_secs(60);

/// A line of the installed unit.
fn unit(machine: &Machine, key: &str) -> String {
    let unit =
        std::fs::read_to_string(machine.path("/usr/lib/systemd/system/netsum.service")).unwrap();
    let line = unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    line.unwrap_or_else(|| panic!("no {key} in the unit")).to_owned()
}

/// Does what systemd does when it starts the unit, except for the sandbox.
fn start(machine: &Machine) -> Running {
    let script = format!(
        "mkdir -p /run/{}; exec {}",
        unit(machine, "RuntimeDirectory"),
        unit(machine, "ExecStart")
    );
    let mut daemon = Running::start("the unit", &mut machine.script(&script)).unwrap();
    let start = Instant::now();
    while machine.run("netsum port show").is_err() {
        assert!(daemon.is_running() && start.elapsed() < TIMEOUT, "no daemon: {}", daemon.stderr());
        std::thread::sleep(Duration::from_millis(20));
    }
    daemon
}

/// Leaves two cards without a bridge, as on a machine that is to become a box.
fn without_bridge(box_: &Netns) {
    output(box_.command("ip").args(["link", "delete", "br0"])).unwrap();
    for (port, card) in [("port0", "eth1"), ("port1", "eth2")] {
        output(box_.command("ip").args(["link", "set", port, "down", "name", card])).unwrap();
        output(box_.command("ip").args(["link", "set", card, "nomaster"])).unwrap();
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_guide_leads_to_an_all_reduce() {
    let folder = tempfile::tempdir().unwrap();
    let packages = guide::packages(folder.path()).unwrap();

    let lab = Lab::new(LabSpec { mtu: 2200, ..LabSpec::hosts(2) }).unwrap();
    without_bridge(lab.box_());
    let box_ = Machine::new(lab.box_()).unwrap();
    let hosts = [lab.host(0), lab.host(1)].map(|host| Machine::new(host).unwrap());
    for machine in hosts.iter().chain([&box_]) {
        for package in &packages {
            std::fs::copy(package, machine.path("/root").join(package.file_name().unwrap()))
                .unwrap();
        }
    }

    let (mut daemon, mut ranks, mut printed, mut summed) = (None, Vec::new(), String::new(), false);
    for Block { who, commands } in blocks().unwrap() {
        let run = |machine: &Machine| {
            machine.run(&commands).unwrap_or_else(|e| panic!("{commands}: {e:#}"))
        };
        match &*who {
            "box" => printed = run(&box_),
            "hosts" => {
                hosts.iter().for_each(|host| drop(run(host)));
                let example =
                    "cc -o sum /usr/share/doc/netsum-hosts/all_reduce.c -lnetsum && ldd sum";
                let printed = hosts[0].run(example).unwrap();
                assert!(printed.contains("libnetsum.so.1 => /lib/libnetsum.so.1"), "{printed}");
            }
            "box unit" => {
                assert_eq!(
                    commands, "systemctl enable --now netsum\n",
                    "what else systemd is told is not tested"
                );
                daemon = Some(start(&box_));
            }
            "host0" | "host1" => {
                let host = &hosts[usize::from(who == "host1")];
                ranks.push(Running::start(&who, &mut host.script(&commands)).unwrap());
                if ranks.len() == 2 {
                    // Rank 0 prints the table.
                    let tables =
                        ranks.drain(..).map(|rank: Running| rank.success(TIMEOUT).unwrap());
                    let table = tables.collect::<Vec<_>>().swap_remove(0);
                    assert!(table.contains("# wrong elements: 0;"), "{table}");
                    let rows: Vec<&str> =
                        table.lines().filter(|line| !line.starts_with('#')).collect();
                    assert!(
                        rows.len() > 5 && rows.iter().all(|row| row.contains(" box ")),
                        "{table}"
                    );
                    summed = true;
                }
            }
            // This needs systemd.
            "box boot" => {}
            "box remove" => {
                // Do what the package's prerm has systemd do.
                let daemon: Running = daemon.take().unwrap();
                daemon.signal(Signal::SIGTERM).unwrap();
                daemon.success(TIMEOUT).unwrap();
                run(&box_);
            }
            who => panic!("who is {who}?"),
        }
        if commands.starts_with("netsum port show") {
            assert!(printed.contains("eth1") && printed.contains("eth2"), "{printed}");
        }
        if commands.contains("netsum stats trial") {
            assert!(printed.contains("completed"), "{printed}");
        }
    }
    assert!(summed, "nobody has summed");
    for left in [
        "/usr/bin/netsum",
        "/etc/netsum/netsum.toml",
        "/sys/fs/bpf/netsum",
        "/run/netsum/netsum.sock",
        "/var/lib/netsum",
    ] {
        assert!(!box_.path(left).exists(), "{left} is left");
    }
    for host in &hosts {
        assert!(!host.path("/usr/bin/netsum").exists(), "a host has a daemon");
    }
    let copy = Path::new("/root").join(packages[0].file_name().unwrap());
    assert!(
        box_.path(copy.to_str().unwrap()).exists() && !copy.exists(),
        "this machine's own files have been changed"
    );
}

#[test]
fn every_block_of_the_guide_is_for_somebody() {
    let blocks = blocks().unwrap();
    assert!(blocks.len() > 8, "{blocks:?}");
    let known = ["box", "hosts", "host0", "host1", "box unit", "box boot", "box remove"];
    assert!(blocks.iter().all(|b| known.contains(&&*b.who)), "{blocks:?}");
}
