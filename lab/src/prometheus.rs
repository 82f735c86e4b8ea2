//! Runs Prometheus from Debian's package on a lab's box: it scrapes the daemon, and tests query it
//! over HTTP.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::netns::Netns;
use crate::process::Running;

/// Folder below cargo's target folder where `cargo xtask test` unpacks the package.
const UNPACKED: &str = "prometheus/usr/bin";
const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9090);
const TIMEOUT: Duration = Duration::from_secs(20);

/// Path of `prometheus` or `promtool`, as installed or as unpacked.
///
/// # Errors
/// If the program is missing.
pub fn program(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let me = std::env::current_exe()?;
    // <target>/<profile>/deps/<test>.
    let unpacked = me.ancestors().nth(3).map(|target| target.join(UNPACKED));
    let mut folders = std::env::split_paths(&path).chain(unpacked);
    let found = folders.find_map(|folder| Some(folder.join(name)).filter(|path| path.is_file()));
    found.with_context(|| format!("no program `{name}`: `cargo xtask test` fetches it"))
}

/// A running Prometheus. It is killed on drop.
#[derive(Debug)]
pub struct Prometheus {
    netns: Netns,
    running: Running,
    /// Its start time in seconds since 1970.
    pub started: f64,
}

impl Prometheus {
    /// Starts it in a namespace, with its data and configuration in `folder`, and waits until it
    /// answers. It scrapes `target` as the job `netsum` and evaluates the rules in the file, both
    /// at the same interval.
    pub fn start(
        netns: &Netns,
        folder: &Path,
        target: &str,
        rules: &Path,
        every: Duration,
    ) -> Result<Self> {
        let every = format!("{}ms", every.as_millis());
        let config = folder.join("prometheus.yml");
        let text = format!(
            "global: {{scrape_interval: {every}, scrape_timeout: {every}, evaluation_interval: {every}}}\n\
             rule_files: [{rules:?}]\n\
             scrape_configs: [{{job_name: netsum, static_configs: [{{targets: [{target:?}]}}]}}]\n"
        );
        std::fs::write(&config, text)?;
        let mut command = netns.command(program("prometheus")?);
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.tsdb.path={}", folder.join("prometheus").display()));
        command.arg(format!("--web.listen-address={ADDRESS}")).arg("--log.level=warn");
        let started = now();
        let running = Running::start("prometheus", &mut command)?;
        let mut prometheus = Self { netns: netns.clone(), running, started };
        let start = Instant::now();
        while prometheus.get("/-/ready").is_err() {
            let printed = prometheus.running.stderr();
            ensure!(
                prometheus.running.is_running() && start.elapsed() < TIMEOUT,
                "no prometheus: {printed}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(prometheus)
    }

    /// Its log.
    pub fn log(&self) -> String {
        self.running.stderr()
    }

    /// The present values of an expression.
    pub fn query(&self, expression: &str) -> Result<Vec<Value>> {
        let data = self.api(&format!("query?query={}", escaped(expression)))?;
        Ok(data["result"].as_array().context("no result")?.clone())
    }

    /// The values of an expression since the start.
    pub fn history(&self, expression: &str) -> Result<Vec<Value>> {
        let (start, end) = (self.started, now());
        let data = self.api(&format!(
            "query_range?query={}&start={start}&end={end}&step=0.5",
            escaped(expression)
        ))?;
        Ok(data["result"].as_array().context("no result")?.clone())
    }

    /// The values of a label in the series of a selector.
    pub fn label_values(&self, label: &str, selector: &str) -> Result<Vec<Value>> {
        let data = self.api(&format!("label/{label}/values?match[]={}", escaped(selector)))?;
        Ok(data.as_array().context("no values")?.clone())
    }

    /// All rules, as `/api/v1/rules` returns them.
    pub fn rules(&self) -> Result<Vec<Value>> {
        let data = self.api("rules")?;
        let groups = data["groups"].as_array().context("no groups")?;
        Ok(groups.iter().filter_map(|group| group["rules"].as_array()).flatten().cloned().collect())
    }

    /// Firing alerts.
    pub fn firing(&self) -> Result<Vec<Value>> {
        let data = self.api("alerts")?;
        let alerts = data["alerts"].as_array().context("no alerts")?;
        Ok(alerts.iter().filter(|alert| alert["state"] == "firing").cloned().collect())
    }

    fn api(&self, request: &str) -> Result<Value> {
        let text = self.get(&format!("/api/v1/{request}"))?;
        let answer: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
        ensure!(answer["status"] == "success", "{request}: {answer}");
        Ok(answer["data"].clone())
    }

    fn get(&self, path: &str) -> Result<String> {
        let answer = self.netns.enter(|| -> Result<String> {
            let mut tcp = TcpStream::connect(ADDRESS)?;
            tcp.set_read_timeout(Some(TIMEOUT))?;
            // HTTP/1.0 has no chunked encoding.
            write!(tcp, "GET {path} HTTP/1.0\r\nHost: {ADDRESS}\r\n\r\n")?;
            let mut answer = String::new();
            tcp.read_to_string(&mut answer)?;
            Ok(answer)
        })?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
        if !head.lines().next().is_some_and(|status| status.contains(" 200 ")) {
            bail!("{path}: {answer}");
        }
        Ok(body.to_owned())
    }
}

fn now() -> f64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

/// Escapes a query for a URL (RFC 3986, section 2.1).
fn escaped(text: &str) -> String {
    text.bytes()
        .map(|b| {
            if b.is_ascii_alphanumeric() { char::from(b).to_string() } else { format!("%{b:02X}") }
        })
        .collect()
}
