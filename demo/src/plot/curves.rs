//! The picture of trainings with PyTorch: the losses over the steps, and the time of a step.

use plotters::prelude::*;

use super::{
    Area, BLUE, FONT, ORANGE, PlotError, SIZE, bars, builder, legend, line, mesh, rounded,
};
use crate::torch::{Comparison, Summary};

/// Draws a summary as SVG.
///
/// # Errors
/// If there is nothing to draw.
pub fn draw(summary: &Summary) -> Result<String, PlotError> {
    if summary.comparisons.iter().all(|comparison| comparison.netsum.loss.is_empty()) {
        return Err(PlotError("the training made no steps".to_owned()));
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
    let mut chart = builder(area, &format!("Loss; netsum and Gloo differ by {apart:.1e} at most"))
        .build_cartesian_2d(0.0..summary.steps as f64, 0.0..highest * 1.1)?;
    mesh!(chart).x_desc("step").y_desc("cross entropy, nats").draw()?;
    // The loss does not depend on the rate of the links, so each model is drawn once.
    let mut drawn: Vec<&str> = Vec::new();
    for Comparison { model, netsum, gloo, .. } in all() {
        if drawn.contains(&&**model) {
            continue;
        }
        // The upper line is thinner, to show both.
        for (who, run, style) in
            [("Gloo", gloo, ORANGE.stroke_width(6)), ("netsum", netsum, BLUE.stroke_width(2))]
        {
            let points = run.loss.iter().enumerate().map(|(step, loss)| (step as f64, *loss));
            let curve = chart.draw_series(LineSeries::new(points, style))?;
            if drawn.is_empty() {
                curve.label(who).legend(line(style));
            }
        }
        let first = netsum.loss.first().copied().unwrap_or_default();
        let at = (0.03 * summary.steps as f64, first + 0.06 * highest);
        chart.draw_series([Text::new(model.clone(), at, (FONT, 16))])?;
        drawn.push(model);
    }
    legend(&mut chart)
}

fn times(area: &Area<'_>, summary: &Summary) -> Result<(), PlotError> {
    let all = || summary.comparisons.iter();
    let names: Vec<String> = all().map(|c| format!("{}, {}", c.model, c.rate)).collect();
    let series = [
        ("netsum", BLUE.filled(), all().map(|c| 1e3 * c.netsum_time()).collect()),
        ("Gloo", ORANGE.filled(), all().map(|c| 1e3 * c.gloo.step_time()).collect::<Vec<_>>()),
    ];
    let highest = series.iter().flat_map(|(_, _, times)| times).copied().fold(1e-3, f64::max);
    legend(&mut bars(area, ["Median time of a step", "milliseconds"], &names, &series, highest)?)
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
