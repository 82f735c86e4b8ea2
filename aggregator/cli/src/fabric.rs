//! `netsum fabric show`.

use std::io::Write;

use netsum_api::v1 as api;
use schemars::JsonSchema;
use serde::Serialize;

use super::failure::Result;
use super::format::Format;
use super::layout::{self, Entry, FAIR, plain, styled};
use super::print::name;

/// A fabric, as its manager knows it.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Fabric {
    pub boxes: Vec<Node>,
    /// Cables between boxes.
    pub links: Vec<Link>,
}

/// A box.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Node {
    pub name: String,
    /// How the manager calls it.
    pub address: String,
    /// It answers the manager.
    pub answers: bool,
    /// Jobs that it sums, as far as the manager has heard last.
    pub jobs: Vec<String>,
    /// Why it gets no new rings; null where it does.
    pub drain: Option<String>,
    /// It gets none, and has none any more.
    pub drained: bool,
}

/// A cable.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Link {
    /// Its lower end: BOX/PORT.
    pub below: String,
    /// Its upper end.
    pub above: String,
    /// Both ends carry something.
    pub up: bool,
}

impl From<api::Fabric> for Fabric {
    fn from(f: api::Fabric) -> Self {
        let node = |b: api::FabricBox| Node {
            name: b.name,
            address: b.address,
            answers: b.answers,
            jobs: b.jobs,
            drain: b.drain,
            drained: b.drained,
        };
        let link = |l: api::FabricLink| Link { below: l.below, above: l.above, up: l.up };
        Self {
            boxes: f.boxes.into_iter().map(node).collect(),
            links: f.links.into_iter().map(link).collect(),
        }
    }
}

pub fn show(out: &mut impl Write, format: Format, fabric: api::Fabric) -> Result<()> {
    let fabric = Fabric::from(fabric);
    if format.json(out, &fabric)? {
        return Ok(());
    }
    let state = |good: bool, [yes, no]: [&str; 2]| if good { plain(yes) } else { styled(no, FAIR) };
    let node = |b: &Node| {
        let mut entry = Entry::new(vec![name(&b.name), state(b.answers, ["answers", "silent"])]);
        let mut facts = vec![plain(b.address.clone())];
        if !b.jobs.is_empty() {
            facts.push(plain(format!("jobs {}", b.jobs.join(", "))));
        }
        if let Some(reason) = &b.drain {
            facts.push(styled(format!("{}: {reason}", if b.drained { "drained" } else { "draining" }), FAIR));
        }
        entry.attributes(0, facts);
        entry
    };
    let link = |l: &Link| {
        Entry::new(vec![name(&l.below), plain(format!("to {}", l.above)), state(l.up, ["up", "down"])])
    };
    let entries: Vec<_> = fabric.boxes.iter().map(node).chain(fabric.links.iter().map(link)).collect();
    Ok(layout::print(out, &entries)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fabric_as_text() {
        let node = |name: &str, answers, jobs: &[&str], drain: Option<&str>| api::FabricBox {
            name: name.into(),
            address: "https://10.0.0.1:4792".into(),
            answers,
            jobs: jobs.iter().map(|&j| j.into()).collect(),
            drain: drain.map(str::to_owned),
            drained: jobs.is_empty(),
            hosts: Vec::new(),
        };
        let link = |below: &str, up| api::FabricLink { below: below.into(), above: "spine0/swp1".into(), up };
        let fabric = api::Fabric {
            boxes: vec![
                node("leaf0", true, &["train", "other"], Some("new fan")),
                node("spine0", false, &[], None),
                node("spine1", true, &[], Some("new kernel")),
            ],
            links: vec![link("leaf0/swp9", true), link("leaf1/swp9", false)],
        };
        let mut out = anstream::StripStream::new(Vec::new());
        show(&mut out, Format::Text, fabric).unwrap();
        insta::assert_snapshot!(String::from_utf8(out.into_inner()).unwrap());
    }
}
