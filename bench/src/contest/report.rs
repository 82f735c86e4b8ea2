//! Rows of figures, as a table, as JSON and as a picture.

use anyhow::Result;
use serde::{Serialize, Serializer};

use super::collective::Collective;
use super::link::{Link, Uplinks, Wire};
use super::{Round, median};
use crate::plot::{self, Height, Panel};

/// A CPU that is busy for this part of a time is its limit, not the links.
const BUSY: f64 = 0.95;

/// One contestant's result with one size over links of one rate.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub name: String,
    /// The best of its settings.
    pub setting: String,
    pub hosts: u32,
    pub ranks_per_host: u32,
    #[serde(serialize_with = "as_text")]
    pub rate: Link,
    pub link_mtu: u32,
    /// The fraction of packets that each link loses, each way.
    pub loss: f64,
    /// Racks, and the rate of their hosts divided by that of their uplinks; 0 with one box.
    pub racks: u32,
    pub oversubscribed: u32,
    pub collective: Collective,
    /// Bytes of each rank's vector, or of all ranks' parts of it.
    pub bytes: usize,
    /// The time of each round, which is the median of its all-reduces.
    pub rounds_ms: Vec<f64>,
    /// Their median.
    pub median_ms: f64,
    pub min_ms: f64,
    pub max_ms: f64,
    /// The vector's bits divided by the median, in Gb/s.
    pub algbw_gbps: f64,
    /// The least time for a sum in the network, in which every host sends and receives the vector
    /// once without headers, divided by the median.
    pub share_of_limit: Option<f64>,
    /// Busy CPUs of the machine: hosts, box and everything else.
    pub cores_busy: f64,
    /// CPU seconds for 10^9 bytes of vector.
    pub cpu_seconds_per_gb: f64,
    /// Whether a CPU was busy nearly all the time.
    pub cpu_bound: bool,
    /// Packets sent again, if the contestant counts them.
    pub retransmissions: u64,
    /// Bytes on a rack's uplink divided by those of the vector; the mean of all racks.
    pub up: Option<f64>,
    /// All-reduces, by rank, that netsum's ring did instead of the box.
    pub astray: u64,
}

fn as_text<S: Serializer>(link: &Link, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(link)
}

impl Row {
    /// Makes a row from at least one round.
    pub fn new(
        name: &str,
        setting: String,
        hosts: u32,
        wire: Wire,
        collective: Collective,
        bytes: usize,
        rounds: &[Round],
    ) -> Self {
        let rounds_ms: Vec<f64> = rounds.iter().map(Round::millis).collect();
        let median_ms = median(rounds_ms.clone());
        let busy: f64 = rounds.iter().map(|r| r.answer.busy).sum();
        let seconds = rounds.iter().flat_map(|r| &r.answer.micros).sum::<f64>() / 1e6;
        let vectors: usize = rounds.iter().map(|r| r.answer.micros.len()).sum();
        let up: u64 = rounds.iter().map(|r| r.cost.up).sum();
        let busiest: f64 = rounds.iter().map(|r| r.answer.busiest).sum();
        Self {
            name: name.to_owned(),
            setting,
            hosts,
            ranks_per_host: wire.ranks_per_host,
            rate: wire.rate,
            link_mtu: wire.mtu,
            loss: wire.loss,
            racks: wire.uplinks.map_or(0, |uplinks| uplinks.racks),
            oversubscribed: wire.uplinks.map_or(0, |uplinks| uplinks.oversubscribed),
            collective,
            bytes,
            median_ms,
            min_ms: rounds_ms.iter().copied().fold(f64::INFINITY, f64::min),
            max_ms: rounds_ms.iter().copied().fold(0.0, f64::max),
            rounds_ms,
            algbw_gbps: bytes as f64 * 8.0 / median_ms / 1e6,
            share_of_limit: wire
                .least(bytes)
                .filter(|_| collective == Collective::AllReduce)
                .map(|least| least * 1e3 / median_ms),
            cores_busy: busy / seconds,
            cpu_seconds_per_gb: busy / seconds * median_ms / 1e3 / (bytes as f64 / 1e9),
            cpu_bound: busiest / seconds > BUSY,
            retransmissions: rounds.iter().map(|r| r.answer.retransmissions).sum(),
            up: wire
                .uplinks
                .map(|uplinks| up as f64 / f64::from(uplinks.racks) / (vectors * bytes) as f64),
            astray: rounds.iter().map(|r| r.answer.astray).sum(),
        }
    }

    fn wire(&self) -> Wire {
        let rate = self.rate.0.filter(|_| self.racks > 0);
        let uplinks =
            rate.map(|rate| Uplinks::new(self.racks, self.hosts, rate, self.oversubscribed));
        let Self { rate, link_mtu: mtu, loss, ranks_per_host, .. } = *self;
        Wire { rate, mtu, loss, uplinks, ranks_per_host }
    }

    /// The headings of [`Row::text`].
    pub fn titles() -> String {
        format!(
            "{:22} {:>10} {:>21} {:>7} {:>6} {:>5} {:3} {:>6} {:>7}  setting",
            "", "median ms", "min..max", "Gb/s", "limit", "cores", "", "s/GB", "retrans"
        )
    }

    /// A line of a table.
    pub fn text(&self) -> String {
        let spread = format!("{}..{}", millis(self.min_ms), millis(self.max_ms));
        let share =
            self.share_of_limit.map_or("-".to_owned(), |share| format!("{:.0} %", share * 100.0));
        let cpu = if self.cpu_bound { "cpu" } else { "" };
        let astray =
            if self.astray > 0 { format!("{} by the ring", self.astray) } else { String::new() };
        let up = self.up.map_or(String::new(), |up| format!("  {up:.2} x the vector goes up"));
        let line = format!(
            "{:22} {:>10} {spread:>21} {:>7.3} {share:>6} {:>5.2} {cpu:3} {:>6.1} \
             {:>7}  {}{astray}{up}",
            self.name,
            millis(self.median_ms),
            self.algbw_gbps,
            self.cores_busy,
            self.cpu_seconds_per_gb,
            self.retransmissions,
            self.setting
        );
        line.trim_end().to_owned()
    }
}

/// Milliseconds with the significant digits.
pub fn millis(time: f64) -> String {
    if time < 10.0 { format!("{time:.3}") } else { format!("{time:.1}") }
}

/// Rows of one number of hosts and one rate, as a table for each size.
pub fn tables(rows: &[Row]) -> String {
    let mut text = String::new();
    for group in rows.chunk_by(|a, b| a.bytes == b.bytes) {
        let Row { hosts, bytes, .. } = group[0];
        let wire = group[0].wire();
        let least = wire.least(bytes).map(|least| format!(", {:.1} ms at least", least * 1e3));
        text += &format!("\n{hosts} hosts, {wire}, {bytes} B{}\n", least.unwrap_or_default());
        text += &format!("{}\n", Row::titles());
        group.iter().for_each(|row| text += &format!("{}\n", row.text()));
    }
    text
}

/// Median times of every collective in one table, a column for each contestant; the last column is
/// the last contestant's time divided by the first one's.
pub fn collectives(rows: &[Row]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        if !names.contains(&&*row.name) {
            names.push(&row.name);
        }
    }
    let mut text = format!("\n{:5} {:14} {:10} {:>9}", "hosts", "collective", "rate", "bytes");
    names.iter().for_each(|name| text += &format!(" {:>14}", format!("{name} ms")));
    let (first, last) = (names.first(), names.last());
    text += &format!(" {:>8}\n", "ratio");
    let key = |row: &Row| (row.hosts, row.wire(), row.collective, row.bytes);
    for group in rows.chunk_by(|a, b| key(a) == key(b)) {
        let Row { hosts, rate, collective, bytes, .. } = &group[0];
        text += &format!("{hosts:5} {collective:14} {:10} {bytes:>9}", rate.to_string());
        let time = |name: Option<&&str>| {
            group.iter().find(|row| name.is_some_and(|n| row.name == *n)).map(|row| row.median_ms)
        };
        for name in &names {
            let time = time(Some(name)).map_or("-".to_owned(), millis);
            text += &format!(" {time:>14}");
        }
        let ratio = time(last).zip(time(first)).map(|(last, first)| last / first);
        text += &format!(" {:>8}\n", ratio.map_or("-".to_owned(), |r| format!("{r:.2}")));
    }
    text
}

/// A picture: for each number of hosts, link MTU and loss, the share of the limit over the rate;
/// with several sizes, or without a rate, algorithm bandwidth over size for each rate.
///
/// # Errors
/// If it cannot be drawn.
pub fn picture(rows: &[Row]) -> Result<String> {
    if rows.iter().any(|row| row.racks > 0) {
        return plot::picture(&over_racks(rows), 2, (700, 460));
    }
    let mut panels: Vec<Panel> = Vec::new();
    for rows in rows.chunk_by(|a, b| (a.hosts, a.link_mtu, a.loss) == (b.hosts, b.link_mtu, b.loss))
    {
        let Row { hosts, link_mtu, loss, .. } = rows[0];
        let lost = if loss > 0.0 { format!(", {} % lost", loss * 100.0) } else { String::new() };
        let by_rate: Vec<&[Row]> = rows.chunk_by(|a, b| a.rate == b.rate).collect();
        let one_size = |rows: &&[Row]| rows.iter().all(|r| r.bytes == rows[0].bytes);
        if by_rate.len() > 1 && by_rate.iter().all(one_size) {
            // Bits per microsecond.
            let mbit = |row: &&Row| row.rate.0.map_or(f64::NAN, |rate| 8e-6 / rate.seconds(1));
            let shaped: Vec<&Row> = rows.iter().filter(|r| r.rate.0.is_some()).collect();
            panels.push(Panel {
                title: format!(
                    "{hosts} hosts, link MTU {link_mtu}{lost}: share of the links' limit"
                ),
                x: "rate of each link, Mb/s".to_owned(),
                y: "least time / time, %".to_owned(),
                height: Height::Linear,
                x_is_bytes: false,
                series: plot::series(
                    &shaped,
                    |r| r.name.clone(),
                    |r| (mbit(r), r.share_of_limit.unwrap_or(f64::NAN) * 100.0),
                ),
            });
        } else {
            panels.extend(by_rate.into_iter().map(|rows| Panel {
                title: format!("{hosts} hosts, {}", rows[0].wire()),
                x: "bytes of each rank's vector".to_owned(),
                y: "algbw, Gb/s".to_owned(),
                height: Height::Log,
                x_is_bytes: true,
                series: plot::series(rows, |r| r.name.clone(), |r| (r.bytes as f64, r.algbw_gbps)),
            }));
        }
    }
    // Points at one x are not curves; they are drawn only if there is nothing else.
    let is_curve = |panel: &Panel| {
        let mut across = panel.series.iter().flat_map(|series| &series.points).map(|point| point.0);
        across.next().is_some_and(|first| across.any(|other| other != first))
    };
    if panels.iter().any(is_curve) {
        panels.retain(is_curve);
    }
    plot::picture(&panels, 2, (700, 460))
}

/// For each number of racks, the time over the oversubscription of their uplinks.
fn over_racks(rows: &[Row]) -> Vec<Panel> {
    let panel = |rows: &[Row]| {
        let all: Vec<&Row> = rows.iter().collect();
        Panel {
            title: format!("{} racks, {} hosts", rows[0].racks, rows[0].hosts),
            x: "what a rack's hosts send / what its uplink carries".to_owned(),
            y: "ms".to_owned(),
            height: Height::Linear,
            x_is_bytes: false,
            series: plot::series(
                &all,
                |r| r.name.clone(),
                |r| (f64::from(r.oversubscribed), r.median_ms),
            ),
        }
    };
    rows.chunk_by(|a, b| (a.racks, a.hosts, a.bytes) == (b.racks, b.hosts, b.bytes))
        .map(panel)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::Answer;
    use super::super::cost::Cost;
    use super::*;

    fn round(micros: &[f64]) -> Round {
        let busy = micros.iter().sum::<f64>() / 1e6 * 0.5;
        let answer = Answer {
            micros: micros.to_vec(),
            busy,
            busiest: busy,
            cpu: busy,
            wrong: 0,
            retransmissions: 1,
            astray: 0,
        };
        Round { answer, cost: Cost::default() }
    }

    fn wire(rate: &str) -> Wire {
        Wire { rate: rate.parse().unwrap(), mtu: 1500, loss: 0.0, uplinks: None, ranks_per_host: 1 }
    }

    fn row(name: &str, rate: &str, bytes: usize) -> Row {
        let rounds = [round(&[200e3, 300e3, 700e3]), round(&[100e3]), round(&[250e3])];
        let collective = Collective::AllReduce;
        Row::new(name, "ring".to_owned(), 4, wire(rate), collective, bytes, &rounds)
    }

    #[test]
    fn a_row_has_the_median_of_rounds_and_their_spread() {
        let slow = row("x", "100mbit", 2_500_000);
        assert_eq!((slow.median_ms, slow.min_ms, slow.max_ms), (250.0, 100.0, 300.0));
        // 20 Mbit take 200 ms.
        assert!(
            (slow.share_of_limit.unwrap() - 0.8).abs() < 1e-9
                && (slow.algbw_gbps - 0.08).abs() < 1e-9
        );
        assert_eq!((slow.retransmissions, slow.cpu_bound), (3, false));
        assert!((slow.cores_busy - 0.5).abs() < 1e-9);
        assert_eq!(row("x", "none", 1000).share_of_limit, None);
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!((millis(0.0712), millis(1342.17)), ("0.071".to_owned(), "1342.2".to_owned()));
    }

    #[test]
    fn a_row_is_marked_if_a_cpu_was_busy_all_the_time() {
        let mut busy = round(&[1e6]);
        busy.answer.busiest = 0.97;
        let row =
            Row::new("x", String::new(), 4, wire("1gbit"), Collective::AllReduce, 1000, &[busy]);
        assert!(row.cpu_bound && row.text().contains(" cpu "), "{}", row.text());
    }

    #[test]
    fn a_table_has_the_limit_of_the_links() {
        let table = tables(&[row("one", "100mbit", 2_500_000), row("two", "100mbit", 2_500_000)]);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[1], "4 hosts, rate 100mbit, link MTU 1500, 2500000 B, 200.0 ms at least");
        assert_eq!(lines.len(), 5);
        assert!(
            lines[3].starts_with("one ")
                && lines[3].contains(" 80 % ")
                && lines[3].ends_with("  ring")
        );
        assert_eq!(lines[2].find("setting"), lines[3].find("ring"));
    }

    #[test]
    fn all_collectives_are_in_one_table() {
        let with = |name, collective, bytes| Row { collective, ..row(name, "1gbit", bytes) };
        let mut fast = with("netsum", Collective::Broadcast, 4096);
        fast.median_ms = 100.0;
        let slow = with("gloo", Collective::Broadcast, 4096);
        let table = collectives(&[fast, slow, with("netsum", Collective::ReduceScatter, 4096)]);
        let lines: Vec<Vec<&str>> =
            table.trim().lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["4", "broadcast", "1gbit", "4096", "100.0", "250.0", "2.50"]);
        assert_eq!(lines[2], ["4", "reduce_scatter", "1gbit", "4096", "250.0", "-", "-"]);
    }

    #[test]
    fn racks_have_the_uplinks_limit_and_a_panel_for_each_number() {
        let rate: Link = "100mbit".parse().unwrap();
        let row = |racks, oversubscribed| {
            let uplinks = Uplinks::new(racks, 8, rate.0.unwrap(), oversubscribed);
            let wire = Wire { uplinks: Some(uplinks), ..wire("100mbit") };
            let mut round = round(&[500e3]);
            round.cost.up = u64::from(racks) * 2_750_000;
            Row::new("one", String::new(), 8, wire, Collective::AllReduce, 2_500_000, &[round])
        };
        let rows = [row(2, 1), row(2, 8), row(4, 1)];
        // 400mbit and 50mbit: 20 Mbit take 200 ms on a host's link, and 400 ms on the second
        // uplink.
        assert_eq!(
            rows[0].wire().to_string(),
            "rate 100mbit, link MTU 1500, 2 racks, uplinks 400mbit (1:1)"
        );
        let shares = [&rows[0], &rows[1]].map(|r| (r.share_of_limit.unwrap() * 100.0).round());
        assert_eq!((shares, rows[0].up), ([40.0, 80.0], Some(1.1)));
        assert!(rows[1].text().ends_with("1.10 x the vector goes up"), "{}", rows[1].text());
        let svg = picture(&rows).unwrap();
        assert!(svg.contains("2 racks, 8 hosts") && svg.contains("4 racks, 8 hosts"), "{svg}");
    }

    #[test]
    fn a_picture_is_over_rates_or_over_sizes() {
        let rates = [
            row("one", "100mbit", 1 << 20),
            row("one", "1gbit", 1 << 20),
            row("one", "none", 1 << 20),
        ];
        let svg = picture(&rates).unwrap();
        for text in ["4 hosts, link MTU 1500: share of", ">\none\n<", "Mb/s"] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        assert!(picture(&rates[..1]).unwrap().contains("4 hosts, rate 100mbit"));
        let sizes = [row("two", "none", 1024), row("two", "none", 1 << 20)];
        let svg = picture(&sizes).unwrap();
        for text in ["4 hosts, rate none", ">\ntwo\n<", "1 MiB"] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
    }
}
