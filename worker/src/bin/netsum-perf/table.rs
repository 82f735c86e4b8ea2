//! Rows, as text or JSON. Only rank 0 prints them.

use std::time::Duration;

use netsum_worker::{Communicator, Dtype, Mode};
use serde::Serialize;

use crate::args::Options;
use crate::command::{Collective, Kind};
use crate::data::{Input, RankCall};
use crate::nccl_name;

/// The data of a row, which a barrier does not have.
#[derive(Clone, Debug)]
pub struct Volume {
    /// As nccl-tests define it for the command.
    pub size: usize,
    pub count: usize,
    pub dtype: Dtype,
    pub op: Option<String>,
    pub root: Option<u32>,
    /// Bus bandwidth divided by algorithm bandwidth.
    pub bus_factor: f64,
}

impl Volume {
    /// `None` for a barrier.
    pub fn new<T: Input>(collective: &Collective, call: &RankCall) -> Option<Self> {
        let parts = if collective.has_parts { call.ranks as usize } else { 1 };
        (call.kind != Kind::Barrier).then(|| Self {
            size: call.count * parts * size_of::<T>(),
            count: call.count,
            dtype: T::DTYPE,
            op: call.kind.reduces().then(|| call.op.to_string()),
            root: call.kind.has_root().then_some(call.root),
            bus_factor: (collective.bus_factor)(f64::from(call.ranks)),
        })
    }
}

/// One size's result.
#[derive(Clone, Debug)]
pub struct Row {
    pub volume: Option<Volume>,
    pub mean: Duration,
    pub p50: Duration,
    pub max: Duration,
    /// `None` if not checked.
    pub wrong: Option<u64>,
    pub mode: Mode,
    /// Packets sent again, at all ranks in all measured operations; `None` if a rank uses an
    /// adapter.
    pub retransmissions: Option<u64>,
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

impl Row {
    fn json(&self) -> Json {
        Json {
            volume: self.volume.as_ref().map(|volume| {
                let algbw = volume.size as f64 / self.mean.as_secs_f64() / 1e9;
                JsonVolume {
                    size: volume.size,
                    count: volume.count,
                    r#type: volume.dtype.name(),
                    redop: volume.op.clone(),
                    root: volume.root,
                    algbw,
                    busbw: algbw * volume.bus_factor,
                    wrong: self.wrong,
                }
            }),
            time_us: micros(self.mean),
            p50_us: micros(self.p50),
            max_us: micros(self.max),
            by: self.mode.name(),
            retransmissions: self.retransmissions,
        }
    }

    fn columns(&self) -> Vec<Column> {
        let (time, or_not) = (
            |t| format!("{:.2}", micros(t)),
            |n: Option<u64>| n.map_or("N/A".to_owned(), |n| n.to_string()),
        );
        let mut columns = Vec::new();
        let json = self.json();
        match (&json.volume, &self.volume) {
            (Some(json), Some(volume)) => columns.extend([
                Column("size", "(B)", 12, json.size.to_string()),
                Column("count", "(elements)", 12, json.count.to_string()),
                Column("type", "", 7, nccl_name(volume.dtype).to_owned()),
                Column("redop", "", 5, json.redop.clone().unwrap_or("none".to_owned())),
                Column("root", "", 4, json.root.map_or("-1".to_owned(), |r| r.to_string())),
                Column("time", "(us)", 11, time(self.mean)),
                Column("algbw", "(GB/s)", 10, bandwidth(json.algbw)),
                Column("busbw", "(GB/s)", 10, bandwidth(json.busbw)),
                Column("#wrong", "", 7, or_not(self.wrong)),
            ]),
            _ => columns.extend([
                Column("time", "(us)", 13, time(self.mean)),
                Column("p50", "(us)", 11, time(self.p50)),
                Column("max", "(us)", 11, time(self.max)),
            ]),
        }
        columns.push(Column("by", "", 4, self.mode.name().to_owned()));
        columns.push(Column("retrans", "", 7, or_not(self.retransmissions)));
        columns
    }
}

/// GB/s with three significant digits or more, and at least three places.
fn bandwidth(rate: f64) -> String {
    let places = if rate > 0.0 { (2.0 - rate.log10().floor()).clamp(3.0, 9.0) } else { 3.0 };
    format!("{rate:.0$}", places as usize)
}

/// A column's head, unit, width and value.
struct Column(&'static str, &'static str, usize, String);

/// A line of the table, from one text of each column.
fn line<'a>(first: char, columns: &'a [Column], text: impl Fn(&'a Column) -> &'a str) -> String {
    let texts = columns.iter().map(|column| format!(" {:>1$}", text(column), column.2));
    let line: String = std::iter::once(first.to_string()).chain(texts).collect();
    line.trim_end().to_owned()
}

#[derive(Serialize)]
struct Json {
    #[serde(flatten)]
    volume: Option<JsonVolume>,
    time_us: f64,
    p50_us: f64,
    max_us: f64,
    by: &'static str,
    retransmissions: Option<u64>,
}

#[derive(Serialize)]
struct JsonVolume {
    size: usize,
    count: usize,
    r#type: &'static str,
    redop: Option<String>,
    root: Option<u32>,
    algbw: f64,
    busbw: f64,
    wrong: Option<u64>,
}

/// The output of rows.
pub struct Table {
    json: bool,
    print: bool,
    rows: Vec<Json>,
    has_head: bool,
}

impl Table {
    pub fn new(json: bool, print: bool) -> Self {
        Self { json, print, rows: Vec::new(), has_head: false }
    }

    pub fn start(&self, comm: &Communicator, collective: &Collective, options: &Options) {
        if !self.print || self.json {
            return;
        }
        let (layout, rooted) = (comm.layout(), collective.kind.has_root());
        println!(
            "# netsum-perf {}: {} ranks, {}{} warm-up and {} measured{}{}",
            collective.name,
            comm.ranks(),
            if rooted { format!("root {}, ", options.root) } else { String::new() },
            options.warmup,
            options.iters,
            match (collective.kind, options.check) {
                (Kind::Barrier, _) => "",
                (_, true) => " for each size, checked bit by bit",
                (_, false) => " for each size, not checked",
            },
            match (options.inflight, options.tensors) {
                (1, 1) => String::new(),
                (1, tensors) => format!(", as {tensors} tensors"),
                (inflight, _) => format!(", {inflight} in flight"),
            }
        );
        println!(
            "# messages of {} bytes, window {}, {} ring{}{}; rank 0 over {}\n#",
            layout.message_size,
            layout.window,
            layout.rings,
            if layout.rings == 1 { "" } else { "s" },
            if comm.is_sealed() { ", sealed" } else { "" },
            comm.transport()
        );
    }

    pub fn row(&mut self, row: &Row) {
        if !self.print {
            return;
        }
        if self.json {
            self.rows.push(row.json());
            return;
        }
        let columns = row.columns();
        if !std::mem::replace(&mut self.has_head, true) {
            println!("{}\n{}", line('#', &columns, |c| c.0), line('#', &columns, |c| c.1));
        }
        println!("{}", line(' ', &columns, |c| &c.3));
    }

    pub fn end(&self, comm: &Communicator, wrong: u64) {
        if !self.print {
        } else if self.json {
            match serde_json::to_string_pretty(&self.rows) {
                Ok(text) => println!("{text}"),
                Err(e) => eprintln!("netsum-perf: {e}"),
            }
        } else {
            let s = comm.statistics();
            println!("# wrong elements: {wrong}; sums verified at rank 0: {}", s.verified);
        }
    }
}

#[cfg(test)]
mod tests {
    use netsum_worker::{Layout, Op};

    use super::*;
    use crate::command::COMMANDS;

    /// A row of 64 MiB of floats in 100 ms, at 4 ranks.
    fn row(name: &str) -> Row {
        let collective = COMMANDS.iter().find(|c| c.name == name).unwrap();
        let parts = if collective.has_parts { 4 } else { 1 };
        let call = RankCall {
            kind: collective.kind,
            rank: 0,
            ranks: 4,
            op: Op::Sum,
            root: 2,
            layout: Layout { message_size: 4096, window: 1, rings: 1 },
            width: None,
            count: (16 << 20) / parts,
        };
        let time = Duration::from_millis(100);
        Row {
            volume: Volume::new::<f32>(collective, &call),
            mean: time,
            p50: time,
            max: time * 2,
            wrong: Some(0),
            mode: Mode::Box,
            retransmissions: Some(12),
        }
    }

    #[test]
    fn columns_stand_under_their_heads() {
        for (name, words) in [
            ("all_reduce", &["67108864", "16777216", "float", "sum", "-1", "0.671", "1.007"][..]),
            ("reduce", &["67108864", "16777216", "float", "sum", "2", "0.671", "0.671"]),
            ("broadcast", &["67108864", "16777216", "float", "none", "2", "0.671", "0.671"]),
            ("all_gather", &["67108864", "4194304", "float", "none", "-1", "0.671", "0.503"]),
            ("reduce_scatter", &["67108864", "4194304", "float", "sum", "-1", "0.671", "0.503"]),
            ("alltoall", &["67108864", "4194304", "float", "none", "-1", "0.671", "0.503"]),
            ("barrier", &["100000.00", "100000.00", "200000.00"]),
        ] {
            let columns = row(name).columns();
            let (head, text) = (line('#', &columns, |c| c.0), line(' ', &columns, |c| &c.3));
            assert_eq!(head.len(), text.len(), "{head}\n{text}");
            let expected = words.iter().copied().chain(["100000.00", "0", "box", "12"]);
            for word in expected.filter(|w| name != "barrier" || *w != "0") {
                assert!(text.split_whitespace().any(|w| w == word), "{word} in {text}");
            }
        }
    }

    #[test]
    fn low_bandwidths_keep_three_digits() {
        for (rate, text) in [
            (0.0, "0.000"),
            (12.34567, "12.346"),
            (0.671_088, "0.671"),
            (0.012_345, "0.0123"),
            (0.000_080_04, "0.0000800"),
        ] {
            assert_eq!(bandwidth(rate), text);
        }
    }

    #[test]
    fn json_has_null_where_a_command_has_no_value() {
        let json = |name| serde_json::to_value(row(name).json()).unwrap();
        let (gather, reduce, barrier) = (json("all_gather"), json("reduce"), json("barrier"));
        assert_eq!((&gather["size"], &gather["count"]), (&(64 << 20).into(), &(4 << 20).into()));
        assert!(gather["redop"].is_null() && gather["root"].is_null(), "{gather}");
        assert_eq!((&reduce["redop"], &reduce["root"]), (&"sum".into(), &2.into()));
        assert!(barrier.get("size").is_none(), "{barrier}");
        assert_eq!(barrier["max_us"], 200_000.0);
    }
}
