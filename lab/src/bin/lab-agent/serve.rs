//! Runs programs and writes files for the lab. Requests run concurrently, one connection each.

use std::fs::{self, File, Permissions};
use std::io::{self, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, bail};
use netsum_lab::vm::protocol::{AgentReply, Kind, PORT, Request, receive, send, send_value, value};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::start::PATH;

/// Answers requests forever.
pub fn serve() -> Result<()> {
    // Accepts IPv4 too, or IPv4 alone on a kernel without IPv6.
    let any = [IpAddr::from(Ipv6Addr::UNSPECIFIED), Ipv4Addr::UNSPECIFIED.into()];
    let listener = TcpListener::bind(&any.map(|ip| SocketAddr::new(ip, PORT))[..])?;
    println!("lab-agent: ready");
    loop {
        // The peer may have closed the connection before it is accepted.
        let Ok((stream, _)) = listener.accept() else { continue };
        std::thread::spawn(move || {
            // A peer that has disconnected needs no answer.
            let _ = answer(&stream);
        });
    }
}

fn answer(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut from = BufReader::new(stream.try_clone()?);
    let (Kind::Request, request) = receive(&mut from)? else { bail!("no request") };
    let to: Sender = Arc::new(Mutex::new(stream.try_clone()?));
    let answer = match value(&request)? {
        Request::Run { command, env } => run(&command, env, from, &to),
        Request::Put { path, mode, version } => put(Path::new(&path), mode, &version, from, &to),
    };
    let answer = answer.unwrap_or_else(|error| AgentReply::Failed(format!("{error:#}")));
    let to = to.lock().expect("not poisoned");
    Ok(send_value(&*to, Kind::Reply, &answer)?)
}

type Sender = Arc<Mutex<TcpStream>>;

fn run(
    command: &[String],
    env: Vec<(String, String)>,
    from: BufReader<TcpStream>,
    to: &Sender,
) -> Result<AgentReply> {
    let (program, arguments) = command.split_first().context("no program")?;
    let mut child = Command::new(program)
        .args(arguments)
        .env("PATH", PATH)
        .env("HOME", "/root")
        .envs(env)
        .current_dir("/root")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    let (stdin, stdout, stderr) = (
        child.stdin.take().context("stdin")?,
        child.stdout.take().context("stdout")?,
        child.stderr.take(),
    );
    let errors = pump(stderr.context("stderr")?, Kind::Errors, to.clone());
    let output = pump(stdout, Kind::Output, to.clone());
    let group = Pid::from_raw(child.id() as i32);
    std::thread::spawn(move || listen(from, stdin, group));
    let status = wait(&mut child, [output, errors])?;
    Ok(match status.signal() {
        Some(signal) => AgentReply::Killed(signal),
        None => AgentReply::Exited(status.code().unwrap_or_default()),
    })
}

/// Waits until the program has ended and all of its output has been sent.
fn wait(
    child: &mut Child,
    pumps: [std::thread::JoinHandle<()>; 2],
) -> io::Result<std::process::ExitStatus> {
    for pump in pumps {
        let _ = pump.join();
    }
    child.wait()
}

/// Sends all output of the program.
fn pump(
    mut from: impl Read + Send + 'static,
    kind: Kind,
    to: Sender,
) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        // Reads to the end even if the peer is gone: the program is then being killed.
        while let Ok(len @ 1..) = from.read(&mut buffer) {
            let to = to.lock().expect("not poisoned");
            let _ = send(&*to, kind, &buffer[..len]);
        }
    })
}

/// Forwards input and signals until the lab disconnects or the program's answer ends the
/// connection.
fn listen(mut from: BufReader<TcpStream>, stdin: ChildStdin, group: Pid) {
    let (input, lines) = channel();
    // A program that does not read its input must still get signals.
    std::thread::spawn(move || feed(stdin, &lines));
    let mut input = Some(input);
    loop {
        match receive(&mut from) {
            Ok((Kind::Input, bytes)) if bytes.is_empty() => input = None,
            Ok((Kind::Input, bytes)) => {
                let _ = input.as_ref().map(|input| input.send(bytes));
            }
            Ok((Kind::Signal, bytes)) => {
                let number = bytes.try_into().map(i32::from_be_bytes).unwrap_or_default();
                let _ = Signal::try_from(number).map(|signal| killpg(group, signal));
            }
            Ok(_) => {}
            Err(_) => {
                let _ = killpg(group, Signal::SIGKILL);
                return;
            }
        }
    }
}

fn feed(mut stdin: ChildStdin, lines: &Receiver<Vec<u8>>) {
    // Closes the program's input after the last line.
    while let Ok(bytes) = lines.recv() {
        if stdin.write_all(&bytes).is_err() {
            return;
        }
    }
}

fn put(
    path: &Path,
    mode: u32,
    version: &str,
    mut from: BufReader<TcpStream>,
    to: &Sender,
) -> Result<AgentReply> {
    // The note is beside the program: a program may be started twice but copied once.
    let note =
        path.with_file_name(format!(".{}.version", path.file_name().context("no name")?.display()));
    if path.exists() && fs::read_to_string(&note).is_ok_and(|known| known == version) {
        return Ok(AgentReply::Have);
    }
    fs::create_dir_all(path.parent().context("no folder")?)?;
    send_value(&*to.lock().expect("not poisoned"), Kind::Reply, &AgentReply::Send)?;
    // Two requests may copy the file at once.
    static COPIES: AtomicU32 = AtomicU32::new(0);
    let new = note.with_extension(COPIES.fetch_add(1, Ordering::Relaxed).to_string());
    let mut file = File::create(&new)?;
    loop {
        match receive(&mut from)? {
            (Kind::Input, bytes) if bytes.is_empty() => break,
            (Kind::Input, bytes) => file.write_all(&bytes)?,
            (kind, _) => bail!("{kind:?} in place of the file"),
        }
    }
    file.set_permissions(Permissions::from_mode(mode))?;
    drop(file);
    // The old file may be running.
    fs::rename(&new, path)?;
    fs::write(&note, version)?;
    Ok(AgentReply::Written)
}
