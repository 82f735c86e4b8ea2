//! `cargo xtask soak`: a long run under loss.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{SigSet, Signal};

use crate::fuzz::duration;
use crate::harness::test_programs;
use crate::paths::{output, root};
use crate::setup;
use crate::vm::Kernel;

/// Arguments of `cargo xtask soak`.
#[derive(clap::Args, Debug)]
pub struct SoakArgs {
    /// End after the box has released this many sums of fragments.
    #[arg(long, default_value_t = 1_000_000)]
    fragments: u64,
    /// Run all-reduces for this time (90s, 5m or 1h) over slow links that lose packets, while one
    /// of them goes down repeatedly, next to a TCP stream. Ctrl-C ends it sooner, with its summary.
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "10m",
        value_parser = duration)]
    #[arg(conflicts_with_all = ["fragments", "vm", "boxes"])]
    wire: Option<Duration>,
    /// Use kernels' Soft-RoCE in virtual machines instead of netsum's own hosts: rings of 3 and 4,
    /// with and without the box and loss.
    #[arg(long, conflicts_with = "fragments")]
    vm: bool,
    /// Use virtual machines as boxes: every kernel with every driver, under everything that a port
    /// can meet. Writes the book's table.
    #[arg(long, conflicts_with_all = ["fragments", "vm"])]
    boxes: bool,
    /// With --vm: the number of messages that each rank sends in each ring.
    #[arg(long, default_value_t = 1000, requires = "vm", value_parser = clap::value_parser!(u32)
        .range(1..))]
    messages: u32,
    /// With --vm: the same for rings with loss, which take much longer for each message.
    #[arg(long, default_value_t = 200, requires = "vm", value_parser = clap::value_parser!(u32)
        .range(1..))]
    with_loss: u32,
    /// With --vm: the machines' kernel: 6.1, 6.12 or newest. Default: 6.1, then 6.12.
    #[arg(long, requires = "vm")]
    kernel: Option<Kernel>,
    /// With --vm: run this many short rings with loss and a short timer instead; each must proceed,
    /// or end with a reason.
    #[arg(long, requires = "vm", conflicts_with_all = ["messages", "with_loss"],
        value_parser = clap::value_parser!(u32).range(1..))]
    rings: Option<u32>,
    /// With --rings: the queue pairs' timeout, 4.096 us * 2^this.
    #[arg(long, default_value_t = 14, requires = "rings", value_parser = clap::value_parser!(u8)
        .range(8..=21))]
    timeout: u8,
    /// With --rings: the lost packets, in percent.
    #[arg(long, default_value_t = 1, requires = "rings", value_parser = clap::value_parser!(u8)
        .range(..=20))]
    loss: u8,
}

/// Runs `cargo xtask soak`: a test of the lab with a longer run than usual.
///
/// # Errors
/// If a sum is wrong, or another check of the test fails.
pub fn run(args: &SoakArgs) -> Result<()> {
    if args.boxes {
        return boxes();
    }
    if let Some(time) = args.wire {
        return wire(time);
    }
    if !args.vm {
        setup::require_bpf()?;
        let fragments = args.fragments.to_string();
        return long(
            "faults",
            "a_long_run_at_one_percent_loss",
            &[("NETSUM_SOAK_FRAGMENTS", fragments)],
        );
    }
    let kernels = args.kernel.map_or(Kernel::ALL.to_vec(), |kernel| vec![kernel]);
    setup::require_vms(&kernels)?;
    if let Some(rings) = args.rings {
        return kernels.iter().try_for_each(|kernel| {
            let env = [
                ("NETSUM_SOAK_RINGS", rings.to_string()),
                ("NETSUM_SOAK_TIMEOUT", args.timeout.to_string()),
                ("NETSUM_SOAK_LOSS", args.loss.to_string()),
                ("NETSUM_SOAK_KERNELS", kernel.to_string()),
            ];
            long("vm_soak", "no_ring_of_stock_hosts_stalls_without_a_reason", &env)
        });
    }
    let names = kernels.iter().map(Kernel::to_string).collect::<Vec<_>>().join(",");
    long(
        "vm_ring",
        "stock_hosts_get_every_sum_with_and_without_loss",
        &[
            ("NETSUM_SOAK_MESSAGES", args.messages.to_string()),
            ("NETSUM_SOAK_WITH_LOSS", args.with_loss.to_string()),
            ("NETSUM_SOAK_KERNELS", names),
        ],
    )
}

/// Runs in a process group of its own: Ctrl-C must not end ranks or daemon. Instead, the end of its
/// input ends it.
fn wire(time: Duration) -> Result<()> {
    setup::require_bpf()?;
    let mut command = command("soak", "sums_over_links_that_lose_and_flap_are_right_however_long")?;
    command
        .env("NETSUM_SOAK_WIRE", time.as_secs().to_string())
        .stdin(Stdio::piped())
        .process_group(0);
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGINT);
    signals.thread_block()?;
    let mut child = command.spawn()?;
    let stdin = child.stdin.take();
    std::thread::spawn(move || {
        // An error ends the run at once, too.
        let _ = signals.wait();
        drop(stdin);
    });
    let status = child.wait()?;
    ensure!(status.success(), "the run failed: {status}");
    Ok(())
}

/// The book's page with the table.
const BOXES: &str = "book/text/reference/boxes.md";

fn boxes() -> Result<()> {
    setup::require_bpf()?;
    setup::require_vms(&Kernel::EVERY)?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("boxes.md");
    let test = "a_box_sums_between_network_cards";
    let run = long("vm_box", test, &[("NETSUM_SOAK_BOXES", file.display().to_string())]);
    // The table also has what failed.
    let Ok(table) = fs::read_to_string(&file) else { return run };
    let date = output(Command::new("date").args(["-u", "+%Y-%m-%d"]))?;
    let text = format!(
        "# Kernels and drivers that were tried as a box\n\n\
         Made by `cargo xtask soak --boxes` on {}. Boxes are virtual machines of QEMU, which \
         emulates processors and cards, so times\n\
         say nothing of real ones. Three hosts add up 200,000 values per all-reduce. \"right\" \
         means: every bit at every host.\n\n{}",
        date.trim(),
        table
    );
    fs::write(root()?.join(BOXES), text).context(BOXES)?;
    run
}

/// Runs one test of a program, with an environment that makes it run longer.
fn long(program: &str, test: &str, env: &[(&str, String)]) -> Result<()> {
    let status =
        command(program, test)?.envs(env.iter().map(|(name, value)| (name, value))).status()?;
    ensure!(status.success(), "the run failed: {status}");
    Ok(())
}

fn command(program: &str, test: &str) -> Result<Command> {
    let programs = test_programs()?;
    let found = programs.iter().find(|p| p.needs_lab() && p.name == program);
    let found = found.with_context(|| format!("no test `{program}`"))?;
    Ok(found.command(&["--include-ignored", "--nocapture"], Some(test)))
}
