//! `netsum spread show`.

use std::io::Write;

use netsum_api::v1 as api;

use super::failure::Result;
use super::format::Format;
use super::layout::{Entry, attribute, plain};
use super::print::{name, up};

pub fn show(out: &mut impl Write, format: Format, spread: api::Spread) -> Result<()> {
    format.show(out, &spread, &spread.uplinks, |uplink| {
        let (flows, bytes) = (attribute("flows", uplink.flows), attribute("bytes", uplink.bytes));
        let mut entry = Entry::new(vec![name(&uplink.name), up(uplink.up), flows, bytes]);
        for flow in spread.flows.iter().filter(|flow| flow.uplink == uplink.name) {
            let line = format!("{} port {} > {}", flow.src, flow.src_port, flow.dst);
            let who = plain(if flow.pinned { "pinned" } else { "chosen" });
            entry.attributes(0, vec![plain(line), who, attribute("bytes", flow.bytes)]);
        }
        entry
    })
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
