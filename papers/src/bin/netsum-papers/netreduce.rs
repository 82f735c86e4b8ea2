//! NetReduce (arXiv 2009.09736): hierarchical sums, first inside machines and then between them by
//! boxes, compared with a flat ring.

use anyhow::Result;
use netsum_papers::collectives::Machines;

use crate::chart::chart;
use crate::table;

const BYTES: f64 = 256e6;
const LATENCIES: [f64; 4] = [0.1e-6, 1e-6, 10e-6, 100e-6];
const INTRA: [f64; 5] = [15.75e9, 20e9, 25e9, 50e9, 100e9];

pub fn run() -> Result<(String, String)> {
    let mut rows = Vec::new();
    let mut curves = Vec::new();
    for intra in INTRA {
        let mut points = Vec::new();
        for machines in [32.0, 64.0, 128.0, 256.0, 512.0, 1024.0] {
            let at = |latency| Machines { machines, gpus: 8.0, intra, inter: 12.5e9, latency };
            let gain = |latency| at(latency).flat_ring(BYTES) / at(latency).hierarchical(BYTES);
            let (ratio, threshold) = (intra / 12.5e9, at(0.0).threshold());
            let mut row =
                vec![format!("{:.2}", intra / 1e9), format!("{machines}"), format!("{ratio:.2}")];
            row.push(format!("{threshold:.2}: {}", if ratio > threshold { "yes" } else { "no" }));
            row.extend(LATENCIES.map(|latency| format!("{:.2}", gain(latency))));
            row.push(format!("{:.2}", 2.0 * (machines - 1.0) / machines));
            row.push(format!("{:.2}", at(1e-6).ring_of_gpus(BYTES) / at(1e-6).hierarchical(BYTES)));
            rows.push(row);
            points.push((machines, gain(1e-6)));
        }
        curves.push((format!("{:.2} GB/s", intra / 1e9), points));
    }
    let head = [
        "GB/s inside",
        "machines",
        "inside / between",
        "inequality",
        "gain at 0.1 us",
        "1 us",
        "10 us",
        "100 us",
        "the paper's limit",
        "over a ring of all GPUs, 1 us",
    ];
    let text = format!(
        "Machines of 8 GPUs, 12.5 GB/s between them, 256 MB. The gain is the time of a flat ring \
         of machines divided by that of the hierarchical sum; the inequality says where it is \
         above 1 if latency is ignored. The paper's limit is 2 (P - 1) / P. It assumes that links \
         inside machines take no time, so it is too high by their time; and it ignores latency, so \
         the gain exceeds it where the ring's many steps take long.\n\n{}",
        table(&head, &rows)
    );
    let title = "Hierarchical sums compared with a flat ring, by the rate inside machines (1 us)";
    Ok((text, chart(title, "machines", "times as fast", &curves)?))
}
