//! Curves as SVG.

use anyhow::{Result, anyhow};
use plotters::prelude::*;

/// A curve: its name and points.
pub type Curve = (String, Vec<(f64, f64)>);

/// Draws curves in a chart whose x axis has powers of two and whose y axis begins at zero.
pub fn chart(title: &str, x: &str, y: &str, curves: &[Curve]) -> Result<String> {
    let mut svg = String::new();
    draw(&mut svg, [title, x, y], curves).map_err(|e| anyhow!("cannot draw {title:?}: {e}"))?;
    Ok(svg)
}

fn draw(
    svg: &mut String,
    [title, x, y]: [&str; 3],
    curves: &[Curve],
) -> Result<(), Box<dyn std::error::Error>> {
    let points = || curves.iter().flat_map(|(_, points)| points);
    let left = points().map(|p| p.0).fold(f64::INFINITY, f64::min);
    let right = points().map(|p| p.0).fold(0.0, f64::max);
    let top = points().map(|p| p.1).fold(0.0, f64::max);
    let root = SVGBackend::with_string(svg, (720, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(45)
        .y_label_area_size(60)
        .build_cartesian_2d((left..right).log_scale().base(2.0), 0.0..top * 1.1)?;
    chart.configure_mesh().x_desc(x).y_desc(y).x_label_formatter(&|x| format!("{x:.0}")).draw()?;
    for (n, (name, points)) in curves.iter().enumerate() {
        let colour = Palette99::pick(n).to_rgba();
        let line = LineSeries::new(points.iter().copied(), colour.stroke_width(2)).point_size(3);
        chart
            .draw_series(line)?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;
    root.present()?;
    Ok(())
}
