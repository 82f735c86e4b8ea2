//! Hosts that are virtual machines, with a kernel of their own and its Soft-RoCE (rdma_rxe).
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`image`] | kernel and first file system |
//! | [`cpio`] | the format of the latter |
//! | [`parts`] | names of what they are made from |
//! | [`protocol`] | what the lab and the agent in the VM say to each other |
//! | [`client`] | the lab's side of it |
//! | [`debian`] | a VM that has booted a Debian with systemd from a disk |
//!
//! The agent's side is the program `lab-agent`, the VM's first and only process of its own. A
//! program in a VM is started by `lab-exec`, which stands for it here: it passes on input, outputs
//! and signals, and ends as the program ends.

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

use crate::cluster::program;
use crate::netns::Netns;
use image::Image;
use parts::Kernel;

/// The emulator.
pub const QEMU: &str = "qemu-system-x86_64";
/// Memory of a VM in MiB, for each of its CPUs.
const MEMORY: u32 = 384;
/// How long a VM may take to boot: 5 s are usual, but several may boot on a busy machine.
const BOOT: Duration = Duration::from_secs(180);

/// What is said of a VM that has not booted.
pub const NOT_THERE: &str = "is not there";

/// Network cards that QEMU has, whose Linux drivers take XDP programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Card {
    /// The Intel 82576, with as many queues as the machine has CPUs.
    Igb,
    #[default]
    VirtioNet,
    /// From Linux 6.6 on with XDP.
    Vmxnet3,
}

impl Card {
    pub const ALL: [Self; 3] = [Self::Igb, Self::VirtioNet, Self::Vmxnet3];

    /// Queues of its tap device: QEMU's 82576 and vmxnet3 share out one queue's packets themselves.
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

/// QEMU 10 emulates several CPUs, and one of them finds the memory map changed by another, as while
/// firmware runs (QEMU's issue 1921).
const RACE: &str = "iotlb_to_section: Assertion";

#[derive(Clone, Debug)]
pub struct VmSpec<'a> {
    pub kernel: Kernel,
    pub cpus: u32,
    /// Its memory in MiB; the usual if `None`.
    pub memory: Option<u32>,
    /// The tap device that is the other end of its cable, and the namespace where that is.
    pub tap: (&'a Netns, String),
    /// From where its agent is reached.
    pub lab: &'a Netns,
    pub mac: String,
    /// MTU of its interface in bytes.
    pub mtu: u32,
    /// Its other interfaces, which it gets as eth1 and so on: the tap devices at their other ends,
    /// beside the first one.
    pub cards: Option<(Card, Vec<String>)>,
    /// Its addresses with prefix lengths. The agent is reached by the first.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Boot the Debian on the disk, and let it boot again; what it writes is gone with the VM.
    pub disk: bool,
    /// What its kernel is told, beyond the usual.
    pub line: &'a str,
}

/// A virtual machine. It is ended on drop.
#[derive(Debug)]
pub struct Vm {
    /// `None` once it has been left alone.
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
    /// If there is no image or no QEMU.
    pub fn start(spec: &VmSpec) -> Result<Self> {
        let image = Image::of(spec.kernel, spec.disk)?;
        let (netns, tap) = &spec.tap;
        let addresses: Vec<_> =
            spec.addresses.iter().map(|(ip, len)| format!("{ip}/{len}")).collect();
        // What the kernel does not know, it gives to the agent as environment variables.
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
        // A card for PCI Express.
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
            // Ctrl-C in the owner's terminal is for the owner.
            .process_group(0);
        let qemu = command.spawn().with_context(|| format!("cannot start {QEMU}"))?;
        let &(ip, _) = spec.addresses.first().context("a VM needs an address")?;
        Ok(Self { qemu: Some(qemu), command, console, lab: spec.lab.clone(), ip })
    }

    /// Waits until the VM has booted.
    ///
    /// # Errors
    /// What it has printed, if it does not.
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

    /// A program to be run in the VM. It dies with the thread that starts it, so that nothing
    /// survives its test.
    ///
    /// One in cargo's target folder is copied into the VM first. Of the environment, only variables
    /// that begin with `NETSUM_` or `RUST_` go along. `sh` in the VM is busybox, which prefers its
    /// own commands: say `/usr/bin/ip` in scripts.
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

    /// Copies a file into the VM, unless it is there already.
    pub fn put(&self, from: &Path, to: &str) -> Result<()> {
        let agent = self.lab.enter(|| client::connect(self.ip, Duration::from_secs(10)))?;
        client::put(&agent, from, to)
    }

    /// What the VM has printed on its console.
    pub fn console(&self) -> String {
        let len = self.console.metadata().map_or(0, |m| m.len());
        let mut bytes = vec![0; len as usize];
        // The offset is shared with QEMU and stays where it is.
        let read = self.console.read_at(&mut bytes, 0).unwrap_or(0);
        String::from_utf8_lossy(&bytes[..read]).into_owned()
    }

    /// Lets it run when this process ends.
    pub(crate) fn leave(&mut self) {
        self.qemu = None;
    }
}

/// A newer QEMU than Debian 12's own, from its folder. That one has no Intel 82576. And of two CPUs
/// it lets one run an instruction that the other has replaced meanwhile: Linux replaces its own
/// when XDP or tcx is first used, and panicked (`int3` in `__netif_receive_skb_core`). QEMU 8.1
/// locks code while it translates it.
fn qemu(netns: &Netns) -> Result<Command> {
    let folder = image::qemu()?;
    let mut command = netns.free_command(folder.join("usr/bin").join(QEMU));
    command.env("QEMU_MODULE_DIR", folder.join("usr/lib/x86_64-linux-gnu/qemu"));
    for data in ["usr/share/qemu", "usr/share/seabios"] {
        command.arg("-L").arg(folder.join(data));
    }
    Ok(command)
}

/// QEMU's arguments for a machine's other interfaces.
fn cards(spec: &VmSpec) -> Vec<String> {
    let Some((card, taps)) = &spec.cards else { return Vec::new() };
    let of = |(i, tap): (usize, &String)| {
        let (port, device) = match card {
            // Its virtual functions take the places beside it: each card has a bus of its own.
            Card::Igb => (
                Some(format!("pcie-root-port,id=bus{i},chassis={i}")),
                format!("{card},bus=bus{i}"),
            ),
            // Vectors for the queues of both ways, the control queue and changes of the
            // configuration.
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

/// What costs time only where the processor is emulated.
///
/// And `no_timer_check`: on a busy machine the emulated timer may not tick while the kernel looks
/// whether it does, and it panics (arch/x86/kernel/apic/io_apic.c, `check_timer`).
const QUICK: &str = "mitigations=off nokaslr cryptomgr.notests no_timer_check";

/// No offloads: every packet that the VM sends is on the wire as it is on the tap.
const PLAIN: &str = "csum=off,gso=off,guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off,\
                     host_tso4=off,host_tso6=off,host_ecn=off,host_ufo=off";

impl Drop for Vm {
    fn drop(&mut self) {
        if let Some(qemu) = &mut self.qemu {
            // Harmless for one that has ended: its id is ours until `wait`.
            let _ = qemu.kill();
            let _ = qemu.wait();
        }
    }
}

/// A program to be run in the VM with this address, which a namespace reaches. It may outlive the
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

/// The name of a program in a VM, and where it is here if it is to be copied there: whatever is in
/// cargo's target folder.
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
