//! The configuration file of `netsum fabric run`.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use netsum_core::rate::Rate;
use serde::Deserialize;

/// A checked configuration.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// Address at which ranks join.
    #[serde(default = "default_workers")]
    pub workers: SocketAddr,
    /// TLS for them; plain text without it.
    pub workers_tls: Option<netsum_controller::tls::Tls>,
    /// Socket for administration.
    #[serde(default = "default_admin")]
    pub admin: PathBuf,
    /// File with the state that survives a killed manager.
    #[serde(default = "default_state")]
    pub state: PathBuf,
    /// Replaces the file if several managers share the state, one of which leads.
    pub etcd: Option<Etcd>,
    /// TLS between manager and boxes; needed for boxes that are called over TCP.
    pub tls: Option<Tls>,
    #[serde(rename = "box")]
    pub boxes: Vec<BoxConfig>,
    #[serde(default, rename = "link")]
    pub links: Vec<Link>,
    /// Ends of links: one that is found is used where either end is among them.
    #[serde(default)]
    pub uplinks: Vec<Pattern>,
    #[serde(default, rename = "link-trust")]
    pub link_trust: LinkTrust,
}

/// Whether found links are used that the file does not list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkTrust {
    /// Links are used once one end is named, or an administrator has accepted them.
    #[default]
    Named,
    /// All links are used. A host with ports at two boxes can forge one.
    Found,
}

/// `BOX/PORT`, with `*` for any characters.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Pattern(End);

impl TryFrom<String> for Pattern {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        End::try_from(text).map(Self)
    }
}

impl Pattern {
    pub fn is(&self, end: &End) -> bool {
        is_like(&self.0.of, &end.of) && is_like(&self.0.port, &end.port)
    }
}

fn is_like(pattern: &str, text: &str) -> bool {
    let Some((begin, rest)) = pattern.split_once('*') else { return pattern == text };
    text.strip_prefix(begin).is_some_and(|text| {
        text.char_indices()
            .map(|(at, _)| at)
            .chain([text.len()])
            .any(|at| is_like(rest, &text[at..]))
    })
}

/// Files for TLS, in PEM form.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// The manager's certificate.
    pub cert: PathBuf,
    pub key: PathBuf,
    /// Authority of the boxes' certificates.
    pub ca: PathBuf,
}

/// Settings of the manager's leader election.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Etcd {
    /// `http://ADDRESS:PORT` each, or `https://` with TLS.
    pub endpoints: Vec<String>,
    pub tls: Option<Tls>,
    /// Prefix of its keys.
    #[serde(default = "default_prefix")]
    pub prefix: String,
    /// Seconds of a leader's silence after which another one may lead.
    #[serde(default = "default_lease")]
    pub lease_s: u32,
}

fn default_prefix() -> String {
    "/netsum".into()
}

fn default_lease() -> u32 {
    5
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BoxConfig {
    pub name: String,
    /// `https://ADDRESS:PORT` of its `listen.fabric`, or `unix:PATH` of its administration socket.
    pub address: String,
    /// Links are discovered between boxes of different levels; the box of the lower level is below.
    #[serde(default)]
    pub level: u32,
}

/// A link between a box and one above it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// `BOX/PORT` of the lower end.
    pub below: End,
    pub above: End,
    /// Overrides the rate that the ports' drivers report, like `2.5gbit`.
    pub rate: Option<Rate>,
}

/// A port of a box.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct End {
    pub of: String,
    pub port: String,
}

impl TryFrom<String> for End {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.split_once('/') {
            Some((of, port)) if !of.is_empty() && !port.is_empty() => {
                Ok(Self { of: of.into(), port: port.into() })
            }
            _ => Err(format!("`{text}`: BOX/PORT is expected, like leaf0/swp9")),
        }
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.of, self.port)
    }
}

fn default_workers() -> SocketAddr {
    SocketAddr::from(([0, 0, 0, 0], netsum_api::DEFAULT_PORT))
}

fn default_admin() -> PathBuf {
    "/run/netsum/fabric.sock".into()
}

fn default_state() -> PathBuf {
    "/var/lib/netsum/fabric.json".into()
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// The error, with its field.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> Result<Self> {
        let config: Self = toml::from_str(text)?;
        ensure!(!config.boxes.is_empty(), "box: at least one is needed");
        if let Some(etcd) = &config.etcd {
            ensure!(!etcd.endpoints.is_empty(), "etcd.endpoints: at least one is needed");
            ensure!((2..=60).contains(&etcd.lease_s), "etcd.lease-s = {}: 2 to 60", etcd.lease_s);
            let scheme = if etcd.tls.is_some() { "https://" } else { "http://" };
            for url in &etcd.endpoints {
                ensure!(
                    url.starts_with(scheme),
                    "etcd.endpoints {url:?}: {scheme}ADDRESS:PORT is expected"
                );
            }
        }
        let mut names = HashSet::new();
        for b in &config.boxes {
            ensure!(
                !b.name.is_empty() && !b.name.contains('/'),
                "box.name = {:?}: a name without `/`",
                b.name
            );
            ensure!(names.insert(&b.name), "box.name = {:?}: two boxes have it", b.name);
            match &*b.address {
                a if a.starts_with("unix:/") => {}
                a if a.starts_with("https://") => {
                    ensure!(
                        config.tls.is_some(),
                        "box.address = {a:?}: over TCP, so [tls] is needed"
                    );
                }
                a => bail!("box.address = {a:?}: https://ADDRESS:PORT or unix:/PATH is possible"),
            }
        }
        for Pattern(end) in &config.uplinks {
            ensure!(
                config.links.is_empty(),
                "uplinks {end}: not allowed with [[link]], which lists all links"
            );
            let is_there = names.iter().any(|name| is_like(&end.of, name));
            ensure!(is_there, "uplinks {end}: there is no box {:?}", end.of);
        }
        let mut ends = HashMap::new();
        for link in &config.links {
            for end in [&link.below, &link.above] {
                ensure!(names.contains(&end.of), "link {end}: box {:?} is not in the file", end.of);
                if let Some(other) = ends.insert(end, link) {
                    bail!(
                        "link {end}: {} to {} and {} to {} both have this end",
                        other.below,
                        other.above,
                        link.below,
                        link.above
                    );
                }
            }
            ensure!(link.below.of != link.above.of, "link {}: from a box to itself", link.below);
        }
        if let Some(cycle) = cycle(&config.links) {
            bail!("link: {cycle}: a box would be above itself");
        }
        Ok(config)
    }
}

/// A cycle of boxes, each of which is below the next.
fn cycle(links: &[Link]) -> Option<String> {
    let mut left: Vec<&Link> = links.iter().collect();
    loop {
        let before = left.len();
        let below: HashSet<&String> = left.iter().map(|link| &link.below.of).collect();
        // A link whose lower box is below nothing is not in a cycle.
        left.retain(|link| below.contains(&link.above.of));
        if left.len() == before {
            break;
        }
    }
    let mut path: Vec<&Link> = left.first().copied().into_iter().collect();
    while let Some(last) = path.last() {
        let next = left.iter().find(|link| link.below.of == last.above.of)?;
        if let Some(begin) = path.iter().position(|link| link.below.of == next.below.of) {
            let text = |link: &&Link| format!("{} to {}", link.below, link.above);
            return Some(path[begin..].iter().map(text).collect::<Vec<_>>().join(", "));
        }
        path.push(next);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "[[box]]\nname = \"leaf0\"\naddress = \"unix:/run/a\"\n\
                        [[box]]\nname = \"spine0\"\naddress = \"unix:/run/b\"\n";

    #[test]
    fn boxes_and_links_are_read() {
        let config = Config::parse(&format!(
            "{GOOD}[[link]]\nbelow = \"leaf0/up\"\nabove = \"spine0/p0\"\nrate = \"2.5gbit\"\n"
        ))
        .unwrap();
        assert_eq!(config.boxes.len(), 2);
        assert_eq!(config.links[0].above.to_string(), "spine0/p0");
        assert_eq!(config.links[0].rate, Some(Rate(2_500_000_000)));
    }

    #[test]
    fn uplinks_are_named_by_patterns() {
        let end = |text: &str| End::try_from(text.to_owned()).unwrap();
        for (pattern, text, is) in [
            ("leaf0/swp9", "leaf0/swp9", true),
            ("leaf0/swp9", "leaf0/swp91", false),
            ("leaf*/swp*", "leaf12/swp9", true),
            ("leaf*/swp*", "spine0/swp9", false),
            ("*/*", "a/b", true),
            ("*/*p*9", "a/swp19", true),
            ("*/*p*9", "a/swp", false),
        ] {
            let pattern = Pattern::try_from(pattern.to_owned()).unwrap();
            assert_eq!(pattern.is(&end(text)), is, "{pattern:?} {text}");
        }
        let config = Config::parse(&format!("uplinks = [\"leaf*/swp9\"]\n{GOOD}")).unwrap();
        assert!(config.uplinks[0].is(&end("leaf7/swp9")) && config.link_trust == LinkTrust::Named);
        let config = Config::parse(&format!("link-trust = \"found\"\n{GOOD}")).unwrap();
        assert_eq!(config.link_trust, LinkTrust::Found);
    }

    #[test]
    fn workers_have_tls_as_at_a_box() {
        let text =
            format!("{GOOD}[workers-tls]\ncert = \"/c\"\nkey = \"/k\"\nclient-ca = \"/a\"\n");
        let tls = Config::parse(&text).unwrap().workers_tls.unwrap();
        assert_eq!((tls.cert, tls.client_ca), ("/c".into(), Some("/a".into())));
        assert!(Config::parse(GOOD).unwrap().workers_tls.is_none());
    }

    #[test]
    fn errors_name_field_and_value() {
        for (text, expected) in [
            ("box = []", "box: at least one is needed"),
            (&format!("uplinks = [\"swp9\"]\n{GOOD}"), "BOX/PORT is expected"),
            (&format!("uplinks = [\"rack*/p\"]\n{GOOD}"), "uplinks rack*/p: there is no box"),
            (
                &format!(
                    "uplinks = [\"*/p\"]\n{GOOD}[[link]]\nbelow = \"leaf0/u\"\nabove = \
                     \"spine0/p0\""
                ),
                "not allowed with [[link]]",
            ),
            (&format!("link-trust = \"all\"\n{GOOD}"), "unknown variant `all`"),
            (&format!("{GOOD}[etcd]\nendpoints = []"), "etcd.endpoints: at least one is needed"),
            (&format!("{GOOD}[etcd]\nendpoints = [\"a:1\"]"), "\"a:1\": http://ADDRESS:PORT"),
            (
                &format!("{GOOD}[etcd]\nendpoints = [\"http://a:1\"]\nlease-s = 1"),
                "etcd.lease-s = 1: 2 to 60",
            ),
            ("[[box]]\nname = \"a/b\"\naddress = \"unix:/a\"", "box.name = \"a/b\""),
            ("[[box]]\nname = \"a\"\naddress = \"10.0.0.1\"", "https://ADDRESS:PORT or unix:/PATH"),
            ("[[box]]\nname = \"a\"\naddress = \"https://10.0.0.1:1\"", "[tls] is needed"),
            (&format!("{GOOD}{GOOD}"), "two boxes have it"),
            (
                &format!("{GOOD}[[link]]\nbelow = \"leaf0\"\nabove = \"spine0/p0\""),
                "BOX/PORT is expected",
            ),
            (
                &format!("{GOOD}[[link]]\nbelow = \"leaf0/u\"\nabove = \"spine1/p0\""),
                "box \"spine1\" is not in the file",
            ),
            (
                &format!("{GOOD}[[link]]\nbelow = \"leaf0/u\"\nabove = \"leaf0/p0\""),
                "from a box to itself",
            ),
            (
                &format!(
                    "{GOOD}[[link]]\nbelow = \"leaf0/u\"\nabove = \"spine0/u\"\n\
                     [[link]]\nbelow = \"leaf0/u\"\nabove = \"spine0/v\""
                ),
                "link leaf0/u: leaf0/u to spine0/u and leaf0/u to spine0/v both have this end",
            ),
            (
                &format!(
                    "{GOOD}[[link]]\nbelow = \"leaf0/u\"\nabove = \"spine0/u\"\n\
                     [[link]]\nbelow = \"spine0/v\"\nabove = \"leaf0/v\""
                ),
                "leaf0/u to spine0/u, spine0/v to leaf0/v: a box would be above itself",
            ),
            (
                &format!(
                    "{GOOD}[[link]]\nbelow = \"leaf0/u\"\nabove = \"spine0/p0\"\nrate = \"fast\""
                ),
                "`fast` is not a rate like 100mbit or 2.5gbit",
            ),
            (&format!("nmae = 1\n{GOOD}"), "unknown field"),
        ] {
            let error = format!("{:#}", Config::parse(text).unwrap_err());
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }
}
