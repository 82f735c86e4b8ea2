//! Runs the ring of `lab/verbs/ring.c`, an application over libibverbs that knows nothing of netsum
//! but, set up in band, the header of its messages. Ranks on hosts that are namespaces run
//! `udp-ring`, its counterpart over the library's own endpoint.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::Host;
use crate::cluster::{Cluster, program};
use crate::lab::BoxNode;
use crate::process::Running;

/// Timeout in a virtual machine for anything that should be quick.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The operation with which ranks send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Send,
    SendImmediate,
    /// RDMA WRITE with immediate.
    Write,
    /// RDMA WRITE, and an empty SEND that notifies the receiver.
    PlainWrite,
    /// RDMA READ, which the library's own endpoint refuses.
    Read,
}

impl Operation {
    /// Its name in the programs' arguments.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::SendImmediate => "send-imm",
            Self::Write => "write",
            Self::PlainWrite => "plain-write",
            Self::Read => "read",
        }
    }
}

#[derive(Clone, Debug)]
pub struct VerbsRingSpec {
    /// The host of each rank.
    pub hosts: Vec<usize>,
    /// Path MTU in bytes.
    pub mtu: u32,
    /// Message sizes in bytes, used in turn. Only one size if the box sums.
    pub sizes: Vec<u32>,
    /// Messages that each rank sends.
    pub messages: u32,
    pub operation: Operation,
    /// A packet that is not acknowledged is sent again after 4.096 us * 2^`timeout`.
    pub timeout: u8,
    /// How often before its sender gives up; 7 means forever (rdma_rxe:
    /// drivers/infiniband/sw/rxe/rxe_comp.c, Linux 6.1).
    pub retry: u8,
    /// Whether its connections are registered with the box, which then sums.
    pub summed: bool,
    /// Its connections are set up in band instead, between virtual machines only.
    pub in_band: bool,
}

impl VerbsRingSpec {
    /// By how many messages a rank's sends may exceed its receives.
    pub const WINDOW: u32 = 2;

    /// Rank r on host r, 128 KiB messages through the box, and a timer that does not expire on a
    /// busy machine.
    pub fn new(ranks: usize, mtu: u32, operation: Operation, messages: u32) -> Self {
        let hosts = (0..ranks).collect();
        Self {
            hosts,
            mtu,
            sizes: vec![128 << 10],
            messages,
            operation,
            timeout: 20,
            retry: 7,
            summed: true,
            in_band: false,
        }
    }

    /// Packets that each rank has to send.
    pub fn packets(&self) -> u64 {
        let sizes = self.sizes.iter().cycle().take(self.messages as usize);
        let data: u64 = sizes.map(|size| u64::from(size.div_ceil(self.mtu).max(1))).sum();
        data + if self.operation == Operation::PlainWrite { self.messages.into() } else { 0 }
    }
}

/// Results of a rank.
#[derive(Clone, Debug, Default)]
pub struct RankReport {
    /// Messages that it has received.
    pub messages: u64,
    /// 32-bit lanes of these messages that were wrong.
    pub wrong: u64,
    /// Its running time in microseconds.
    pub micros: u64,
    /// Counters of the host's device, or of the library's endpoint, that have increased, and by how
    /// much.
    pub counters: BTreeMap<String, u64>,
    /// Data packets that the host sent in excess of those that it had to send; only in a lab with
    /// fault-injecting links.
    pub retransmitted: Option<u64>,
}

impl RankReport {
    /// By how much a counter has increased.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or_default()
    }
}

/// Runs a ring. Its connections are registered with `netsum flow add`, as by an administrator, or
/// in band.
///
/// # Errors
/// If a rank fails, or is not done within `timeout`.
pub fn run(cluster: &Cluster, spec: &VerbsRingSpec, timeout: Duration) -> Result<Vec<RankReport>> {
    let mut ring = VerbsRing::start(cluster, spec, timeout)?;
    let start = Instant::now();
    while !ring.is_over(Duration::from_millis(100))? {
        ensure!(start.elapsed() < timeout, "not done within {timeout:?}\n{}", stats(cluster, spec));
        // After one rank has failed, the others would wait in vain.
        if let Some(error) = ring.outcomes().find_map(|outcome| outcome?.error.as_deref()) {
            bail!("{error}\n{}", stats(cluster, spec));
        }
    }
    let reports = ring.end(cluster)?.into_iter().map(|outcome| match outcome.error {
        Some(error) => Err(anyhow!("{error}\n{}", stats(cluster, spec))),
        None => Ok(outcome.report),
    });
    reports.collect()
}

/// A running ring.
#[derive(Debug)]
pub struct VerbsRing {
    hosts: Vec<usize>,
    packets: u64,
    ranks: Vec<Running>,
    outcomes: Vec<Option<Outcome>>,
    counters: Vec<BTreeMap<String, u64>>,
    sent: Vec<Option<u64>>,
}

/// How a rank ended.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Its results until then.
    pub report: RankReport,
    /// Why it gave up early.
    pub error: Option<String>,
}

impl VerbsRing {
    /// Connects the ranks, registers their connections and starts them. A rank gives up after
    /// `timeout` without a message.
    pub fn start(cluster: &Cluster, spec: &VerbsRingSpec, timeout: Duration) -> Result<Self> {
        let hosts: Vec<&Host> = spec.hosts.iter().map(|&host| cluster.lab().host(host)).collect();
        let counters = hosts.iter().map(|host| hw_counters(host)).collect::<Result<_>>()?;
        let sent = hosts.iter().map(|host| data_packets(host)).collect::<Result<_>>()?;
        let token = spec.in_band.then(|| create_in_band(cluster, spec)).transpose()?;
        let mut ranks = start_ranks(&hosts, spec, timeout, token.as_deref())?;
        let ends: Vec<Ends> = ranks
            .iter_mut()
            .map(|rank| Ends::parse(&rank.line(TIMEOUT)?))
            .collect::<Result<_>>()?;
        if spec.summed && !spec.in_band {
            register(cluster, spec, &ends)?;
        }
        let count = ranks.len();
        for (rank, running) in ranks.iter_mut().enumerate() {
            let (next, last) = (&ends[(rank + 1) % count], &ends[(rank + count - 1) % count]);
            running.send_line(&format!("{} {} {}", next.receiving, last.gid, last.sending))?;
        }
        for rank in &mut ranks {
            let line = rank.line(TIMEOUT)?;
            ensure!(line == "ready", "{line}");
        }
        for rank in &mut ranks {
            rank.send_line("go")?;
        }
        let outcomes = vec![None; count];
        Ok(Self {
            hosts: spec.hosts.clone(),
            packets: spec.packets(),
            ranks,
            outcomes,
            counters,
            sent,
        })
    }

    /// Waits for `moment` for each rank that still runs. Returns whether all are done or have
    /// failed.
    pub fn is_over(&mut self, moment: Duration) -> Result<bool> {
        for (rank, outcome) in
            self.ranks.iter_mut().zip(&mut self.outcomes).filter(|(_, o)| o.is_none())
        {
            match rank.line(moment) {
                Ok(line) => {
                    *outcome = Some(Outcome { report: report(&line)?, error: failed(rank, &line) })
                }
                Err(error) if !rank.is_running() => {
                    *outcome =
                        Some(Outcome { error: Some(format!("{error:#}")), ..Outcome::default() });
                }
                Err(_) => {}
            }
        }
        Ok(self.outcomes.iter().all(Option::is_some))
    }

    /// The outcome of each rank that has ended.
    pub fn outcomes(&self) -> impl Iterator<Item = Option<&Outcome>> {
        self.outcomes.iter().map(Option::as_ref)
    }

    /// Ends the ranks, which must all be done or have failed: then none needs acknowledgements.
    pub fn end(self, cluster: &Cluster) -> Result<Vec<Outcome>> {
        let mut outcomes: Vec<Outcome> = self.outcomes.into_iter().flatten().collect();
        ensure!(outcomes.len() == self.ranks.len(), "ranks are at work");
        for (rank, outcome) in self.ranks.into_iter().zip(&outcomes) {
            let ended = rank.end(TIMEOUT)?;
            ensure!(ended.status.success() || outcome.error.is_some(), "{}", ended.stderr);
        }
        for (i, Outcome { report, .. }) in outcomes.iter_mut().enumerate() {
            let host = cluster.lab().host(self.hosts[i]);
            let after = hw_counters(host)?;
            let moved = after.into_iter().map(|(name, count)| {
                let before = self.counters[i].get(&name).copied().unwrap_or_default();
                (name, count.wrapping_sub(before))
            });
            report.counters.extend(moved);
            report.counters.retain(|_, count| *count > 0);
            report.retransmitted = data_packets(host)?
                .zip(self.sent[i])
                .map(|(after, before)| (after - before).saturating_sub(self.packets));
        }
        Ok(outcomes)
    }
}

fn start_ranks(
    hosts: &[&Host],
    spec: &VerbsRingSpec,
    timeout: Duration,
    token: Option<&str>,
) -> Result<Vec<Running>> {
    let sizes = spec.sizes.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let mut ranks = Vec::new();
    for (rank, host) in hosts.iter().enumerate() {
        let mut command = match host.vm() {
            Some(_) => host.command("verbs-ring"),
            None => host.command(program("udp-ring")?),
        };
        if host.vm().is_none() {
            command.args(["--ip", &host.ip(0).to_string()]);
        }
        for (name, value) in [
            ("--rank", rank as u32),
            ("--ranks", hosts.len() as u32),
            ("--mtu", spec.mtu),
            ("--messages", spec.messages),
            ("--window", VerbsRingSpec::WINDOW),
            ("--timeout", spec.timeout.into()),
            ("--retry", spec.retry.into()),
            ("--give-up-after", timeout.as_secs() as u32),
        ] {
            command.arg(name).arg(value.to_string());
        }
        command.args(["--size", &sizes, "--op", spec.operation.word()]);
        command.args(["--expect", if spec.summed { "sum" } else { "neighbour" }]);
        if let Some(token) = token {
            let vm = host.vm().context("only virtual machines are set up in band here")?;
            vm.put(&program("libnetsum.so")?, "/usr/lib/x86_64-linux-gnu/libnetsum.so.1")?;
            command.args(["--token", token]);
        }
        ranks.push(Running::start(&format!("rank {rank} of the ring"), &mut command)?);
    }
    Ok(ranks)
}

/// The reason why a rank has failed, if this line reports that.
fn failed(rank: &mut Running, line: &str) -> Option<String> {
    let start = Instant::now();
    // The reason arrives on another stream than the line.
    while line.starts_with("failed ")
        && rank.is_running()
        && start.elapsed() < Duration::from_secs(10)
    {
        std::thread::sleep(Duration::from_millis(10));
    }
    line.starts_with("failed ").then(|| format!("{line}: {}", rank.stderr().trim()))
}

/// Name of the ring's job; it stays until [`forget`], with its counters.
pub const JOB: &str = "ring";

/// Removes the ring's job on every box.
pub fn forget(cluster: &Cluster) -> Result<()> {
    let mut boxes = (0..cluster.lab().spec().racks).map(Some).chain([None]);
    boxes.try_for_each(|rack| {
        cluster.netsum_on(rack, &["job", "delete", "--forget-connections", JOB]).map(drop)
    })
}

/// Creates the job; returns the token for its messages.
fn create_in_band(cluster: &Cluster, spec: &VerbsRingSpec) -> Result<String> {
    let numbers = [
        ("--ranks", spec.hosts.len() as u32),
        ("--mtu", spec.mtu),
        ("--message-size", spec.sizes[0]),
        ("--window", VerbsRingSpec::WINDOW),
    ];
    let created = cluster.create(JOB, &numbers, &["--in-band"])?;
    let token = created["in_band"]["token"].as_str();
    Ok(token.with_context(|| format!("no token in {created}"))?.to_owned())
}

fn register(cluster: &Cluster, spec: &VerbsRingSpec, ends: &[Ends]) -> Result<()> {
    let lab = cluster.lab();
    let port = |rank: usize| lab.box_().port(lab.host(spec.hosts[rank]).number());
    if lab.spec().racks == 0 {
        let flows = (0..ends.len()).map(|rank| (rank, port(rank)));
        return register_on(cluster, None, spec, ends, &[], flows);
    }
    // The racks' ranks, one rack after the other.
    let rack_of = |rank: usize| lab.spec().rack(spec.hosts[rank]);
    let groups: Vec<(usize, usize)> = (0..lab.spec().racks)
        .map(|rack| {
            let mut ranks = (0..ends.len()).filter(|&rank| rack_of(rank) == Some(rack));
            let first = ranks.next().with_context(|| format!("no rank in rack {rack}"))?;
            Ok((first, ranks.next_back().unwrap_or(first)))
        })
        .collect::<Result<_>>()?;
    let text = |(first, last): &(usize, usize)| format!("{first}-{last}");
    for (rack, &(first, last)) in groups.iter().enumerate() {
        let before = (first + ends.len() - 1) % ends.len();
        let up = (before, BoxNode::UPLINK.to_owned());
        let flows = (first..=last).map(|rank| (rank, port(rank))).chain([up]);
        let members = text(&(first, last));
        register_on(
            cluster,
            Some(rack),
            spec,
            ends,
            &["--members", &members, "--uplink", BoxNode::UPLINK],
            flows,
        )?;
    }
    let flows =
        groups.iter().enumerate().map(|(rack, &(_, last))| (last, lab.box_().rack_port(rack)));
    let all = groups.iter().map(text).collect::<Vec<_>>().join(",");
    register_on(cluster, None, spec, ends, &["--groups", &all], flows)
}

/// Creates the job on a box, and registers these ranks' connections, which arrive by these ports.
fn register_on(
    cluster: &Cluster,
    rack: Option<usize>,
    spec: &VerbsRingSpec,
    ends: &[Ends],
    members: &[&str],
    flows: impl Iterator<Item = (usize, String)>,
) -> Result<()> {
    let text = |number: u32| number.to_string();
    cluster.netsum_on(
        rack,
        &[
            &["job", "create", JOB, "--ranks", &text(ends.len() as u32)][..],
            &["--mtu", &text(spec.mtu), "--message-size", &text(spec.sizes[0])],
            &["--window", &text(VerbsRingSpec::WINDOW)],
            members,
        ]
        .concat(),
    )?;
    let host = |rank: usize| cluster.lab().host(spec.hosts[rank % ends.len()]);
    for (sender, port) in flows {
        let (end, next) = (&ends[sender], &ends[(sender + 1) % ends.len()]);
        let (src, dst) = (host(sender).ip(0).to_string(), host(sender + 1).ip(0).to_string());
        cluster.netsum_on(
            rack,
            &[
                &[
                    "flow",
                    "add",
                    JOB,
                    "--ring",
                    "0",
                    "--rank",
                    &text(sender as u32),
                    "--port",
                    &port,
                ][..],
                &["--src", &src, "--dst", &dst, "--qpn", &next.qpn, "--psn", &end.psn],
            ]
            .concat(),
        )?;
    }
    Ok(())
}

/// The line that a rank prints: `here GID QPN PSN RKEY ADDRESS QPN PSN`.
#[derive(Debug, PartialEq, Eq)]
struct Ends {
    gid: String,
    /// Number of the queue pair that receives.
    qpn: String,
    /// First PSN of the sending queue pair.
    psn: String,
    /// Data for the previous rank.
    receiving: String,
    /// Data for the next rank, besides the GID.
    sending: String,
}

impl Ends {
    fn parse(line: &str) -> Result<Self> {
        let words: Vec<&str> = line.split(' ').collect();
        let ["here", gid, qpn, _, _, _, _, psn] = *words else {
            anyhow::bail!("a rank says `{line}`")
        };
        Ok(Self {
            gid: gid.into(),
            qpn: qpn.into(),
            psn: psn.into(),
            receiving: words[1..6].join(" "),
            sending: words[6..].join(" "),
        })
    }
}

/// Parses `done messages=M wrong=W ...`, or `failed`.
fn report(line: &str) -> Result<RankReport> {
    let value = |key: &str| {
        let found = line.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        found.and_then(|text| text.parse().ok()).with_context(|| format!("a rank says `{line}`"))
    };
    ensure!(line.starts_with("done ") || line.starts_with("failed "), "a rank says `{line}`");
    let (messages, wrong, micros) = (value("messages")?, value("wrong")?, value("micros")?);
    let counter = |word: &str| {
        let (name, count) = word.split_once('=')?;
        Some((name.to_owned(), count.parse().ok()?))
    };
    let counters = line.split(' ').filter_map(counter).collect();
    Ok(RankReport { messages, wrong, micros, counters, ..RankReport::default() })
}

fn stats(cluster: &Cluster, spec: &VerbsRingSpec) -> String {
    if !spec.summed {
        return "without the box".into();
    }
    let or_error = |text: Result<String>| text.unwrap_or_else(|error| format!("{error:#}"));
    let boxes = (0..cluster.lab().spec().racks).map(Some).chain([None]);
    let of = |rack, command| or_error(cluster.netsum_on(rack, &[command, JOB]));
    boxes.map(|rack| of(rack, "diagnose") + &of(rack, "stats")).collect()
}

/// Counters of a virtual machine's Soft-RoCE device (drivers/infiniband/sw/rxe/rxe_hw_counters.c);
/// empty for other hosts.
pub fn hw_counters(host: &Host) -> Result<BTreeMap<String, u64>> {
    if host.vm().is_none() {
        return Ok(BTreeMap::new());
    }
    let script = "cd /sys/class/infiniband/rxe0/ports/1/hw_counters && grep -H . *";
    let text =
        Running::start("hw_counters", host.command("sh").args(["-c", script]))?.success(TIMEOUT)?;
    let counter = |line: &str| {
        let (name, count) = line.split_once(':')?;
        Some((name.to_owned(), count.parse().ok()?))
    };
    Ok(text.lines().filter_map(counter).collect())
}

fn data_packets(host: &Host) -> Result<Option<u64>> {
    host.fault_link().ok().map(|link| link.data_packets()).transpose()
}

/// A foreign program between two hosts: a server on one, and a client on the other that gets the
/// server's address.
#[derive(Debug)]
pub struct UnknownFlow {
    what: String,
    server: Running,
    client: Running,
}

impl UnknownFlow {
    /// Starts `words` on `server`, and once the server listens on TCP `port`, on `client` with the
    /// server's address appended.
    pub fn start(server: &Host, client: &Host, port: u16, words: &[&str]) -> Result<Self> {
        let command = |host: &Host| {
            let mut command = host.command(words[0]);
            command.args(&words[1..]).args(["-p", &port.to_string()]);
            command
        };
        let what = words.join(" ");
        let running = Running::start(&format!("{what}, server"), &mut command(server))?;
        // LISTEN is state 0A in /proc/net/tcp.
        let listening = format!(
            "until grep -qi ':{port:04x} [0-9a-f:]* 0a ' /proc/net/tcp /proc/net/tcp6; do sleep \
             0.1; done"
        );
        Running::start("wait", server.command("sh").args(["-c", &listening]))?.success(TIMEOUT)?;
        let ip = server.ip(0).to_string();
        let client = Running::start(&format!("{what}, client"), command(client).arg(ip))?;
        Ok(Self { what, server: running, client })
    }

    pub fn what(&self) -> &str {
        &self.what
    }

    /// Waits until both have ended successfully; returns the client's output.
    pub fn end(self, timeout: Duration) -> Result<String> {
        let printed = self.client.success(timeout)?;
        self.server.success(timeout)?;
        Ok(printed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_that_ranks_print_are_parsed() {
        let ends = Ends::parse("here 0a01 17 4289274 621 1400 18 11600857").unwrap();
        assert_eq!(
            (ends.receiving.as_str(), ends.sending.as_str()),
            ("0a01 17 4289274 621 1400", "18 11600857")
        );
        assert_eq!(
            (ends.gid.as_str(), ends.qpn.as_str(), ends.psn.as_str()),
            ("0a01", "17", "11600857")
        );
        assert!(Ends::parse("here 1 2").is_err());
        let done = report("done messages=20 wrong=1 first_wrong=3 micros=77").unwrap();
        assert_eq!(
            (done.messages, done.wrong, done.micros, done.counter("first_wrong")),
            (20, 1, 77, 3)
        );
        assert!(report("done messages=20").is_err());
        assert!(report("ready").is_err());
        assert_eq!(report("failed messages=3 wrong=0 first_wrong=0 micros=7").unwrap().messages, 3);
    }
}
