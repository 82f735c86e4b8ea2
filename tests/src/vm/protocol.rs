//! What the lab and the agent in a VM say to each other: one TCP connection for each request.
//!
//! Frames: one byte for the kind, four for the length (big endian), then as many bytes.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// TCP port of the agent.
pub const PORT: u16 = 4788;

pub const MAX_FRAME: usize = 1 << 20;

/// What the lab wants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Runs a program. [`Kind::Input`] and [`Kind::Signal`] follow as they come; if the connection
    /// ends before the program, it is killed.
    Run {
        /// Program and arguments.
        command: Vec<String>,
        /// Environment variables besides the agent's own.
        env: Vec<(String, String)>,
    },
    /// Writes a file, whose bytes follow as [`Kind::Input`], unless [`Answer::Have`] says that it
    /// is there already.
    Put {
        path: String,
        mode: u32,
        /// Tells versions of the file apart.
        version: String,
    },
}

/// What the agent answers, as the last frame; before [`Kind::Input`] in case of [`Request::Put`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The program has ended with this code.
    Exited(i32),
    /// The program was ended by this signal.
    Killed(i32),
    /// The request could not be carried out.
    Failed(String),
    /// This version of the file is there already.
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
    /// Bytes for the program's input or for a file; none means that there are no more.
    Input = 2,
    /// A signal for the program: its number, big endian.
    Signal = 3,
    /// What the program has printed.
    Output = 4,
    /// What the program has printed to standard error.
    Errors = 5,
    Answer = 6,
}

impl Kind {
    const ALL: [Self; 6] =
        [Self::Request, Self::Input, Self::Signal, Self::Output, Self::Errors, Self::Answer];
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
/// If the other side has ended the connection, or sends no frame.
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
        send_value(&mut wire, Kind::Answer, &Answer::Exited(3)).unwrap();
        let mut from = wire.as_slice();
        assert_eq!(receive(&mut from).unwrap(), (Kind::Output, b"abc".to_vec()));
        let (kind, bytes) = receive(&mut from).unwrap();
        assert_eq!((kind, value::<Answer>(&bytes).unwrap()), (Kind::Answer, Answer::Exited(3)));
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
