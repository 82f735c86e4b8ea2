//! A classifier of two layers: 64 pixels, a hidden layer of rectified linear units, 10 digits by
//! softmax.
//!
//! All arithmetic is f32, one operation after the other in the order written here: the same
//! parameters and images give the same bits. (Rust neither reorders floating point operations nor
//! contracts them.)

use fastrand::Rng;

use crate::data::{DIGITS, Image, PIXELS};

/// Parameters of the two layers in one vector: weights (a row for each input), biases, and again
/// for the second layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    hidden: usize,
    parameters: Vec<f32>,
}

/// Working memory of [`Model::backward`], reused from image to image to avoid allocations.
#[derive(Clone, Debug)]
pub struct Scratch {
    hidden: Vec<f32>,
    hidden_gradient: Vec<f32>,
}

/// The two layers' parameters, or their gradients.
struct Layers<T> {
    weights1: T,
    biases1: T,
    weights2: T,
    biases2: T,
}

impl Model {
    /// A new model with `hidden` hidden units and random weights.
    pub fn new(hidden: usize, seed: u64) -> Self {
        let mut model = Self { hidden, parameters: vec![0.0; Self::len(hidden)] };
        let mut rng = Rng::with_seed(seed);
        let layers = split_mut(&mut model.parameters, hidden);
        // He et al., "Delving deep into rectifiers" (2015): variance 2 / inputs, here uniform.
        // Biases stay zero.
        for (weights, inputs) in [(layers.weights1, PIXELS), (layers.weights2, hidden)] {
            let bound = (6.0 / inputs as f32).sqrt();
            weights.iter_mut().for_each(|w| *w = bound * symmetric(&mut rng));
        }
        model
    }

    /// Number of parameters of a model with `hidden` hidden units.
    pub const fn len(hidden: usize) -> usize {
        PIXELS * hidden + hidden + hidden * DIGITS + DIGITS
    }

    pub fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    pub fn parameters_mut(&mut self) -> &mut [f32] {
        &mut self.parameters
    }

    /// Working memory for [`Model::backward`].
    pub fn scratch(&self) -> Scratch {
        Scratch { hidden: vec![0.0; self.hidden], hidden_gradient: vec![0.0; self.hidden] }
    }

    /// Adds the gradient of one image's loss to `gradient`, and returns the loss (cross entropy, in
    /// nats).
    pub fn backward(&self, image: &Image, gradient: &mut [f32], scratch: &mut Scratch) -> f32 {
        let Scratch { hidden, hidden_gradient } = scratch;
        let mut output = self.forward(image, hidden);
        let loss = softmax(&mut output, image.digit);

        // The gradient of the loss with respect to the last layer's sums is softmax minus the
        // wanted outputs.
        output[image.digit] -= 1.0;
        let layers = split(&self.parameters, self.hidden);
        let gradient = split_mut(gradient, self.hidden);
        let rows =
            layers.weights2.chunks_exact(DIGITS).zip(gradient.weights2.chunks_exact_mut(DIGITS));
        for ((weights, to), (h, dh)) in rows.zip(hidden.iter().zip(hidden_gradient.iter_mut())) {
            *dh = 0.0;
            for ((w, to), d) in weights.iter().zip(to).zip(&output) {
                *to += h * d;
                *dh += w * d;
            }
            // The rectifier passes no gradient where it is off.
            if *h <= 0.0 {
                *dh = 0.0;
            }
        }
        add(gradient.biases2, &output);
        for (x, to) in image.pixels.iter().zip(gradient.weights1.chunks_exact_mut(self.hidden)) {
            for (to, d) in to.iter_mut().zip(hidden_gradient.iter()) {
                *to += x * d;
            }
        }
        add(gradient.biases1, hidden_gradient);
        loss
    }

    /// The digit that the model recognises in an image.
    pub fn classify(&self, image: &Image) -> usize {
        let output = self.forward(image, &mut vec![0.0; self.hidden]);
        let mut best = 0;
        for (digit, score) in output.iter().enumerate() {
            if *score > output[best] {
                best = digit;
            }
        }
        best
    }

    /// The fraction of the images that the model gets right.
    pub fn accuracy(&self, images: &[Image]) -> f64 {
        images.iter().filter(|i| self.classify(i) == i.digit).count() as f64 / images.len() as f64
    }

    /// Fills the hidden layer and returns the last layer's sums.
    fn forward(&self, image: &Image, hidden: &mut [f32]) -> [f32; DIGITS] {
        let layers = split(&self.parameters, self.hidden);
        hidden.copy_from_slice(layers.biases1);
        for (x, weights) in image.pixels.iter().zip(layers.weights1.chunks_exact(self.hidden)) {
            for (h, w) in hidden.iter_mut().zip(weights) {
                *h += x * w;
            }
        }
        let mut output: [f32; DIGITS] =
            layers.biases2.try_into().expect("as many biases as digits");
        for (h, weights) in hidden.iter_mut().zip(layers.weights2.chunks_exact(DIGITS)) {
            *h = h.max(0.0);
            for (o, w) in output.iter_mut().zip(weights) {
                *o += *h * w;
            }
        }
        output
    }
}

fn add(to: &mut [f32], from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += from;
    }
}

/// Replaces scores by probabilities, and returns the cross entropy of `digit`.
fn softmax(output: &mut [f32; DIGITS], digit: usize) -> f32 {
    // Without subtracting the largest score, exp could overflow.
    let largest = output.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let wanted = output[digit] - largest;
    let mut sum = 0.0;
    for o in output.iter_mut() {
        *o = (*o - largest).exp();
        sum += *o;
    }
    output.iter_mut().for_each(|o| *o /= sum);
    sum.ln() - wanted
}

/// A number from -1 up to, not including, 1, with the same bits on every machine.
fn symmetric(rng: &mut Rng) -> f32 {
    2.0 * rng.f32() - 1.0
}

fn split(parameters: &[f32], hidden: usize) -> Layers<&[f32]> {
    let (weights1, rest) = parameters.split_at(PIXELS * hidden);
    let (biases1, rest) = rest.split_at(hidden);
    let (weights2, biases2) = rest.split_at(hidden * DIGITS);
    Layers { weights1, biases1, weights2, biases2 }
}

fn split_mut(parameters: &mut [f32], hidden: usize) -> Layers<&mut [f32]> {
    let (weights1, rest) = parameters.split_at_mut(PIXELS * hidden);
    let (biases1, rest) = rest.split_at_mut(hidden);
    let (weights2, biases2) = rest.split_at_mut(hidden * DIGITS);
    Layers { weights1, biases1, weights2, biases2 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Data;

    /// Loss and gradient of one image, and the hidden units that it turns on.
    fn loss(model: &Model, image: &Image) -> (f64, Vec<f32>, Vec<bool>) {
        let mut gradient = vec![0.0; model.parameters().len()];
        let mut scratch = model.scratch();
        let loss = f64::from(model.backward(image, &mut gradient, &mut scratch));
        (loss, gradient, scratch.hidden.iter().map(|h| *h > 0.0).collect())
    }

    #[test]
    fn gradient_agrees_with_finite_differences() {
        let data = Data::load().unwrap();
        let hidden = 16;
        let model = Model::new(hidden, 3);
        let mut rng = Rng::with_seed(9);
        let n = Model::len(hidden);
        let biases1 = PIXELS * hidden;
        let weights2 = biases1 + hidden;
        let biases2 = weights2 + hidden * DIGITS;
        // In random directions within each layer's weights and biases, and in all at once.
        for range in [0..biases1, biases1..weights2, weights2..biases2, biases2..n, 0..n] {
            let mut compared = 0;
            for image in &data.train[..40] {
                let direction: Vec<f32> = (0..n)
                    .map(|i| if range.contains(&i) { symmetric(&mut rng) } else { 0.0 })
                    .collect();
                let eps = 3e-3;
                let moved = |step: f32| {
                    let mut moved = model.clone();
                    for (p, d) in moved.parameters_mut().iter_mut().zip(&direction) {
                        *p += step * d;
                    }
                    loss(&moved, image)
                };
                let (here, ahead, behind) = (loss(&model, image), moved(eps), moved(-eps));
                // Where a rectifier switches, the loss has a kink, and the difference does not
                // approximate the gradient.
                if here.2 != ahead.2 || here.2 != behind.2 {
                    continue;
                }
                compared += 1;
                let measured = (ahead.0 - behind.0) / (2.0 * f64::from(eps));
                let computed: f64 =
                    here.1.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
                let error = (measured - computed).abs();
                assert!(
                    error < 1e-3 * computed.abs() + 5e-4,
                    "{range:?}: {measured}, not {computed}"
                );
            }
            assert!(compared >= 20, "{range:?}: only {compared} compared");
        }
    }

    #[test]
    fn gradients_add_up() {
        let data = Data::load().unwrap();
        let model = Model::new(8, 1);
        let mut scratch = model.scratch();
        let mut both = vec![0.0; Model::len(8)];
        let mut each = [both.clone(), both.clone()];
        for (i, image) in data.train[..2].iter().enumerate() {
            model.backward(image, &mut both, &mut scratch);
            model.backward(image, &mut each[i], &mut scratch);
        }
        assert!(both.iter().zip(each[0].iter().zip(&each[1])).all(|(b, (x, y))| *b == x + y));
    }

    #[test]
    fn a_new_model_knows_nothing_and_has_moderate_scores() {
        let data = Data::load().unwrap();
        for seed in 0..5 {
            let model = Model::new(64, seed);
            let sum: f64 = data.train.iter().map(|i| loss(&model, i).0).sum();
            let mean = sum / data.train.len() as f64;
            assert!((1.5..6.0).contains(&mean), "{mean} is far from ln 10");
            assert!(model.accuracy(&data.test) < 0.4);
        }
        assert_ne!(Model::new(64, 1), Model::new(64, 2));
        assert_eq!(Model::new(64, 1), Model::new(64, 1));
    }

    #[test]
    fn huge_scores_do_not_overflow() {
        let mut output = [1e4, -1e4, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        assert_eq!(softmax(&mut output, 1), 2e4);
        assert_eq!(output[..2], [1.0, 0.0]);
    }
}
