//! The picture: the loss over the steps, and the bytes on each host's link; or the effects of a
//! failure.

use plotters::coord::types::RangedCoordf64;
use plotters::coord::{CoordTranslate, Shift};
use plotters::prelude::*;

use crate::report::{LinkBytes, Summary};

pub mod curves;
mod timeline;

/// A picture could not be drawn.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw the picture: {0}")]
pub struct PlotError(String);

impl<E: std::error::Error + Send + Sync> From<DrawingAreaErrorKind<E>> for PlotError {
    fn from(error: DrawingAreaErrorKind<E>) -> Self {
        Self(error.to_string())
    }
}

/// Width and height in pixels.
pub const SIZE: (u32, u32) = (1200, 500);

// Colours that people with colour blindness can distinguish (Okabe and Ito, "Color universal
// design", 2008).
const BLUE: RGBColor = RGBColor(0, 114, 178);
const LIGHT_BLUE: RGBColor = RGBColor(86, 180, 233);
const ORANGE: RGBColor = RGBColor(230, 159, 0);
const GREY: RGBColor = RGBColor(150, 150, 150);
const FONT: &str = "sans-serif";

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b, C = Cartesian2d<RangedCoordf64, RangedCoordf64>> =
    ChartContext<'a, SVGBackend<'b>, C>;

/// The mesh of all charts.
macro_rules! mesh {
    ($chart:expr) => {{
        let mut mesh = $chart.configure_mesh();
        mesh.light_line_style(WHITE)
            .bold_line_style(BLACK.mix(0.12))
            .label_style((FONT, 14))
            .axis_desc_style((FONT, 15))
            .x_label_formatter(&|x| rounded(*x))
            .y_label_formatter(&|y| rounded(*y));
        mesh
    }};
}
use mesh;

fn builder<'a, 'b>(area: &'a Area<'b>, caption: &str) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(area);
    builder.caption(caption, (FONT, 22)).margin(16).x_label_area_size(44).y_label_area_size(72);
    builder
}

/// Draws the legend of the labelled series.
fn legend<'a, 'b: 'a, C: CoordTranslate>(chart: &mut Chart<'a, 'b, C>) -> Result<(), PlotError> {
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.9))
        .border_style(GREY)
        .label_font((FONT, 14))
        .draw()?;
    Ok(())
}

fn line(style: ShapeStyle) -> impl Fn((i32, i32)) -> PathElement<(i32, i32)> {
    move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style)
}

fn block(style: ShapeStyle) -> impl Fn((i32, i32)) -> Rectangle<(i32, i32)> {
    move |(x, y)| Rectangle::new([(x, y - 6), (x + 18, y + 6)], style)
}

/// Draws bars of one colour for each series, side by side over each name; `highest` is the top of
/// the axis.
fn bars<'a, 'b>(
    area: &'a Area<'b>,
    [caption, y]: [&str; 2],
    names: &[String],
    series: &[(&str, ShapeStyle, Vec<f64>)],
    highest: f64,
) -> Result<Chart<'a, 'b>, PlotError> {
    // Leave space for the legend above the bars.
    let mut chart = builder(area, caption)
        .build_cartesian_2d(-0.5..names.len() as f64 - 0.5, 0.0..highest * 1.4)?;
    let name = |x: &f64| names.get(*x as usize).filter(|_| x.fract() == 0.0 && *x >= 0.0).cloned();
    mesh!(chart)
        .disable_x_mesh()
        .x_labels(2 * names.len() + 1)
        .x_label_formatter(&|x| name(x).unwrap_or_default())
        .y_desc(y)
        .draw()?;
    let width = 0.8 / series.len() as f64;
    for (i, (label, style, values)) in series.iter().enumerate() {
        let left = |group: usize| group as f64 - 0.4 + i as f64 * width;
        let bars = values.iter().enumerate().map(|(group, value)| {
            Rectangle::new([(left(group), 0.0), (left(group) + width * 0.92, *value)], *style)
        });
        chart.draw_series(bars)?.label(*label).legend(block(*style));
    }
    Ok(chart)
}

/// Draws a summary as SVG.
///
/// # Errors
/// If there is nothing to draw.
pub fn draw(summary: &Summary) -> Result<String, PlotError> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        if let Some(failure) = &summary.failure {
            timeline::draw(&root, summary, failure)?;
            root.present()?;
            drop(root);
            return Ok(svg);
        }
        let (left, right) = root.split_horizontally(SIZE.0 / 2);
        loss(&left, summary)?;
        bytes(&right, summary)?;
        root.present()?;
    }
    Ok(svg)
}

/// A tick's number without the rounding errors of binary fractions.
fn rounded(x: f64) -> String {
    format!("{}", (x * 1e6).round() / 1e6)
}

fn loss(area: &Area<'_>, summary: &Summary) -> Result<(), PlotError> {
    let steps = &summary.loss;
    if steps.is_empty() {
        return Err(PlotError("the training made no steps".to_owned()));
    }
    let per_epoch = (steps.len() / summary.epochs.max(1)).max(1);
    let highest = steps.iter().copied().fold(0.0f32, f32::max);
    // A logarithmic axis shows that a small loss still falls.
    let lowest = steps.iter().copied().fold(f32::INFINITY, f32::min).max(1e-6);
    let right = 100.0 * summary.ranks.first().map_or(0.0, |r| r.accuracy);
    let mut chart = builder(area, &format!("Loss; {right:.1} % of the test images right"))
        .build_cartesian_2d(
            0.0..steps.len() as f64 / per_epoch as f64,
            (f64::from(lowest) * 0.8..f64::from(highest) * 1.25).log_scale(),
        )?;
    mesh!(chart).x_desc("epoch").y_desc("cross entropy, nats").draw()?;
    let epoch_of = |step: usize| step as f64 / per_epoch as f64;
    let each = steps.iter().enumerate().map(|(i, l)| (epoch_of(i), f64::from(l.max(lowest))));
    let thin = LIGHT_BLUE.stroke_width(1);
    chart.draw_series(LineSeries::new(each, thin))?.label("each step").legend(line(thin));
    let means = steps.chunks(per_epoch).enumerate().map(|(epoch, losses)| {
        let mean = losses.iter().map(|l| f64::from(*l)).sum::<f64>() / losses.len() as f64;
        (epoch as f64 + 0.5 * losses.len() as f64 / per_epoch as f64, mean.max(f64::from(lowest)))
    });
    let thick = BLUE.stroke_width(3);
    chart.draw_series(LineSeries::new(means, thick))?.label("mean of an epoch").legend(line(thick));
    legend(&mut chart)
}

fn bytes(area: &Area<'_>, summary: &Summary) -> Result<(), PlotError> {
    let mega = |bytes: u64| bytes as f64 / 1e6;
    let both = |links: &[LinkBytes]| {
        let all =
            |way: fn(&LinkBytes) -> u64| links.iter().map(|l| mega(way(l))).collect::<Vec<_>>();
        [all(|l| l.sent), all(|l| l.received)]
    };
    let [sent, received] = both(&summary.links);
    let mut series =
        vec![("sent", BLUE.filled(), sent), ("received", LIGHT_BLUE.filled(), received)];
    if let Some(measured) = &summary.ring {
        let [sent, received] = both(&measured.links);
        series.push(("sent, ring measured", ORANGE.filled(), sent));
        series.push(("received, ring measured", ORANGE.mix(0.5).filled(), received));
    }
    let ring = mega(summary.ring_computed());
    let highest = series.iter().flat_map(|(_, _, values)| values).copied().fold(ring, f64::max);
    let hosts: Vec<String> = (0..summary.links.len()).map(|host| format!("host {host}")).collect();
    let caption = format!("Bytes on each host's link; summed by {}", summary.summed_by());
    let mut chart = bars(area, [&caption, "megabytes"], &hosts, &series, highest)?;
    let (best, style) = ([(-0.5, ring), (hosts.len() as f64 - 0.5, ring)], BLACK.stroke_width(2));
    let dashes = chart.draw_series(DashedLineSeries::new(best, 8, 5, style))?;
    dashes.label("a ring at best, each way").legend(line(style));
    legend(&mut chart)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::tests::failure;
    use crate::report::Ring;
    use crate::report::tests::summary;

    #[test]
    fn the_picture_shows_a_loss_curve_and_a_bar_for_each_host_and_direction() {
        let mut summary = summary();
        let count = |svg: &str, what: &str| svg.matches(what).count();
        let svg = draw(&summary).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for host in 0..4 {
            assert!(svg.contains(&format!("host {host}\n")), "no host {host}");
        }
        let bars = count(&svg, "#0072B2");
        // Four bars, the legend's key, and the curve with its own.
        assert_eq!(bars, 4 + 1 + 2, "{svg}");
        assert!(!svg.contains("NaN"));

        let links = vec![LinkBytes { sent: 30_000_000, received: 30_000_000 }; 4];
        summary.ring = Some(Ring { links, uplinks: Vec::new(), seconds: 1.0, identical: true });
        assert!(draw(&summary).unwrap().contains("sent, ring measured"));
    }

    #[test]
    fn a_failures_events_are_on_the_time_axis() {
        let mut summary = summary();
        summary.loss.truncate(100);
        summary.failure = Some(failure());
        let svg = draw(&summary).unwrap();
        for part in ["netsum on spine0 is killed", "the boxes sum again", "seconds"] {
            assert!(svg.contains(part), "no `{part}` in\n{svg}");
        }
        assert!(!svg.contains("NaN"));
    }

    #[test]
    fn short_and_unusual_trainings_are_drawn_too() {
        let mut summary = summary();
        summary.loss = vec![0.0];
        summary.epochs = 1;
        summary.links = vec![LinkBytes::default(); 2];
        summary.hosts = 2;
        assert!(!draw(&summary).unwrap().contains("NaN"));
        summary.loss.clear();
        assert!(draw(&summary).is_err());
    }
}
