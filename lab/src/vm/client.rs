//! Sends requests to the agent in a VM: to run a program, or to write a file.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::socket::{setsockopt, sockopt};

use super::protocol::{AgentReply, Kind, PORT, Request, receive, send, send_value, value};

/// Bytes in a frame.
const CHUNK: usize = 64 << 10;
/// After this many seconds of silence, the kernel probes whether the agent's machine is alive.
const KEEPALIVE_IDLE: u32 = 10;

/// How a program in a VM has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It exited with this code.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
}

/// Connects to the agent of the VM with this address, from the namespace of the calling thread.
pub fn connect(ip: IpAddr, timeout: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&SocketAddr::new(ip, PORT), timeout)?;
    stream.set_nodelay(true)?;
    // A machine that has rebooted does not know the connection, and resets it when it is probed.
    setsockopt(&stream, sockopt::KeepAlive, &true)?;
    setsockopt(&stream, sockopt::TcpKeepIdle, &KEEPALIVE_IDLE)?;
    Ok(stream)
}

/// Runs a program with this process's input and outputs. Signals that this process blocks are
/// forwarded to the program.
pub fn run(
    agent: TcpStream,
    command: Vec<String>,
    env: Vec<(String, String)>,
    signals: SigSet,
) -> Result<Exit> {
    send_value(&agent, Kind::Request, &Request::Run { command, env })?;
    let to_agent = Arc::new(Mutex::new(agent.try_clone()?));
    let input = to_agent.clone();
    // Both threads end with the process.
    std::thread::spawn(move || {
        let mut buffer = vec![0; CHUNK];
        loop {
            let len = io::stdin().read(&mut buffer).unwrap_or(0);
            let to = input.lock().expect("not poisoned");
            if send(&*to, Kind::Input, &buffer[..len]).is_err() || len == 0 {
                return;
            }
        }
    });
    std::thread::spawn(move || {
        while let Ok(signal) = signals.wait() {
            let to = to_agent.lock().expect("not poisoned");
            if send(&*to, Kind::Signal, &(signal as i32).to_be_bytes()).is_err() {
                return;
            }
        }
    });
    let mut from = io::BufReader::new(agent);
    loop {
        match receive(&mut from).context("the VM's agent has gone")? {
            (Kind::Output, bytes) => {
                io::stdout().write_all(&bytes).and_then(|()| io::stdout().flush())?
            }
            (Kind::Errors, bytes) => io::stderr().write_all(&bytes)?,
            (Kind::Reply, bytes) => match value(&bytes)? {
                AgentReply::Exited(code) => return Ok(Exit::Code(code)),
                AgentReply::Killed(signal) => return Ok(Exit::Signal(signal)),
                AgentReply::Failed(why) => bail!("{why}"),
                other => bail!("the VM's agent answers {other:?}"),
            },
            (kind, _) => bail!("the VM's agent sends {kind:?}"),
        }
    }
}

/// Copies a file into the VM, unless it is there already.
pub fn put(agent: &TcpStream, from: &Path, to: &str) -> Result<()> {
    let mut file = File::open(from).with_context(|| from.display().to_string())?;
    let metadata = file.metadata()?;
    let version = format!("{} {} {}", metadata.len(), metadata.mtime(), metadata.mtime_nsec());
    let request = Request::Put { path: to.to_owned(), mode: metadata.mode() & 0o777, version };
    send_value(agent, Kind::Request, &request)?;
    match answer(agent)? {
        AgentReply::Have => return Ok(()),
        AgentReply::Send => {}
        other => bail!("cannot write {to} in the VM: {other:?}"),
    }
    let mut buffer = vec![0; CHUNK];
    loop {
        let len = file.read(&mut buffer)?;
        send(agent, Kind::Input, &buffer[..len])?;
        if len == 0 {
            break;
        }
    }
    match answer(agent)? {
        AgentReply::Written => Ok(()),
        other => bail!("cannot write {to} in the VM: {other:?}"),
    }
}

fn answer(agent: &TcpStream) -> Result<AgentReply> {
    match receive(agent).context("the VM's agent has gone")? {
        (Kind::Reply, bytes) => Ok(value(&bytes)?),
        (kind, _) => bail!("the VM's agent sends {kind:?}"),
    }
}

/// Signals that are forwarded to a program in a VM instead of its stand-in here.
pub fn passed_on() -> SigSet {
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGUSR1, Signal::SIGUSR2]
        .into_iter()
        .collect()
}
