//! Runs a fabric's manager on the spine of a lab with racks.

use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::cluster::{Cluster, Group, JobSpec, RankHost, TIMEOUT, program};
use crate::lab::BoxNode;
use crate::netns;
use crate::process::Running;
use crate::topology::Rate;

/// Differs from the port of the spine's own daemon.
const PORT: u16 = 4795;

/// `netsum fabric run`.
#[derive(Debug)]
pub struct Manager {
    running: Running,
    socket: String,
}

impl Cluster {
    /// Starts a manager of all boxes, whose daemons must run, and waits until it knows their ports.
    ///
    /// # Errors
    /// If the manager ends: its output.
    pub fn start_manager(&self) -> Result<Manager> {
        self.manager_with(true, &[])
    }

    /// The same without links in its file: the manager discovers them.
    ///
    /// # Errors
    /// As there.
    pub fn start_manager_that_finds_links(&self) -> Result<Manager> {
        self.manager_with(false, &[])
    }

    /// The same with a rate for the links of each spine.
    ///
    /// # Errors
    /// As there.
    pub fn start_manager_with_rates(&self, rates: &[Rate]) -> Result<Manager> {
        self.manager_with(true, rates)
    }

    fn manager_with(&self, explicit: bool, rates: &[Rate]) -> Result<Manager> {
        let spec = self.lab().spec();
        let socket = self.file(None, "fabric.sock").display().to_string();
        let uplinks = if explicit { "" } else { "uplinks = [\"spine*/rack*\"]\n" };
        let mut text = format!(
            "{uplinks}workers = \"{}\"\nadmin = {socket:?}\nstate = {:?}\n",
            self.manager(),
            self.file(None, "fabric.json")
        );
        for number in spec.boxes().map(Some).chain([None]) {
            let (name, path) = (spec.box_name(number), self.file(number, "netsum.sock"));
            let level = u32::from(number.is_none_or(|number| number >= spec.below().end));
            text += &format!(
                "[[box]]\nname = {name:?}\naddress = \"unix:{}\"\nlevel = {level}\n",
                path.display()
            );
        }
        let spines = if explicit { spec.spines } else { 0 };
        for (spine, rack) in
            (0..spines).flat_map(|spine| spec.below().map(move |rack| (spine, rack)))
        {
            let below = format!("{}/{}", spec.box_name(Some(rack)), BoxNode::uplink(spine));
            let above = format!("{}/rack{rack}", spec.box_name(spec.spine(spine)));
            text += &format!("[[link]]\nbelow = {below:?}\nabove = {above:?}\n");
            if let Some(rate) = rates.get(spine) {
                text += &format!("rate = \"{rate}\"\n");
            }
        }
        let config = self.file(None, "fabric.toml");
        std::fs::write(&config, text)?;
        let mut command = self.lab().box_().command(program("netsum")?);
        let running = Running::start(
            "netsum fabric run",
            command.args(["fabric", "run", "--config"]).arg(config),
        )?;
        let mut manager = Manager { running, socket };
        let start = Instant::now();
        let has_seen =
            |fabric: Value| Some(fabric["boxes"].as_array()?.iter().any(|b| b["answers"] == true));
        while manager.json(self, &["fabric", "show"]).ok().and_then(has_seen) != Some(true) {
            ensure!(manager.running.is_running(), "the manager has ended: {}", manager.log());
            ensure!(start.elapsed() < TIMEOUT, "no box answers the manager: {}", manager.log());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        Ok(manager)
    }

    /// Address where ranks join the manager.
    pub fn manager(&self) -> SocketAddr {
        SocketAddr::new(self.lab().box_().ip(), PORT)
    }

    /// Starts the ranks of a manager's job and waits until they are connected.
    ///
    /// # Errors
    /// A rank's error.
    pub fn ranks_of(&self, manager: &Manager, job: &JobSpec, places: &[RankHost]) -> Result<Group> {
        self.members(manager, job, places, false)
    }

    /// The same over IPv6.
    ///
    /// # Errors
    /// As there.
    pub fn ranks_of_v6(
        &self,
        manager: &Manager,
        job: &JobSpec,
        places: &[RankHost],
    ) -> Result<Group> {
        self.members(manager, job, places, true)
    }

    fn members(
        &self,
        manager: &Manager,
        job: &JobSpec,
        places: &[RankHost],
        v6: bool,
    ) -> Result<Group> {
        let token = manager.create(self, job)?;
        let group = self.group(job, Some((self.manager().to_string(), &token)), places, v6);
        group.with_context(|| manager.log())
    }
}

impl Manager {
    /// Runs `netsum -j ARGUMENTS` on its socket; null if that prints nothing.
    ///
    /// # Errors
    /// The command's error.
    pub fn json(&self, cluster: &Cluster, arguments: &[&str]) -> Result<Value> {
        let text = self.netsum(cluster, &[&["-j"], arguments].concat())?;
        serde_json::from_str(if text.is_empty() { "null" } else { &text })
            .with_context(|| format!("not JSON: {text}"))
    }

    /// Runs `netsum ARGUMENTS` on its socket.
    ///
    /// # Errors
    /// The command's error.
    pub fn netsum(&self, cluster: &Cluster, arguments: &[&str]) -> Result<String> {
        let mut command = cluster.lab().box_().command(program("netsum")?);
        netns::output(command.args(["--socket", &self.socket]).args(arguments))
    }

    /// Creates a job; returns its token.
    ///
    /// # Errors
    /// The command's error.
    pub fn create(&self, cluster: &Cluster, job: &JobSpec) -> Result<String> {
        let arguments = job.create_arguments();
        let created =
            self.json(cluster, &arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
        Ok(created["token"].as_str().with_context(|| format!("no token in {created}"))?.to_owned())
    }

    /// The manager's log so far.
    #[must_use]
    pub fn log(&self) -> String {
        self.running.stderr()
    }

    /// Kills it as `kill -9` does.
    ///
    /// # Errors
    /// If it has ended already.
    pub fn kill(self) -> Result<()> {
        self.running.signal(Signal::SIGKILL)?;
        self.running.end(TIMEOUT).map(drop)
    }
}
