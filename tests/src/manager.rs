//! A fabric's manager on the spine of a lab with racks.

use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::cluster::{Cluster, Group, JobSpec, PATIENCE, RankHost, program};
use crate::lab::BoxNode;
use crate::netns;
use crate::process::Running;

/// Beside the workers' API of the spine's own daemon.
const PORT: u16 = 4795;

/// `netsum fabric run`.
#[derive(Debug)]
pub struct Manager {
    running: Running,
    socket: String,
}

impl Cluster {
    /// Starts a manager of all boxes, whose daemons run, and waits until it knows their ports.
    ///
    /// # Errors
    /// What it says when it ends.
    pub fn start_manager(&self) -> Result<Manager> {
        self.start_manager_with(&[])
    }

    /// The same with further links: BOX/PORT below and above.
    ///
    /// # Errors
    /// What it says when it ends.
    pub fn start_manager_with(&self, links: &[(String, String)]) -> Result<Manager> {
        let racks = self.lab().spec().racks;
        let socket = self.file(None, "fabric.sock").display().to_string();
        let name = |rack: Option<usize>| rack.map_or("spine0".to_owned(), |rack| format!("leaf{rack}"));
        let mut text = format!(
            "workers = \"{}\"\nadmin = {socket:?}\nstate = {:?}\n",
            self.manager(),
            self.file(None, "fabric.json")
        );
        for rack in (0..racks).map(Some).chain([None]) {
            let path = self.file(rack, "netsum.sock");
            text += &format!("[[box]]\nname = \"{}\"\naddress = \"unix:{}\"\n", name(rack), path.display());
        }
        let up = |rack: usize| {
            (
                format!("leaf{rack}/{}", BoxNode::UPLINK),
                format!("spine0/{}", self.lab().box_().rack_port(rack)),
            )
        };
        for (below, above) in (0..racks).map(up).chain(links.iter().cloned()) {
            text += &format!("[[link]]\nbelow = {below:?}\nabove = {above:?}\n");
        }
        let config = self.file(None, "fabric.toml");
        std::fs::write(&config, text)?;
        let mut command = self.lab().box_().command(program("netsum")?);
        let running =
            Running::start("netsum fabric run", command.args(["fabric", "run", "--config"]).arg(config))?;
        let mut manager = Manager { running, socket };
        let start = Instant::now();
        while manager.json(self, &["port", "show"]).ok().and_then(|v| Some(v.as_array()?.is_empty()))
            != Some(false)
        {
            ensure!(manager.running.is_running(), "the manager has ended: {}", manager.log());
            ensure!(start.elapsed() < PATIENCE, "the manager knows no ports: {}", manager.log());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        Ok(manager)
    }

    fn manager(&self) -> SocketAddr {
        SocketAddr::new(self.lab().box_().ip(), PORT)
    }

    /// Starts the ranks of a manager's job and waits until they are connected.
    ///
    /// # Errors
    /// What a rank says.
    pub fn ranks_of(&self, manager: &Manager, job: &JobSpec, places: &[RankHost]) -> Result<Group> {
        let token = manager.create(self, job)?;
        self.group(job, Some((self.manager().to_string(), &token)), places, false)
            .with_context(|| manager.log())
    }
}

impl Manager {
    /// Runs `netsum -j ARGUMENTS` on its socket; null where that prints nothing.
    ///
    /// # Errors
    /// What the command says.
    pub fn json(&self, cluster: &Cluster, arguments: &[&str]) -> Result<Value> {
        let mut command = cluster.lab().box_().command(program("netsum")?);
        let text = netns::output(command.args(["-j", "--socket", &self.socket]).args(arguments))?;
        serde_json::from_str(if text.is_empty() { "null" } else { &text })
            .with_context(|| format!("not JSON: {text}"))
    }

    fn create(&self, cluster: &Cluster, job: &JobSpec) -> Result<String> {
        let arguments = job.create_arguments();
        let created = self.json(cluster, &arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
        Ok(created["token"].as_str().with_context(|| format!("no token in {created}"))?.to_owned())
    }

    /// What it has said so far.
    #[must_use]
    pub fn log(&self) -> String {
        self.running.stderr()
    }

    /// Ends it as `kill -9` does.
    ///
    /// # Errors
    /// If it has ended already.
    pub fn kill(self) -> Result<()> {
        self.running.signal(Signal::SIGKILL)?;
        self.running.end(PATIENCE).map(drop)
    }
}
