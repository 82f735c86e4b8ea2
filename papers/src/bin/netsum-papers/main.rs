//! `cargo xtask papers`: computes the results of NetReduce, Blink and Ethereal with the planner and
//! the fluid network, and the cost of sharing links with other jobs.

mod background;
mod blink;
mod chart;
mod ethereal;
mod netreduce;

use std::path::Path;

use anyhow::{Context, Result};

/// A table as Markdown.
fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let head: Vec<String> = head.iter().map(|&cell| cell.to_owned()).collect();
    let rule = vec!["---".to_owned(); head.len()];
    line(&head) + &line(&rule) + &rows.iter().map(|row| line(row)).collect::<String>()
}

fn main() -> Result<()> {
    let folder = std::env::args().nth(1).context("netsum-papers FOLDER")?;
    let folder = Path::new(&folder);
    std::fs::create_dir_all(folder)?;
    for (name, make) in [
        ("netreduce", netreduce::run as fn() -> Result<(String, String)>),
        ("blink", blink::run),
        ("ethereal", ethereal::run),
        ("background", background::run),
    ] {
        let start = std::time::Instant::now();
        let (text, svg) = make()?;
        std::fs::write(folder.join(format!("{name}.md")), &text)?;
        std::fs::write(folder.join(format!("{name}.svg")), svg)?;
        println!("# {name}, {:.1} s\n\n{text}", start.elapsed().as_secs_f64());
    }
    println!("written to {}", folder.display());
    Ok(())
}
