//! `netsum-demo hosts`, as `cargo xtask demo` runs it: hosts of a lab train a model together, and
//! the box between them adds up their gradients.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`daemon`] | `netsum run` on a box, and its job; [`boxes`]: those of all boxes |
//! | [`ranks`] | the training processes on the hosts, and the progress bar |
//! | [`link`] | hosts' addresses, and the byte counters of links |
//! | [`interrupt`] | Ctrl-C |

mod boxes;
mod daemon;
mod interrupt;
mod link;
mod ranks;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use netsum_demo::report::{Line, LinkBytes, Ring, Summary, Trained, grouped};
use netsum_demo::train::Config;
use netsum_demo::{DEFAULT_EPOCHS, PATH_MTU, plot};
use netsum_lab::faults::Faults;
use netsum_lab::netns::output;
use netsum_lab::{Lab, LabSpec};

use boxes::Boxes;
use ranks::{Ranks, Summer};

/// Hosts of a lab that train together.
#[derive(clap::Args, Debug)]
pub struct DemoArgs {
    /// Hosts that train, one rank on each.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..=64))]
    hosts: u16,
    /// How often each image is seen.
    #[arg(long, default_value_t = DEFAULT_EPOCHS as u16, value_parser = clap::value_parser!(u16).range(1..))]
    epochs: u16,
    /// Share of the packets that is lost in each direction at each host, as `1%` or `0.01`.
    #[arg(long, default_value = "0", value_parser = parse_share)]
    drop: f64,
    /// For the first weights, the order of the images and the losses.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder for the picture, the summary and the weights.
    #[arg(long, default_value = "demo-out")]
    out: PathBuf,
    /// Spread the hosts over so many racks, each with a box, and a spine between these. With 0 there is one box for all.
    #[arg(long, default_value_t = 0)]
    racks: u8,
    /// Do not train a second time with a ring of the hosts, to compare the bytes.
    #[arg(long)]
    no_ring: bool,
}

/// Losses beyond this make a demo that nobody waits for.
const MOST_LOSS: f64 = 0.2;

/// Where the programs are: beside this one.
struct Programs {
    netsum: PathBuf,
    demo: PathBuf,
}

/// Trains by the box, by a ring of the hosts, and in one process.
///
/// # Errors
/// What went wrong; which promise of the demo does not hold.
pub fn run(args: DemoArgs) -> Result<()> {
    interrupt::catch()?;
    ensure!(args.racks != 1, "--racks 1: a spine needs two racks, and one box needs none");
    ensure!(u16::from(args.racks) <= args.hosts, "--racks {}: there are {} hosts", args.racks, args.hosts);
    std::fs::create_dir_all(&args.out).with_context(|| format!("--out {}", args.out.display()))?;
    let demo = std::env::current_exe()?;
    let programs = Programs { netsum: demo.with_file_name("netsum"), demo };
    let config = Config::new(args.hosts.into(), args.epochs.into(), args.seed);

    let mut lab = build_lab(&args)?;
    let folder = tempfile::tempdir().context("a folder for the daemon's files")?;
    let mut boxes = Boxes::start(&lab, &programs.netsum, folder.path())?;
    let job = boxes.job.clone();
    println!(
        "the {} has the job `{}`: {} ranks, {} bytes of memory",
        if args.racks == 0 { "box" } else { "spine" },
        job.name,
        config.ranks,
        grouped(job.memory)
    );

    let summer = if args.racks == 0 { Summer::Box(&job) } else { Summer::Boxes };
    println!("training; the box{}", if args.racks == 0 { " sums" } else { "es sum" });
    let by_box = train(&mut lab, &mut boxes, &args, &config, &programs, summer)?;
    // Else they would sum for the ring, too.
    boxes.forget()?;
    let by_ring = if args.no_ring {
        None
    } else {
        println!("the same again, summed by a ring of the hosts, to compare");
        Some(train(&mut lab, &mut boxes, &args, &config, &programs, Summer::Ring)?)
    };
    boxes.stop()?;
    drop(lab);
    println!("the same in one process");
    let (reference, alone) = train_alone(&config, &programs, &args.out)?;

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
        loss: by_box.loss,
    };
    let picture = present(&summary, &args.out)?;
    println!("\n{}", summary.table());
    println!("  picture: {}", picture.display());
    println!("  summary: {}", args.out.join("summary.json").display());
    let complaints = summary.complaints();
    if !complaints.is_empty() {
        bail!("the demo has not shown what it should: {}", complaints.join("; "));
    }
    Ok(())
}

fn build_lab(args: &DemoArgs) -> Result<Lab> {
    let racks = usize::from(args.racks);
    match racks {
        0 => println!("building a lab: {} hosts on the ports of a box with a Linux bridge", args.hosts),
        _ => println!("building a lab: {} hosts in {racks} racks, a box for each, and a spine", args.hosts),
    }
    let lab = Lab::new(LabSpec { cables: args.drop > 0.0, racks, ..LabSpec::hosts(args.hosts.into()) })?;
    if args.drop > 0.0 {
        println!("each host's link loses {} % of the packets in each direction", 100.0 * args.drop);
    }
    Ok(lab)
}

/// What the hosts came to.
struct Together {
    ranks: Vec<Trained>,
    loss: Vec<f32>,
    /// Of the box, for its job.
    counters: BTreeMap<String, u64>,
    weights: Vec<Vec<u8>>,
    links: Vec<LinkBytes>,
    uplinks: Vec<LinkBytes>,
    /// Packets lost on all links, if any were to be lost.
    lost: Option<u64>,
}

/// Trains on the lab's hosts.
fn train(
    lab: &mut Lab,
    boxes: &mut Boxes,
    args: &DemoArgs,
    config: &Config,
    programs: &Programs,
    summer: Summer<'_>,
) -> Result<Together> {
    if args.drop > 0.0 {
        for host in lab.hosts() {
            // Another seed for each host, or all would lose the same packets.
            let seed = (args.seed as u32).wrapping_mul(64).wrapping_add(host.number() as u32);
            host.set_faults(Faults::loss(args.drop), Faults::loss(args.drop), seed)?;
        }
    }
    let read = |lab: &Lab| {
        let hosts = lab.hosts().iter().map(link::read).collect::<Result<Vec<_>>>()?;
        let uplinks = (0..lab.spec().racks).map(|rack| link::read_uplink(lab, rack));
        Ok::<_, anyhow::Error>((hosts, uplinks.collect::<Result<Vec<_>>>()?))
    };
    let before = read(lab)?;
    let processes = Ranks::start(lab, config, &programs.demo, summer, &args.out)?;
    let (ranks, loss) = processes.train(boxes)?;
    let after = read(lab)?;
    // Before the job's ring goes with its ranks.
    let counters = match summer {
        Summer::Box(_) | Summer::Boxes => boxes.counters()?,
        Summer::Ring => BTreeMap::new(),
    };
    let mut lost = None;
    if args.drop > 0.0 {
        let counts = lab.hosts().iter().map(|h| h.cable()?.counts()).collect::<Result<Vec<_>>>()?;
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
    })
}

/// The same training in one process: the same program, without a network. What it came to, and the weights.
fn train_alone(config: &Config, programs: &Programs, out: &Path) -> Result<(Trained, Vec<u8>)> {
    let file = "weights-reference.bin";
    let mut command = Command::new(&programs.demo);
    command.arg("reference").args(ranks::training_arguments(config)).arg("--weights").arg(out.join(file));
    let said = output(&mut command)?;
    let last = said.lines().last().context("netsum-demo reference said nothing")?;
    match serde_json::from_str(last)? {
        Line::Trained(trained) => Ok((trained, read_weights(out, file)?)),
        other => bail!("netsum-demo reference ended with {other:?}"),
    }
}

fn read_weights(out: &Path, file: &str) -> Result<Vec<u8>> {
    let path = out.join(file);
    std::fs::read(&path).with_context(|| path.display().to_string())
}

/// Writes summary and picture; where the picture is.
fn present(summary: &Summary, out: &Path) -> Result<PathBuf> {
    let write = |name: &str, bytes: &[u8]| -> Result<PathBuf> {
        let path = out.join(name);
        std::fs::write(&path, bytes).with_context(|| path.display().to_string())?;
        Ok(path)
    };
    write("summary.json", serde_json::to_string_pretty(summary)?.as_bytes())?;
    let svg = write("demo.svg", plot::draw(summary)?.as_bytes())?;
    // For those who have the converter; a browser shows the SVG.
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
    let share =
        number.trim().parse::<f64>().map_err(|_| "not a share: write `1%` or `0.01`".to_owned())? / unit;
    if !(0.0..=MOST_LOSS).contains(&share) {
        return Err(format!("0% to {}% can be lost", 100.0 * MOST_LOSS));
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
