//! The picture of a failure: the loss and the time of each sum, over the time of the training.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Area, BLUE, FONT, GREY, ORANGE, PlotError, block, legend, mesh, rounded};
use crate::failure::Failure;
use crate::report::Summary;

/// The origins of a sum, with their text in the legend and their colour.
const WHO: [(bool, &str, RGBColor); 2] =
    [(true, "the boxes sum", BLUE), (false, "the hosts' ring sums", ORANGE)];

/// A panel of the picture.
struct Panel<'a> {
    caption: String,
    y: &'a str,
    x: &'a str,
    /// The value of each step.
    values: Vec<f64>,
    /// Whether to draw dots instead of a line.
    dots: bool,
    /// The height of the axis relative to the largest value; a larger height leaves space for names
    /// of events.
    room: f64,
}

/// Draws both panels, one above the other.
pub fn draw(root: &Area<'_>, summary: &Summary, failure: &Failure) -> Result<(), PlotError> {
    if failure.steps.is_empty() {
        return Err(PlotError("the training made no steps".to_owned()));
    }
    let (upper, lower) = root.split_vertically(270);
    let right = 100.0 * summary.ranks.first().map_or(0.0, |rank| rank.accuracy);
    let same = if summary.reference_identical {
        "as without the failure, bit by bit"
    } else {
        "DIFFERENT"
    };
    let loss = Panel {
        caption: format!(
            "Training continues: {right:.1} % of the test images right; weights \
                          {same}"
        ),
        y: "loss, nats",
        x: "",
        values: summary.loss.iter().map(|loss| f64::from(*loss)).collect(),
        dots: false,
        room: 300.0,
    };
    panel(&upper, &loss, failure)?;
    let longest = failure.pauses().map(|pause| pause.took).fold(0.0, f64::max);
    let pause = if longest > 0.0 {
        format!("the longest pause is {longest:.1} s")
    } else {
        "no pause".into()
    };
    let sums = Panel {
        caption: format!("Time of each sum over all hosts; {pause}"),
        y: "milliseconds",
        x: "seconds of training",
        values: failure.steps.iter().map(|step| 1e3 * step.took).collect(),
        dots: true,
        room: 2.0,
    };
    panel(&lower, &sums, failure)
}

fn panel(area: &Area<'_>, panel: &Panel<'_>, failure: &Failure) -> Result<(), PlotError> {
    let times = || failure.steps.iter().map(|step| step.at);
    let end = times().fold(0.0, f64::max);
    // Zero has no logarithm.
    let values = || panel.values.iter().map(|value| value.max(1e-4));
    let (lowest, highest) =
        (0.7 * values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max));
    let top = highest * panel.room;
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.caption, (FONT, 20))
        .margin(10)
        .margin_right(24)
        .x_label_area_size(if panel.x.is_empty() { 24 } else { 40 })
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..end, (lowest..top).log_scale())?;
    mesh!(chart)
        .x_desc(panel.x)
        .y_desc(panel.y)
        .y_label_formatter(&|y| if *y > highest * 1.5 { String::new() } else { rounded(*y) })
        .draw()?;
    for (by_box, who, colour) in WHO {
        let phases = failure.phases().into_iter().filter(|phase| phase.by_box == by_box);
        let shades = phases.map(|phase| {
            Rectangle::new([(phase.from, lowest), (phase.to, top)], colour.mix(0.12).filled())
        });
        chart.draw_series(shades)?.label(who).legend(block(colour.mix(0.6).filled()));
    }
    let pauses = failure.pauses().map(|step| [(step.at - step.took, lowest), (step.at, top)]);
    let grey = GREY.mix(0.45).filled();
    chart
        .draw_series(pauses.map(|corners| Rectangle::new(corners, grey)))?
        .label("all wait")
        .legend(block(grey));
    if panel.dots {
        let dots = times().zip(values()).zip(&failure.steps).map(|(dot, step)| {
            let colour = if step.by_box { BLUE } else { ORANGE };
            Circle::new(dot, 2, colour.filled())
        });
        chart.draw_series(dots)?;
        legend(&mut chart)?;
    } else {
        chart.draw_series(LineSeries::new(times().zip(values()), BLACK.stroke_width(1)))?;
    }
    let moments = failure.moments();
    for (row, moment) in moments.iter().enumerate() {
        // Each name has a row of its own that later events' lines do not cross.
        let from = if panel.dots { top } else { top / 2.5_f64.powi(row as i32) };
        let line = [(moment.at, lowest), (moment.at, from)];
        chart.draw_series(DashedLineSeries::new(line, 4, 4, BLACK.stroke_width(1)))?;
        if panel.dots {
            continue;
        }
        let late = moment.at > 0.6 * end;
        let anchor = Pos::new(if late { HPos::Right } else { HPos::Left }, VPos::Center);
        let style = (FONT, 15).into_text_style(area).color(&BLACK).pos(anchor);
        let text = format!("{:.1} s: {}", moment.at, moment.what);
        let (x, y) = chart.plotting_area().map_coordinate(&(moment.at, from));
        let (left, above) = area.get_base_pixel();
        area.draw(&Text::new(text, (x - left + if late { -6 } else { 6 }, y - above + 9), style))?;
    }
    Ok(())
}
