//! Data-parallel training by stochastic gradient descent with momentum.
//!
//! Each rank computes the gradient of its own mini-batch; the sum over all ranks moves the weights.
//! The caller provides the sum: a rank that trains with others uses the box, and the reference adds
//! up [`Config::ranks`] batches in one process. The code, and so the order of every floating point
//! operation, is the same for both.

use fastrand::Rng;

use crate::data::Data;
use crate::model::Model;

/// Parameters of a training, equal for all ranks.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Config {
    /// Ranks that train together.
    pub ranks: usize,
    /// Units of the hidden layer.
    pub hidden: usize,
    /// Images of one rank in one step.
    pub batch: usize,
    /// Number of times that all images are used.
    pub epochs: usize,
    /// Learning rate.
    pub rate: f32,
    /// The fraction of the last step's movement that is kept.
    pub momentum: f32,
    /// Seed of the first weights and the order of the images.
    pub seed: u64,
}

/// The approximate number of images of all ranks together in one step.
const GLOBAL_BATCH: usize = 64;

impl Config {
    /// The usual training: about 64 images in a step, shared by all ranks.
    pub fn new(ranks: usize, epochs: usize, seed: u64) -> Self {
        let batch = (GLOBAL_BATCH + ranks / 2).checked_div(ranks).unwrap_or(1).max(1);
        Self { ranks, hidden: 128, batch, epochs, rate: 0.2, momentum: 0.9, seed }
    }

    /// Floats that are summed in each step: the gradient, followed by the loss.
    pub fn floats(&self) -> usize {
        Model::len(self.hidden) + 1
    }

    /// Steps of an epoch. Images that do not fill a batch at every rank are left out of this epoch.
    pub fn steps_per_epoch(&self, data: &Data) -> usize {
        data.train.len().checked_div(self.ranks * self.batch).unwrap_or(0)
    }

    /// Steps of the whole training.
    pub fn steps(&self, data: &Data) -> usize {
        self.epochs * self.steps_per_epoch(data)
    }

    fn check(&self, data: &Data) -> Result<(), TrainError> {
        let wrong = |what: String| Err(TrainError::Config(what));
        if self.ranks == 0 {
            return wrong("0 ranks: must be at least 1".to_owned());
        }
        if self.batch == 0 || self.hidden == 0 || self.epochs == 0 {
            return wrong(format!(
                "batch {}, hidden {}, epochs {}: each must be at least 1",
                self.batch, self.hidden, self.epochs
            ));
        }
        if self.steps_per_epoch(data) == 0 {
            return wrong(format!(
                "{} ranks with {} images each in a step: only {} images to train with",
                self.ranks,
                self.batch,
                data.train.len()
            ));
        }
        Ok(())
    }
}

/// The reason why a training failed.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The configuration cannot be trained.
    #[error("{0}")]
    Config(String),
    /// The gradients could not be summed.
    #[error("step {step}: {source}")]
    Sum {
        /// From 0.
        step: usize,
        /// The error of the sum.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The weights are not finite.
    #[error("step {step}: the loss is {loss}; a lower learning rate helps")]
    Diverged {
        /// From 0.
        step: usize,
        /// Not finite.
        loss: f32,
    },
}

/// A completed step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// From 0.
    pub step: usize,
    /// From 0.
    pub epoch: usize,
    /// Mean loss over all ranks' images of this step, before it.
    pub loss: f32,
}

/// Trains with the batches of `here`, the ranks whose images are read in this process.
///
/// In every step `sum(parts, total)` gets one vector for each of these ranks and must fill `total`
/// with the sum over *all* ranks. `progress` is called after every step.
///
/// # Errors
/// If the configuration is wrong, `sum` fails, or the weights become infinite.
pub fn train(
    config: &Config,
    data: &Data,
    here: std::ops::Range<usize>,
    mut sum: impl FnMut(&[Vec<f32>], &mut [f32]) -> Result<(), Box<dyn std::error::Error + Send + Sync>>,
    mut progress: impl FnMut(Step),
) -> Result<Model, TrainError> {
    config.check(data)?;
    let mut model = Model::new(config.hidden, config.seed);
    let mut scratch = model.scratch();
    let mut velocity = vec![0.0; model.parameters().len()];
    let mut batches: Vec<_> = here.map(|rank| Batches::new(config, data, rank)).collect();
    let mut parts = vec![vec![0.0; config.floats()]; batches.len()];
    let mut total = vec![0.0; config.floats()];
    let steps_per_epoch = config.steps_per_epoch(data);
    // The mean over the images of all ranks.
    let scale = 1.0 / (config.ranks * config.batch) as f32;

    for step in 0..config.steps(data) {
        for (batches, part) in batches.iter_mut().zip(&mut parts) {
            part.fill(0.0);
            let (loss, gradient) = part.split_last_mut().expect("the loss is there");
            for &image in batches.next(step % steps_per_epoch) {
                *loss += model.backward(&data.train[image], gradient, &mut scratch);
            }
        }
        sum(&parts, &mut total).map_err(|source| TrainError::Sum { step, source })?;
        let (loss, gradient) = total.split_last().expect("the loss is there");
        let loss = loss * scale;
        if !loss.is_finite() {
            return Err(TrainError::Diverged { step, loss });
        }
        for ((p, v), g) in model.parameters_mut().iter_mut().zip(&mut velocity).zip(gradient) {
            *v = config.momentum * *v + g * scale;
            *p -= config.rate * *v;
        }
        progress(Step { step, epoch: step / steps_per_epoch, loss });
    }
    Ok(model)
}

/// The order in which a rank uses its images, different in each epoch.
struct Batches {
    part: Vec<usize>,
    rng: Rng,
    batch: usize,
}

impl Batches {
    fn new(config: &Config, data: &Data, rank: usize) -> Self {
        let mut seeds = Rng::with_seed(config.seed);
        let rng = (0..=rank).fold(Rng::with_seed(0), |_, _| seeds.fork());
        Self { part: data.part(rank, config.ranks), rng, batch: config.batch }
    }

    /// The images of step `step` of an epoch. Steps must be requested in order.
    fn next(&mut self, step: usize) -> &[usize] {
        if step == 0 {
            self.rng.shuffle(&mut self.part);
        }
        &self.part[step * self.batch..][..self.batch]
    }
}

/// A short number for a model's bits (FNV-1a), for people. To be sure, compare the bits.
pub fn fingerprint(parameters: &[f32]) -> u64 {
    to_bytes(parameters).iter().fold(0xcbf2_9ce4_8422_2325, |hash, b| {
        (hash ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Parameters as a file of little-endian floats.
pub fn to_bytes(parameters: &[f32]) -> Vec<u8> {
    parameters.iter().flat_map(|p| p.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, Mutex};

    use super::*;
    use crate::sum_here;

    type SumResult = Result<(), Box<dyn std::error::Error + Send + Sync>>;

    fn reference(config: &Config, data: &Data) -> (Model, Vec<Step>) {
        let mut steps = Vec::new();
        let sum = |parts: &[Vec<f32>], total: &mut [f32]| -> SumResult {
            sum_here(parts, total);
            Ok(())
        };
        let model = train(config, data, 0..config.ranks, sum, |s| steps.push(s)).unwrap();
        (model, steps)
    }

    /// As on real hosts: each rank runs in a thread of its own and gets the sum of all.
    /// Contributions arrive in any order.
    fn distributed(config: &Config, data: &Data) -> Vec<Model> {
        let arrived = Mutex::new(Vec::new());
        let barrier = Barrier::new(config.ranks);
        let rank = |rank: usize| {
            let sum = |parts: &[Vec<f32>], total: &mut [f32]| -> SumResult {
                assert_eq!(parts.len(), 1);
                arrived.lock().unwrap().push(parts[0].clone());
                barrier.wait();
                sum_here(&arrived.lock().unwrap(), total);
                if barrier.wait().is_leader() {
                    arrived.lock().unwrap().clear();
                }
                barrier.wait();
                Ok(())
            };
            train(config, data, rank..rank + 1, sum, |_| ()).unwrap()
        };
        std::thread::scope(|s| {
            let ranks: Vec<_> = (0..config.ranks).map(|r| s.spawn(move || rank(r))).collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        })
    }

    #[test]
    fn the_usual_training_gets_more_than_95_percent_right_for_any_number_of_hosts() {
        let data = Data::load().unwrap();
        for ranks in [1, 2, 3, 4, 8, 16] {
            for seed in [0, 1, 42] {
                let config = Config::new(ranks, crate::DEFAULT_EPOCHS, seed);
                let (model, steps) = reference(&config, &data);
                let accuracy = model.accuracy(&data.test);
                assert!(accuracy > 0.96, "{ranks} ranks, seed {seed}: {accuracy}");
                assert_eq!(steps.len(), config.steps(&data));
                let (first, last) = (steps[0].loss, steps[steps.len() - 1].loss);
                assert!(first > 1.5 && last < 0.1, "{first} to {last}");
            }
        }
    }

    #[test]
    fn ranks_with_a_batch_each_get_the_bits_of_one_process() {
        let data = Data::load().unwrap();
        for ranks in [1, 2, 3, 4, 5, 8] {
            let config = Config { hidden: 24, ..Config::new(ranks, 2, 7) };
            let (reference, _) = reference(&config, &data);
            for model in distributed(&config, &data) {
                assert_eq!(
                    to_bytes(model.parameters()),
                    to_bytes(reference.parameters()),
                    "{ranks} ranks"
                );
            }
        }
    }

    #[test]
    fn seeds_and_ranks_make_a_difference() {
        let data = Data::load().unwrap();
        let base = Config { hidden: 16, ..Config::new(4, 1, 1) };
        let bits = |config: &Config| fingerprint(reference(config, &data).0.parameters());
        assert_eq!(bits(&base), bits(&base));
        assert_ne!(bits(&base), bits(&Config { seed: 2, ..base.clone() }));
        assert_ne!(bits(&base), bits(&Config { ranks: 2, ..base.clone() }));
    }

    #[test]
    fn every_image_is_seen_at_most_once_in_an_epoch() {
        let data = Data::load().unwrap();
        let config = Config::new(4, 1, 5);
        let mut orders = Vec::new();
        let mut batches = Batches::new(&config, &data, 2);
        for _epoch in 0..2 {
            let mut seen: Vec<_> =
                (0..config.steps_per_epoch(&data)).flat_map(|s| batches.next(s).to_vec()).collect();
            orders.push(seen.clone());
            seen.sort();
            seen.dedup();
            assert_eq!(seen.len(), config.steps_per_epoch(&data) * config.batch);
            assert!(seen.iter().all(|i| i % 4 == 2), "another rank's image");
        }
        assert_ne!(orders[0], orders[1]);
    }

    #[test]
    fn errors_name_their_step_and_their_values() {
        let data = Data::load().unwrap();
        let config = Config { hidden: 8, ..Config::new(2, 1, 1) };
        let mut left = 3;
        let sum = |_: &[Vec<f32>], _: &mut [f32]| -> SumResult {
            left -= 1;
            if left == 0 { Err("the link is down".into()) } else { Ok(()) }
        };
        let error = train(&config, &data, 0..1, sum, |_| ()).unwrap_err().to_string();
        assert_eq!(error, "step 2: the link is down");

        let nan = |_: &[Vec<f32>], total: &mut [f32]| -> SumResult {
            total.fill(f32::NAN);
            Ok(())
        };
        let error = train(&config, &data, 0..1, nan, |_| ()).unwrap_err().to_string();
        assert!(error.starts_with("step 0: the loss is NaN"), "{error}");

        let never = |_: &[Vec<f32>], _: &mut [f32]| -> SumResult { unreachable!() };
        let too_many = Config { ranks: 100, batch: 16, ..config };
        let error = train(&too_many, &data, 0..1, never, |_| ()).unwrap_err().to_string();
        assert!(error.contains("100 ranks with 16 images") && error.contains("1438"), "{error}");
    }
}
