//! The report as text.

use std::fmt::Write as _;

use super::{Figures, fragment, live, memory, paths};

pub fn text(figures: &Figures) -> String {
    let mut text = paths(&figures.paths, figures.rounds);
    text += &parts(&figures.parts);
    text += &fragments(&figures.fragments);
    match &figures.live_skipped {
        Some(why) => text += &format!("\nSKIP live frames: {why}\n"),
        None => text += &live(&figures.live),
    }
    text += &memory(&figures.memory);
    text += "\nprogram      verified instructions   program length\n";
    for p in &figures.programs {
        let _ = writeln!(
            text,
            "{:<12} {:>21} {:>16}",
            p.program, p.verified_instructions, p.instructions
        );
    }
    text
}

fn paths(rows: &[paths::Row], rounds: usize) -> String {
    let mtus = distinct(rows.iter().map(|r| r.mtu));
    let mut text = format!(
        "Programs alone: ns per packet, without the cost of a test run and of resetting what a \
         run changes; the same in millions of\n\
         packets per second, and in Gb/s of payload. BPF_PROG_TEST_RUN, 4 ranks, IPv4 SEND, best \
         of {rounds} rounds.\n\n"
    );
    let _ = write!(text, "{:<34}", "path MTU");
    mtus.iter().for_each(|mtu| _ = write!(text, " |{mtu:>20}"));
    let _ = write!(text, "\n{:<34}", "");
    mtus.iter().for_each(|_| _ = write!(text, " |{:>6}{:>7}{:>7}", "ns", "M/s", "Gb/s"));
    text.push('\n');
    for row in rows.iter().filter(|r| r.mtu == mtus[0]) {
        let _ = write!(text, "{:<34}", row.what);
        for mtu in &mtus {
            match rows.iter().find(|r| (r.path, r.mtu) == (row.path, *mtu)) {
                // These do not move the payload.
                Some(r) if matches!(r.path, "empty" | "reset" | "restore") => {
                    let _ = write!(text, " |{:>6.0}{:>7}{:>7}", r.ns, "", "");
                }
                Some(r) => {
                    let _ = write!(text, " |{:>6.0}{:>7.2}{:>7.1}", r.ns, r.mpps, r.gbps);
                }
                None => text += " |                    ",
            }
        }
        text.push('\n');
    }
    text
}

fn parts(rows: &[paths::Parts]) -> String {
    let mut text = String::from(
        "\nAn absorbed contribution divided by the sum of its parts, each measured alone: \
         steering, CRC, addition (the aim is at most 1.3).\n\n",
    );
    let _ = writeln!(
        text,
        "{:>8} {:>10} {:>10} {:>8} {:>14}",
        "path MTU", "absorb ns", "parts ns", "ratio", "without ICRC"
    );
    for r in rows {
        let _ = writeln!(
            text,
            "{:>8} {:>10.0} {:>10.0} {:>8.2} {:>14.2}",
            r.mtu, r.absorb_ns, r.parts_ns, r.ratio, r.ratio_without_icrc
        );
    }
    text
}

fn fragments(rows: &[fragment::Row]) -> String {
    let mut text = String::from(
        "\nA whole fragment by the programs alone, on one core: the contribution that claims the \
         slot, those that are absorbed, the one that\n\
         completes it, and egress for each rank. The kernel's part (queues, clones, sending) is \
         not included.\n\n",
    );
    let _ = writeln!(
        text,
        "{:>8} {:>6} {:>6} {:>9} {:>9} {:>11} {:>9} {:>12} {:>12} {:>8}",
        "path MTU",
        "ranks",
        "ICRC",
        "claim ns",
        "absorb ns",
        "complete ns",
        "egress ns",
        "fragment ns",
        "fragments/s",
        "Gb/s in"
    );
    for r in rows {
        let absorb = r.absorb_ns.map_or("-".into(), |ns| format!("{ns:.0}"));
        let _ = writeln!(
            text,
            "{:>8} {:>6} {:>6} {:>9.0} {absorb:>9} {:>11.0} {:>9.0} {:>12.0} {:>11.0}k {:>8.1}",
            r.mtu,
            r.ranks,
            if r.icrc { "yes" } else { "no" },
            r.claim_ns,
            r.complete_ns,
            r.egress_ns,
            r.fragment_ns,
            r.kfragments,
            r.gbps
        );
    }
    text
}

fn live(rows: &[live::Row]) -> String {
    let mut text = String::from(
        "\nLive frames: the capacity of one core, the ring's. Included: the CPU map's queue, \
         `aggregate`, clones, `egress`, handing\n\
         clones to veths, and an XDP program that drops them at the veths' other ends. Not \
         included: ingress and steering, which another CPU\n\
         does (first line of each), hosts, and a network card's driver. Inline: frames arrive on \
         the ring's CPU, which does everything without the\n\
         queue; the sender's cost (first line) is subtracted. Busy: the core's share of the time, \
         by which rates are divided.\n\n",
    );
    let _ = writeln!(
        text,
        "{:>8} {:>6} {:<36} {:>10} {:>6} {:>12} {:>16} {:>8} {:>11}",
        "path MTU",
        "ranks",
        "",
        "fragments",
        "busy",
        "fragment ns",
        "contributions/s",
        "Gb/s in",
        "over floor"
    );
    for r in rows {
        let _ = writeln!(
            text,
            "{:>8} {:>6} {:<36} {:>10} {:>5.0}% {:>12.0} {:>15.3}M {:>8.2} {:>11.2}",
            r.mtu,
            r.ranks,
            r.setup.text(),
            r.fragments,
            100.0 * r.busy_seconds / r.seconds,
            r.fragment_ns,
            r.mcontributions,
            r.gbps,
            r.over_floor
        );
    }
    text
}

fn memory(rows: &[memory::Row]) -> String {
    let mut text = String::from(
        "\nMemory of a ring with 8 messages of 64 KiB in flight, as the kernel reports it for its \
         maps, divided by that of payload and headers of\n\
         all slots: the longest headers, 98 bytes, which a slot must have room for (the aim is at \
         most 1.5), and those of IPv4 SENDs, 54.\n\n",
    );
    let _ = writeln!(
        text,
        "{:>6} {:>8} {:>6} {:>10} {:>10} {:>8} {:>16}",
        "ranks", "path MTU", "slots", "KiB", "needed", "ratio", "ratio, IPv4 SEND"
    );
    for r in rows {
        let _ = writeln!(
            text,
            "{:>6} {:>8} {:>6} {:>10.0} {:>10.0} {:>8.2} {:>16.2}",
            r.ranks,
            r.mtu,
            r.slots,
            r.bytes as f64 / 1024.0,
            r.needed as f64 / 1024.0,
            r.ratio,
            r.ratio_ipv4_send
        );
    }
    text
}

/// Each value once, in order of appearance.
fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut once = Vec::new();
    for x in all {
        if !once.contains(&x) {
            once.push(x);
        }
    }
    once
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataplane::live::Setup;

    #[test]
    fn columns_stay_under_their_titles() {
        let row = |setup| live::Row {
            setup,
            ranks: 32,
            mtu: 2048,
            fragments: 1_234_567,
            seconds: 2.0,
            busy_seconds: 2.0,
            fragment_ns: 123_456.0,
            mcontributions: 12.345,
            gbps: 123.45,
            over_floor: 12.34,
        };
        let text = live(&Setup::ALL.map(row));
        let lines: Vec<&str> = text.lines().skip(6).collect();
        assert_eq!(lines.len(), 1 + Setup::ALL.len());
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
    }

    #[test]
    fn every_path_mtu_is_a_group_of_columns() {
        let row = |path, mtu| paths::Row {
            path,
            what: path,
            mtu,
            run_ns: 1.0,
            ns: 1.0,
            mpps: 1.0,
            gbps: 8.0,
        };
        let rows = [row("empty", 256), row("sum", 256), row("empty", 512), row("sum", 512)];
        let text = paths(&rows, 3);
        let lines: Vec<&str> = text.lines().skip(3).collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
        assert!(lines[2].starts_with("empty") && !lines[2].contains("8.0"), "{text}");
        assert!(lines[3].contains("8.0"), "{text}");
    }

    #[test]
    fn skipped_live_frames_are_reported() {
        let figures = Figures {
            rounds: 1,
            paths: vec![paths::Row {
                path: "empty",
                what: "empty",
                mtu: 256,
                run_ns: 1.0,
                ns: 1.0,
                mpps: 1.0,
                gbps: 1.0,
            }],
            parts: Vec::new(),
            fragments: Vec::new(),
            live: Vec::new(),
            live_skipped: Some("one CPU".into()),
            memory: Vec::new(),
            programs: Vec::new(),
        };
        assert!(text(&figures).contains("SKIP live frames: one CPU"));
    }
}
