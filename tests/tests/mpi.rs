//! Programs of Open MPI and MPICH over netsum, by `LD_PRELOAD`. `cargo xtask test mpi` builds
//! target/plugins.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec, TIMEOUT};
use netsum_lab::mpi::Mpi;
use netsum_lab::netns::output;
use netsum_lab::process::{Ended, Running};

/// A file of the project.
fn of_project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Compiles a program of the tests.
fn compile(mpi: Mpi, cluster: &Cluster, name: &str) -> PathBuf {
    let program = cluster.folder().join(format!("{name}-{}", mpi.name()));
    let mut compiler = Command::new(format!("mpicc.{}", mpi.name()));
    compiler.args(["-std=c11", "-D_DEFAULT_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror"]);
    // GCC takes MPICH's MPI_STATUSES_IGNORE for an array.
    compiler.arg("-Wno-stringop-overflow");
    compiler.arg(of_project(&format!("worker/mpi/tests/{name}.c"))).arg("-o").arg(&program);
    output(compiler.arg("-lm")).unwrap();
    program
}

/// Ranks of a job, and how many of them each host has.
struct Ranks<'a> {
    cluster: &'a Cluster,
    mpi: Mpi,
    hosts: &'a [usize],
    variables: Vec<(&'static str, OsString)>,
}

impl<'a> Ranks<'a> {
    /// With a job of the same number of ranks.
    fn with_job(cluster: &'a Cluster, mpi: Mpi, hosts: &'a [usize], job: &JobSpec) -> Self {
        let mut ranks = Self::without_job(cluster, mpi, hosts);
        let token = cluster.create_job(job).unwrap();
        ranks.set("NETSUM_CONTROLLER", cluster.workers().to_string());
        ranks.set("NETSUM_JOB", &job.name);
        ranks.set("NETSUM_TOKEN", token);
        ranks
    }

    fn without_job(cluster: &'a Cluster, mpi: Mpi, hosts: &'a [usize]) -> Self {
        let plugin = of_project(&format!("target/plugins/{}/libnetsum-mpi.so", mpi.name()));
        assert!(plugin.exists(), "no {}: `cargo xtask plugins` makes it", plugin.display());
        let mut ranks = Self { cluster, mpi, hosts, variables: Vec::new() };
        ranks.set("LD_PRELOAD", plugin.canonicalize().unwrap());
        ranks.set("NETSUM_MPI_STATS", "1");
        ranks
    }

    fn set(&mut self, name: &'static str, value: impl Into<OsString>) {
        self.variables.push((name, value.into()));
    }

    /// Starts a program and waits for its end.
    fn run(&self, options: &[&str], program: &Path, arguments: &[&str]) -> Ended {
        let mut command = self.mpi.launcher(self.cluster, self.hosts, &self.variables).unwrap();
        command.args(options).arg(program).args(arguments);
        Running::start(self.mpi.name(), &mut command).unwrap().end(4 * TIMEOUT).unwrap()
    }

    fn succeed(&self, program: &Path, arguments: &[&str]) -> Ended {
        let ended = self.run(&[], program, arguments);
        let log = self.cluster.daemon_log();
        // MPICH 4.0.2 may hang in its own end, which programs of the tests cut short; its launcher
        // calls that a failure. They print this when all ranks have come to the end.
        let cut = self.mpi == Mpi::Mpich && ended.stdout.contains("Barrier");
        assert!(ended.status.success() || cut, "{}\n{}\n{log}", ended.stdout, ended.stderr);
        ended
    }
}

/// Calls that netsum took, from a line of the statistics.
fn taken(text: &str, kind: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.split_once(&format!("{kind}: netsum ")))?.1;
    line.split(' ').next()?.parse().ok()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn each_call_has_the_result_of_mpis_own_and_goes_over_the_box() {
    let cluster = Cluster::start(LabSpec::hosts(3)).unwrap();
    for mpi in Mpi::ALL {
        let job = JobSpec::new(mpi.name(), 4);
        let mut ranks = Ranks::with_job(&cluster, mpi, &[2, 1, 1], &job);
        ranks.set("NETSUM_MPI_MIN_BYTES", "0");
        let ended = ranks.succeed(&compile(mpi, &cluster, "calls"), &[]);
        for kind in ["Allreduce", "Reduce", "Bcast", "Reduce_scatter_block", "Allgather", "Barrier"]
        {
            let (expected, by_netsum) = (taken(&ended.stdout, kind), taken(&ended.stderr, kind));
            assert!(expected > Some(0), "{kind}: {}", ended.stdout);
            assert_eq!(expected, by_netsum, "{kind}: {}\n{}", ended.stdout, ended.stderr);
        }
        let counted = cluster.netsum_json(&["stats", &job.name]).unwrap();
        assert!(counted["contributions"].as_u64() > Some(0), "{counted}");
        assert!(!ended.stderr.contains("uses MPI's own"), "{}", ended.stderr);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_dead_rank_is_an_error_for_mpis_handler() {
    let cluster = Cluster::start(LabSpec::hosts(3)).unwrap();
    for (mpi, option) in [(Mpi::Open, "--enable-recovery"), (Mpi::Mpich, "-disable-auto-cleanup")] {
        let job = JobSpec::new(&format!("dies-{}", mpi.name()), 3);
        let mut ranks = Ranks::with_job(&cluster, mpi, &[1, 1, 1], &job);
        ranks.set("NETSUM_TIMEOUT", "2");
        let printed = cluster.folder().join(mpi.name()).display().to_string();
        let ended = ranks.run(&[option], &compile(mpi, &cluster, "calls"), &["die", &printed]);
        for rank in 0..2 {
            let printed = std::fs::read_to_string(format!("{printed}{rank}")).unwrap_or_default();
            let handled = format!("rank {rank} handles class own: netsum: ");
            let lines = printed.lines().filter(|line| line.starts_with(&handled));
            let all = format!("{}: {printed}\n{}\n{}", mpi.name(), ended.stdout, ended.stderr);
            assert_eq!(lines.count(), 22, "{all}");
            assert!(printed.contains(&format!("rank {rank} has an error")), "{all}");
        }
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn python_sums_by_the_box_and_mpi_alone_sums_without_a_job() {
    const SCRIPT: &str = "import numpy; from mpi4py import MPI; w = MPI.COMM_WORLD; \
        x = numpy.full(1 << 20, w.rank + 1, dtype='f'); w.Allreduce(MPI.IN_PLACE, x); \
        print(f'{(x == 6).all()} {w.allreduce(1)}\\n', end='', flush=True)";
    let cluster = Cluster::start(LabSpec::hosts(3)).unwrap();
    let python = Path::new("/usr/bin/python3");
    let ranks = Ranks::with_job(&cluster, Mpi::Open, &[1, 1, 1], &JobSpec::new("python", 3));
    let ended = ranks.succeed(python, &["-c", SCRIPT]);
    assert_eq!(ended.stdout.matches("True 3").count(), 3, "{}", ended.stdout);
    assert_eq!(taken(&ended.stderr, "Allreduce"), Some(1), "{}", ended.stderr);

    for mpi in Mpi::ALL {
        let ranks = Ranks::without_job(&cluster, mpi, &[1, 1, 1]);
        let ended = ranks.succeed(&compile(mpi, &cluster, "calls"), &["plain"]);
        let line = "netsum-mpi: the job uses MPI's own collectives: rank 0: NETSUM_JOB and \
                    NETSUM_PEERS are not set";
        assert_eq!(ended.stderr.matches(line).count(), 1, "{}", ended.stderr);
        assert_eq!(taken(&ended.stderr, "Allreduce"), Some(0), "{}", ended.stderr);
    }
    let mut ranks = Ranks::without_job(&cluster, Mpi::Open, &[1, 1, 1]);
    ranks.set("NETSUM_MPI_STATS", "0");
    let ended = ranks.succeed(&compile(Mpi::Open, &cluster, "calls"), &["plain"]);
    assert_eq!(taken(&ended.stderr, "Allreduce"), None, "{}", ended.stderr);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn no_sum_is_in_clear_beside_a_secret() {
    const SECRET: &str = "a secret that box and network do not have";
    let cluster = Cluster::start(LabSpec::hosts(3)).unwrap();
    for mpi in Mpi::ALL {
        let program = compile(mpi, &cluster, "calls");
        let job = JobSpec::new(&format!("sealed-{}", mpi.name()), 3);
        let mut ranks = Ranks::with_job(&cluster, mpi, &[1, 1, 1], &job);
        ranks.set("NETSUM_SECRET", SECRET);
        ranks.set("NETSUM_MPI_MIN_BYTES", "0");
        let ended = ranks.succeed(&program, &["plain"]);
        assert!(taken(&ended.stderr, "Allreduce") > Some(0), "{}", ended.stderr);

        let mut ranks = Ranks::without_job(&cluster, mpi, &[1, 1, 1]);
        ranks.set("NETSUM_SECRET", SECRET);
        let ended = ranks.run(&[], &program, &["plain"]);
        assert!(!ended.status.success(), "{}\n{}", ended.stdout, ended.stderr);
        let line = "netsum-mpi: the program ends: the job cannot use netsum, and a secret is set, \
                    but MPI's own collectives are in clear: rank 0: NETSUM_JOB and NETSUM_PEERS are \
                    not set";
        assert!(ended.stderr.contains(line), "{}\n{}", ended.stdout, ended.stderr);
        assert!(!ended.stdout.contains("Barrier"), "{}\n{}", ended.stdout, ended.stderr);
    }
}

/// Prints the times from which `LEAST` in worker/mpi/collectives.c was chosen.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn times_beside_mpis_own() {
    let rate = std::env::var("NETSUM_TEST_RATE").unwrap_or("250mbit".to_owned());
    for (mpi, hosts) in [(Mpi::Open, 4), (Mpi::Open, 8), (Mpi::Mpich, 4)] {
        let spec = LabSpec { rate: Some(rate.parse().unwrap()), ..LabSpec::hosts(hosts) };
        let cluster = Cluster::start(spec).unwrap();
        let (places, job) = (vec![1; hosts], JobSpec::new("times", hosts as u32));
        let mut ranks = Ranks::with_job(&cluster, mpi, &places, &job);
        ranks.set("NETSUM_MPI_MIN_BYTES", "0");
        let program = compile(mpi, &cluster, "times");
        let sizes = ["5", "4096", "16384", "65536", "262144", "1048576", "4194304"];
        let ended = ranks.succeed(&program, &sizes);
        println!("{}, {hosts} hosts, {rate}\n{}", mpi.name(), ended.stdout);
        assert_eq!(ended.stdout.lines().count(), 6 * 6 + 1, "{}", ended.stdout);
    }
}
