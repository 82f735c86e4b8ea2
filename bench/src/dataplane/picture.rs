//! The report as a picture.

use anyhow::Result;

use super::live::Setup;
use super::{DEFAULT_RANKS, Figures, fragment, live};
use crate::plot::{self, Height, Panel, Series};

/// The capacity of one core over ranks and over path MTU, by the programs alone and with live
/// frames.
///
/// # Errors
/// If it cannot be drawn.
pub fn svg(figures: &Figures) -> Result<String> {
    let mut panels = vec![
        panel(
            "one core, the programs alone",
            "ranks",
            "Gb/s of contributions",
            by_ranks(&figures.fragments),
        ),
        panel("contribution absorbed, 4 ranks", "path MTU", "ns", by_mtu(figures)),
    ];
    if !figures.live.is_empty() {
        let largest = figures.live.iter().map(|r| r.mtu).max().unwrap_or_default();
        let title = format!("one core, live frames, path MTU {largest}");
        let at_largest = |r: &&live::Row| r.mtu == largest;
        panels.push(panel(
            &title,
            "ranks",
            "Gb/s of contributions",
            live_over(figures, at_largest, |r| r.ranks),
        ));
        let usual = |r: &&live::Row| r.ranks == DEFAULT_RANKS;
        let curves = live_over(figures, usual, |r| r.mtu);
        panels.push(panel(
            "one core, live frames, 4 ranks",
            "path MTU",
            "Gb/s of contributions",
            curves,
        ));
    }
    plot::picture(&panels, 2, (620, 420))
}

fn panel(title: &str, x: &str, y: &str, series: Vec<Series>) -> Panel {
    let (title, x, y) = (title.to_owned(), x.to_owned(), y.to_owned());
    Panel { title, x, y, height: Height::Linear, x_is_bytes: false, series }
}

fn by_ranks(rows: &[fragment::Row]) -> Vec<Series> {
    let verified: Vec<_> = rows.iter().filter(|r| r.icrc).collect();
    plot::series(&verified, |r| format!("path MTU {}", r.mtu), |r| (r.ranks.into(), r.gbps))
}

fn by_mtu(figures: &Figures) -> Vec<Series> {
    let shown = ["copy", "sum", "crc", "absorb/ignore", "absorb/verify"];
    let rows: Vec<_> = figures.paths.iter().filter(|r| shown.contains(&r.path)).collect();
    plot::series(&rows, |r| r.what.to_owned(), |r| (r.mtu.into(), r.ns))
}

/// The ring's CPU only, without the sender's ways.
fn live_over(
    figures: &Figures,
    of: impl Fn(&&live::Row) -> bool,
    x: impl Fn(&live::Row) -> u32,
) -> Vec<Series> {
    let rows: Vec<_> =
        figures.live.iter().filter(|r| r.setup != Setup::IngressDrop).filter(of).collect();
    plot::series(&rows, |r| r.setup.text().to_owned(), |r| (x(r).into(), r.gbps))
}
