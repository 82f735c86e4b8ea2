//! Pictures of figures: panels of curves, as SVG.

use anyhow::{Result, anyhow, ensure};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;

/// A curve.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Its points, from left to right.
    pub points: Vec<(f64, f64)>,
}

/// The scale of the y axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Height {
    /// Linear, from zero.
    Linear,
    /// Logarithmic.
    Log,
}

/// A chart. Its x axis has powers of two: sizes, or numbers of things that are doubled.
#[derive(Clone, Debug)]
pub struct Panel {
    /// The title.
    pub title: String,
    /// The label of the x axis.
    pub x: String,
    /// The label of the y axis.
    pub y: String,
    /// The scale of the y axis.
    pub height: Height,
    /// Whether x values are written in KiB and MiB.
    pub x_is_bytes: bool,
    /// The curves.
    pub series: Vec<Series>,
}

/// Makes curves from rows: `name` gives a row's curve, and `point` its point. Curves are in order
/// of appearance.
pub fn series<R>(
    rows: &[R],
    name: impl Fn(&R) -> String,
    point: impl Fn(&R) -> (f64, f64),
) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    for row in rows {
        let name = name(row);
        match all.iter_mut().find(|s| s.name == name) {
            Some(series) => series.points.push(point(row)),
            None => all.push(Series { name, points: vec![point(row)] }),
        }
    }
    all
}

/// Draws panels side by side, `columns` in a row, each of `size` pixels.
///
/// # Errors
/// If a panel has no points, or cannot be drawn.
pub fn picture(panels: &[Panel], columns: usize, size: (u32, u32)) -> Result<String> {
    ensure!(!panels.is_empty() && columns > 0, "there is nothing to draw");
    for panel in panels {
        let points = panel.series.iter().map(|s| s.points.len()).sum::<usize>();
        ensure!(points > 0, "{}: no points", panel.title);
    }
    let mut svg = String::new();
    draw(&mut svg, panels, columns, size).map_err(|e| anyhow!("cannot draw the picture: {e}"))?;
    Ok(svg)
}

type Failed = Box<dyn std::error::Error>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn draw(
    svg: &mut String,
    panels: &[Panel],
    columns: usize,
    size: (u32, u32),
) -> Result<(), Failed> {
    let (columns, rows) = (columns.min(panels.len()), panels.len().div_ceil(columns));
    let whole = (size.0 * columns as u32, size.1 * rows as u32);
    let root = SVGBackend::with_string(svg, whole).into_drawing_area();
    root.fill(&WHITE)?;
    for (panel, area) in panels.iter().zip(root.split_evenly((rows, columns))) {
        let heights = || panel.series.iter().flat_map(|s| &s.points).map(|p| p.1);
        let (least, most) =
            (heights().fold(f64::INFINITY, f64::min), heights().fold(0.0, f64::max));
        match panel.height {
            Height::Log => draw_panel(&area, panel, (least / 1.5..most * 1.5).log_scale())?,
            Height::Linear => draw_panel::<std::ops::Range<f64>>(&area, panel, 0.0..most * 1.15)?,
        }
    }
    root.present()?;
    Ok(())
}

fn draw_panel<Y>(area: &Area, panel: &Panel, heights: Y) -> Result<(), Failed>
where
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let across = || panel.series.iter().flat_map(|s| &s.points).map(|p| p.0);
    let (left, right) = (across().fold(f64::INFINITY, f64::min), across().fold(0.0, f64::max));
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(45)
        .y_label_area_size(65)
        .build_cartesian_2d((left..right * 1.1).log_scale().base(2.0), heights)?;
    let across_text = |x: &f64| if panel.x_is_bytes { size_text(*x) } else { format!("{x:.0}") };
    chart
        .configure_mesh()
        .x_desc(&panel.x)
        .y_desc(&panel.y)
        .x_label_formatter(&across_text)
        .y_label_formatter(&|y| figure(*y))
        .light_line_style(WHITE)
        .draw()?;
    for (i, series) in panel.series.iter().enumerate() {
        let colour = Palette99::pick(i).to_rgba();
        let dots =
            series.points.iter().map(|&p| Circle::new(p, 3, colour.filled())).collect::<Vec<_>>();
        chart
            .draw_series(LineSeries::new(series.points.iter().copied(), colour.stroke_width(2)))?
            .label(&series.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        chart.draw_series(dots)?;
    }
    let place = match panel.height {
        Height::Log => SeriesLabelPosition::LowerRight,
        Height::Linear => SeriesLabelPosition::LowerLeft,
    };
    chart
        .configure_series_labels()
        .position(place)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    Ok(())
}

/// Bytes in powers of 1024.
fn size_text(bytes: f64) -> String {
    match bytes {
        b if b >= 1048576.0 => format!("{:.0} MiB", b / 1048576.0),
        b if b >= 1024.0 => format!("{:.0} KiB", b / 1024.0),
        b => format!("{b:.0} B"),
    }
}

/// A figure with the significant digits.
fn figure(y: f64) -> String {
    match y.abs() {
        a if a >= 10.0 => format!("{y:.0}"),
        a if a >= 1.0 => format!("{y:.1}"),
        _ => format!("{y:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(title: &str, height: Height) -> Panel {
        let points = vec![(1024.0, 1.0), (1048576.0, 30.0)];
        let series =
            ["one", "two"].map(|name| Series { name: name.into(), points: points.clone() });
        let (x, y) = ("bytes".to_owned(), "Gb/s".to_owned());
        Panel { title: title.into(), x, y, height, x_is_bytes: true, series: series.to_vec() }
    }

    #[test]
    fn a_picture_has_every_panel_and_curve() {
        let panels = [panel("powers", Height::Log), panel("plain", Height::Linear)];
        let svg = picture(&panels, 2, (500, 400)).unwrap();
        for text in ["powers", "plain", ">\none\n<", ">\ntwo\n<", "1 MiB", "width=\"1000\""] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        assert!(picture(&[], 1, (500, 400)).is_err());
        let empty = Panel { series: Vec::new(), ..panel("empty", Height::Log) };
        assert!(picture(&[empty], 1, (500, 400)).unwrap_err().to_string().contains("empty"));
    }

    #[test]
    fn rows_become_curves_by_name() {
        let rows = [("a", 1, 2), ("b", 1, 3), ("a", 2, 5)];
        let curves = series(&rows, |r| r.0.into(), |r| (r.1.into(), r.2.into()));
        assert_eq!(curves[0], Series { name: "a".into(), points: vec![(1.0, 2.0), (2.0, 5.0)] });
        assert_eq!((curves.len(), &*curves[1].name), (2, "b"));
    }
}
