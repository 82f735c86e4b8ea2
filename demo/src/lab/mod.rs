//! `netsum-demo hosts`, as `cargo xtask demo` runs it: hosts of a lab train a model together, and
//! the box between them adds up their gradients.
//!
//! | module | content |
//! | --- | --- |
//! | [`boxes`] | the lab, `netsum run` on all boxes, the manager of several, and their job |
//! | [`failure`] | the failure that is caused during the training |
//! | [`ranks`] | the training processes on the hosts, and the progress bar |
//! | [`link`] | addresses of hosts, and the byte counters of links |
//! | [`torch`] | `netsum-demo torch`: training with PyTorch, by netsum and by Gloo |
//! | [`interrupt`] | Ctrl-C |

mod boxes;
mod failure;
mod interrupt;
mod link;
mod ranks;
pub mod torch;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use netsum_demo::failure::Failure;
use netsum_demo::report::{Line, LinkBytes, Ring, Sealed, Summary, Trained};
use netsum_demo::train::Config;
use netsum_demo::{DEFAULT_EPOCHS, PATH_MTU, plot};
use netsum_lab::faults::Faults;
use netsum_lab::netns::output;
use netsum_lab::{Lab, LabSpec};
use serde::Serialize;

use boxes::Boxes;
use failure::{Plan, Victim};
use ranks::{Ranks, SumBackend, Training};

/// Train on hosts of a lab.
#[derive(clap::Args, Debug)]
pub struct DemoArgs {
    /// Number of hosts, with one rank on each.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..=64))]
    hosts: u16,
    /// Number of times that each image is used.
    #[arg(long, default_value_t = DEFAULT_EPOCHS as u16, value_parser = clap::value_parser!(u16)
        .range(1..))]
    epochs: u16,
    /// Fraction of packets that is lost in each direction at each host, as `1%` or `0.01`.
    #[arg(long, default_value = "0", value_parser = parse_share)]
    drop: f64,
    /// Seed of the first weights, the order of the images, and the losses.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder for the picture, the summary and the weights.
    #[arg(long, default_value = "demo-out")]
    out: PathBuf,
    /// Spread the hosts over this many racks, each with a box, and connect the boxes by a spine; a
    /// fabric manager runs them. With 0 there is one box for all.
    #[arg(long, default_value_t = 0)]
    racks: u8,
    /// With --racks: the number of spines.
    #[arg(long, default_value_t = 1, requires = "racks", value_parser = clap::value_parser!(u8)
        .range(1..=8))]
    spines: u8,
    /// With --racks: fail something during the training, for five seconds. `spine0`, `leaf1` and so
    /// on: kill netsum on that box, with its programs. `uplink`: cut the last leaf's link to the
    /// last spine. `manager`: kill the fabric manager. The training is slowed down to show the
    /// effects, and the trainings for comparison are skipped.
    #[arg(long, requires = "racks")]
    fail: Option<String>,
    /// Train once: skip the trainings with sealed sums and with the hosts' ring, for comparison.
    #[arg(long)]
    once: bool,
}

/// The time of a step besides its all-reduce if something fails, in seconds.
const WATCHED: f64 = 0.04;

/// With higher losses the demo takes too long.
const MOST_LOSS: f64 = 0.2;

/// Trains by the box, by the hosts' ring, and in one process.
///
/// # Errors
/// If something fails, or a promise of the demo is not kept.
pub fn run(args: DemoArgs) -> Result<()> {
    interrupt::catch()?;
    ensure!(args.racks != 1, "--racks 1: use 2 or more racks, or 0 for one box");
    ensure!(
        u16::from(args.racks) <= args.hosts,
        "--racks {}: use at most as many racks as hosts, which are {}",
        args.racks,
        args.hosts
    );
    std::fs::create_dir_all(&args.out).with_context(|| format!("--out {}", args.out.display()))?;
    let program = std::env::current_exe()?;
    let config = Config::new(args.hosts.into(), args.epochs.into(), args.seed);

    let spec = lab_spec(&args);
    let victim = args.fail.as_ref().map(|text| Victim::parse(text, &spec)).transpose()?;
    let mut boxes = Boxes::start(spec)?;
    let job = boxes.job.clone();
    println!("the {} created the job `{}` with {} ranks", who(&args), job.name, config.ranks);

    println!("training; the box{}", if args.racks == 0 { " sums" } else { "es sum" });
    let by_box = train(&mut boxes, &args, &config, &program, SumBackend::Box(&job), victim)?;
    let compares = !args.once && victim.is_none();
    let sealed = if compares {
        println!("training again, with sums that no box can read or forge");
        let job = boxes.create_sealed()?;
        // Only this program's processes need to agree on it.
        let secret = format!("{:032x}", fastrand::u128(..));
        let backend = SumBackend::Sealed(&job, &secret);
        let sealed = train(&mut boxes, &args, &config, &program, backend, None)?;
        boxes.forget(&job)?;
        Some(sealed)
    } else {
        None
    };
    // Otherwise the boxes would sum the ring's packets, too.
    boxes.forget(&job)?;
    let by_ring = if compares {
        println!("training again, summed by the hosts' ring, for comparison");
        Some(train(&mut boxes, &args, &config, &program, SumBackend::Ring, None)?)
    } else {
        None
    };
    drop(boxes);
    println!("training again in one process");
    let (reference, alone) = train_alone(&config, &program, &args.out)?;

    let same = |weights: &[Vec<u8>], one: &Vec<u8>| weights.iter().all(|w| w == one);
    let summary = Summary {
        hosts: config.ranks,
        epochs: config.epochs,
        seed: config.seed,
        drop: args.drop,
        lost: by_box.lost,
        mtu: PATH_MTU,
        floats: config.floats(),
        ranks: by_box.ranks,
        reference,
        ranks_identical: same(&by_box.weights, &by_box.weights[0]),
        reference_identical: by_box.weights[0] == alone,
        counters: by_box.counters,
        links: by_box.links,
        uplinks: by_box.uplinks,
        ring: by_ring.map(|ring| Ring {
            links: ring.links,
            uplinks: ring.uplinks,
            seconds: ring.ranks[0].seconds,
            identical: same(&ring.weights, &alone),
        }),
        sealed: sealed.map(|sealed| Sealed {
            seconds: sealed.ranks[0].seconds,
            identical: same(&sealed.weights, &alone),
            by_box: sealed.ranks.iter().all(|r| r.is_sealed && r.by_box == r.all_reduces),
        }),
        failure: by_box.failure,
        loss: by_box.loss,
    };
    let picture = present(&summary, &plot::draw(&summary)?, &args.out)?;
    println!("\n{}", summary.table());
    println!("  picture: {}", picture.display());
    println!("  summary: {}", args.out.join("summary.json").display());
    let complaints = summary.complaints();
    if !complaints.is_empty() {
        bail!("the demo did not keep its promises: {}", complaints.join("; "));
    }
    Ok(())
}

/// The name of what creates the job.
fn who(args: &DemoArgs) -> &'static str {
    if args.racks == 0 { "box" } else { "manager" }
}

fn lab_spec(args: &DemoArgs) -> LabSpec {
    let (racks, spines) = (usize::from(args.racks), usize::from(args.spines));
    match (racks, spines) {
        (0, _) => println!(
            "building a lab: {} hosts on the ports of a box with a Linux bridge",
            args.hosts
        ),
        (_, 1) => {
            println!(
                "building a lab: {} hosts in {racks} racks, a box for each, and a spine",
                args.hosts
            )
        }
        _ => println!(
            "building a lab: {} hosts in {racks} racks, a box for each, and {spines} spines",
            args.hosts
        ),
    }
    if args.drop > 0.0 {
        println!("each host's link loses {} % of the packets in each direction", 100.0 * args.drop);
    }
    LabSpec { faulty_links: args.drop > 0.0, racks, spines, ..LabSpec::hosts(args.hosts.into()) }
}

/// The result of the hosts.
struct Together {
    ranks: Vec<Trained>,
    loss: Vec<f32>,
    /// The box's counters for its job.
    counters: BTreeMap<String, u64>,
    weights: Vec<Vec<u8>>,
    links: Vec<LinkBytes>,
    uplinks: Vec<LinkBytes>,
    /// Packets lost on all links, if losses were asked for.
    lost: Option<u64>,
    failure: Option<Failure>,
}

/// Trains on the lab's hosts.
fn train(
    boxes: &mut Boxes,
    args: &DemoArgs,
    config: &Config,
    program: &Path,
    summer: SumBackend<'_>,
    victim: Option<Victim>,
) -> Result<Together> {
    let lab = boxes.lab();
    if args.drop > 0.0 {
        for host in lab.hosts() {
            // Each host has a seed of its own, or all would lose the same packets.
            let seed = (args.seed as u32).wrapping_mul(64).wrapping_add(host.number() as u32);
            host.set_faults(Faults::loss(args.drop), Faults::loss(args.drop), seed)?;
        }
    }
    let read = |lab: &Lab| {
        let hosts = lab.hosts().iter().map(link::read).collect::<Result<Vec<_>>>()?;
        let uplinks = (0..lab.spec().racks).map(|rack| link::read_uplinks(lab, rack));
        Ok::<_, anyhow::Error>((hosts, uplinks.collect::<Result<Vec<_>>>()?))
    };
    let before = read(lab)?;
    let compute = if victim.is_some() { WATCHED } else { 0.0 };
    let processes = Ranks::start(lab, config, program, summer, compute, &args.out)?;
    let mut plan = victim.map(|victim| Plan::new(victim, processes.steps));
    let Training { ranks, loss, times, began } = processes.train(boxes, plan.as_mut())?;
    let lab = boxes.lab();
    let after = read(lab)?;
    let failure = plan.and_then(|Plan { victim, failed, recovered, .. }| {
        let seconds = |at: Instant| (at - began).as_secs_f64();
        let (failed, recovered) = (seconds(failed?), recovered.map(seconds));
        Some(Failure { words: victim.words(lab.spec()), failed, recovered, steps: times })
    });
    // Read them before the ranks leave and the job's ring ends. Boxes that were set up again have
    // lost their earlier counts.
    let counters = match summer {
        SumBackend::Box(_) if failure.is_none() => boxes.counters()?,
        _ => BTreeMap::new(),
    };
    let mut lost = None;
    if args.drop > 0.0 {
        let counts =
            lab.hosts().iter().map(|h| h.fault_link()?.counts()).collect::<Result<Vec<_>>>()?;
        lost = Some(counts.iter().map(|c| c.up.lost + c.down.lost).sum());
    }
    processes.leave(boxes)?;
    let weights = (0..config.ranks).map(|r| read_weights(&args.out, &summer.weights_file(r)));
    Ok(Together {
        ranks,
        loss,
        counters,
        weights: weights.collect::<Result<_>>()?,
        links: link::since(&before.0, &after.0),
        uplinks: link::since(&before.1, &after.1),
        lost,
        failure,
    })
}

/// The same training in one process, with the same program and without a network. Returns the
/// result and the weights.
fn train_alone(config: &Config, program: &Path, out: &Path) -> Result<(Trained, Vec<u8>)> {
    let file = "weights-reference.bin";
    let mut command = Command::new(program);
    command
        .arg("reference")
        .args(ranks::training_arguments(config))
        .arg("--weights")
        .arg(out.join(file));
    let answer = output(&mut command)?;
    let last = answer.lines().last().context("netsum-demo reference printed nothing")?;
    match serde_json::from_str(last)? {
        Line::Trained(trained) => Ok((trained, read_weights(out, file)?)),
        other => bail!("netsum-demo reference ended with {other:?}"),
    }
}

fn read_weights(out: &Path, file: &str) -> Result<Vec<u8>> {
    let path = out.join(file);
    std::fs::read(&path).with_context(|| path.display().to_string())
}

/// Writes summary and picture; returns the picture's path.
fn present(summary: &impl Serialize, picture: &str, out: &Path) -> Result<PathBuf> {
    let write = |name: &str, bytes: &[u8]| -> Result<PathBuf> {
        let path = out.join(name);
        std::fs::write(&path, bytes).with_context(|| path.display().to_string())?;
        Ok(path)
    };
    write("summary.json", serde_json::to_string_pretty(summary)?.as_bytes())?;
    let svg = write("demo.svg", picture.as_bytes())?;
    // A PNG needs a converter; any browser shows the SVG.
    let png = out.join("demo.png");
    let converted = Command::new("rsvg-convert").arg(&svg).arg("-o").arg(&png).status();
    if converted.is_ok_and(|status| status.success()) {
        return Ok(png);
    }
    Ok(svg)
}

fn parse_share(text: &str) -> Result<f64, String> {
    let (number, unit) = match text.strip_suffix('%') {
        Some(percent) => (percent, 100.0),
        None => (text, 1.0),
    };
    let share = number
        .trim()
        .parse::<f64>()
        .map_err(|_| "use a share such as `1%` or `0.01`".to_owned())?
        / unit;
    if !(0.0..=MOST_LOSS).contains(&share) {
        return Err(format!("use a share from 0% to {}%", 100.0 * MOST_LOSS));
    }
    Ok(share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_percent_or_fractions() {
        assert_eq!(parse_share("1%"), Ok(0.01));
        assert_eq!(parse_share("0.5 %"), Ok(0.005));
        assert_eq!(parse_share("0.01"), Ok(0.01));
        assert_eq!(parse_share("0"), Ok(0.0));
        for wrong in ["1", "-1%", "50%", "x", "", "NaN"] {
            assert!(parse_share(wrong).is_err(), "{wrong}");
        }
    }
}
