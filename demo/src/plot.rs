//! The picture: the loss over the steps, and the bytes on each host's link; or what a failure did to the training.

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::report::Summary;

pub mod curves;
mod timeline;

/// What can go wrong with a picture.
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

// Told apart also by those who do not tell red from green (Okabe and Ito, "Color universal design", 2008).
const BLUE: RGBColor = RGBColor(0, 114, 178);
const LIGHT_BLUE: RGBColor = RGBColor(86, 180, 233);
const ORANGE: RGBColor = RGBColor(230, 159, 0);
const GREY: RGBColor = RGBColor(150, 150, 150);
const FONT: &str = "sans-serif";

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

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

/// A tick's number without the noise of binary fractions.
fn rounded(x: f64) -> String {
    format!("{}", (x * 1e6).round() / 1e6)
}

fn loss(area: &Area<'_>, summary: &Summary) -> Result<(), PlotError> {
    let steps = &summary.loss;
    if steps.is_empty() {
        return Err(PlotError("no step was made".to_owned()));
    }
    let per_epoch = (steps.len() / summary.epochs.max(1)).max(1);
    let highest = steps.iter().copied().fold(0.0f32, f32::max);
    // Over some decades: a logarithm shows that it still falls when it is small.
    let lowest = steps.iter().copied().fold(f32::INFINITY, f32::min).max(1e-6);
    let mut chart = ChartBuilder::on(area)
        .caption(
            format!(
                "Loss; {:.1} % of the test images right",
                100.0 * summary.ranks.first().map_or(0.0, |r| r.accuracy)
            ),
            (FONT, 22),
        )
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d(
            0.0..steps.len() as f64 / per_epoch as f64,
            (f64::from(lowest) * 0.8..f64::from(highest) * 1.25).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_desc("epoch")
        .y_desc("cross entropy, nats")
        .light_line_style(WHITE)
        .bold_line_style(BLACK.mix(0.12))
        .label_style((FONT, 14))
        .axis_desc_style((FONT, 15))
        .x_label_formatter(&|x| rounded(*x))
        .y_label_formatter(&|y| rounded(*y))
        .draw()?;
    let epoch_of = |step: usize| step as f64 / per_epoch as f64;
    let each = steps.iter().enumerate().map(|(i, l)| (epoch_of(i), f64::from(l.max(lowest))));
    chart
        .draw_series(LineSeries::new(each, LIGHT_BLUE.stroke_width(1)))?
        .label("each step")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], LIGHT_BLUE.stroke_width(1)));
    let means = steps.chunks(per_epoch).enumerate().map(|(epoch, losses)| {
        let mean = losses.iter().map(|l| f64::from(*l)).sum::<f64>() / losses.len() as f64;
        (epoch as f64 + 0.5 * losses.len() as f64 / per_epoch as f64, mean.max(f64::from(lowest)))
    });
    chart
        .draw_series(LineSeries::new(means, BLUE.stroke_width(3)))?
        .label("mean of an epoch")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], BLUE.stroke_width(3)));
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.9))
        .border_style(GREY)
        .label_font((FONT, 14))
        .draw()?;
    Ok(())
}

fn bytes(area: &Area<'_>, summary: &Summary) -> Result<(), PlotError> {
    let mega = |bytes: u64| bytes as f64 / 1e6;
    let ring = mega(summary.ring_computed());
    let measured = summary.ring.as_ref().map_or(&[][..], |ring| &ring.links);
    let highest = summary
        .links
        .iter()
        .chain(measured)
        .flat_map(|l| [mega(l.sent), mega(l.received)])
        .fold(ring, f64::max);
    let hosts = summary.links.len();
    let mut chart = ChartBuilder::on(area)
        .caption(format!("Bytes on each host's link; summed by {}", summary.summed_by()), (FONT, 22))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(72)
        // Room for the legend above the bars.
        .build_cartesian_2d(-0.5..hosts as f64 - 0.5, 0.0..highest * 1.4)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(2 * hosts + 1)
        .x_label_formatter(&|x| match x.fract() == 0.0 && *x >= 0.0 {
            true => format!("host {x}"),
            false => String::new(),
        })
        .y_desc("megabytes")
        .y_label_formatter(&|y| rounded(*y))
        .light_line_style(WHITE)
        .bold_line_style(BLACK.mix(0.12))
        .label_style((FONT, 14))
        .axis_desc_style((FONT, 15))
        .draw()?;

    let sent = summary.links.iter().map(|l| mega(l.sent)).collect();
    let received = summary.links.iter().map(|l| mega(l.received)).collect();
    let mut groups: Vec<(&str, ShapeStyle, Vec<f64>)> =
        vec![("sent", BLUE.filled(), sent), ("received", LIGHT_BLUE.filled(), received)];
    if !measured.is_empty() {
        groups.push((
            "sent, ring measured",
            ORANGE.filled(),
            measured.iter().map(|l| mega(l.sent)).collect(),
        ));
        groups.push((
            "received, ring measured",
            ORANGE.mix(0.5).filled(),
            measured.iter().map(|l| mega(l.received)).collect(),
        ));
    }
    let width = 0.8 / groups.len() as f64;
    for (i, (label, style, values)) in groups.into_iter().enumerate() {
        let left = move |host: usize| host as f64 - 0.4 + i as f64 * width;
        let bars = values
            .into_iter()
            .enumerate()
            .map(|(host, v)| Rectangle::new([(left(host), 0.0), (left(host) + width * 0.92, v)], style));
        chart
            .draw_series(bars)?
            .label(label)
            .legend(move |(x, y)| Rectangle::new([(x, y - 6), (x + 18, y + 6)], style));
    }
    let line = [(-0.5, ring), (hosts as f64 - 0.5, ring)];
    chart
        .draw_series(DashedLineSeries::new(line, 8, 5, BLACK.stroke_width(2)))?
        .label("a ring at best, each way")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], BLACK.stroke_width(2)));
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.9))
        .border_style(GREY)
        .label_font((FONT, 14))
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::tests::failure;
    use crate::report::tests::summary;
    use crate::report::{LinkBytes, Ring};

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
    fn a_failure_has_its_moments_on_the_time_axis() {
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
    fn short_and_strange_runs_are_drawn_too() {
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
