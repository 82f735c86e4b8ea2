//! `netsum fabric show` and `fabric probe`.

use std::io::Write;

use netsum_api::v1 as api;
use netsum_core::rate::Rate;
use schemars::JsonSchema;
use serde::Serialize;

use super::failure::Result;
use super::format::Format;
use super::layout::{self, Entry, FAIR, attribute, plain, styled};
use super::print::name;
use super::print::speed;

/// A port of a box, and the other end of its link, as they see each other by LLDP.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Probe {
    #[serde(flatten)]
    port: api::FabricPort,
    /// The largest path MTU that fits both ends.
    path_mtu: u32,
}

impl From<api::FabricPort> for Probe {
    fn from(port: api::FabricPort) -> Self {
        let least =
            if port.neighbour_mtu == 0 { port.mtu } else { port.mtu.min(port.neighbour_mtu) };
        Self { path_mtu: netsum_core::largest_mtu(least), port }
    }
}

/// Links, with nominal and measured rates.
pub fn links(links: &[api::FabricLink]) -> impl Iterator<Item = Entry> {
    let text = |rate: u64| if rate == 0 { "?".to_owned() } else { Rate(rate).to_string() };
    links.iter().map(move |l| {
        let state = if l.up { plain("up") } else { styled("down", FAIR) };
        let mut entry = Entry::new(vec![name(&l.below), plain(format!("to {}", l.above)), state]);
        let mut facts =
            vec![attribute("rate", text(l.rate)), attribute("nominal", text(l.nominal))];
        facts.extend((l.measured > 0).then(|| attribute("measured", text(l.measured))));
        facts.extend(l.unmeasured.as_ref().map(|why| plain(format!("not measured: {why}"))));
        facts.extend(l.problem.as_ref().map(|problem| styled(problem.clone(), FAIR)));
        entry.attributes(0, facts);
        entry
    })
}

pub fn show(out: &mut impl Write, format: Format, fabric: api::Fabric) -> Result<()> {
    if format.json(out, &fabric)? {
        return Ok(());
    }
    let state = |good: bool, [yes, no]: [&str; 2]| if good { plain(yes) } else { styled(no, FAIR) };
    let node = |b: &api::FabricBox| {
        let mut entry = Entry::new(vec![name(&b.name), state(b.answers, ["answers", "silent"])]);
        let mut facts = vec![plain(b.address.clone())];
        facts.extend(
            b.aggregation_rate.map(|rate| attribute("aggregation rate", speed(rate as f64))),
        );
        if !b.jobs.is_empty() {
            facts.push(plain(format!("jobs {}", b.jobs.join(", "))));
        }
        if let Some(reason) = &b.drain {
            facts.push(styled(
                format!("{}: {reason}", if b.drained { "drained" } else { "draining" }),
                FAIR,
            ));
        }
        entry.attributes(0, facts);
        entry
    };
    let entries: Vec<_> = fabric.boxes.iter().map(node).chain(links(&fabric.links)).collect();
    Ok(layout::print(out, &entries)?)
}

/// Ports, and links if they were measured.
pub fn probe(
    out: &mut impl Write,
    format: Format,
    fabric: api::Fabric,
    measured: bool,
) -> Result<()> {
    let links_found = if measured { &fabric.links[..] } else { &[] };
    let ports: Vec<Probe> = fabric.ports.into_iter().map(Probe::from).collect();
    if format.json(out, &ports)? {
        return Ok(());
    }
    let entry = |Probe { port: p, path_mtu }: &Probe| {
        let state = match (p.foreign, p.sees_neighbour, p.seen_by_neighbour) {
            (true, ..) => plain("not a box of the fabric"),
            (_, true, true) => plain("both ways"),
            (_, true, false) => styled("one way: the other end receives no LLDP", FAIR),
            (_, false, true) => styled("one way: this end receives no LLDP", FAIR),
            (_, false, false) => plain(if p.up { "no neighbour" } else { "down" }),
        };
        let to = if p.neighbour.is_empty() {
            Vec::new()
        } else {
            vec![plain(format!("to {}", p.neighbour))]
        };
        let mut entry = Entry::new([vec![name(&p.port)], to, vec![state]].concat());
        let mut facts = vec![plain(format!("MTU {}", p.mtu))];
        if p.neighbour_mtu > 0 && p.neighbour_mtu != p.mtu {
            facts = vec![styled(format!("MTU {}, and {} there", p.mtu, p.neighbour_mtu), FAIR)];
        }
        facts.push(plain(format!("path MTU {path_mtu}")));
        facts.extend((p.rate > 0).then(|| plain(Rate(p.rate).to_string())));
        entry.attributes(0, facts);
        entry
    };
    Ok(layout::print(out, &ports.iter().map(entry).chain(links(links_found)).collect::<Vec<_>>())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fabric_as_text() {
        let node = |name: &str, answers, jobs: &[&str], drain: Option<&str>| api::FabricBox {
            name: name.into(),
            address: "https://10.0.0.1:4793".into(),
            answers,
            jobs: jobs.iter().map(|&j| j.into()).collect(),
            drain: drain.map(str::to_owned),
            drained: jobs.is_empty(),
            hosts: Vec::new(),
            aggregation_rate: answers.then_some(2_900_000_000),
            cpus: answers.then_some(2),
        };
        let link = |below: &str, up, problem: Option<&str>| api::FabricLink {
            below: below.into(),
            above: "spine0/swp1".into(),
            up,
            problem: problem.map(str::to_owned),
            rate: 2_500_000_000,
            nominal: 10_000_000_000,
            measured: if up { 2_500_000_000 } else { 0 },
            unmeasured: (!up).then(|| "a job has its rings at swp9".to_owned()),
        };
        let fabric = api::Fabric {
            boxes: vec![
                node("leaf0", true, &["train", "other"], Some("new fan")),
                node("spine0", false, &[], None),
                node("spine1", true, &[], Some("new kernel")),
            ],
            links: vec![
                link("leaf0/swp9", true, None),
                link("leaf1/swp9", false, Some("spine0/swp1 receives no LLDP from leaf1/swp9")),
            ],
            ..api::Fabric::default()
        };
        let measured =
            |link: &api::FabricLink| serde_json::to_value(link).unwrap()["measured"].take();
        assert_eq!(
            fabric.links.iter().map(measured).collect::<Vec<_>>()[..],
            [2_500_000_000u64.into(), serde_json::Value::Null]
        );
        let mut out = anstream::StripStream::new(Vec::new());
        show(&mut out, Format::Text, fabric).unwrap();
        insta::assert_snapshot!(String::from_utf8(out.into_inner()).unwrap());
    }

    #[test]
    fn ports_as_text() {
        let port = |port: &str,
                    neighbour: &str,
                    [foreign, sees_neighbour, seen_by_neighbour]: [bool; 3],
                    neighbour_mtu| {
            let (port, neighbour) = (port.into(), neighbour.into());
            let (up, rate, mtu) = (true, 10_000_000_000, 9000);
            api::FabricPort {
                port,
                up,
                rate,
                mtu,
                neighbour,
                foreign,
                sees_neighbour,
                seen_by_neighbour,
                neighbour_mtu,
                rx_rate: 0,
                tx_rate: 0,
            }
        };
        let ports = vec![
            port("leaf0/swp1", "", [false; 3], 0),
            port("leaf0/swp8", "core Ethernet1 (02:00:00:00:00:07)", [true, true, false], 0),
            port("leaf0/swp9", "spine0/swp1", [false, true, true], 1500),
            port("leaf1/swp9", "spine0/swp2", [false, true, false], 9000),
            port("spine0/swp2", "leaf1/swp9", [false, false, true], 9000),
        ];
        let mut out = anstream::StripStream::new(Vec::new());
        probe(&mut out, Format::Text, api::Fabric { ports, ..api::Fabric::default() }, false)
            .unwrap();
        insta::assert_snapshot!(String::from_utf8(out.into_inner()).unwrap());
    }
}
