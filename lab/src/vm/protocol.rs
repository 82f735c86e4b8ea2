//! The protocol between the lab and the agent in a VM: one TCP connection for each request.
//!
//! A frame has one byte for the kind, four for the length (big endian), and as many bytes of data.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// TCP port of the agent.
pub const PORT: u16 = 4788;

pub const MAX_FRAME: usize = 1 << 20;

/// Requests of the lab.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Runs a program. [`Kind::Input`] and [`Kind::Signal`] follow as they arrive; if the
    /// connection ends before the program, it is killed.
    Run {
        /// Program and arguments.
        command: Vec<String>,
        /// Environment variables besides the agent's own.
        env: Vec<(String, String)>,
    },
    /// Writes a file, whose bytes follow as [`Kind::Input`], unless the agent answers
    /// [`AgentReply::Have`].
    Put {
        path: String,
        mode: u32,
        /// Distinguishes versions of the file.
        version: String,
    },
}

/// The agent's answer, in the last frame; for [`Request::Put`], also before [`Kind::Input`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentReply {
    /// The program has ended with this code.
    Exited(i32),
    /// This signal killed the program.
    Killed(i32),
    /// The request could not be carried out.
    Failed(String),
    /// The VM already has this version of the file.
    Have,
    /// Send the file.
    Send,
    /// The file has been written.
    Written,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    Request = 1,
    /// Bytes for the program's input or for a file; an empty frame ends them.
    Input = 2,
    /// A signal for the program: its number, big endian.
    Signal = 3,
    /// Bytes of the program's standard output.
    Output = 4,
    /// Bytes of the program's standard error.
    Errors = 5,
    Reply = 6,
}

impl Kind {
    const ALL: [Self; 6] =
        [Self::Request, Self::Input, Self::Signal, Self::Output, Self::Errors, Self::Reply];
}

/// Writes a frame in one piece.
pub fn send(mut to: impl Write, kind: Kind, bytes: &[u8]) -> io::Result<()> {
    let mut frame = Vec::with_capacity(5 + bytes.len());
    frame.push(kind as u8);
    frame.extend((bytes.len() as u32).to_be_bytes());
    frame.extend(bytes);
    to.write_all(&frame)
}

pub fn send_value(to: impl Write, kind: Kind, value: &impl Serialize) -> io::Result<()> {
    send(to, kind, &serde_json::to_vec(value)?)
}

/// Reads a frame.
///
/// # Errors
/// If the other side has closed the connection, or sends an invalid frame.
pub fn receive(mut from: impl Read) -> io::Result<(Kind, Vec<u8>)> {
    let mut header = [0; 5];
    from.read_exact(&mut header)?;
    let [kind, len @ ..] = header;
    let len = u32::from_be_bytes(len) as usize;
    let kind = Kind::ALL.into_iter().find(|k| *k as u8 == kind);
    let Some(kind) = kind.filter(|_| len <= MAX_FRAME) else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "no frame of the lab's agent"));
    };
    let mut bytes = vec![0; len];
    from.read_exact(&mut bytes)?;
    Ok((kind, bytes))
}

/// Reads the value in a frame.
pub fn value<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    serde_json::from_slice(bytes).map_err(io::Error::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_and_others_are_refused() {
        let mut wire = Vec::new();
        send(&mut wire, Kind::Output, b"abc").unwrap();
        send_value(&mut wire, Kind::Reply, &AgentReply::Exited(3)).unwrap();
        let mut from = wire.as_slice();
        assert_eq!(receive(&mut from).unwrap(), (Kind::Output, b"abc".to_vec()));
        let (kind, bytes) = receive(&mut from).unwrap();
        assert_eq!(
            (kind, value::<AgentReply>(&bytes).unwrap()),
            (Kind::Reply, AgentReply::Exited(3))
        );
        assert_eq!(receive(&mut from).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        for bad in [&[9, 0, 0, 0, 0][..], &[1, 0xff, 0, 0, 0], &[0; 5]] {
            assert_eq!(receive(bad).unwrap_err().kind(), io::ErrorKind::InvalidData, "{bad:?}");
        }
        assert_eq!(
            receive(&[4, 0, 0, 0, 2, 7][..]).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }
}
