//! `cargo xtask test`: runs the tests, and lists those that could not run, with the reason.
//!
//! It builds the whole workspace once, then runs each test program by itself. The lab's tests
//! mostly wait, so they run in [`LANES`], each of them one test at a time; what keeps the
//! processors busy, the pure tests and the virtual machines, gets the rest of the time. Tests that
//! measure run last.

use std::path::PathBuf;
use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::build_ebpf::{self, OBJECTS};
use crate::harness::{TestProgram, test_programs};
use crate::lanes::{self, Queue};
use crate::tally::{Counts, NOT_ASKED_FOR, Tally};
use crate::toolchain::Toolchain;
use crate::vm::Kernel;
use crate::{paths, plugins, python, setup};

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
    /// Also run the tests that are left out by default: the same on more kernels and network cards,
    /// and those that take minutes. Tests that are asked for by name run in any case.
    #[arg(long)]
    all: bool,
    /// The PyTorch that the Python package is tested with.
    #[arg(long, value_enum, default_value = "debian")]
    torch: python::Torch,
    /// Also test tensors on a GPU, with PyPI's PyTorch.
    #[arg(long)]
    gpu: bool,
}

/// The test files of the lab that `--fast` runs.
const FAST: [&str; 4] = ["programs", "all_reduce", "daemon", "first_packets"];

/// How many modules of the lab's tests run at the same time.
const LANES: usize = 2;

/// The longest modules of the lab's tests, which start first.
const LONGEST: [&str; 8] =
    ["fabric_failures", "racks", "vm_ring", "vm_systemd", "vm_box", "inband", "fabric", "restart"];

/// Modules and single tests beside which no other lab tests run, only virtual machines: they must
/// happen within a time, or depend on what other processes make on the machine.
const SENSITIVE: [&str; 8] = [
    "lab::a_lab_whose_owner_and_cleaner_have_ended_is_removed_by_the_next",
    "links::a_host_that_loses_its_address_with_its_link_is_an_error",
    "links::a_link_that_stays_down_is_an_error_that_names_the_rank_behind_it",
    "reconnect::a_detached_program_is_reattached_without_errors",
    "reconnect::ranks_are_back_on_a_box_that_is_detached_and_attached_again",
    "reconnect::ranks_are_back_on_the_box_when_a_port_that_was_down_is_up",
    "reconnect::ranks_return_to_a_replaced_box_with_their_job",
    "soak",
];

/// Those beside which nothing runs: they measure rates, notice each packet that is late, or flood.
const EXCLUSIVE: [&str; 16] = [
    "benchmarks",
    "congestion",
    "contest",
    "inline",
    "measured::links_are_measured_and_rings_are_shared_out_by_that",
    "measured::links_as_fast_as_the_machine_keep_their_nominal_rates",
    "planned::a_plan_for_one_box_is_granted_and_reached",
    "planned::a_plan_for_two_spines_is_granted_and_reached",
    "security::floods_slow_a_job_down_but_do_no_harm",
    "shaped::a_flood_arrives_at_the_rate_and_no_more",
    "shaped::four_hosts_at_100_megabits_do_not_retransmit",
    "shaped::four_hosts_at_a_gigabit_do_not_retransmit",
    "shaped::small_vectors_at_10_megabits_are_not_retransmitted",
    "shaped::the_hosts_own_ring_does_not_retransmit",
    "shaped::without_a_rate_nothing_is_retransmitted_either",
    "vm_racks",
];

/// Tests that only `--all` runs: each is a further case of one that always runs, or takes minutes.
const ONLY_WITH_ALL: [&str; 11] = [
    "mpi::times_beside_mpis_own",
    "racks::racks_in_a_vlan_without_loss_or_with_tagged_receivers",
    "racks::the_other_leaf_or_middle_box_goes_in_the_middle",
    "shaped::eight_hosts_at_100_megabits_do_not_retransmit",
    "shaped::the_ring_of_more_hosts_or_with_a_larger_window_does_not_retransmit",
    "vm_bond::bonds_of_linux_6_1",
    "vm_box::a_box_sums_between_virtio_cards",
    "vm_cpus::a_job_lives_through_many_losses_of_its_rings_cpu",
    "vm_limits::apparmor_lets_the_daemon_do_its_work_and_nothing_else",
    "vm_soak",
    "vm_systemd::a_job_survives_an_upgrade_a_stop_and_a_reboot",
];

/// The limit for one test program: twice the time of the slowest on two cores that others use too.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Runs `cargo xtask test`.
///
/// # Errors
/// If a test has failed, or if there was nothing to build.
pub fn run(args: &TestArgs) -> Result<()> {
    let start = Instant::now();
    let bpf_ready = setup::require_bpf();
    if let Err(reason) = &bpf_ready {
        println!("SKIP tests in the lab: {reason:#}");
    }
    let everything = !args.fast && args.filter.is_none();
    // Both run in parallel with the build for the host: none keeps both cores busy all the time.
    let rebuild = (everything && !args.no_rebuild).then(|| std::thread::spawn(rebuild_objects));
    let fetch = (everything && bpf_ready.is_ok()).then(|| std::thread::spawn(setup::fetch_all));

    println!("building the workspace");
    let programs = test_programs()?;
    // What is missing is tried again where it is needed, and reported there.
    fetch.map(JoinHandle::join);
    let filter = args.filter.as_deref();
    if filter.is_none()
        && let Err(reason) = setup::require_etcd()
    {
        println!("SKIP the test of two fabric managers: {reason:#}");
    }
    let mut tally = Tally::default();
    let (lab, pure): (Vec<_>, Vec<_>) = programs.into_iter().partition(TestProgram::needs_lab);
    let lab = selected(args, lab, &mut tally);
    let any = |needs: fn(&TestProgram) -> bool| lab.iter().any(needs);
    let vms_ready =
        if any(TestProgram::needs_vms) { setup::require_vms(&Kernel::ALL) } else { Ok(()) };
    let terminal_ready = setup::require_bpf().and_then(|()| setup::require_terminal());
    let prometheus_ready = match any(TestProgram::needs_prometheus) {
        true => setup::require_bpf().and_then(|()| setup::require_prometheus()),
        false => Ok(()),
    };
    let compiler_ready = match any(TestProgram::needs_compiler) {
        true => setup::require_bpf().and_then(|()| setup::require_compiler()),
        false => Ok(()),
    };
    let mpi_ready = match any(TestProgram::needs_mpi) {
        true => setup::require_bpf().and_then(|()| setup::require_mpi()).and_then(|()| {
            println!("building the plugins");
            plugins::build(paths::profile()?).map(drop)
        }),
        false => Ok(()),
    };
    // Compilers must not disturb the lab's tests.
    objects(rebuild, &mut tally);
    let (python, lab): (Vec<_>, Vec<_>) = lab.into_iter().partition(TestProgram::needs_python);
    let lab = ready(lab, filter, &mut tally, |program| match () {
        () if program.needs_vms() => &vms_ready,
        () if program.needs_terminal() => &terminal_ready,
        () if program.needs_prometheus() => &prometheus_ready,
        () if program.needs_compiler() => &compiler_ready,
        () if program.needs_mpi() => &mpi_ready,
        () => &bpf_ready,
    });
    let (mut exclusive, mut sensitive, mut rest) = (Vec::new(), Vec::new(), Vec::new());
    for program in lab {
        let [exclusive_part, others] = program.split(&EXCLUSIVE);
        let [sensitive_part, others] =
            others.map_or([None, None], |program| program.split(&SENSITIVE));
        exclusive.extend(exclusive_part);
        sensitive.extend(sensitive_part);
        rest.extend(others);
    }
    let place = |program: &TestProgram| LONGEST.iter().position(|name| *name == program.name);
    rest.sort_by_key(|program| place(program).unwrap_or(LONGEST.len()));
    let (vms, rest): (Vec<_>, Vec<_>) = rest.into_iter().partition(TestProgram::needs_vms);
    let (vms, rest) = (Queue::new(vms), Queue::new(rest));
    let tally = Mutex::new(tally);
    let run = |program: &TestProgram| {
        let counts = program.run(filter, true, TIMEOUT);
        tally.lock().expect("nobody panics here").count(set(program), &program.title(), counts);
    };
    let busy = || {
        lanes::give_way();
        let mut tally = Tally::default();
        pure.iter().for_each(|program| run_pure(program, filter, &mut tally));
        if filter.is_none() {
            doc_tests(&mut tally);
        }
        if !python.is_empty() {
            let python_ready =
                python::test(&mut tally, args.torch, args.gpu).and_then(|()| setup::require_bpf());
            let torch_ready = match python.iter().any(TestProgram::needs_torch) {
                true => setup::require_torch(),
                false => Ok(()),
            };
            let python = ready(python, filter, &mut tally, |program| {
                let needs_torch = program.needs_torch() && python_ready.is_ok();
                if needs_torch { &torch_ready } else { &python_ready }
            });
            python.iter().for_each(run);
        }
        vms.lane(run);
        tally
    };
    let pure = std::thread::scope(|scope| {
        let busy = scope.spawn(busy);
        let lanes = [(); LANES].map(|()| scope.spawn(|| rest.lane(run)));
        lanes.into_iter().for_each(|lane| lane.join().expect("nobody panics here"));
        sensitive.iter().for_each(run);
        vms.lane(run);
        busy.join().expect("nobody panics here")
    });
    exclusive.iter().for_each(run);
    let mut tally = tally.into_inner().expect("nobody panics here");
    tally.extend(pure);
    tally.print(start.elapsed());
    if !tally.is_success() {
        bail!("tests have failed");
    }
    if let Some(filter) = filter.filter(|_| tally.is_empty()) {
        bail!("no test name contains {filter:?}");
    }
    Ok(())
}

/// The programs that have tests which are asked for; counts all others.
fn selected(args: &TestArgs, lab: Vec<TestProgram>, tally: &mut Tally) -> Vec<TestProgram> {
    let filter = args.filter.as_deref();
    let mut selected = Vec::new();
    for program in lab {
        let rest = if args.all || args.fast || filter.is_some() {
            Some(program)
        } else {
            let [left, rest] = program.split(&ONLY_WITH_ALL);
            if let Some(left) = left {
                let tests = left.tests();
                tally.skip("left to --all", tests.len() as u32, &tests.join(", "));
            }
            rest
        };
        let Some(program) = rest else { continue };
        match program.list(filter) {
            Ok(tests) if args.fast && !FAST.contains(&program.name.as_str()) => {
                tally.skip(set(&program), tests, "not asked for (--fast)");
            }
            Ok(0) => {}
            Ok(_) => selected.push(program),
            Err(error) => tally.count(set(&program), &program.title(), Err(error)),
        }
    }
    selected
}

/// The programs for which the machine is ready; counts all others.
fn ready<'a>(
    programs: Vec<TestProgram>,
    filter: Option<&str>,
    tally: &mut Tally,
    ready: impl Fn(&TestProgram) -> &'a Result<()>,
) -> Vec<TestProgram> {
    let is_ready = |program: &TestProgram| match (ready(program), program.list(filter)) {
        (Ok(()), _) => true,
        (Err(reason), Ok(tests)) => {
            tally.skip(set(program), tests, &format!("{reason:#}"));
            false
        }
        (Err(_), Err(error)) => {
            tally.count(set(program), &program.title(), Err(error));
            false
        }
    };
    programs.into_iter().filter(is_ready).collect()
}

/// The row of the table that has a program of the lab.
fn set(program: &TestProgram) -> &'static str {
    match program.name.as_str() {
        "programs" | "ingress" | "xdp" => "XDP programs",
        _ if program.needs_vms() => "virtual machines",
        _ if program.needs_terminal() => "terminal",
        _ if program.needs_prometheus() => "Prometheus",
        _ => "lab",
    }
}

fn run_pure(program: &TestProgram, filter: Option<&str>, tally: &mut Tally) {
    match program.needs_compiler().then(setup::require_compiler) {
        Some(Err(reason)) => match program.list(filter) {
            Ok(tests) => tally.skip("C", tests, &format!("{reason:#}")),
            Err(error) => tally.count("C", &program.title(), Err(error)),
        },
        Some(Ok(())) => {
            let nccl = program.is_nccl() && std::env::var_os("NETSUM_TEST_NCCL").is_some();
            tally.count("C", &program.title(), program.run(filter, nccl, TIMEOUT));
        }
        None => tally.count("unit tests", &program.title(), program.run(filter, false, TIMEOUT)),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_test_that_is_named_here_exists() {
        let root = paths::root().unwrap();
        for name in
            LONGEST.iter().chain(&FAST).chain(&SENSITIVE).chain(&EXCLUSIVE).chain(&ONLY_WITH_ALL)
        {
            let (module, test) = name.split_once("::").unwrap_or((name, ""));
            let text = ["tests/tests", "bench/tests"].iter().find_map(|folder| {
                std::fs::read_to_string(root.join(folder).join(module).with_extension("rs")).ok()
            });
            let text = text.unwrap_or_else(|| panic!("{name}: no such file"));
            let test = if test.is_empty() { "fn ".to_owned() } else { format!("fn {test}(") };
            assert!(text.contains(&test), "{name}: no such test");
        }
    }
}
