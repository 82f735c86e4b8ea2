//! Starts programs of Open MPI and MPICH over the hosts of a lab.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::cluster::Cluster;
use crate::{Host, netns};

/// A Debian package of MPI.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mpi {
    /// Open MPI over its own TCP.
    Open,
    /// MPICH over UCX's TCP.
    Mpich,
}

impl Mpi {
    pub const ALL: [Self; 2] = [Self::Open, Self::Mpich];

    /// Its name, as in `mpicc.NAME`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Open => "openmpi",
            Self::Mpich => "mpich",
        }
    }

    /// The command that starts `per_host` ranks on each host; the program and its arguments follow.
    /// Launcher and ranks have these variables.
    ///
    /// # Errors
    /// If the cluster's folder cannot be written.
    pub fn launcher(
        self,
        cluster: &Cluster,
        ranks: &[usize],
        variables: &[(&str, OsString)],
    ) -> Result<Command> {
        let agent = agent(cluster, self.name())?;
        let hosts: Vec<String> = cluster
            .lab()
            .hosts()
            .iter()
            .zip(ranks)
            .map(|(host, ranks)| format!("{}:{ranks}", host.ip(0)))
            .collect();
        let mut command = cluster.lab().host(0).command("unshare");
        // Each host needs a name of its own, or Open MPI takes them all for one.
        command.args(["--uts", "sh", "-c", "hostname host0; exec \"$0\" \"$@\""]);
        command.arg(format!("mpirun.{}", self.name()));
        match self {
            Self::Open => {
                command.args(["--allow-run-as-root", "--host", &hosts.join(",")]);
                command.args(["--mca", "plm_rsh_agent"]).arg(agent);
                // Real hosts share no memory. Ranks that spin keep others from the two cores.
                for setting in ["btl=tcp,self", "pml=ob1", "mpi_yield_when_idle=1"] {
                    let (name, value) = setting.split_once('=').unwrap_or_default();
                    command.args(["--mca", name, value]);
                }
                for layer in ["btl", "oob"] {
                    command.args(["--mca", &format!("{layer}_tcp_if_include"), Host::INTERFACE]);
                }
                for (name, _) in variables {
                    command.args(["-x", name]);
                }
            }
            Self::Mpich => {
                let number: usize = ranks.iter().sum();
                command.args(["-launcher", "rsh", "-launcher-exec"]).arg(agent);
                command.args(["-iface", Host::INTERFACE, "-hosts", &hosts.join(",")]);
                command.args(["-n", &number.to_string()]);
                command.env("UCX_TLS", "tcp,self").env("UCX_NET_DEVICES", Host::INTERFACE);
            }
        }
        // It leaves files behind if it is killed.
        command.envs(variables.iter().cloned()).env("TMPDIR", cluster.folder());
        Ok(command)
    }
}

/// Writes the program with which launchers start their daemons instead of ssh, `agent HOST
/// COMMAND...`, and returns its path.
///
/// # Errors
/// If it cannot be written.
pub fn agent(cluster: &Cluster, name: &str) -> Result<PathBuf> {
    let mut text = String::from("#!/bin/sh\nhost=$1\nshift\ncase $host in\n");
    for (i, host) in cluster.lab().hosts().iter().enumerate() {
        let netns = Path::new(netns::RUN_NETNS).join(host.name());
        text += &format!("{}) name=host{i} netns={} ;;\n", host.ip(0), netns.display());
    }
    text += "*) echo \"no host $host\" >&2; exit 1 ;;\nesac\n";
    text += "exec nsenter --net=\"$netns\" unshare --uts sh -c \"hostname $name; $*\"\n";
    let path = cluster.folder().join(format!("agent-{name}"));
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o700).open(&path)?;
    file.write_all(text.as_bytes())?;
    Ok(path)
}
