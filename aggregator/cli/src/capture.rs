//! Frames in files that other tools read and write: pcapng, with comments from netsum, and pcap.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;
use std::time::Duration;

use netsum_api::v1 as api;
use netsum_common::abi::MAX_CAPTURE;
use pcap_file::pcap::PcapReader;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::pcapng::{Block, PcapNgReader, PcapNgWriter};
use pcap_file::{DataLink, PcapError};

use super::failure::{Failure, Kind, Result};

/// `if_tsresol`: timestamps are nanoseconds.
const NANOSECONDS: u8 = 9;
/// `epb_flags`: the packet's direction, inbound or outbound.
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;

/// Writes pcapng, in which each port is an interface.
pub struct Writer {
    pcapng: PcapNgWriter<Box<dyn Write>>,
    ports: Vec<String>,
}

impl Writer {
    /// Creates a file, or replaces it; `-` is standard output.
    pub fn create(path: &Path) -> Result<Self> {
        let to: Box<dyn Write> = if path == Path::new("-") {
            // The standard stream for text would remove byte sequences that look like colours.
            Box::new(io::stdout())
        } else {
            let file = File::create(path);
            Box::new(
                file.map_err(|e| Failure::new(Kind::Failed, format!("{}: {e}", path.display())))?,
            )
        };
        let mut writer = Self::new(to)?;
        writer.flush()?;
        Ok(writer)
    }

    fn new(to: Box<dyn Write>) -> Result<Self> {
        let to: Box<dyn Write> = Box::new(BufWriter::with_capacity(1 << 16, to));
        Ok(Self { pcapng: PcapNgWriter::new(to).map_err(failure)?, ports: Vec::new() })
    }

    /// Writes a packet; `lost` counts the missing ones before it.
    pub fn packet(&mut self, p: &api::TracedPacket, comment: &str, lost: u64) -> Result<()> {
        let interface_id = self.interface(&p.port)?;
        let outgoing = p.program == netsum_common::abi::programs::EGRESS;
        let mut options = vec![
            EnhancedPacketOption::Comment(Cow::Borrowed(comment)),
            EnhancedPacketOption::Flags(if outgoing { OUTBOUND } else { INBOUND }),
        ];
        if lost > 0 {
            options.push(EnhancedPacketOption::DropCount(lost));
        }
        let block = EnhancedPacketBlock {
            interface_id,
            timestamp: Duration::from_nanos(p.time_ns),
            original_len: p.len,
            data: Cow::Borrowed(&p.frame),
            options,
        };
        self.pcapng.write_pcapng_block(block).map_err(failure)?;
        Ok(())
    }

    /// Flushes everything written so far.
    pub fn flush(&mut self) -> Result<()> {
        Ok(self.pcapng.get_mut().flush()?)
    }

    fn interface(&mut self, port: &str) -> Result<u32> {
        if let Some(known) = self.ports.iter().position(|p| p == port) {
            return Ok(known as u32);
        }
        let block = InterfaceDescriptionBlock {
            linktype: DataLink::ETHERNET,
            snaplen: MAX_CAPTURE as u32,
            options: vec![
                InterfaceDescriptionOption::IfName(Cow::Owned(port.to_owned())),
                InterfaceDescriptionOption::IfTsResol(NANOSECONDS),
            ],
        };
        self.pcapng.write_pcapng_block(block).map_err(failure)?;
        self.ports.push(port.to_owned());
        Ok(self.ports.len() as u32 - 1)
    }
}

/// A frame of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Captured {
    /// Its bytes.
    pub frame: Vec<u8>,
    /// Its length on the wire, which may be more.
    pub len: usize,
    /// Name of the interface that captured it, if the file has it.
    pub interface: Option<String>,
    /// It left by that interface, if the file says so.
    pub outbound: bool,
}

/// Reads a file in either format; `-` is standard input.
///
/// # Errors
/// If it is neither, is cut off, or has other frames than Ethernet; the message names the packet.
pub fn read(path: &Path) -> Result<Vec<Captured>> {
    let named = |f: Failure| Failure::new(f.kind, format!("{}: {}", path.display(), f.message));
    let input: Box<dyn Read> = if path == Path::new("-") {
        Box::new(io::stdin())
    } else {
        Box::new(File::open(path).map_err(Failure::from).map_err(named)?)
    };
    read_from(BufReader::new(input)).map_err(named)
}

/// The first bytes of every pcapng file, in either byte order.
const SECTION_HEADER: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];

fn read_from(mut input: impl Read) -> Result<Vec<Captured>> {
    let mut magic = [0; 4];
    let short = |_| Failure::new(Kind::Failed, "neither pcap nor pcapng: it is too short");
    input.read_exact(&mut magic).map_err(short)?;
    let input = magic.chain(input);
    if magic == SECTION_HEADER { read_pcapng(input) } else { read_pcap(input) }
}

fn read_pcap(input: impl Read) -> Result<Vec<Captured>> {
    let neither = |_| Failure::new(Kind::Failed, "neither pcap nor pcapng");
    let mut reader = PcapReader::new(input).map_err(neither)?;
    ethernet(reader.header().datalink)?;
    let mut packets = Vec::new();
    while let Some(packet) = reader.next_packet() {
        let packet = packet.map_err(|e| broken(packets.len(), e))?;
        packets.push(Captured {
            len: packet.orig_len as usize,
            frame: packet.data.into_owned(),
            interface: None,
            outbound: false,
        });
    }
    Ok(packets)
}

fn read_pcapng(input: impl Read) -> Result<Vec<Captured>> {
    let mut reader = PcapNgReader::new(input).map_err(|e| broken(0, e))?;
    let mut packets: Vec<Captured> = Vec::new();
    // Interfaces of the current section: link type and name.
    let mut interfaces: Vec<(DataLink, Option<String>)> = Vec::new();
    while let Some(block) = reader.next_block() {
        let number = packets.len();
        let (id, frame, len, outbound) = match block.map_err(|e| broken(number, e))? {
            Block::SectionHeader(_) => {
                interfaces.clear();
                continue;
            }
            Block::InterfaceDescription(i) => {
                let name = i.options.iter().find_map(|o| match o {
                    InterfaceDescriptionOption::IfName(name) => Some(name.to_string()),
                    _ => None,
                });
                interfaces.push((i.linktype, name));
                continue;
            }
            Block::EnhancedPacket(p) => {
                let outbound = |o: &EnhancedPacketOption<'_>| matches!(o, EnhancedPacketOption::Flags(f) if f & 3 == OUTBOUND);
                let outbound = p.options.iter().any(outbound);
                (p.interface_id, p.data.into_owned(), p.original_len, outbound)
            }
            Block::SimplePacket(p) => (0, p.data.into_owned(), p.original_len, false),
            _ => continue,
        };
        let Some((link, interface)) = interfaces.get(id as usize).cloned() else {
            return Err(broken(number, PcapError::InvalidInterfaceId(id)));
        };
        ethernet(link)?;
        packets.push(Captured { frame, len: len as usize, interface, outbound });
    }
    Ok(packets)
}

fn ethernet(link: DataLink) -> Result<()> {
    if link == DataLink::ETHERNET {
        return Ok(());
    }
    let message = format!(
        "link type {link:?}: Ethernet frames are needed, captured on a port or a host's interface"
    );
    Err(Failure::new(Kind::Failed, message))
}

fn broken(packets: usize, error: PcapError) -> Failure {
    Failure::new(Kind::Failed, format!("broken behind packet {packets}: {error}"))
}

fn failure(error: PcapError) -> Failure {
    match error {
        PcapError::IoError(e) => e.into(),
        other => anyhow::Error::from(other).into(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn packet(port: &str, program: &str, frame: &[u8]) -> api::TracedPacket {
        api::TracedPacket {
            time_ns: 1_700_000_000_123_456_789,
            port: port.into(),
            program: program.into(),
            frame: frame.to_vec(),
            len: 1086,
            ..Default::default()
        }
    }

    #[test]
    fn captures_are_read_back_with_comments_interfaces_and_time() {
        let bytes = Shared::default();
        let mut writer = Writer::new(Box::new(bytes.clone())).unwrap();
        writer.packet(&packet("port0", "aggregate", &[1, 2, 3, 4, 5]), "contributions", 0).unwrap();
        writer.packet(&packet("port1", "egress", &[6, 7]), "results", 3).unwrap();
        writer.packet(&packet("port0", "ingress", &[8; 60]), "not_roce", 0).unwrap();
        writer.flush().unwrap();
        let bytes = bytes.0.lock().unwrap().clone();
        let read = read_from(&bytes[..]).unwrap();
        let of = |i: usize| (read[i].interface.as_deref(), &read[i].frame[..], read[i].len);
        assert_eq!(of(0), (Some("port0"), &[1, 2, 3, 4, 5][..], 1086));
        assert_eq!(of(1), (Some("port1"), &[6, 7][..], 1086));
        assert_eq!(of(2), (Some("port0"), &[8; 60][..], 1086));
        assert_eq!(read.iter().map(|c| c.outbound).collect::<Vec<_>>(), [false, true, false]);
        let mut reader = PcapNgReader::new(&bytes[..]).unwrap();
        let mut second = None;
        while let Some(block) = reader.next_block() {
            if let Block::EnhancedPacket(p) = block.unwrap().into_owned()
                && p.interface_id == 1
            {
                second = Some(p);
            }
        }
        let second = second.unwrap();
        assert_eq!(second.timestamp, Duration::from_nanos(1_700_000_000_123_456_789));
        assert_eq!(
            second.options,
            [
                EnhancedPacketOption::Comment("results".into()),
                EnhancedPacketOption::Flags(OUTBOUND),
                EnhancedPacketOption::DropCount(3)
            ]
        );
    }

    #[test]
    fn files_that_are_not_captures_are_refused_with_the_reason() {
        let message = |bytes: &[u8]| read_from(bytes).unwrap_err().message;
        assert!(message(b"ab").contains("too short"));
        assert!(
            message(b"#!/bin/sh and so on, long enough for any header")
                .contains("neither pcap nor pcapng")
        );
        // A pcap file of another link type: 113, Linux cooked.
        let mut header = [0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0].to_vec();
        header.extend([0; 8]);
        header.extend([0xff, 0xff, 0, 0, 113, 0, 0, 0]);
        assert!(message(&header).contains("Ethernet frames are needed"), "{}", message(&header));
        // And one that breaks off within its first packet.
        header[20] = 1;
        assert_eq!(read_from(&header[..]).unwrap(), []);
        header.extend([0, 0, 0, 0, 0, 0, 0, 0, 60, 0, 0, 0, 60, 0, 0, 0, 1, 2, 3]);
        assert!(message(&header).contains("broken behind packet 0"), "{}", message(&header));
    }
}
