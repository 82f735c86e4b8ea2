//! PyTorch trains on hosts of the lab, and the box sums its gradients. `cargo xtask test` creates
//! target/python/debian.

use std::path::Path;

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec};
use netsum_lab::train::{SumBackend, TrainSpec, Trained, Trainers};

const RANKS: usize = 4;
const STEPS: usize = 40;
/// How far losses may differ: floats are summed in another order, and rounded otherwise. 2.4e-7 is
/// usual.
const CLOSE: f64 = 1e-5;

fn train(cluster: &Cluster, summer: SumBackend<'_>, wire: &'static str) -> Trained {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/python/debian/bin/python");
    assert!(python.exists(), "no {}: `cargo xtask test train` makes it", python.display());
    let spec = TrainSpec { python, model: "mlp".to_owned(), steps: STEPS, seed: 1, wire };
    let mut trainers = Trainers::start(cluster, &spec, summer)
        .unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.daemon_log()));
    let trained =
        trainers.train(|_, _| Ok(())).unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.daemon_log()));
    trainers.leave().unwrap();
    assert!(trained.weights.iter().all(|weights| *weights == trained.weights[0]), "{trained:?}");
    assert!(trained.test < 0.5, "has learnt nothing: {trained:?}");
    trained
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn box_training_matches_gloo_and_is_reproducible() {
    let cluster = Cluster::start(LabSpec::hosts(RANKS)).unwrap();
    let token = cluster.create_job(&JobSpec::new("train", RANKS as u32)).unwrap();
    let by_box = || {
        let trained = train(&cluster, SumBackend::Hook("train", &token), "32bit");
        for statistics in &trained.statistics {
            let count = |name: &str| statistics[name].as_u64().unwrap();
            assert!(count("all_reduces") >= STEPS as u64, "{statistics}");
            assert_eq!((count("fallbacks"), count("ring_bytes")), (0, 0), "{statistics}");
        }
        trained
    };
    let (first, second, gloo) = (by_box(), by_box(), train(&cluster, SumBackend::Gloo, "32bit"));
    let backend = train(&cluster, SumBackend::Backend("train", &token), "32bit");
    assert_eq!(first.loss, second.loss);
    assert_eq!(first.weights, second.weights);
    // The hook averages, and PyTorch divides the backend's sums; the results are equal because the
    // number of ranks is a power of two.
    assert_eq!(first.weights, backend.weights);
    let apart = first.loss.iter().zip(&gloo.loss).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    println!("losses are {apart:.1e} apart at most; {} and {}", first.weights[0], gloo.weights[0]);
    assert!(apart < CLOSE, "{apart}: {:?}\n{:?}", first.loss, gloo.loss);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn training_in_16_bits_takes_half_the_bytes_and_learns_as_well() {
    let cluster = Cluster::start(LabSpec::hosts(RANKS)).unwrap();
    let token = cluster.create_job(&JobSpec::new("half", RANKS as u32)).unwrap();
    let by_box = |wire| train(&cluster, SumBackend::Hook("half", &token), wire);
    let (half, again, full) = (by_box("16bit"), by_box("16bit"), by_box("32bit"));
    assert_eq!(half.weights, again.weights);
    let bytes = |trained: &Trained| trained.statistics[0]["box_bytes"].as_f64().unwrap();
    let share = bytes(&half) / bytes(&full);
    let apart = half.loss.iter().zip(&full.loss).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    println!("{share:.2} of the bytes, losses are {apart:.1e} apart at most");
    println!("test loss {} and {}", half.test, full.test);
    assert!((0.45..0.6).contains(&share) && apart < 0.01, "{share} {apart}: {:?}", half.loss);
}
