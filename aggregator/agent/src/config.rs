//! The configuration file of `netsum run`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use netsum_common::abi::MAX_UPLINKS;
use netsum_common::size::Size;
use netsum_controller::socket::Access;
use netsum_controller::state::HEARTBEAT;
use netsum_controller::tls::Tls;
use netsum_core::job::is_name;
use netsum_core::tenant::Limits;
use netsum_core::watch::{HELD_BACK_TIMEOUT, RingTimeouts};
use serde::Deserialize;

/// A configuration that has been checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where the ports come from.
    pub ports: Ports,
    /// Bytes for the rings of all jobs.
    pub memory: u64,
    /// CPUs that serve rings; all online ones if empty.
    pub cpus: Vec<u32>,
    /// Address for workers; `None`: no listener.
    pub workers: Option<SocketAddr>,
    /// TLS for workers; `None`: cleartext.
    pub tls: Option<Tls>,
    /// Address for a fabric's manager; `None`: no listener.
    pub fabric: Option<Fabric>,
    /// Socket for administration.
    pub admin: PathBuf,
    /// Permissions of the socket.
    pub admin_access: Access,
    /// Interval of the ranks' heartbeats.
    pub heartbeat: Duration,
    /// A job fails if none of its ranks has sent a heartbeat for this long.
    pub heartbeat_timeout: Duration,
    /// Folder in a bpffs for the maps and programs that outlive a killed daemon; `None`: none do.
    pub pin: Option<PathBuf>,
    /// File for the jobs that outlive it.
    pub state: PathBuf,
    /// File for the jobs that are created again at every start; `None`: none are.
    pub jobs: Option<PathBuf>,
    /// How long sums may wait.
    pub timeouts: RingTimeouts,
    /// Loopback address for Prometheus; `None`: no metrics.
    pub metrics: Option<SocketAddr>,
    /// Uplinks over which unsummed flows are spread; empty: none are.
    pub spread: Vec<String>,
    /// Each tenant's limits on its share of the pool, by name.
    pub tenants: BTreeMap<String, Limits>,
}

/// The source of the ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ports {
    /// All ports of a bridge.
    Bridge(String),
    /// These interfaces.
    List(Vec<String>),
}

impl Ports {
    /// The bridge's name, or those of the interfaces.
    pub fn names(&self) -> &[String] {
        match self {
            Self::Bridge(name) => std::slice::from_ref(name),
            Self::List(names) => names,
        }
    }
}

/// Where a fabric's manager connects. It has an administrator's rights there, so both sides show
/// certificates.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fabric {
    pub address: SocketAddr,
    /// The box's certificate, with its chain to an authority.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Authority that signs only managers' certificates.
    pub ca: PathBuf,
}

/// Why a configuration is refused: the field, its value, and what is expected.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {0}: {1}")]
    Read(PathBuf, std::io::Error),
    /// Invalid TOML, an unknown field, or a value of the wrong type.
    #[error("{0}: {1}")]
    Syntax(PathBuf, String),
    /// An invalid value.
    #[error("{field} = {value}: {expected}")]
    Value {
        /// The field's name.
        field: &'static str,
        value: String,
        /// The expected values.
        expected: String,
    },
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct File {
    bridge: Option<String>,
    ports: Option<Vec<String>>,
    pool: Pool,
    cpus: Vec<u32>,
    spread: Vec<String>,
    listen: Listen,
    heartbeat: Heartbeat,
    watch: Watch,
    restart: Restart,
    metrics: Metrics,
    tenants: BTreeMap<String, Tenant>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Tenant {
    jobs: Option<u64>,
    rings: Option<u64>,
    slots: Option<u64>,
    memory: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct Pool {
    memory: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Listen {
    workers: String,
    tls: Option<Tls>,
    fabric: Option<Fabric>,
    admin: PathBuf,
    admin_mode: String,
    admin_group: Option<String>,
}

impl Default for Listen {
    fn default() -> Self {
        Self {
            workers: format!("0.0.0.0:{}", netsum_api::DEFAULT_PORT),
            tls: None,
            fabric: None,
            admin: netsum_api::DEFAULT_SOCKET.into(),
            admin_mode: "0600".into(),
            admin_group: None,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Heartbeat {
    interval_ms: u64,
    timeout_ms: u64,
}

/// Milliseconds after which a job fails if none of its ranks has sent a heartbeat.
const TIMEOUT_MS: u64 = 60_000;

impl Default for Heartbeat {
    fn default() -> Self {
        Self { interval_ms: HEARTBEAT.as_millis() as u64, timeout_ms: TIMEOUT_MS }
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Watch {
    stall_ms: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Restart {
    pin: PathBuf,
    state: PathBuf,
    jobs: PathBuf,
}

impl Default for Restart {
    fn default() -> Self {
        Self {
            pin: "/sys/fs/bpf/netsum".into(),
            state: "/run/netsum/state.json".into(),
            jobs: "/var/lib/netsum/jobs.json".into(),
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct Metrics {
    listen: Option<String>,
}

impl Config {
    /// Reads and checks a file.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|e| ConfigError::Read(path.to_owned(), e))?;
        Self::parse(path, &text)
    }

    /// Checks a file's text; `path` is for errors.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let file: File = toml::from_str(text)
            .map_err(|e| ConfigError::Syntax(path.to_owned(), e.to_string()))?;
        let refuse = |field, value: &dyn std::fmt::Debug, expected: &str| {
            Err(ConfigError::Value {
                field,
                value: format!("{value:?}"),
                expected: expected.into(),
            })
        };
        let ports = match (file.bridge, file.ports) {
            (Some(bridge), None) => Ports::Bridge(bridge),
            (None, Some(ports)) if !ports.is_empty() => Ports::List(ports),
            (None, Some(ports)) => {
                return refuse("ports", &ports, "at least one interface must be named");
            }
            (None, None) => {
                return refuse("bridge", &"", "give a bridge, or ports as a list of interfaces");
            }
            (Some(bridge), Some(_)) => {
                return refuse("bridge", &bridge, "give a bridge or ports, not both");
            }
        };
        let names: BTreeSet<&String> = file.spread.iter().collect();
        if file.spread.len() > MAX_UPLINKS as usize || names.len() < file.spread.len() {
            let expected = format!("the box's uplinks, each once, and at most {MAX_UPLINKS}");
            return refuse("spread", &file.spread, &expected);
        }
        let memory = file.pool.memory.as_deref().unwrap_or("256MiB");
        let memory = match memory.parse::<Size>() {
            Ok(size) if size.0 > 0 => size.0,
            _ => return refuse("pool.memory", &memory, "must be a size like \"256MiB\""),
        };
        let workers = match file.listen.workers.as_str() {
            "none" => None,
            address => match address.parse() {
                Ok(address) => Some(address),
                Err(_) => {
                    let expected = "an address and port like \"0.0.0.0:4790\", or \"none\"";
                    return refuse("listen.workers", &file.listen.workers, expected);
                }
            },
        };
        let admin_mode = match u32::from_str_radix(&file.listen.admin_mode, 8) {
            Ok(mode) if mode <= 0o777 && mode & 0o007 == 0 => mode,
            _ => {
                let expected =
                    "an octal mode like \"0600\" or \"0660\", with nothing for all users";
                return refuse("listen.admin-mode", &file.listen.admin_mode, expected);
            }
        };
        if file.listen.tls.is_some() && workers.is_none() {
            return refuse("listen.tls", &"", "there is no listener for workers to use it");
        }
        let Heartbeat { interval_ms, timeout_ms } = file.heartbeat;
        if interval_ms == 0 {
            return refuse("heartbeat.interval-ms", &interval_ms, "at least 1");
        }
        if timeout_ms < 2 * interval_ms {
            return refuse("heartbeat.timeout-ms", &timeout_ms, "at least twice interval-ms");
        }
        let pin =
            if file.restart.pin.as_os_str() == "none" { None } else { Some(file.restart.pin) };
        if let Some(dir) = &pin
            && (!dir.is_absolute() || dir.parent().is_none_or(|p| p == Path::new("/")))
        {
            return refuse("restart.pin", dir, "a folder like \"/sys/fs/bpf/netsum\", or \"none\"");
        }
        if file.restart.state.file_name().is_none() {
            return refuse(
                "restart.state",
                &file.restart.state,
                "a file like \"/run/netsum/state.json\"",
            );
        }
        let jobs =
            if file.restart.jobs.as_os_str() == "none" { None } else { Some(file.restart.jobs) };
        if let Some(path) = &jobs
            && (path.file_name().is_none()
                || path.with_extension("") == file.restart.state.with_extension(""))
        {
            let expected = "a file of its own like \"/var/lib/netsum/jobs.json\", or \"none\"";
            return refuse("restart.jobs", path, expected);
        }
        let metrics = match file.metrics.listen.as_deref() {
            None | Some("none") => None,
            Some(address) => match address.parse::<SocketAddr>() {
                Ok(address) if address.ip().is_loopback() => Some(address),
                _ => {
                    let expected =
                        "a loopback address and port like \"127.0.0.1:4792\", or \"none\"";
                    return refuse("metrics.listen", &address, expected);
                }
            },
        };
        let tenants = file.tenants.into_iter().map(tenant).collect::<Result<_, _>>()?;
        let stall_ms = file.watch.stall_ms.unwrap_or(5_000);
        if stall_ms == 0 {
            return refuse("watch.stall-ms", &stall_ms, "at least 1");
        }
        Ok(Self {
            ports,
            memory,
            cpus: file.cpus,
            workers,
            tls: file.listen.tls,
            fabric: file.listen.fabric,
            admin: file.listen.admin,
            admin_access: Access { mode: admin_mode, group: file.listen.admin_group },
            heartbeat: Duration::from_millis(interval_ms),
            heartbeat_timeout: Duration::from_millis(timeout_ms),
            pin,
            state: file.restart.state,
            jobs,
            timeouts: RingTimeouts {
                hold: HELD_BACK_TIMEOUT,
                stall: Duration::from_millis(stall_ms),
            },
            metrics,
            spread: file.spread,
            tenants,
        })
    }
}

/// Checks a section `[tenants.NAME]`.
fn tenant((name, section): (String, Tenant)) -> Result<(String, Limits), ConfigError> {
    if !is_name(&name) {
        let expected = "must be 1 to 64 of a-z, 0-9, `.`, `_`, `-`".into();
        return Err(ConfigError::Value { field: "tenants", value: format!("{name:?}"), expected });
    }
    let Tenant { jobs, rings, slots, memory } = section;
    let size = |text: String| match text.parse::<Size>() {
        Ok(size) => Ok(size.0),
        Err(_) => Err(ConfigError::Value {
            field: "tenants.NAME.memory",
            value: format!("{text:?}"),
            expected: format!("tenant {name}: must be a size like \"64MiB\""),
        }),
    };
    Ok((name.clone(), Limits { jobs, rings, slots, memory: memory.map(size).transpose()? }))
}

impl Config {
    /// The fields that differ from another configuration and that a daemon reads only when it
    /// starts.
    pub fn needs_restart(&self, other: &Self) -> Vec<&'static str> {
        let fields = [
            ("cpus", self.cpus == other.cpus),
            ("listen.workers", self.workers == other.workers),
            ("listen.tls", self.tls == other.tls),
            ("listen.fabric", self.fabric == other.fabric),
            ("listen.admin", self.admin == other.admin),
            ("listen.admin-mode, listen.admin-group", self.admin_access == other.admin_access),
            ("heartbeat.interval-ms", self.heartbeat == other.heartbeat),
            (
                "restart",
                (&self.pin, &self.state, &self.jobs) == (&other.pin, &other.state, &other.jobs),
            ),
            ("metrics.listen", self.metrics == other.metrics),
            ("spread", self.spread == other.spread),
        ];
        fields.into_iter().filter(|(_, same)| !same).map(|(name, _)| name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(Path::new("netsum.toml"), text).map_err(|e| e.to_string())
    }

    #[test]
    fn the_example_is_what_it_says_about_defaults() {
        let example = parse(include_str!("../../../netsum/netsum.example.toml")).unwrap();
        assert_eq!(example, parse("bridge = \"br0\"").unwrap());
    }

    #[test]
    fn a_file_that_cannot_be_read_says_why_once() {
        let error = anyhow::Error::from(Config::read(Path::new("/nowhere")).unwrap_err());
        assert_eq!(
            format!("{error:#}"),
            "cannot read /nowhere: No such file or directory (os error 2)"
        );
    }

    #[test]
    fn settings_that_only_a_start_can_change_are_named() {
        let old = parse("bridge = \"br0\"").unwrap();
        let live = "bridge = \"br1\"\n[tenants.a]\njobs = 1\n[pool]\nmemory = \
            \"1MiB\"\n[watch]\nstall-ms = 9\n[heartbeat]\ntimeout-ms = 9000";
        assert!(old.needs_restart(&parse(live).unwrap()).is_empty());
        let start = "bridge = \"br0\"\ncpus = [1]\n[listen]\nadmin-mode = \
            \"0660\"\n[metrics]\nlisten = \"127.0.0.1:1\"";
        assert_eq!(
            old.needs_restart(&parse(start).unwrap()),
            ["cpus", "listen.admin-mode, listen.admin-group", "metrics.listen"]
        );
    }

    #[test]
    fn tenants_have_limits_or_none() {
        let text =
            "bridge = \"br0\"\n[tenants.vision]\njobs = 4\nmemory = \"64MiB\"\n[tenants.default]\n";
        let tenants = parse(text).unwrap().tenants;
        let vision = Limits { jobs: Some(4), memory: Some(64 << 20), ..Limits::default() };
        let expected = [("default".to_owned(), Limits::default()), ("vision".to_owned(), vision)];
        assert_eq!(tenants.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn errors_name_field_value_and_what_would_be_right() {
        for (text, expected) in [
            ("", "bridge"),
            ("bridge = \"br0\"\nports = [\"p0\"]", "not both"),
            ("ports = []", "ports = []: at least one"),
            ("bridge = \"br0\"\n[pool]\nmemory = \"lots\"", "pool.memory = \"lots\""),
            ("bridge = \"br0\"\n[listen]\nworkers = \"here\"", "listen.workers = \"here\""),
            (
                "bridge = \"br0\"\n[listen]\nadmin-mode = \"0666\"",
                "listen.admin-mode = \"0666\": an octal mode",
            ),
            ("bridge = \"br0\"\n[listen]\nadmin-mode = \"rw\"", "listen.admin-mode = \"rw\""),
            ("bridge = \"br0\"\n[listen.tls]\ncert = \"c\"", "missing field `key`"),
            (
                "bridge = \"br0\"\n[listen]\nworkers = \"none\"\ntls = \
                 { cert = \"c\", key = \"k\" }",
                "listen.tls",
            ),
            (
                "bridge = \"br0\"\n[metrics]\nlisten = \"0.0.0.0:4792\"",
                "metrics.listen = \"0.0.0.0:4792\": a loopback address",
            ),
            ("bridge = \"br0\"\n[listen.fabric]\naddress = \"0.0.0.0:1\"", "missing field `cert`"),
            ("bridge = \"br0\"\nbrdige = 1", "unknown field `brdige`"),
            ("bridge = 7", "expected a string"),
            ("bridge = \"br0\"\n[tenants.a]\njobs = -1", "expected u64"),
            ("bridge = \"br0\"\n[tenants.a]\ncpus = 1", "unknown field `cpus`"),
            ("bridge = \"br0\"\n[tenants.A]", "tenants = \"A\": must be 1 to 64"),
            (
                "bridge = \"br0\"\n[tenants.a]\nmemory = \"lots\"",
                "tenants.NAME.memory = \"lots\": tenant a: must be a size",
            ),
            (
                "bridge = \"br0\"\n[restart]\npin = \"here\"",
                "restart.pin = \"here\": a folder like",
            ),
            ("bridge = \"br0\"\n[restart]\nstate = \"/\"", "restart.state = \"/\": a file like"),
            (
                "bridge = \"br0\"\n[restart]\njobs = \"/\"",
                "restart.jobs = \"/\": a file of its own like",
            ),
            (
                "bridge = \"br0\"\n[restart]\njobs = \"/run/netsum/state.jobs\"",
                "restart.jobs = \"/run/netsum/state.jobs\": a file of its own",
            ),
            (
                "bridge = \"br0\"\n[heartbeat]\ntimeout-ms = 5",
                "heartbeat.timeout-ms = 5: at least twice",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }
}
