//! Hosts that are virtual machines, with a kernel of their own and its Soft-RoCE (rdma_rxe).
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`image`] | kernel and first file system |
//! | [`cpio`] | the format of the first file system |
//! | [`parts`] | names of their parts |
//! | [`protocol`] | messages between the lab and the agent in the VM |
//! | [`client`] | the lab's side of the protocol |
//! | [`debian`] | a VM that has booted a Debian with systemd from a disk |
//!
//! The agent's side is the program `lab-agent`, the VM's first process. The program `lab-exec`
//! starts a program in a VM and stands for it here: it forwards input, outputs and signals, and
//! ends as the program ends.

pub mod client;
pub mod cpio;
pub mod debian;
pub mod image;
pub mod parts;
pub mod protocol;

use std::ffi::OsStr;
use std::fs::File;
use std::net::IpAddr;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::netns::Netns;
use crate::process::program;
use image::Image;
use parts::Kernel;

/// The emulator.
pub const QEMU: &str = "qemu-system-x86_64";
/// Memory of a VM in MiB, for each of its CPUs.
const MEMORY: u32 = 384;
/// Timeout for booting a VM: 5 s are usual, but several may boot on a busy machine.
const BOOT: Duration = Duration::from_secs(180);

/// Part of the error when a VM has not booted.
pub const NOT_THERE: &str = "is not there";

/// QEMU's network cards whose Linux drivers accept XDP programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Card {
    /// The Intel 82576, with as many queues as the machine has CPUs.
    Igb,
    #[default]
    VirtioNet,
    /// Has XDP since Linux 6.6.
    Vmxnet3,
}

impl Card {
    pub const ALL: [Self; 3] = [Self::Igb, Self::VirtioNet, Self::Vmxnet3];

    /// Queues of its tap device. QEMU's 82576 and vmxnet3 distribute the packets of one queue
    /// themselves.
    pub const fn queues(self) -> u32 {
        match self {
            Self::VirtioNet => 2,
            Self::Igb | Self::Vmxnet3 => 1,
        }
    }
}

impl std::fmt::Display for Card {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Igb => "igb",
            Self::VirtioNet => "virtio_net",
            Self::Vmxnet3 => "vmxnet3",
        })
    }
}

impl std::str::FromStr for Card {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|card| card.to_string() == text);
        found.ok_or_else(|| "igb, virtio_net and vmxnet3 are possible".into())
    }
}

/// Message of a race in QEMU 10: with several CPUs, one finds the memory map changed by another, as
/// while firmware runs (QEMU's issue 1921).
const RACE: &str = "iotlb_to_section: Assertion";

#[derive(Clone, Debug)]
pub struct VmSpec<'a> {
    pub kernel: Kernel,
    pub cpus: u32,
    /// Its memory in MiB; if `None`, an amount that depends on its CPUs.
    pub memory: Option<u32>,
    /// The tap device at the other end of its link, and the tap's namespace.
    pub tap: (&'a Netns, String),
    /// The namespace from which its agent is reached.
    pub lab: &'a Netns,
    pub mac: String,
    /// MTU of its interface in bytes.
    pub mtu: u32,
    /// Its other interfaces, eth1 and so on: their tap devices, in the same namespace as the first
    /// one's.
    pub cards: Option<(Card, Vec<String>)>,
    /// Its addresses with prefix lengths. The first one leads to the agent.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Boot the Debian on the disk, and allow reboots. Changes of the disk are discarded with the
    /// VM.
    pub disk: bool,
    /// Further kernel command line.
    pub line: &'a str,
}

/// A virtual machine. It is ended on drop.
#[derive(Debug)]
pub struct Vm {
    /// `None` once it must survive this process.
    qemu: Option<Child>,
    command: Command,
    console: File,
    lab: Netns,
    ip: IpAddr,
}

impl Vm {
    /// Starts a VM, which then boots.
    ///
    /// # Errors
    /// If the image or QEMU is missing.
    pub fn start(spec: &VmSpec) -> Result<Self> {
        let image = Image::of(spec.kernel, spec.disk)?;
        let (netns, tap) = &spec.tap;
        let addresses: Vec<_> =
            spec.addresses.iter().map(|(ip, len)| format!("{ip}/{len}")).collect();
        // The kernel passes unknown parameters to the agent as environment variables.
        let mut line = format!(
            "console=ttyS0 quiet panic=-1 {QUICK} lab_mtu={} lab_addresses={}",
            spec.mtu,
            addresses.join(",")
        );
        if image.disk.is_some() {
            line += debian::LINE;
        }
        line = line + " " + spec.line;
        // COMMAND_LINE_SIZE of x86.
        anyhow::ensure!(line.len() < 2048, "too many addresses for a VM: {}", addresses.len());
        let memory = spec.memory.unwrap_or(spec.cpus * MEMORY);
        let console = tempfile::tempfile()?;
        // This card needs PCI Express.
        let machine = if matches!(spec.cards, Some((Card::Igb, _))) { "q35" } else { "pc" };
        let mut command = qemu(netns)?;
        command
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-machine", machine, "-accel", "tcg", "-cpu", "max"])
            .args(["-smp", &spec.cpus.to_string(), "-m", &memory.to_string()])
            .args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"])
            .args([
                "-netdev",
                &format!("tap,id=net,ifname={tap},script=no,downscript=no,vhost=off"),
            ])
            .args([
                "-device",
                &format!("virtio-net-pci,netdev=net,mac={},romfile=,{PLAIN}", spec.mac),
            ])
            .args(cards(spec))
            .args(debian::disk(image.disk.as_deref()))
            .arg("-kernel")
            .arg(&image.kernel)
            .arg("-initrd")
            .arg(&image.initramfs)
            .args(["-append", &line])
            .stdin(Stdio::null())
            .stdout(console.try_clone()?)
            .stderr(console.try_clone()?)
            // Ctrl-C in the owner's terminal must only reach the owner.
            .process_group(0);
        let qemu = command.spawn().with_context(|| format!("cannot start {QEMU}"))?;
        let &(ip, _) = spec.addresses.first().context("a VM needs an address")?;
        Ok(Self { qemu: Some(qemu), command, console, lab: spec.lab.clone(), ip })
    }

    /// Waits until the VM has booted.
    ///
    /// # Errors
    /// The VM's console output, if it does not boot.
    pub fn wait(&mut self) -> Result<()> {
        let (start, mut again) = (Instant::now(), false);
        loop {
            let tried = self.lab.enter(|| client::connect(self.ip, Duration::from_secs(1)));
            let error = match tried {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            let ended = self.qemu.as_mut().map(Child::try_wait).transpose()?.flatten();
            if let Some(status) = ended {
                if again || !self.console().contains(RACE) {
                    bail!("the VM {} has ended: {status}\n{}", self.ip, self.console());
                }
                println!(
                    "QEMU has lost a race of its own while the VM {} booted: once more",
                    self.ip
                );
                (self.qemu, again) = (Some(self.command.spawn()?), true);
            }
            if start.elapsed() > BOOT {
                bail!(
                    "the VM {} {NOT_THERE} within {BOOT:?}: {error}\n{}",
                    self.ip,
                    self.console()
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A command that runs in the VM. It dies with the thread that starts it, and so it does not
    /// survive its test.
    ///
    /// A program in cargo's target folder is first copied into the VM. Only environment variables
    /// that begin with `NETSUM_` or `RUST_` are passed on. `sh` in the VM is busybox, which prefers
    /// its own commands: use paths such as `/usr/bin/ip` in scripts.
    ///
    /// # Panics
    /// If `lab-exec` has not been built.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        stand_in(self.ip, program.as_ref(), |exec| self.lab.command(exec))
    }

    /// Like [`Vm::command`], but it may outlive the thread that starts it.
    pub fn free_command(&self, program: impl AsRef<OsStr>) -> Command {
        command_at(&self.lab, self.ip, program)
    }

    /// Copies a file into the VM, unless it already has it.
    pub fn put(&self, from: &Path, to: &str) -> Result<()> {
        let agent = self.lab.enter(|| client::connect(self.ip, Duration::from_secs(10)))?;
        client::put(&agent, from, to)
    }

    /// The VM's console output.
    pub fn console(&self) -> String {
        let len = self.console.metadata().map_or(0, |m| m.len());
        let mut bytes = vec![0; len as usize];
        // QEMU shares the file offset, which must not move.
        let read = self.console.read_at(&mut bytes, 0).unwrap_or(0);
        String::from_utf8_lossy(&bytes[..read]).into_owned()
    }

    /// Lets it survive this process.
    pub(crate) fn leave(&mut self) {
        self.qemu = None;
    }
}

/// A newer QEMU than Debian 12's, from its folder. Debian 12's does not emulate the Intel 82576. It
/// also lets one of two CPUs execute an instruction that the other is replacing: Linux replaces
/// instructions of its own when XDP or tcx is first used, and panicked (`int3` in
/// `__netif_receive_skb_core`). QEMU 8.1 locks code while it translates it.
fn qemu(netns: &Netns) -> Result<Command> {
    let folder = image::qemu()?;
    let mut command = netns.free_command(folder.join("usr/bin").join(QEMU));
    command.env("QEMU_MODULE_DIR", folder.join("usr/lib/x86_64-linux-gnu/qemu"));
    for data in ["usr/share/qemu", "usr/share/seabios"] {
        command.arg("-L").arg(folder.join(data));
    }
    Ok(command)
}

/// QEMU's arguments for the other interfaces of a machine.
fn cards(spec: &VmSpec) -> Vec<String> {
    let Some((card, taps)) = &spec.cards else { return Vec::new() };
    let of = |(i, tap): (usize, &String)| {
        let (port, device) = match card {
            // The card's virtual functions occupy the neighbouring slots, and so each card needs a
            // bus of its own.
            Card::Igb => (
                Some(format!("pcie-root-port,id=bus{i},chassis={i}")),
                format!("{card},bus=bus{i}"),
            ),
            // Vectors for the queues of both directions, the control queue and configuration
            // changes.
            Card::VirtioNet => {
                (None, format!("virtio-net-pci,mq=on,vectors={},{PLAIN}", 2 * card.queues() + 2))
            }
            Card::Vmxnet3 => (None, card.to_string()),
        };
        let queues =
            if card.queues() > 1 { format!(",queues={}", card.queues()) } else { String::new() };
        let netdev =
            format!("tap,id=card{i},ifname={tap},script=no,downscript=no,vhost=off{queues}");
        let device = format!("{device},netdev=card{i},mac=02:00:00:00:01:{:02x},romfile=", i + 1);
        let port = port.into_iter().flat_map(|port| ["-device".to_owned(), port]);
        port.chain(["-netdev".to_owned(), netdev, "-device".to_owned(), device]).collect::<Vec<_>>()
    };
    taps.iter().enumerate().flat_map(of).collect()
}

/// Disables what is slow only on an emulated CPU.
///
/// Also sets `no_timer_check`: on a busy machine, the emulated timer may not tick while the kernel
/// checks it, and the kernel panics (arch/x86/kernel/apic/io_apic.c, `check_timer`).
const QUICK: &str = "mitigations=off nokaslr cryptomgr.notests no_timer_check";

/// Disables offloads: every packet of the VM is on the link as it is on the tap.
const PLAIN: &str = "csum=off,gso=off,guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off,\
                     host_tso4=off,host_tso6=off,host_ecn=off,host_ufo=off";

impl Drop for Vm {
    fn drop(&mut self) {
        if let Some(qemu) = &mut self.qemu {
            // Harmless if the process has ended: its ID is not reused before `wait`.
            let _ = qemu.kill();
            let _ = qemu.wait();
        }
    }
}

/// A command that runs in the VM with this address, reached from a namespace. It may outlive the
/// thread that starts it.
///
/// # Panics
/// If `lab-exec` has not been built.
pub fn command_at(lab: &Netns, ip: IpAddr, program: impl AsRef<OsStr>) -> Command {
    stand_in(ip, program.as_ref(), |exec| lab.free_command(exec))
}

fn stand_in(ip: IpAddr, inside: &OsStr, command: impl Fn(&Path) -> Command) -> Command {
    let exec = program("lab-exec").unwrap_or_else(|e| panic!("{e:#}"));
    let mut command = command(&exec);
    command.arg(ip.to_string()).arg(inside);
    command
}

/// The name of a program in a VM, and the path from which it must be copied there: any program in
/// cargo's target folder is copied.
pub fn name_inside(given: &str) -> (String, Option<PathBuf>) {
    let ours = || {
        let path = Path::new(given)
            .canonicalize()
            .ok()
            .filter(|path| given.contains('/') && path.is_file())?;
        let me = std::env::current_exe().ok()?;
        // <target>/<profile>/lab-exec.
        path.starts_with(me.ancestors().nth(2)?).then_some(path)
    };
    match ours() {
        Some(path) => {
            (format!("/lab/{}", path.file_name().unwrap_or_default().display()), Some(path))
        }
        None => (given.to_owned(), None),
    }
}
