//! `cargo xtask test`: runs every test, and lists those that could not run, with the reason.
//!
//! It builds the whole workspace once, then runs each test program by itself: the pure ones first,
//! then those that need root and BPF, two at a time. Each of these runs one test at a time, because
//! the tests have timeouts and there may be only two cores.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::build_ebpf::{self, OBJECTS};
use crate::harness::{TestProgram, test_programs};
use crate::tally::{Counts, NOT_ASKED_FOR, Tally};
use crate::toolchain::Toolchain;
use crate::vm::Kernel;
use crate::{paths, python, setup};

/// Arguments of `cargo xtask test`.
#[derive(clap::Args, Debug)]
pub struct TestArgs {
    /// Run only tests whose names contain this.
    filter: Option<String>,
    /// Do not rebuild the BPF objects.
    #[arg(long)]
    no_rebuild: bool,
    /// Run the pure tests and the most telling tests of the lab. Rebuilds no BPF objects.
    #[arg(long)]
    fast: bool,
    /// The PyTorch that the Python package is tested with.
    #[arg(long, value_enum, default_value = "debian")]
    torch: python::Torch,
}

/// The test files of the lab that `--fast` runs.
const FAST: [&str; 4] = ["programs", "all_reduce", "daemon", "first_packets"];

/// Test files that run alone: they measure times, flood, or depend on what other processes leave or
/// make on the machine.
const ALONE: [&str; 14] = [
    "benchmarks",
    "congestion",
    "contest",
    "epochs",
    "inline",
    "lab",
    "links",
    "measured",
    "planned",
    "reconnect",
    "security",
    "shaped",
    "soak",
    "timing",
];

/// The limit for one test program: twice the time of the slowest on two cores that others use too.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Runs `cargo xtask test`.
///
/// # Errors
/// If a test has failed, or if there was nothing to build.
pub fn run(args: &TestArgs) -> Result<()> {
    let start = Instant::now();
    let ready = setup::require_bpf();
    if let Err(reason) = &ready {
        println!("SKIP tests in the lab: {reason:#}");
    }
    // Runs in parallel with the build for the host: neither keeps both cores busy all the time.
    let rebuild = (!args.no_rebuild && !args.fast && args.filter.is_none())
        .then(|| std::thread::spawn(rebuild_objects));

    println!("building the workspace");
    let programs = test_programs()?;
    let filter = args.filter.as_deref();
    let mut tally = Tally::default();
    let (lab, pure): (Vec<_>, Vec<_>) = programs.iter().partition(|p| p.needs_lab());
    if filter.is_none()
        && let Err(reason) = setup::require_etcd()
    {
        println!("SKIP the test of two fabric managers: {reason:#}");
    }
    for program in pure {
        match program.needs_compiler().then(setup::require_compiler) {
            Some(Err(reason)) => match program.list(filter) {
                Ok(tests) => tally.skip("C", tests, &format!("{reason:#}")),
                Err(error) => tally.count("C", &program.title(), Err(error)),
            },
            Some(Ok(())) => tally.count("C", &program.title(), program.run(filter, false, TIMEOUT)),
            None => {
                tally.count("unit tests", &program.title(), program.run(filter, false, TIMEOUT))
            }
        }
    }
    if filter.is_none() {
        doc_tests(&mut tally);
    }
    let needs_python = |program: &&TestProgram| {
        program.needs_python() && (filter.is_none() || program.list(filter).is_ok_and(|n| n > 0))
    };
    let python_ready = match lab.iter().any(needs_python) {
        true if args.fast => Err(anyhow::anyhow!("not asked for (--fast)")),
        true => python::test(&mut tally, args.torch).and_then(|()| setup::require_bpf()),
        false => Ok(()),
    };
    let torch_ready = match lab.iter().any(|program| needs_python(program) && program.needs_torch())
    {
        true if !args.fast => setup::require_torch(),
        _ => Ok(()),
    };
    // Compilers must not disturb timings in the lab.
    objects(rebuild, &mut tally);
    let is_left_out = |program: &TestProgram| args.fast && !FAST.contains(&program.name.as_str());
    let needs_vms = |program: &&TestProgram| match program.list(filter) {
        _ if !program.needs_vms() || is_left_out(program) => false,
        Ok(tests) => tests > 0,
        Err(_) => true,
    };
    let vms_ready =
        if lab.iter().any(needs_vms) { setup::require_vms(&Kernel::ALL) } else { Ok(()) };
    let terminal_ready = setup::require_bpf().and_then(|()| setup::require_terminal());
    // Only if a test needs it.
    let needs_prometheus = |program: &&TestProgram| {
        program.needs_prometheus()
            && !is_left_out(program)
            && program.list(filter).is_ok_and(|n| n > 0)
    };
    let prometheus_ready = match lab.iter().any(needs_prometheus) {
        true => setup::require_bpf().and_then(|()| setup::require_prometheus()),
        false => Ok(()),
    };
    let tally = Mutex::new(tally);
    let tallied = || tally.lock().expect("no test program panics here");
    let run = |program: &TestProgram| {
        let (set, ready) = match program.name.as_str() {
            "programs" | "ingress" | "xdp" => ("XDP programs", &ready),
            _ if program.needs_vms() => ("virtual machines", &vms_ready),
            _ if program.needs_torch() && python_ready.is_ok() => ("lab", &torch_ready),
            _ if program.needs_python() => ("lab", &python_ready),
            _ if program.needs_terminal() => ("terminal", &terminal_ready),
            _ if program.needs_prometheus() => ("Prometheus", &prometheus_ready),
            _ => ("lab", &ready),
        };
        let reason = match ready {
            _ if is_left_out(program) => Some("not asked for (--fast)".to_owned()),
            Ok(()) => None,
            Err(reason) => Some(format!("{reason:#}")),
        };
        match reason {
            None => {
                let counts = program.run(filter, true, TIMEOUT);
                tallied().count(set, &program.title(), counts);
            }
            Some(reason) => match program.list(filter) {
                Ok(tests) => tallied().skip(set, tests, &reason),
                Err(error) => tallied().count(set, &program.title(), Err(error)),
            },
        }
    };
    let (alone, beside): (Vec<_>, Vec<_>) =
        lab.into_iter().partition(|program| ALONE.contains(&program.name.as_str()));
    side_by_side(beside, run);
    alone.into_iter().for_each(run);
    let tally = tally.into_inner().expect("no test program panics here");
    tally.print(start.elapsed());
    if !tally.is_success() {
        bail!("tests have failed");
    }
    if let Some(filter) = filter.filter(|_| tally.is_empty()) {
        bail!("no test name contains {filter:?}");
    }
    Ok(())
}

/// Runs programs, two at a time, from the front and from the back: that keeps two programs with
/// virtual machines apart.
fn side_by_side(programs: Vec<&TestProgram>, run: impl Fn(&TestProgram) + Sync) {
    let programs = Mutex::new(VecDeque::from(programs));
    let rest = || programs.lock().expect("nobody panics here");
    std::thread::scope(|scope| {
        scope.spawn(|| std::iter::from_fn(|| rest().pop_front()).for_each(&run));
        scope.spawn(|| std::iter::from_fn(|| rest().pop_back()).for_each(&run));
    });
}

fn doc_tests(tally: &mut Tally) {
    let result = paths::cargo().and_then(|mut cargo| {
        Ok(cargo.args(["test", "--workspace", "--doc", "--quiet"]).output()?)
    });
    let set = "examples in docs";
    match result {
        Ok(out) => {
            let text = String::from_utf8_lossy(&out.stdout);
            let counts: Counts = text.lines().filter_map(Counts::parse).sum();
            if !out.status.success() {
                println!("{text}{}", String::from_utf8_lossy(&out.stderr));
            }
            if !out.status.success() && counts.failed == 0 {
                tally.fail(set, "cargo test --doc", &format!("{}", out.status));
            }
            tally.add(set, counts);
        }
        Err(error) => tally.fail(set, "cargo test --doc", &format!("{error:#}")),
    }
}

/// The rebuilt objects, or the reason why they are missing.
enum Rebuilt {
    Objects(Vec<(&'static str, PathBuf)>),
    NoToolchain(String),
    Broken(String),
}

fn rebuild_objects() -> Rebuilt {
    match Toolchain::set_up() {
        Err(reason) => Rebuilt::NoToolchain(format!("{reason:#}")),
        Ok(toolchain) => match build_ebpf::build(&toolchain) {
            Ok(objects) => Rebuilt::Objects(objects),
            Err(error) => Rebuilt::Broken(format!("{error:#}")),
        },
    }
}

fn objects(rebuild: Option<JoinHandle<Rebuilt>>, tally: &mut Tally) {
    let set = "BPF objects as built";
    let Some(rebuild) = rebuild else {
        return tally.skip(set, OBJECTS.len() as u32, NOT_ASKED_FOR);
    };
    if !rebuild.is_finished() {
        println!("waiting for the rebuild of the BPF objects");
    }
    match rebuild.join() {
        Ok(Rebuilt::Objects(objects)) => {
            for (name, built) in objects {
                match build_ebpf::compare(name, &built) {
                    Ok(()) => tally.add(set, Counts { passed: 1, ..Counts::default() }),
                    Err(error) => tally.fail(set, name, &format!("{error:#}")),
                }
            }
        }
        Ok(Rebuilt::NoToolchain(reason)) => tally.skip(set, OBJECTS.len() as u32, &reason),
        Ok(Rebuilt::Broken(error)) => tally.fail(set, "cargo xtask build-ebpf", &error),
        Err(_) => tally.fail(set, "cargo xtask build-ebpf", "panicked"),
    }
}
