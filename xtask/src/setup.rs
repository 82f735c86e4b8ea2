//! Checks what commands need on this machine, and installs what is missing.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::debian::{self, Archive};
use crate::paths::{self, find_program};
use crate::vm::{self, Kernel};

/// A program, its Debian package, and its purpose.
#[derive(Clone, Copy)]
struct Tool {
    program: &'static str,
    package: &'static str,
    purpose: &'static str,
}

const TOOLS: [Tool; 2] = [
    Tool {
        program: "ip",
        package: "iproute2",
        purpose: "builds the lab's namespaces, links and bridge",
    },
    Tool {
        program: "ethtool",
        package: "ethtool",
        purpose: "makes veth devices take redirected frames",
    },
];

const COMPILER: Tool =
    Tool { program: "cc", package: "gcc", purpose: "compiles programs of tests" };

const VM_TOOLS: [Tool; 4] = [
    Tool {
        program: "qemu-system-x86_64",
        package: "qemu-system-x86",
        purpose: "runs the lab's virtual machines",
    },
    COMPILER,
    Tool { program: "debootstrap", package: "debootstrap", purpose: "installs a Debian for them" },
    Tool { program: "mke2fs", package: "e2fsprogs", purpose: "makes that Debian's disk" },
];

const TERMINAL_TOOLS: [Tool; 1] = [Tool {
    program: "tmux",
    package: "tmux",
    purpose: "is the terminal in which `netsum top` is tested",
}];

/// Software that netsum is compared with: modules of Debian's own Python, and what peers in virtual
/// environments need.
const RIVALS: [Tool; 5] = [
    Tool { program: "mpirun", package: "openmpi-bin", purpose: "starts Open MPI's ranks" },
    TORCH[0],
    MPI4PY,
    VENV,
    Tool {
        program: "/usr/lib/x86_64-linux-gnu/libfabric.so.1",
        package: "libfabric1",
        purpose: "carries oneCCL's packets",
    },
];

const VENV: Tool = Tool {
    program: "/usr/lib/python3.11/ensurepip/__init__.py",
    package: "python3-venv",
    purpose: "makes virtual environments for packages of PyPI",
};

const TORCH: [Tool; 2] = [
    Tool {
        program: "/usr/lib/python3/dist-packages/torch/__init__.py",
        package: "python3-torch",
        purpose: "has Gloo, and trains models",
    },
    Tool {
        program: "/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3",
        package: "libopenblas0-pthread",
        purpose: "multiplies PyTorch's matrices much faster than its default library",
    },
];

const MPI_COMPILERS: [Tool; 3] = [
    COMPILER,
    Tool {
        program: "mpicc.openmpi",
        package: "libopenmpi-dev",
        purpose: "compiles programs of Open MPI",
    },
    Tool { program: "mpicc.mpich", package: "libmpich-dev", purpose: "compiles those of MPICH" },
];

const MPI_RUN: [Tool; 2] = [
    Tool { program: "mpirun.openmpi", package: "openmpi-bin", purpose: "starts Open MPI's ranks" },
    Tool { program: "mpirun.mpich", package: "mpich", purpose: "starts MPICH's ranks" },
];

const MPI4PY: Tool = Tool {
    program: "/usr/lib/python3/dist-packages/mpi4py/__init__.py",
    package: "python3-mpi4py",
    purpose: "calls Open MPI",
};

const NUMPY: [Tool; 1] = [Tool {
    program: "/usr/lib/python3/dist-packages/numpy/__init__.py",
    package: "python3-numpy",
    purpose: "has arrays for the Python package to sum",
}];

/// The folder in which the daemon pins its maps.
const BPFFS: &str = "/sys/fs/bpf";

/// Makes the machine ready for the lab.
///
/// # Errors
/// If something is missing and cannot be installed.
pub fn require_lab() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("run as root: the lab needs network namespaces and XDP");
    }
    install(&TOOLS)?;
    can_make_namespaces()
}

/// Makes the machine ready for the lab and for XDP programs in it.
///
/// # Errors
/// If something is missing and cannot be installed.
pub fn require_bpf() -> Result<()> {
    require_lab()?;
    mount_bpffs()
}

/// Makes the machine ready for virtual machines with these kernels in the lab.
///
/// # Errors
/// If something is missing and cannot be installed.
pub fn require_vms(kernels: &[Kernel]) -> Result<()> {
    require_bpf()?;
    if cfg!(not(target_arch = "x86_64")) {
        bail!("the lab's virtual machines need an x86-64 machine");
    }
    // Machines that use VPNs have it; containers often lack it.
    if !Path::new("/dev/net/tun").exists() {
        bail!("/dev/net/tun is missing: this machine has no tap devices");
    }
    install(&VM_TOOLS)?;
    vm::prepare(kernels)
}

/// Makes the machine ready for tests in a terminal.
///
/// # Errors
/// If something is missing and cannot be installed.
pub fn require_terminal() -> Result<()> {
    install(&TERMINAL_TOOLS)
}

/// Makes the machine ready for tests that compile C.
///
/// # Errors
/// If something is missing and cannot be installed.
pub fn require_compiler() -> Result<()> {
    install(&[COMPILER])
}

/// Makes the machine ready to compile programs of Open MPI and MPICH.
///
/// # Errors
/// If something is missing and cannot be installed.
pub fn require_mpi_compilers() -> Result<()> {
    install(&MPI_COMPILERS)
}

/// Makes the machine ready for tests that run them.
///
/// # Errors
/// If something is missing and cannot be installed.
pub fn require_mpi() -> Result<()> {
    install(&[&MPI_COMPILERS[..], &MPI_RUN, &[MPI4PY]].concat())
}

/// Makes Debian's Python ready to make virtual environments.
///
/// # Errors
/// If something is missing and cannot be installed.
pub fn require_venv() -> Result<()> {
    install(&[VENV])
}

/// Makes the machine ready for tests of the Python package with Debian's numpy.
///
/// # Errors
/// If something is missing and cannot be installed.
pub fn require_debian_numpy() -> Result<()> {
    install(&NUMPY)
}

/// Makes the machine ready to train with Debian's PyTorch.
///
/// # Errors
/// If something is missing and cannot be installed.
pub fn require_torch() -> Result<()> {
    install(&TORCH)
}

/// Makes the machine ready for tests that start Prometheus.
///
/// # Errors
/// If something is missing and cannot be installed.
pub fn require_prometheus() -> Result<()> {
    fetch(
        "prometheus",
        "prometheus",
        &["prometheus", "promtool"],
        "tests of the metrics: about 20 MB",
    )
}

/// Makes the machine ready for tests that start etcd.
///
/// # Errors
/// If something is missing and cannot be installed.
pub fn require_etcd() -> Result<()> {
    fetch("etcd", "etcd-server", &["etcd"], "tests of fabric managers: about 10 MB")
}

/// Fetches what only some tests need, as far as possible.
pub fn fetch_all() {
    let _ = require_vms(&Kernel::ALL);
    let _ = require_prometheus();
    let _ = require_etcd();
    let _ = require_mpi();
    let _ = install(&[&TERMINAL_TOOLS[..], &TORCH, &NUMPY, &[VENV]].concat());
}

/// Fetches Debian's package with these programs into a subfolder of the target folder. It is
/// unpacked and not installed, because installing it would start a service on this machine.
fn fetch(folder: &str, package: &str, programs: &[&str], purpose: &str) -> Result<()> {
    let target = paths::target_dir()?;
    let (to, bin) = (target.join(folder), Path::new("usr/bin"));
    let there = |name: &&str| find_program(name).is_some() || to.join(bin).join(name).is_file();
    if programs.iter().all(there) {
        return Ok(());
    }
    if find_program("apt-get").is_none() {
        bail!("{package} is missing: install it; apt-get, which could fetch it, is missing too");
    }
    println!("fetching Debian's {package} for {purpose}");
    // An interrupted fetch must not look complete, so it runs in a temporary folder.
    let fetched = tempfile::Builder::new().prefix(&format!("{folder}-")).tempdir_in(&target)?;
    let archive = Archive::open(&fetched.path().join("apt"), &[&debian::codename()?])
        .with_context(|| package.to_owned())?;
    let unpacked = fetched.path().join("unpacked");
    archive
        .download(&[package])?
        .iter()
        .try_for_each(|package| debian::unpack(package, &unpacked))?;
    drop(std::fs::remove_dir_all(&to));
    std::fs::rename(unpacked, &to).with_context(|| to.display().to_string())
}

/// Installs the software for comparisons as far as possible; prints what cannot be installed.
pub fn install_rivals() {
    for tool in &RIVALS {
        if let Err(error) = install(std::slice::from_ref(tool)) {
            println!("{error:#}");
        }
    }
}

fn install(tools: &[Tool]) -> Result<()> {
    let missing: Vec<&Tool> = tools.iter().filter(|t| find_program(t.program).is_none()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let packages: Vec<&str> = missing.iter().map(|t| t.package).collect();
    if find_program("apt-get").is_none() {
        bail!("install these packages by hand, as apt-get is missing: {}", packages.join(", "));
    }
    for tool in &missing {
        println!(
            "installing the Debian package {}: `{}` {}",
            tool.package, tool.program, tool.purpose
        );
    }
    let apt = |args: &[&str]| -> Result<()> {
        let out = Command::new("apt-get")
            .args(["-q", "-y"])
            .args(args)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .output()
            .context("cannot start apt-get")?;
        if !out.status.success() {
            bail!("apt-get {}: {}", args.join(" "), String::from_utf8_lossy(&out.stderr).trim());
        }
        Ok(())
    };
    let mut install = vec!["install", "--no-install-recommends"];
    install.extend(&packages);
    // Update the lists only if the first try fails: on a fresh machine they are missing or old.
    apt(&install).or_else(|_| apt(&["update"]).and_then(|()| apt(&install)))
}

fn can_make_namespaces() -> Result<()> {
    // In a thread of its own: the namespace ends with the thread.
    let tried =
        std::thread::spawn(|| nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)).join();
    match tried {
        Ok(Ok(())) => Ok(()),
        Ok(Err(e)) => bail!("this machine does not allow network namespaces: {e}"),
        Err(_) => bail!("this machine does not allow network namespaces"),
    }
}

fn mount_bpffs() -> Result<()> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").context("/proc/self/mounts")?;
    let is_bpffs = |line: &str| {
        let mut words = line.split(' ').skip(1);
        words.next() == Some(BPFFS) && words.next() == Some("bpf")
    };
    if mounts.lines().any(is_bpffs) {
        return Ok(());
    }
    if !Path::new(BPFFS).is_dir() {
        bail!("{BPFFS} is missing: this kernel has no BPF, or /sys is not mounted");
    }
    println!("mounting the BPF file system at {BPFFS}: the daemon pins its maps there");
    nix::mount::mount(Some("bpf"), BPFFS, Some("bpf"), nix::mount::MsFlags::empty(), None::<&str>)
        .with_context(|| format!("cannot mount {BPFFS}"))
}
