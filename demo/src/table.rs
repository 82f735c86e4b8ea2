//! The table that the demo ends with.

use std::fmt::Write;

use crate::report::{ENOUGH_EPOCHS, HEADERS, LEAST_ACCURACY, Summary, Trained, grouped};

impl Summary {
    pub fn table(&self) -> String {
        let mut out = String::new();
        for (what, value, remark) in self.rows() {
            let _ = writeln!(out, "  {what:<22}{value:>17}   {remark}");
        }
        out.push('\n');
        self.links(&mut out);
        out
    }

    fn rows(&self) -> Vec<(&'static str, String, String)> {
        let first = &self.ranks[0];
        let sum = |f: fn(&Trained) -> u64| self.ranks.iter().map(f).sum::<u64>();
        let same = |same| if same { "bit-identical" } else { "DIFFERENT" };
        let judged = match first.accuracy > LEAST_ACCURACY {
            true => format!("above {:.0} %", 100.0 * LEAST_ACCURACY),
            false if self.epochs < ENOUGH_EPOCHS => {
                format!("epochs: {} are few, {ENOUGH_EPOCHS} are enough", self.epochs)
            }
            false => "TOO LOW".to_owned(),
        };
        let losses = match self.lost {
            Some(lost) => {
                format!("packets; {} were lost, {} % each way at each host", grouped(lost), 100.0 * self.drop)
            }
            None => "packets; none was made to be lost".to_owned(),
        };
        let row = |what, value, remark| (what, value, remark);
        let mut rows = vec![
            row("test accuracy", format!("{:.1} %", 100.0 * first.accuracy), judged),
            row(
                "weights, hosts",
                first.fingerprint.clone(),
                format!("{} on all {}", same(self.ranks_identical), self.hosts),
            ),
            row(
                "weights, one process",
                self.reference.fingerprint.clone(),
                format!("{} to the hosts'", same(self.reference_identical)),
            ),
            row("summed by", self.summed_by().to_owned(), self.work_of_the_box()),
            row("steps", grouped(first.steps as u64), format!("in {} epochs", self.epochs)),
            row(
                "all-reduces",
                grouped(sum(|r| r.all_reduces)),
                format!("{} a host, of {} floats", grouped(first.all_reduces), grouped(self.floats as u64)),
            ),
            row(
                "sums verified",
                grouped(sum(|r| r.sums_verified)),
                "messages by their check lanes, all right".to_owned(),
            ),
            row("sent again", grouped(sum(|r| r.retransmissions)), losses),
            row(
                "time",
                format!("{:.2} s", first.seconds),
                format!(
                    "{:.2} ms a step; one process {:.2} s",
                    1e3 * first.seconds / first.steps as f64,
                    self.reference.seconds
                ),
            ),
        ];
        if let Some(ring) = &self.ring {
            let remark = format!("weights {} to one process's", same(ring.identical));
            rows.push(row("time with a ring", format!("{:.2} s", ring.seconds), remark));
        }
        rows
    }

    fn work_of_the_box(&self) -> String {
        let count = |name: &str| self.counters.get(name).copied().unwrap_or(0);
        let work = format!(
            "{} packets of gradients became {} of sums",
            grouped(count("fragments")),
            grouped(count("released"))
        );
        match count("replay") {
            0 => work,
            replays => format!("{work}, {} sent again", grouped(replays)),
        }
    }

    fn links(&self, out: &mut String) {
        let computed = self.ring_computed();
        let ring = self.ring.as_ref().map(|r| &r.links);
        let column = |heading: &str| format!("{heading:>16}");
        let mut line = format!("  {:<16}{}{}", "bytes", column("sent"), column("received"));
        if ring.is_some() {
            line += &(column("ring[1], sent") + &column("received"));
        }
        let _ = writeln!(out, "{line}{}{:>9}", column("ring at best[2]"), "saved");
        for (host, link) in self.links.iter().enumerate() {
            let mut line = format!("  {:<16}", format!("link of host {host}"));
            line += &(column(&grouped(link.sent)) + &column(&grouped(link.received)));
            // Against what was measured in the same way, if it was. A ring at best loses nothing.
            let mut other = (self.drop == 0.0).then_some(2 * computed);
            if let Some(ring) = ring.and_then(|links| links.get(host)) {
                other = Some(ring.sent + ring.received);
                line += &(column(&grouped(ring.sent)) + &column(&grouped(ring.received)));
            }
            let saved = other.map_or(String::new(), |other| {
                let saved = 100.0 * (1.0 - (link.sent + link.received) as f64 / other.max(1) as f64);
                // As an integer there is no "-0".
                format!("{:>7} %", saved.round() as i64)
            });
            let _ = writeln!(out, "{line}{}{saved}", column(&grouped(computed)));
        }
        out.push('\n');
        if ring.is_some() {
            let _ =
                writeln!(out, "  [1] the same training again, with the sums by netsum's ring of the hosts");
        }
        let _ = writeln!(
            out,
            "  [2] each way: steps x 2(N-1) messages of floats/N floats, N = {}, in packets of {} bytes with\n      \
             {HEADERS} bytes of headers; no acknowledgements, which the measured numbers have",
            self.hosts, self.mtu
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::report::tests::summary;
    use crate::report::{LinkBytes, Ring};

    #[test]
    fn the_table_shows_what_was_promised() {
        let mut s = summary();
        let table = s.table();
        for part in [
            "97.5 %   above 95 %",
            "bit-identical on all 4",
            "bit-identical to the hosts'",
            "1 760   440 a host, of 9 611 floats",
            "5 280   messages",
            "68 640 packets of gradients became 17 160 of sums",
            "18 500 000      18 600 000",
            "3.41 ms a step",
        ] {
            assert!(table.contains(part), "no `{part}` in\n{table}");
        }
        s.reference_identical = false;
        assert!(s.table().contains("DIFFERENT to the hosts'"));
    }

    #[test]
    fn savings_are_against_the_measured_ring_if_there_is_one() {
        let mut s = summary();
        assert!(s.table().contains(" 31 %"), "{}", s.table());
        s.ring = Some(Ring {
            links: vec![LinkBytes { sent: 37_000_000, received: 37_200_000 }; 4],
            seconds: 2.0,
            identical: true,
        });
        assert!(s.table().contains("37 000 000      37 200 000"), "{}", s.table());
        assert!(s.table().contains(" 50 %"), "{}", s.table());
    }
}
