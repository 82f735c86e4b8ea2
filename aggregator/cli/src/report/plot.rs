//! The pictures of a report, as SVG. Pure.
//!
//! They have no background and few colours, all defined here: the page's style replaces each on
//! dark screens.

use netsum_common::timing::Histogram;
use plotters::coord::Shift;
use plotters::prelude::*;

use super::WatchedJob;
use crate::timing::{Sums, time};

/// An error of drawing.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw a picture: {0}")]
pub struct PlotError(String);

impl<E: std::error::Error + Send + Sync> From<DrawingAreaErrorKind<E>> for PlotError {
    fn from(error: DrawingAreaErrorKind<E>) -> Self {
        Self(error.to_string())
    }
}

/// A result of drawing.
pub type Result<T> = std::result::Result<T, PlotError>;

/// Colours in the pictures, and their replacements on a dark screen. Colour-blind readers can tell
/// them apart (Okabe and Ito, "Color universal design", 2008).
pub const COLOURS: [(&str, &str); 3] =
    [("#000000", "#dddddd"), ("#0072B2", "#56B4E9"), ("#D55E00", "#E69F00")];
const INK: RGBColor = RGBColor(0, 0, 0);
const BLUE: RGBColor = RGBColor(0, 0x72, 0xb2);
const ORANGE: RGBColor = RGBColor(0xd5, 0x5e, 0);
const SIZE: (u32, u32) = (860, 300);
const FONT: &str = "sans-serif";

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn svg(draw: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        draw(&root)?;
        root.present()?;
    }
    Ok(svg)
}

fn chart<'a, 'b>(area: &'a Area<'b>) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut chart = ChartBuilder::on(area);
    // The last mark's label reaches beyond the axis.
    chart.margin(12).margin_right(44).x_label_area_size(44).y_label_area_size(76);
    chart
}

/// The mesh of all pictures.
macro_rules! mesh {
    ($chart:expr, $x:expr, $y:expr) => {{
        let mut mesh = $chart.configure_mesh();
        mesh.x_desc($x)
            .y_desc($y)
            .light_line_style(TRANSPARENT)
            .bold_line_style(INK.mix(0.15))
            .axis_style(INK.mix(0.6))
            .label_style((FONT, 14))
            .axis_desc_style((FONT, 15));
        mesh
    }};
}

/// Throughput over the watch.
///
/// # Errors
/// If plotters fails.
pub fn throughput(report: &WatchedJob) -> Result<String> {
    let highest = report.points.iter().map(|p| p.gbps.0.max(p.gbps.1)).fold(0.0, f64::max);
    // Room for the legend above the curve.
    let highest = if highest > 0.0 { highest * 1.35 } else { 1.0 };
    svg(|area| {
        let mut chart =
            chart(area).build_cartesian_2d(0.0..report.seconds.max(1e-3), 0.0..highest)?;
        mesh!(chart, "seconds", "Gb/s of payload").draw()?;
        // One step per interval, at its mean.
        let mut starts = vec![0.0];
        starts.extend(report.points.iter().map(|p| p.time));
        let steps = |of: fn(&(f64, f64)) -> f64| {
            let step =
                |(p, &start): (&super::Point, &f64)| [(start, of(&p.gbps)), (p.time, of(&p.gbps))];
            report.points.iter().zip(&starts).flat_map(step).collect::<Vec<_>>()
        };
        for (name, colour, line) in [("in", BLUE, steps(|g| g.0)), ("out", ORANGE, steps(|g| g.1))]
        {
            chart.draw_series(LineSeries::new(line, colour.stroke_width(2)))?.label(name).legend(
                move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)),
            );
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .label_font((FONT, 14))
            .draw()?;
        Ok(())
    })
}

/// How long sums took: the share of each bucket.
///
/// # Errors
/// If plotters fails.
pub fn completion(report: &WatchedJob) -> Result<String> {
    let h = &report.sums.completion;
    let all = h.count().max(1) as f64;
    let used = |n: &u64| *n > 0;
    let first = h.counts.iter().position(used).unwrap_or(0).saturating_sub(1) as i32;
    let last = h.counts.iter().rposition(used).unwrap_or(0) as i32 + 1;
    let highest = h.counts.iter().copied().max().unwrap_or(0) as f64 / all;
    svg(|area| {
        // The bounds of the buckets are the marks of the axis.
        let x = f64::from(first)..f64::from(last + 1);
        let mut chart = chart(area).build_cartesian_2d(x, 0.0..(highest * 115.0).max(1.0))?;
        mesh!(chart, "from first contribution to last", "% of the timed sums")
            .disable_x_mesh()
            .x_labels((last - first + 2) as usize)
            .x_label_formatter(&|x| match x.fract() == 0.0 && *x >= 1.0 {
                true => time(Histogram::bound(*x as usize - 1)),
                false => String::new(),
            })
            .draw()?;
        let bar = |(bucket, n): (usize, &u64)| {
            let (left, share) = (bucket as f64, *n as f64 / all * 100.0);
            Rectangle::new([(left + 0.04, 0.0), (left + 0.96, share)], BLUE.filled())
        };
        chart.draw_series(h.counts.iter().enumerate().filter(|(_, n)| used(n)).map(bar))?;
        Ok(())
    })
}

/// Delay of each rank: half of its contributions are above and below a line, 99 of 100 below the
/// bar's end.
///
/// # Errors
/// If plotters fails.
pub fn lateness(report: &WatchedJob) -> Result<String> {
    let ranks = report.sums.ranks.len();
    let highest =
        report.sums.ranks.iter().filter_map(|r| r.late.percentile(990)).max().unwrap_or(1 << 10);
    let least = Histogram::bound(0) as f64 / 2.0;
    svg(|area| {
        let y = (least..highest as f64 * 2.0).log_scale().base(10.0);
        let mut chart = chart(area).build_cartesian_2d(-0.5..ranks as f64 - 0.5, y)?;
        mesh!(chart, "rank", "behind the first")
            .disable_x_mesh()
            .x_labels((2 * ranks + 1).min(64))
            .x_label_formatter(&|x| rank_label(&report.sums, *x))
            .y_label_formatter(&|ns| time(*ns as u64))
            .draw()?;
        let straggler = report.sums.straggler();
        let bounds = report.sums.ranks.iter().enumerate().filter_map(|(rank, part)| {
            Some((rank, part.late.percentile(500)? as f64, part.late.percentile(990)? as f64))
        });
        for (rank, p50, p99) in bounds {
            let colour = if straggler == Some(rank) { ORANGE } else { BLUE };
            let (left, right) = (rank as f64 - 0.4, rank as f64 + 0.4);
            let bar = Rectangle::new([(left, least), (right, p99)], colour.mix(0.55).filled());
            let half = PathElement::new([(left, p50), (right, p50)], INK.stroke_width(3));
            chart.draw_series([bar])?;
            chart.draw_series([half])?;
        }
        Ok(())
    })
}

/// How often each rank was last.
///
/// # Errors
/// If plotters fails.
pub fn last(report: &WatchedJob) -> Result<String> {
    let ranks = report.sums.ranks.len();
    let shares: Vec<f64> = (0..ranks).map(|rank| 100.0 * report.sums.share(rank)).collect();
    let highest = shares.iter().copied().fold(1.0, f64::max) * 1.15;
    svg(|area| {
        let mut chart = chart(area).build_cartesian_2d(-0.5..ranks as f64 - 0.5, 0.0..highest)?;
        mesh!(chart, "rank", "% of the timed sums")
            .disable_x_mesh()
            .x_labels((2 * ranks + 1).min(64))
            .x_label_formatter(&|x| rank_label(&report.sums, *x))
            .draw()?;
        let straggler = report.sums.straggler();
        let bar = |(rank, &share): (usize, &f64)| {
            let colour = if straggler == Some(rank) { ORANGE } else { BLUE };
            Rectangle::new([(rank as f64 - 0.4, 0.0), (rank as f64 + 0.4, share)], colour.filled())
        };
        chart.draw_series(shares.iter().enumerate().map(bar))?;
        // Equal shares of all ranks.
        let fair = 100.0 / ranks.max(1) as f64;
        let line = [(-0.5, fair), (ranks as f64 - 0.5, fair)];
        chart.draw_series(DashedLineSeries::new(line, 6, 4, INK.stroke_width(1)))?;
        Ok(())
    })
}

/// Ranks are whole numbers; marks between them have no label.
fn rank_label(sums: &Sums, x: f64) -> String {
    if x.fract() == 0.0 && x >= 0.0 { sums.rank(x as usize).to_string() } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::super::tests::report;
    use super::*;
    use crate::timing::tests::sums;

    /// Bars that are filled with a colour.
    fn bars(svg: &str, colour: &str) -> usize {
        svg.lines()
            .filter(|l| l.contains("<rect") && l.contains(&format!("fill=\"{colour}\"")))
            .count()
    }

    #[test]
    fn there_is_a_bar_for_each_bucket_and_rank_and_the_last_one_is_marked() {
        let mut report = report();
        report.sums = sums(7, 5, 100, 50_000);
        report.sums.completion.add(5_000_000);
        assert_eq!(bars(&completion(&report).unwrap(), "#0072B2"), 2);
        for picture in [lateness(&report).unwrap(), last(&report).unwrap()] {
            assert_eq!((bars(&picture, "#0072B2"), bars(&picture, "#D55E00")), (6, 1), "{picture}");
            for rank in 0..7 {
                assert!(picture.contains(&format!("\n{rank}\n")), "no rank {rank}: {picture}");
            }
        }
        let curve = throughput(&report).unwrap();
        assert!(curve.contains("#0072B2") && curve.contains("#D55E00"));
    }

    #[test]
    fn no_other_colours_than_the_page_knows() {
        let report = report();
        for picture in [throughput(&report), completion(&report), lateness(&report), last(&report)]
        {
            let picture = picture.unwrap();
            for (at, _) in picture.match_indices("=\"#") {
                let colour = &picture[at + 2..at + 9];
                assert!(COLOURS.iter().any(|(light, _)| *light == colour), "{colour}");
            }
        }
    }

    #[test]
    fn one_rank_sixty_four_and_none_are_drawn() {
        let mut report = report();
        for some in
            [Sums::default(), sums(2, 0, 0, 0), sums(64, 63, 1000, 1 << 36), sums(2, 1, 1, 0)]
        {
            report.sums = some;
            for picture in [completion(&report), lateness(&report), last(&report)] {
                assert!(!picture.unwrap().contains("NaN"));
            }
        }
        report.points.clear();
        report.seconds = 0.0;
        assert!(!throughput(&report).unwrap().contains("NaN"));
    }
}
