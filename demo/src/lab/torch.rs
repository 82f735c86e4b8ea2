//! `netsum-demo torch`, as `cargo xtask demo --torch` runs it: PyTorch trains on hosts of a lab
//! with slow links, and netsum sums its gradients, then Gloo, then netsum again.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use netsum_demo::plot::curves;
use netsum_demo::torch::{Comparison, Run, Summary, WARMING};
use netsum_lab::cluster::Cluster;
use netsum_lab::train::{SumBackend, TrainSpec, Trainers};
use netsum_lab::{LabSpec, Rate};

use super::{interrupt, link, present};

const JOB: &str = "train";

/// Train with PyTorch on hosts of a lab.
#[derive(clap::Args, Debug)]
pub struct TorchArgs {
    /// A Python that has torch and netsum.
    #[arg(long)]
    python: PathBuf,
    /// Number of hosts, with one rank on each.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..=64))]
    hosts: u16,
    /// Models to train: mlp, cnn, transformer.
    #[arg(long, value_delimiter = ',', default_values = ["cnn", "transformer"])]
    models: Vec<String>,
    /// Bandwidth of each host's link, each way.
    #[arg(long, value_delimiter = ',', default_values = ["250mbit", "1gbit"])]
    rates: Vec<Rate>,
    /// Steps of each training.
    #[arg(long, default_value_t = 30)]
    steps: usize,
    /// Seed of the first weights and the order of the data.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder for the picture and the summary.
    #[arg(long, default_value = "demo-out")]
    out: PathBuf,
}

/// Trains each model over links of each rate.
///
/// # Errors
/// If something fails, or a promise of the demo is not kept.
pub fn run(args: &TorchArgs) -> Result<()> {
    interrupt::catch()?;
    ensure!(args.steps > WARMING, "--steps {}: the first {WARMING} are not timed", args.steps);
    std::fs::create_dir_all(&args.out).with_context(|| format!("--out {}", args.out.display()))?;
    let mut comparisons = Vec::new();
    for &rate in &args.rates {
        println!(
            "building a lab: {} hosts on the ports of a box, over links of {rate}",
            args.hosts
        );
        let cluster =
            Cluster::start(LabSpec { rate: Some(rate), ..LabSpec::hosts(args.hosts.into()) })?;
        // A job with the daemon's defaults.
        let job = cluster.create(JOB, &[("--ranks", args.hosts.into())], &[])?;
        let token = job["token"].as_str().context("no token")?;
        for model in &args.models {
            let train = |summer| {
                train(args, &cluster, model, summer)
                    .with_context(|| format!("log of the box:\n{}", cluster.daemon_log()))
            };
            // Gloo runs between netsum's trainings: other load on the machine then affects both.
            let (floats, netsum) = train(SumBackend::Hook(JOB, token))?;
            let (_, gloo) = train(SumBackend::Gloo)?;
            let (_, again) = train(SumBackend::Hook(JOB, token))?;
            let (model, rate) = (model.clone(), rate.to_string());
            comparisons.push(Comparison { model, rate, floats, netsum, gloo, again });
        }
    }
    let summary =
        Summary { hosts: args.hosts.into(), steps: args.steps, seed: args.seed, comparisons };
    let picture = present(&summary, &curves::draw(&summary)?, &args.out)?;
    println!("\n{}", summary.table());
    println!("  picture: {}", picture.display());
    println!("  summary: {}", args.out.join("summary.json").display());
    let complaints = summary.complaints();
    if !complaints.is_empty() {
        bail!("the demo did not keep its promises: {}", complaints.join("; "));
    }
    Ok(())
}

/// Runs one training; returns the number of parameters and the result.
fn train(
    args: &TorchArgs,
    cluster: &Cluster,
    model: &str,
    summer: SumBackend<'_>,
) -> Result<(u64, Run)> {
    let who = if summer == SumBackend::Gloo { "Gloo" } else { "netsum" };
    let bar = ProgressBar::new(args.steps as u64)
        .with_style(
            ProgressStyle::with_template("  {prefix} {bar:40} step {pos}/{len}  {msg}")?
                .progress_chars("=> "),
        )
        .with_prefix(format!("{model:<12} {who:<7}"))
        .with_message("loading PyTorch");
    bar.tick();
    let spec = TrainSpec {
        python: args.python.clone(),
        model: model.to_owned(),
        steps: args.steps,
        seed: args.seed,
        wire: "32bit",
    };
    let mut trainers = Trainers::start(cluster, &spec, summer)?;
    interrupt::check()?;
    let read = || cluster.lab().hosts().iter().map(link::read).collect::<Result<Vec<_>>>();
    let before = read()?;
    let trained = trainers.train(|step, loss| {
        bar.set_position(step as u64 + 1);
        bar.set_message(format!("loss {loss:.4}"));
        interrupt::check()
    })?;
    let links = link::since(&before, &read()?);
    finish(&bar, model, who, &trained.loss);
    let floats = trainers.floats;
    trainers.leave()?;
    let by_box =
        trained.statistics.iter().all(|count| count["fallbacks"] == 0 && count["ring_bytes"] == 0);
    Ok((
        floats,
        Run {
            loss: trained.loss,
            seconds: trained.seconds,
            test: trained.test,
            weights: trained.weights,
            links,
            by_box: (summer != SumBackend::Gloo).then_some(by_box),
        },
    ))
}

/// Leaves the bar on the screen. Without a terminal it is hidden, and a line is printed instead.
fn finish(bar: &ProgressBar, model: &str, who: &str, loss: &[f64]) {
    bar.abandon();
    match (bar.is_hidden(), loss.last()) {
        (true, Some(loss)) => {
            println!("  {model}, {who}: {} steps, loss {loss:.4}", bar.length().unwrap_or(0))
        }
        _ => println!(),
    }
}
