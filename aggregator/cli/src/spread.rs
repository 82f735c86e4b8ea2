//! `netsum spread show`.

use std::io::Write;

use netsum_api::v1 as api;
use schemars::JsonSchema;
use serde::Serialize;

use super::failure::Result;
use super::format::Format;
use super::layout::{self, Entry, attribute, plain};
use super::print::{name, up};

/// How unsummed flows are spread over uplinks.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Spread {
    /// The uplinks.
    pub uplinks: Vec<Uplink>,
    /// The flows that use them.
    pub flows: Vec<Flow>,
}

/// An uplink.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "SpreadUplink")]
pub struct Uplink {
    /// Its name.
    pub name: String,
    /// It is up and has a carrier.
    pub up: bool,
    /// Number of flows that use it.
    pub flows: u32,
    /// Bytes of frames that these have sent.
    pub bytes: u64,
}

/// A flow that uses one uplink.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "SpreadFlow")]
pub struct Flow {
    /// Its sender's address.
    pub src: String,
    /// Its UDP source port.
    pub src_port: u32,
    /// Its receiver's address.
    pub dst: String,
    /// The uplink.
    pub uplink: String,
    /// An administrator chose the uplink; otherwise the box did.
    pub pinned: bool,
    /// Bytes of frames that it has sent.
    pub bytes: u64,
}

impl From<api::Spread> for Spread {
    fn from(spread: api::Spread) -> Self {
        let uplink = |u: api::SpreadUplink| Uplink {
            name: u.name,
            up: u.up,
            flows: u.flows,
            bytes: u.bytes,
        };
        let flow = |f: api::SpreadFlow| Flow {
            src: f.src,
            src_port: f.src_port,
            dst: f.dst,
            uplink: f.uplink,
            pinned: f.pinned,
            bytes: f.bytes,
        };
        Self {
            uplinks: spread.uplinks.into_iter().map(uplink).collect(),
            flows: spread.flows.into_iter().map(flow).collect(),
        }
    }
}

pub fn show(out: &mut impl Write, format: Format, spread: api::Spread) -> Result<()> {
    let spread = Spread::from(spread);
    if format.json(out, &spread)? {
        return Ok(());
    }
    let mut entries = Vec::new();
    for uplink in &spread.uplinks {
        let (flows, bytes) = (attribute("flows", uplink.flows), attribute("bytes", uplink.bytes));
        let mut entry = Entry::new(vec![name(&uplink.name), up(uplink.up), flows, bytes]);
        for flow in spread.flows.iter().filter(|flow| flow.uplink == uplink.name) {
            let line = format!("{} port {} > {}", flow.src, flow.src_port, flow.dst);
            let who = plain(if flow.pinned { "pinned" } else { "chosen" });
            entry.attributes(0, vec![plain(line), who, attribute("bytes", flow.bytes)]);
        }
        entries.push(entry);
    }
    layout::print(out, &entries)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_flows_as_text() {
        let flow = |src_port, pinned, bytes| api::SpreadFlow {
            src: "10.0.0.1".into(),
            src_port,
            dst: "10.0.0.3".into(),
            uplink: "swp9".into(),
            pinned,
            bytes,
        };
        let uplink = |name: &str, up, flows, bytes| api::SpreadUplink {
            name: name.into(),
            up,
            flows,
            bytes,
        };
        let spread = api::Spread {
            uplinks: vec![uplink("swp9", true, 2, 5000), uplink("swp10", false, 0, 0)],
            flows: vec![flow(49152, true, 3000), flow(49153, false, 2000)],
        };
        let mut out = anstream::StripStream::new(Vec::new());
        show(&mut out, Format::Text, spread).unwrap();
        insta::assert_snapshot!(String::from_utf8(out.into_inner()).unwrap());
    }
}
