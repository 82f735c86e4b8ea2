//! Prepares a VM: file systems, modules, the interface, and Soft-RoCE on it.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use netsum_lab::vm::parts::MODULE_LIST;
use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::mount::{MsFlags, mount};

/// Search path for programs named without a path: Debian's programs come before busybox's.
pub const PATH: &str = "/usr/bin:/bin:/usr/sbin:/sbin";

/// Turns a machine that has only the first file system into a host in the lab's network.
pub fn up() -> Result<()> {
    for (kind, to) in
        [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("devpts", "/dev/pts")]
    {
        fs::create_dir_all(to).context(to)?;
        mount(Some(kind), to, Some(kind), MsFlags::empty(), None::<&str>).context(to)?;
    }
    // Some kernels do not have bpffs.
    if let Err(error) =
        mount(Some("bpf"), "/sys/fs/bpf", Some("bpf"), MsFlags::empty(), None::<&str>)
    {
        println!("/sys/fs/bpf: {error}");
    }
    for folder in ["/tmp", "/run", "/root", "/dev/shm"] {
        fs::create_dir_all(folder).context(folder)?;
    }
    // Does not replace existing programs.
    run(Command::new("/bin/busybox").args(["--install", "-s"]).stderr(Stdio::null()))
        .unwrap_or_else(|e| println!("{e:#}"));
    load_all(MODULE_LIST)?;
    wait_for(Path::new("/sys/class/net/eth0"))?;
    let given = |name: &str| {
        std::env::var(name).with_context(|| format!("{name} on the kernel's command line"))
    };
    // A kernel without IPv6 does not have this mode.
    let quiet = if Path::new("/proc/net/if_inet6").exists() {
        "link set eth0 addrgenmode none\n"
    } else {
        ""
    };
    let mut lines = format!(
        "link set lo up\n{quiet}link set eth0 mtu {} txqueuelen 8192 up\n",
        given("lab_mtu")?
    );
    for address in given("lab_addresses")?.split(',') {
        let nodad = if address.contains(':') { " nodad" } else { "" };
        lines += &format!("address add {address} dev eth0{nodad}\n");
    }
    let mut ip = Command::new("/usr/bin/ip")
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .context("ip")?;
    ip.stdin.take().context("stdin")?.write_all(lines.as_bytes())?;
    ensure!(ip.wait()?.success(), "ip -batch of\n{lines}");
    Ok(())
}

/// Sets up Soft-RoCE on the host's interface.
pub fn soft_roce() -> Result<()> {
    run(Command::new("/usr/bin/rdma")
        .args(["link", "add", "rxe0", "type", "rxe", "netdev", "eth0"]))
}

/// Loads the modules listed in a file, in order.
pub fn load_all(list: &str) -> Result<()> {
    let modules = fs::read_to_string(list).context(list.to_owned())?;
    modules
        .lines()
        .try_for_each(|module| load(Path::new(module)).with_context(|| module.to_owned()))
}

/// Waits for a file that a driver creates.
pub fn wait_for(file: &Path) -> Result<()> {
    let start = Instant::now();
    while !file.exists() {
        ensure!(start.elapsed() < Duration::from_secs(10), "no {}", file.display());
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn load(module: &Path) -> Result<()> {
    // The module would create a bond by itself.
    let options = if module.ends_with("bonding.ko") { c"max_bonds=0" } else { c"" };
    match finit_module(&File::open(module)?, options, ModuleInitFlags::empty()) {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}
