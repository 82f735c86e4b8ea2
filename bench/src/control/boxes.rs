//! Boxes that have only an API.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use netsum_agent::agent::{Agent, Shared};
use netsum_agent::listen::serve;
use netsum_agent::network::Network;
use netsum_controller::socket::{self, Access};
use netsum_core::watch::RingTimeouts;
use netsum_core::{Controller, PortInfo};
use netsum_lab::recorder::{RecordedState, Recorder};
use tokio::net::UnixListener;
use tokio::runtime::Builder;
use tokio::sync::oneshot;

use super::ranks::mac;

/// A box. Dropping it ends it and its connections.
pub struct FakeBox {
    pub name: String,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl FakeBox {
    /// Starts a box with a port for each of these hosts, and ports `link0`, `link1`, ... for links.
    /// Its socket is `NAME.sock`.
    pub fn start(folder: &Path, name: &str, hosts: Vec<usize>, links: usize) -> Result<Self> {
        let mut controller = Controller::new(1 << 40, 64, Duration::from_secs(10));
        let names = hosts
            .iter()
            .map(|host| format!("host{host}"))
            .chain((0..links).map(|n| format!("link{n}")));
        let port = |(ifindex, name)| PortInfo { name, ifindex, mtu: 1500, router: None };
        controller.set_ports((1..).zip(names).map(port).collect());
        let timeouts =
            RingTimeouts { hold: Duration::from_secs(10), stall: Duration::from_secs(10) };
        let recorded = RecordedState { idle: true, ..RecordedState::default() };
        let agent = Agent::new(Box::new(Recorder(Arc::new(Mutex::new(recorded)))), timeouts);
        let shared = Shared::new(controller, agent, Duration::from_secs(1));
        let find = move |wanted| {
            let place = hosts.iter().position(|&host| mac(host) == wanted)?;
            Some(place as u32 + 1)
        };
        let admin = socket::listen(&folder.join(format!("{name}.sock")), &Access::default())?;
        let (end, ended) = oneshot::channel();
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let run = move || {
            runtime.block_on(async {
                let Ok(admin) = UnixListener::from_std(admin) else { return };
                tokio::select! {
                    _ = ended => {}
                    _ = serve(shared, Network::Fixed(Arc::new(find)), admin, None) => {}
                }
            });
        };
        let thread =
            std::thread::Builder::new().name(name.to_owned()).spawn(run).context("a thread")?;
        Ok(Self { name: name.to_owned(), end: Some(end), thread: Some(thread) })
    }
}

impl Drop for FakeBox {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
