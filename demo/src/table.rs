//! The demo's final table.

use std::fmt::Write;

use crate::failure::{Failure, Moment};
use crate::report::{ENOUGH_EPOCHS, HEADERS, LEAST_ACCURACY, LinkBytes, Summary, Trained, grouped};

impl Summary {
    pub fn table(&self) -> String {
        let mut out = String::new();
        for (what, value, remark) in self.rows() {
            let _ = writeln!(out, "  {what:<22}{value:>17}   {remark}");
        }
        out.push('\n');
        if let Some(failure) = &self.failure {
            moments(&mut out, failure);
        }
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
                format!("not judged: {} epochs; {ENOUGH_EPOCHS} are enough", self.epochs)
            }
            false => "TOO LOW".to_owned(),
        };
        let losses = match self.lost {
            Some(lost) => {
                format!(
                    "packets; {} were lost, {} % each way at each host",
                    grouped(lost),
                    100.0 * self.drop
                )
            }
            None => "packets; losses were not asked for".to_owned(),
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
                format!(
                    "{} a host, of {} floats",
                    grouped(first.all_reduces),
                    grouped(self.floats as u64)
                ),
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
        if let Some(sealed) = &self.sealed {
            let remark = format!(
                "the network can neither read nor forge; weights {} to one process's",
                same(sealed.identical)
            );
            rows.push(row("time sealed", format!("{:.2} s", sealed.seconds), remark));
        }
        if let Some(ring) = &self.ring {
            let remark = format!("weights {} to one process's", same(ring.identical));
            rows.push(row("time with a ring", format!("{:.2} s", ring.seconds), remark));
        }
        rows
    }

    fn work_of_the_box(&self) -> String {
        if self.failure.is_some() {
            let (by_box, all) = self.by_box();
            return format!("{} of the {} all-reduces by the boxes", grouped(by_box), grouped(all));
        }
        let count = |name: &str| self.counters.get(name).copied().unwrap_or(0);
        let work = format!(
            "{} packets of gradients became {} of sums",
            grouped(count("contributions")),
            grouped(count("released"))
        );
        match count("replays") {
            0 => work,
            replays => format!("{work}, {} sent again", grouped(replays)),
        }
    }

    /// Racks and hosts, with the bytes on each link.
    fn tree(&self, out: &mut String) {
        if self.uplinks.is_empty() {
            return;
        }
        let bytes = |link: &LinkBytes| {
            format!("{} up, {} down", grouped(link.sent), grouped(link.received))
        };
        let (racks, hosts) = (self.uplinks.len(), self.links.len());
        let branch = |last| if last { '└' } else { '├' };
        let _ = writeln!(out, "  spine");
        for (rack, uplink) in self.uplinks.iter().enumerate() {
            let _ =
                writeln!(out, "  {}─ rack {rack}    {}", branch(rack + 1 == racks), bytes(uplink));
            let of_rack: Vec<usize> =
                (0..hosts).filter(|host| host * racks / hosts == rack).collect();
            for &host in &of_rack {
                let trunk = if rack + 1 == racks { ' ' } else { '│' };
                let last = Some(&host) == of_rack.last();
                let _ = writeln!(
                    out,
                    "  {trunk}  {}─ host {host}  {}",
                    branch(last),
                    bytes(&self.links[host])
                );
            }
        }
        out.push('\n');
    }

    fn links(&self, out: &mut String) {
        let computed = self.ring_computed();
        let of_all = |links: &[LinkBytes], uplinks: &[LinkBytes]| [links, uplinks].concat();
        let ring = self.ring.as_ref().map(|r| of_all(&r.links, &r.uplinks));
        let column = |heading: &str| format!("{heading:>16}");
        let mut line = format!("  {:<16}{}{}", "bytes", column("sent"), column("received"));
        if ring.is_some() {
            line += &(column("ring[1], sent") + &column("received"));
        }
        let _ = writeln!(out, "{line}{}{:>9}", column("ring at best[2]"), "saved");
        for (i, link) in of_all(&self.links, &self.uplinks).iter().enumerate() {
            let name = match i.checked_sub(self.links.len()) {
                None => format!("link of host {i}"),
                Some(rack) => format!("uplink of rack {rack}"),
            };
            let mut line = format!("  {name:<16}");
            line += &(column(&grouped(link.sent)) + &column(&grouped(link.received)));
            // Compared with the measured ring, if there is one. The ring at best has no losses.
            let mut other = (self.drop == 0.0).then_some(2 * computed);
            if let Some(ring) = ring.as_ref().and_then(|links| links.get(i)) {
                other = Some(ring.sent + ring.received);
                line += &(column(&grouped(ring.sent)) + &column(&grouped(ring.received)));
            }
            let saved = other.map_or(String::new(), |other| {
                let saved =
                    100.0 * (1.0 - (link.sent + link.received) as f64 / other.max(1) as f64);
                // An integer, to avoid "-0".
                format!("{:>7} %", saved.round() as i64)
            });
            let _ = writeln!(out, "{line}{}{saved}", column(&grouped(computed)));
        }
        out.push('\n');
        self.tree(out);
        if ring.is_some() {
            let _ =
                writeln!(out, "  [1] the same training again, with the sums by the hosts' ring");
        }
        let _ = writeln!(
            out,
            "  [2] each way: steps x 2(N-1) messages of floats/N floats, N = {}, in packets of {} \
             bytes with\n      {HEADERS} bytes of headers; no acknowledgements, which the measured \
             numbers have",
            self.hosts, self.mtu
        );
    }
}

/// The events of the training, with their times.
fn moments(out: &mut String, failure: &Failure) {
    for Moment { at, what } in failure.moments() {
        let step = failure.steps.iter().filter(|step| step.at < at).count();
        let _ = writeln!(out, "  {at:>6.1} s   step {step:>5}   {what}");
    }
    let usual =
        [(true, "the boxes"), (false, "the hosts")].into_iter().filter_map(|(by_box, who)| {
            Some(format!("{:.1} ms by {who}", 1e3 * failure.usual(by_box)?))
        });
    let usual: Vec<String> = usual.collect();
    let pauses: Vec<String> =
        failure.pauses().map(|pause| format!("{:.1} s", pause.took)).collect();
    let pauses = if pauses.is_empty() { "none".to_owned() } else { pauses.join(", ") };
    let _ = writeln!(out, "  pauses: {pauses}; as a rule a sum takes {}\n", usual.join(", "));
}

#[cfg(test)]
mod tests {
    use crate::failure::tests::failure;
    use crate::report::tests::summary;
    use crate::report::{LinkBytes, Ring};

    #[test]
    fn the_table_shows_the_promises() {
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
    fn savings_are_relative_to_the_measured_ring_if_there_is_one() {
        let mut s = summary();
        assert!(s.table().contains(" 31 %"), "{}", s.table());
        s.ring = Some(Ring {
            links: vec![LinkBytes { sent: 37_000_000, received: 37_200_000 }; 4],
            uplinks: Vec::new(),
            seconds: 2.0,
            identical: true,
        });
        assert!(s.table().contains("37 000 000      37 200 000"), "{}", s.table());
        assert!(s.table().contains(" 50 %"), "{}", s.table());
    }

    #[test]
    fn the_table_lists_the_events_of_a_failure() {
        let mut s = summary();
        s.failure = Some(failure());
        s.ranks.iter_mut().for_each(|rank| rank.by_box = 420);
        let table = s.table();
        for part in [
            "1 680 of the 1 760 all-reduces by the boxes",
            "     4.0 s   step    40   netsum on spine0 is killed\n     7.1 s   step    40   the \
             hosts' ring sums\n",
            "     8.5 s   step    54   netsum on spine0 is started again\n     9.1 \
             s   step    60   the boxes sum again\n",
            "pauses: 3.0 s; as a rule a sum takes 2.1 ms by the boxes, 2.1 ms by the hosts",
        ] {
            assert!(table.contains(part), "no `{part}` in\n{table}");
        }
    }

    #[test]
    fn racks_are_a_tree_with_bytes_on_each_link() {
        let mut s = summary();
        assert!(!s.table().contains("spine"));
        s.uplinks = vec![LinkBytes { sent: 18_400_000, received: 18_300_000 }; 2];
        let table = s.table();
        for part in [
            "  uplink of rack 1      18 400 000      18 300 000",
            "  ├─ rack 0    18 400 000 up, 18 300 000 down\n  │  ├─ host 0  18 500 000 up",
            "  └─ rack 1    18 400 000 up, 18 300 000 down\n     ├─ host 2  ",
            "     └─ host 3  18 500 000 up, 18 600 000 down\n",
        ] {
            assert!(table.contains(part), "no `{part}` in\n{table}");
        }
    }
}
