//! Rows, as text or JSON. Only rank 0 prints them.

use std::time::Duration;

use netsum_worker::{Communicator, Dtype, Mode};
use serde::Serialize;

use crate::args::Options;
use crate::name;

/// One size's result.
#[derive(Clone, Debug)]
pub struct Row {
    pub size: usize,
    pub count: usize,
    pub dtype: Dtype,
    /// Mean of one all-reduce.
    pub time: Duration,
    pub ranks: u32,
    /// `None` if not checked.
    pub wrong: Option<u64>,
    pub mode: Mode,
    /// Packets sent again, at all ranks in all measured all-reduces; `None` if a rank uses an
    /// adapter.
    pub retransmissions: Option<u64>,
}

impl Row {
    /// Bytes reduced in a second, in GB/s.
    fn algbw(&self) -> f64 {
        self.size as f64 / self.time.as_secs_f64() / 1e9
    }

    /// The rate of a link in a ring all-reduce, as nccl-tests define it.
    fn busbw(&self) -> f64 {
        let n = f64::from(self.ranks);
        self.algbw() * 2.0 * (n - 1.0) / n
    }

    fn json(&self) -> Json {
        Json {
            size: self.size,
            count: self.count,
            r#type: self.dtype.name(),
            redop: "sum",
            time_us: self.time.as_secs_f64() * 1e6,
            algbw: self.algbw(),
            busbw: self.busbw(),
            wrong: self.wrong,
            by: self.mode.name(),
            retransmissions: self.retransmissions,
        }
    }
}

#[derive(Serialize)]
struct Json {
    size: usize,
    count: usize,
    r#type: &'static str,
    redop: &'static str,
    time_us: f64,
    algbw: f64,
    busbw: f64,
    wrong: Option<u64>,
    by: &'static str,
    retransmissions: Option<u64>,
}

/// The output of rows.
pub struct Table {
    json: bool,
    print: bool,
    rows: Vec<Json>,
}

impl Table {
    pub fn new(json: bool, print: bool) -> Self {
        Self { json, print, rows: Vec::new() }
    }

    pub fn start(&self, comm: &Communicator, dtype: Dtype, options: &Options) {
        if !self.print || self.json {
            return;
        }
        let layout = comm.layout();
        println!(
            "# netsum-perf all_reduce: {} ranks, {dtype}, {} warm-up and {} measured for each \
             size, {}{}",
            comm.ranks(),
            options.warmup,
            options.iters,
            if options.check { "checked bit by bit" } else { "not checked" },
            match (options.inflight, options.tensors) {
                (1, 1) => String::new(),
                (1, tensors) => format!(", as {tensors} tensors"),
                (inflight, _) => format!(", {inflight} in flight"),
            }
        );
        println!(
            "# messages of {} bytes, window {}, {} ring{}; rank 0 over {}",
            layout.message_size,
            layout.window,
            layout.rings,
            if layout.rings == 1 { "" } else { "s" },
            comm.transport()
        );
        println!("#\n#{}", HEAD[0]);
        println!("#{}", HEAD[1]);
    }

    pub fn row(&mut self, row: &Row) {
        if !self.print {
        } else if self.json {
            self.rows.push(row.json());
        } else {
            println!("{}", text(row));
        }
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

const HEAD: [&str; 2] = [
    "        size         count    type  redop        time   algbw   busbw  #wrong    by  retrans",
    "         (B)    (elements)                      (us)  (GB/s)  (GB/s)",
];

fn text(row: &Row) -> String {
    format!(
        "{:>13} {:>13} {:>7} {:>6} {:>11.2} {:>7.3} {:>7.3} {:>7} {:>5} {:>8}",
        row.size,
        row.count,
        name(row.dtype),
        "sum",
        row.time.as_secs_f64() * 1e6,
        row.algbw(),
        row.busbw(),
        row.wrong.map_or("N/A".to_owned(), |w| w.to_string()),
        row.mode.name(),
        row.retransmissions.map_or("N/A".to_owned(), |r| r.to_string())
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_under_their_heads() {
        let row = Row {
            size: 64 << 20,
            count: 16 << 20,
            dtype: Dtype::F32,
            time: Duration::from_millis(100),
            ranks: 4,
            wrong: Some(0),
            mode: Mode::Box,
            retransmissions: Some(12),
        };
        let line = text(&row);
        assert_eq!(line.len(), HEAD[0].len() + 1, "{line}");
        for word in ["67108864", "16777216", "float", "100000.00", "0.671", "1.007", "box"] {
            assert!(line.contains(word), "{word} in {line}");
        }
    }
}
