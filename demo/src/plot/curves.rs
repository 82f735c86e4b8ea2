//! The picture of trainings with PyTorch: the losses over the steps, and the time of a step.

use plotters::prelude::*;

use super::{Area, BLUE, FONT, GREY, ORANGE, PlotError, SIZE, rounded};
use crate::torch::{Comparison, Summary};

/// Draws a summary as SVG.
///
/// # Errors
/// If there is nothing to draw.
pub fn draw(summary: &Summary) -> Result<String, PlotError> {
    if summary.comparisons.iter().all(|comparison| comparison.netsum.loss.is_empty()) {
        return Err(PlotError("no step was made".to_owned()));
    }
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let (left, right) = root.split_horizontally(SIZE.0 / 2);
        losses(&left, summary)?;
        times(&right, summary)?;
        root.present()?;
    }
    Ok(svg)
}

fn losses(area: &Area<'_>, summary: &Summary) -> Result<(), PlotError> {
    let all = || summary.comparisons.iter();
    let apart = all().map(Comparison::largest_difference).fold(0.0, f64::max);
    let highest = all().flat_map(|c| &c.netsum.loss).copied().fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(format!("Loss; netsum and Gloo differ by {apart:.1e} at most"), (FONT, 22))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..summary.steps as f64, 0.0..highest * 1.1)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc("cross entropy, nats")
        .light_line_style(WHITE)
        .bold_line_style(BLACK.mix(0.12))
        .label_style((FONT, 14))
        .axis_desc_style((FONT, 15))
        .x_label_formatter(&|x| rounded(*x))
        .y_label_formatter(&|y| rounded(*y))
        .draw()?;
    // The rate of the links is not seen in a loss, so each model is drawn once.
    let mut drawn: Vec<&str> = Vec::new();
    for Comparison { model, netsum, gloo, .. } in all() {
        if drawn.contains(&&**model) {
            continue;
        }
        // What is over the other's line is thinner.
        for (who, run, colour, width) in [("Gloo", gloo, ORANGE, 6), ("netsum", netsum, BLUE, 2)] {
            let points = run.loss.iter().enumerate().map(|(step, loss)| (step as f64, *loss));
            let line = chart.draw_series(LineSeries::new(points, colour.stroke_width(width)))?;
            if drawn.is_empty() {
                line.label(who).legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(width))
                });
            }
        }
        let first = netsum.loss.first().copied().unwrap_or_default();
        let at = (0.03 * summary.steps as f64, first + 0.06 * highest);
        chart.draw_series([Text::new(model.clone(), at, (FONT, 16))])?;
        drawn.push(model);
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.9))
        .border_style(GREY)
        .label_font((FONT, 14))
        .draw()?;
    Ok(())
}

fn times(area: &Area<'_>, summary: &Summary) -> Result<(), PlotError> {
    let bars: Vec<[f64; 2]> =
        summary.comparisons.iter().map(|c| [c.netsum_time(), c.gloo.step_time()].map(|s| 1e3 * s)).collect();
    let highest = bars.iter().flatten().copied().fold(0.0, f64::max);
    let names: Vec<String> = summary.comparisons.iter().map(|c| format!("{}, {}", c.model, c.rate)).collect();
    let mut chart = ChartBuilder::on(area)
        .caption("Median time of a step", (FONT, 22))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(72)
        // Room for the legend above the bars.
        .build_cartesian_2d(-0.5..bars.len() as f64 - 0.5, 0.0..highest.max(1e-3) * 1.3)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(2 * bars.len() + 1)
        .x_label_formatter(&|x| match x.fract() == 0.0 && *x >= 0.0 {
            true => names.get(*x as usize).cloned().unwrap_or_default(),
            false => String::new(),
        })
        .y_desc("milliseconds")
        .y_label_formatter(&|y| rounded(*y))
        .light_line_style(WHITE)
        .bold_line_style(BLACK.mix(0.12))
        .label_style((FONT, 14))
        .axis_desc_style((FONT, 15))
        .draw()?;
    for (who, colour, i) in [("netsum", BLUE, 0), ("Gloo", ORANGE, 1)] {
        let left = |group: usize| group as f64 - 0.36 + 0.36 * i as f64;
        let of_it = bars.iter().enumerate().map(|(group, times)| {
            Rectangle::new([(left(group), 0.0), (left(group) + 0.34, times[i])], colour.filled())
        });
        chart
            .draw_series(of_it)?
            .label(who)
            .legend(move |(x, y)| Rectangle::new([(x, y - 6), (x + 18, y + 6)], colour.filled()));
    }
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

    #[test]
    fn the_picture_has_a_curve_of_each_model_and_bars_of_each_rate() {
        let mut summary = crate::torch::tests::summary();
        let svg = draw(&summary).unwrap();
        // Two bars and their key, and a curve and its key.
        assert_eq!(svg.matches("#0072B2").count(), 2 + 1 + 2, "{svg}");
        for part in ["cnn, 250mbit\n", "cnn, 1gbit\n", "differ by 0.0e0 at most"] {
            assert!(svg.contains(part), "no {part} in {svg}");
        }
        assert!(!svg.contains("NaN"));
        summary.comparisons.clear();
        assert!(draw(&summary).is_err());
    }
}
