//! A communicator's configuration from names and texts, as in the environment, from launchers, and
//! from callers in other languages.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::{IpAddr, ToSocketAddrs};
use std::os::unix::fs::PermissionsExt;
use std::str::FromStr;
use std::time::Duration;

use crate::addresses::towards;

use super::bootstrap::check_peers;
use netsum_collective::numeric::block::Width;

use super::config::{AdapterRetry, Bootstrap, CommConfig, Hierarchy, Tls, Transport};
use netsum_collective::error::Error;
use netsum_collective::seal::Secret;
use netsum_common::defaults;
use netsum_common::size::Size;

/// Names; each is `NETSUM_` and the name in capitals in the environment. Launchers set the first
/// three.
const SETTINGS: [&str; 25] = [
    "rank",
    "ranks",
    "local_rank",
    "controller",
    "job",
    "token",
    "group",
    "ip",
    "peers",
    "mtu",
    "message_size",
    "window",
    "rings",
    "transport",
    "wire",
    "hierarchy",
    "secret",
    "secret_file",
    "ib_timeout",
    "ib_retry_cnt",
    "timeout",
    "connect_timeout",
    "tls_ca",
    "tls_cert",
    "tls_key",
];

/// The launchers' names of `rank`, `ranks` and `local_rank`. The first launcher that has set a rank
/// has started this process: mpirun sets its own within Slurm's, and torchrun within both.
const LAUNCHERS: [[&str; 3]; 4] = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"],
];

/// The host of a box or a fabric's manager, if `controller` is not set.
const WELL_KNOWN: &str = "netsum";

/// Settings by name. Each is `NETSUM_` and the name in capitals in the environment. For `rank`,
/// `ranks` and `local_rank`, the names of torchrun (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`), Open MPI,
/// MPICH and Slurm are also read.
///
/// | name | meaning |
/// | --- | --- |
/// | `rank`, `ranks` | this rank, and how many there are |
/// | `controller` | HOST:PORT of the box's daemon, or of a fabric's manager; default: host `netsum`
/// |
/// | `job`, `token` | the job's name and token |
/// | `group` | connects `ranks` of the job's ranks as a group of this name |
/// | `local_rank` | this rank's number on its host, from 0 |
/// | `ip` | this rank's address, or several separated by commas, one for each `local_rank`;
/// default: the one on the route to the controller |
/// | `peers` | without a controller: the addresses of all ranks, separated by commas; the hosts'
/// ring sums |
/// | `mtu`, `message_size`, `window`, `rings` | with `peers`: the job's properties, the same at all
/// ranks |
/// | `transport` | `auto`, `udp`, `xdp` or `verbs` |
/// | `wire` | `32bit` or `16bit`: bits of a float in sums of over 4,096; default: its own |
/// | `hierarchy` | `auto`, `on` or `off`: see [`Hierarchy`] |
/// | `secret` | at least 16 random characters, the same at all ranks: seals all sums |
/// | `secret_file` | a file with that, which only its user and group can open |
/// | `ib_timeout`, `ib_retry_cnt` | as [`AdapterRetry`] |
/// | `timeout`, `connect_timeout` | seconds |
/// | `tls_ca`, `tls_cert`, `tls_key` | PEM files, as [`Tls`] |
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Settings(BTreeMap<&'static str, String>);

impl Settings {
    /// Settings from the environment.
    pub fn from_environment() -> Self {
        Self::from(|name| std::env::var(name).ok())
    }

    fn from(variable: impl Fn(&str) -> Option<String>) -> Self {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let launcher = LAUNCHERS.iter().find(|names| variable(names[0]).is_some());
        let value = |(at, name): (usize, &&'static str)| {
            let own = variable(&format!("NETSUM_{}", name.to_uppercase()));
            let value = own.or_else(|| {
                launcher.and_then(|names| names.get(at)).and_then(|name| variable(name))
            });
            value.map(|value| (*name, value))
        };
        Self(SETTINGS.iter().enumerate().filter_map(value).collect())
    }

    /// Replaces a setting.
    ///
    /// # Errors
    /// If there is no setting of this name.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), Error> {
        let Some(name) = SETTINGS.iter().find(|s| **s == name) else {
            return Err(Error::Config(format!(
                "no setting {name:?}: the names are {}",
                SETTINGS.join(", ")
            )));
        };
        self.0.insert(name, value.to_owned());
        Ok(())
    }

    /// The value of a setting.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// The configuration from these settings.
    ///
    /// # Errors
    /// [`Error::Config`] names the missing or wrong setting, and what to do.
    pub fn config(&self) -> Result<CommConfig, Error> {
        let (rank, ranks) = (self.needed("rank")?, self.needed("ranks")?);
        let bootstrap = self.bootstrap()?;
        let ip = self.ip(rank, &bootstrap)?;
        let usual = CommConfig::new(rank, ranks, ip, bootstrap);
        let transport = match self.get("transport") {
            Some(text) => text.parse().map_err(|e: String| wrong("transport", text, &e))?,
            None => Transport::default(),
        };
        let hierarchy = match self.get("hierarchy") {
            Some(text) => text.parse().map_err(|e: String| wrong("hierarchy", text, &e))?,
            None => Hierarchy::default(),
        };
        let wire = match self.get("wire") {
            Some(text) => Some(text.parse::<Width>().map_err(|e| wrong("wire", text, &e))?),
            None => None,
        };
        let secret = self.secret()?;
        let retry = AdapterRetry {
            timeout: self.number("ib_timeout", usual.retry.timeout)?,
            count: self.number("ib_retry_cnt", usual.retry.count)?,
        };
        let identity = self.get("tls_cert").zip(self.get("tls_key"));
        let identity = identity.map(|(cert, key)| (cert.into(), key.into()));
        let tls = self.get("tls_ca").map(|ca| Tls { ca: ca.into(), identity });
        let timeout = self.seconds("timeout", usual.timeout)?;
        let connect_timeout = self.seconds("connect_timeout", usual.connect_timeout)?;
        let group = self.get("group").map(str::to_owned);
        let usual = CommConfig { transport, retry, group, tls, timeout, connect_timeout, ..usual };
        Ok(CommConfig { wire, hierarchy, secret, ..usual })
    }

    /// What seals the sums, out of `secret` or `secret_file`.
    ///
    /// # Errors
    /// [`Error::Config`] if it is too short, both are set, the file cannot be read, or every user can
    /// open it.
    pub fn secret(&self) -> Result<Option<Secret>, Error> {
        // No error repeats the text.
        let made = |name: &str, text: &str| {
            Secret::new(text).map(Some).map_err(|e| Error::Config(format!("{name} {e}")))
        };
        match (self.get("secret"), self.get("secret_file")) {
            (None, None) => Ok(None),
            (Some(text), None) => made("NETSUM_SECRET", text),
            (None, Some(path)) => {
                let text = of_file(path).map_err(|e| wrong("secret_file", path, &e))?;
                made(&format!("NETSUM_SECRET_FILE {path:?}: its text"), &text)
            }
            (Some(_), Some(_)) => Err(Error::Config(
                "NETSUM_SECRET and NETSUM_SECRET_FILE are both set: unset one".to_owned(),
            )),
        }
    }

    fn bootstrap(&self) -> Result<Bootstrap, Error> {
        if let Some(peers) = self.get("peers") {
            let peers = addresses("peers", peers)?;
            check_peers(&peers).map_err(Error::Config)?;
            return Ok(Bootstrap::Static {
                peers,
                mtu: self.number("mtu", defaults::MTU)?,
                message_size: self.size("message_size", defaults::MESSAGE_SIZE)?,
                window: self.number("window", defaults::WINDOW)?,
                rings: self.number("rings", 1)?,
            });
        }
        let address = match self.get("controller") {
            Some(controller) => controller.to_owned(),
            None => {
                let address = format!("{WELL_KNOWN}:{}", netsum_api::DEFAULT_PORT);
                let known = address.to_socket_addrs().is_ok_and(|mut found| found.next().is_some());
                if !known {
                    return Err(Error::Config(format!(
                        "no box found: set NETSUM_CONTROLLER to its HOST:PORT, because there is no \
                         host {WELL_KNOWN:?}. Without a box, set NETSUM_PEERS to the addresses of \
                         all ranks, which then sum over the hosts' ring"
                    )));
                }
                address
            }
        };
        let text = |name: &str| {
            let missing = format!(
                "NETSUM_{} is not set: `netsum job create` on the box creates a job and prints its \
                 token",
                name.to_uppercase()
            );
            self.get(name).map(str::to_owned).ok_or(Error::Config(missing))
        };
        Ok(Bootstrap::Controller { address, job: text("job")?, token: text("token")? })
    }

    fn ip(&self, rank: u32, bootstrap: &Bootstrap) -> Result<IpAddr, Error> {
        let local = self.number("local_rank", 0usize)?;
        match (self.get("ip"), bootstrap) {
            (Some(ip), _) => {
                let all = addresses("ip", ip)?;
                // One address for all ranks: the others are on other machines.
                let own = if all.len() == 1 { all.first() } else { all.get(local) };
                own.copied().ok_or_else(|| {
                    Error::Config(format!(
                        "NETSUM_IP: {} addresses, and none for local rank {local}: set one for \
                         each rank on this machine",
                        all.len()
                    ))
                })
            }
            (None, Bootstrap::Static { peers, .. }) => {
                let own = peers.get(rank as usize).copied();
                own.ok_or_else(|| {
                    let count = peers.len();
                    Error::Config(format!(
                        "NETSUM_PEERS: {count} addresses, and none for rank {rank}"
                    ))
                })
            }
            (None, Bootstrap::Controller { address, .. }) => {
                towards(address.as_str()).map_err(|e| {
                    Error::Config(format!(
                        "NETSUM_CONTROLLER {address:?}: no route to it: {e}: set it to HOST:PORT \
                         of the box, such as netsum:4790"
                    ))
                })
            }
        }
    }

    fn needed<T: FromStr>(&self, name: &str) -> Result<T, Error> {
        let Some(text) = self.get(name) else {
            return Err(Error::Config(format!(
                "{name} is not known: set NETSUM_{}, or start with torchrun, mpirun or srun, which \
                 set it",
                name.to_uppercase()
            )));
        };
        text.parse().map_err(|_| wrong(name, text, "must be a number"))
    }

    fn number<T: FromStr>(&self, name: &str, usual: T) -> Result<T, Error> {
        self.get(name).map_or(Ok(usual), |text| {
            text.parse().map_err(|_| wrong(name, text, "must be a number"))
        })
    }

    fn size(&self, name: &str, usual: &str) -> Result<u32, Error> {
        let text = self.get(name).unwrap_or(usual);
        let Size(bytes) = text.parse::<Size>().map_err(|e| wrong(name, text, &e.to_string()))?;
        bytes.try_into().map_err(|_| wrong(name, text, "must be less than 4 GiB"))
    }

    fn seconds(&self, name: &str, usual: Duration) -> Result<Duration, Error> {
        let Some(text) = self.get(name) else { return Ok(usual) };
        let seconds = text.parse().ok().filter(|s| (0.1..=86_400.0).contains(s));
        seconds
            .map(Duration::from_secs_f64)
            .ok_or_else(|| wrong(name, text, "must be 0.1 to 86400 seconds"))
    }
}

/// Does not print the token and the secret.
impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map()
            .entries(self.0.iter().filter(|(name, _)| !["token", "secret"].contains(*name)))
            .finish()
    }
}

fn wrong(name: &str, text: &str, right: &str) -> Error {
    Error::Config(format!("NETSUM_{} {text:?}: {right}", name.to_uppercase()))
}

/// A secret's text, without newlines at its end, as the shell's `$(cat FILE)`.
fn of_file(path: &str) -> Result<String, String> {
    let open = || -> std::io::Result<_> {
        let file = File::open(path)?;
        Ok((file.metadata()?.permissions().mode(), file))
    };
    let (mode, file) = open().map_err(|e| e.to_string())?;
    // Groups may: Kubernetes gives files to one.
    if mode & 0o006 != 0 {
        return Err("every user of this machine can open it, and with the secret read and forge \
                    sums: `chmod 600` it, and put a new secret into it"
            .to_owned());
    }
    let text = std::io::read_to_string(file).map_err(|e| e.to_string())?;
    Ok(text.trim_end_matches('\n').to_owned())
}

fn addresses(name: &str, text: &str) -> Result<Vec<IpAddr>, Error> {
    let parsed: Result<_, std::net::AddrParseError> =
        text.split(',').map(|ip| ip.trim().parse()).collect();
    parsed.map_err(|_| wrong(name, text, "must be IP addresses separated by commas"))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;

    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Settings {
        Settings::from(|name| variables.iter().find(|v| v.0 == name).map(|v| v.1.to_owned()))
    }

    const TORCHRUN: [(&str, &str); 3] = [("RANK", "2"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")];

    #[test]
    fn variables_of_torchrun_and_of_the_box_are_enough() {
        let box_ =
            [("NETSUM_CONTROLLER", "127.0.0.1:4790"), ("NETSUM_JOB", "j"), ("NETSUM_TOKEN", "t")];
        let config = settings(&[&TORCHRUN[..], &box_].concat()).config().unwrap();
        assert_eq!((config.rank, config.ranks, config.ip), (2, 4, [127, 0, 0, 1].into()));
        let two =
            [&TORCHRUN[..], &box_, &[("NETSUM_IP", "10.0.0.1, 10.0.0.2"), ("NETSUM_RANK", "3")]]
                .concat();
        let config = settings(&two).config().unwrap();
        assert_eq!((config.rank, config.ip), (3, [10, 0, 0, 2].into()));
        assert_eq!(config.group, None);
        let config = settings(&[&two[..], &[("NETSUM_GROUP", "g")]].concat()).config().unwrap();
        assert_eq!(config.group.as_deref(), Some("g"));
    }

    #[test]
    fn the_innermost_launcher_counts() {
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_LOCALID", "0")];
        let mpi = [("OMPI_COMM_WORLD_RANK", "5"), ("OMPI_COMM_WORLD_SIZE", "6")];
        let ranks = |variables: &[(&str, &str)]| {
            let settings = settings(variables);
            ["rank", "ranks", "local_rank"].map(|name| settings.get(name).map(str::to_owned))
        };
        let are =
            |a: &str, b: &str, c: Option<&str>| [Some(a), Some(b), c].map(|s| s.map(str::to_owned));
        assert_eq!(ranks(&slurm), are("0", "1", Some("0")));
        assert_eq!(ranks(&[&slurm[..], &mpi].concat()), are("5", "6", None));
        assert_eq!(ranks(&[&slurm[..], &mpi, &TORCHRUN].concat()), are("2", "4", Some("1")));
        assert_eq!(
            ranks(&[&mpi[..], &[("NETSUM_RANK", "3"), ("RANK", "")]].concat()),
            are("3", "6", None)
        );
    }

    #[test]
    fn peers_need_no_box() {
        let peers =
            [("NETSUM_PEERS", "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4"), ("NETSUM_TIMEOUT", "2.5")];
        let config = settings(&[&TORCHRUN[..], &peers].concat()).config().unwrap();
        assert_eq!(config.ip, IpAddr::from([10, 0, 0, 3]));
        assert_eq!(config.timeout, Duration::from_millis(2500));
        assert!(matches!(
            config.bootstrap,
            Bootstrap::Static { mtu: 1024, message_size: 65536, window: 8, .. }
        ));
    }

    #[test]
    fn missing_and_wrong_settings_are_named() {
        let says = |variables: &[(&str, &str)], word: &str| {
            let text = settings(variables).config().unwrap_err().to_string();
            assert!(text.contains(word), "{text}");
        };
        says(&[], "set NETSUM_RANK, or start with torchrun, mpirun or srun");
        says(&[("RANK", "0")], "NETSUM_RANKS");
        let job = [&TORCHRUN[..], &[("NETSUM_CONTROLLER", "127.0.0.1:1")]].concat();
        says(&job, "NETSUM_JOB is not set: `netsum job create`");
        let box_ = [("NETSUM_CONTROLLER", "127.0.0.1"), ("NETSUM_JOB", "j"), ("NETSUM_TOKEN", "t")];
        says(&[&TORCHRUN[..], &box_].concat(), "NETSUM_CONTROLLER \"127.0.0.1\": no route to it");
        let with = |more| [&TORCHRUN[..], &[("NETSUM_PEERS", "10.0.0.1,10.0.0.2"), more]].concat();
        says(&with(("A", "")), "2 addresses, and none for rank 2");
        says(&with(("NETSUM_IP", "10.0.0.x")), "NETSUM_IP \"10.0.0.x\": must be IP addresses");
        says(&with(("NETSUM_RANK", "x")), "NETSUM_RANK \"x\": must be a number");
        let ok = ("NETSUM_IP", "10.0.0.1");
        for (name, value, word) in [
            ("NETSUM_TIMEOUT", "0", "0.1 to 86400 seconds"),
            ("NETSUM_TRANSPORT", "tcp", "auto, udp, xdp or verbs"),
            ("NETSUM_HIERARCHY", "yes", "auto, on or off"),
            ("NETSUM_MTU", "-1", "must be a number"),
            ("NETSUM_MESSAGE_SIZE", "8X", "must be a number like 65536, 64K"),
            ("NETSUM_MESSAGE_SIZE", "4G", "must be less than 4 GiB"),
        ] {
            says(&[&with(ok)[..], &[(name, value)]].concat(), word);
        }
        let mut settings = settings(&TORCHRUN);
        assert!(
            settings
                .set("colour", "red")
                .unwrap_err()
                .to_string()
                .contains("no setting \"colour\"")
        );
        settings.set("token", "secret").unwrap();
        assert!(!format!("{settings:?}").contains("secret"));
    }

    #[test]
    fn a_secret_may_be_in_a_file_that_other_users_cannot_open() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        let config = |secret: &str, path: &str| {
            let peers = ("NETSUM_PEERS", "10.0.0.1,10.0.0.2,10.0.0.3");
            let both = [peers, ("NETSUM_SECRET", secret), ("NETSUM_SECRET_FILE", path)];
            settings(&[&TORCHRUN[..], &both].concat()).config()
        };
        let (text, own, group) = ("sixteen or more!", 0o600, 0o440);
        let wanted = Some(Secret::new(text).unwrap());
        for (mode, end) in [(own, ""), (own, "\n"), (group, "\n\n")] {
            std::fs::write(path, format!("{text}{end}")).unwrap();
            std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(config("", path).unwrap().secret, wanted, "{mode:o} {end:?}");
        }
        assert_eq!(config(text, "").unwrap().secret, wanted);

        let says = |secret: &str, path: &str, words: &str| {
            let error = config(secret, path).unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains(text), "{error}");
        };
        says(text, path, "NETSUM_SECRET and NETSUM_SECRET_FILE are both set");
        for open in [0o604, 0o602, 0o666] {
            std::fs::set_permissions(path, Permissions::from_mode(open)).unwrap();
            says("", path, "every user of this machine can open it");
        }
        std::fs::set_permissions(path, Permissions::from_mode(own)).unwrap();
        says("", &format!("{path}.none"), "No such file");
        for bad in ["", "\n", "fifteen letters\n"] {
            std::fs::write(path, bad).unwrap();
            says("", path, "its text must have at least 16 characters");
        }
        std::fs::write(path, [0xff; 32]).unwrap();
        says("", path, "valid UTF-8");
    }
}
