//! The images of handwritten digits, embedded in the program.
//!
//! The folder's README names their source.

use std::io::Read;

use flate2::read::GzDecoder;

/// Pixels of an image, 8 rows of 8.
pub const PIXELS: usize = 64;
/// Number of different digits.
pub const DIGITS: usize = 10;
/// One in this many images is a test image.
pub const TEST_SHARE: usize = 5;

const FILE: &[u8] = include_bytes!("../digits.csv.gz");
/// The largest value of a pixel in the file.
const WHITE: u8 = 16;

/// A problem of the file of images.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// Not a gzip file, or not text.
    #[error("cannot unpack the images: {0}")]
    Unpack(#[from] std::io::Error),
    /// A line that is not an image and its digit.
    #[error("line {line} of the images: {what}")]
    Line {
        /// The line's number, from 1.
        line: usize,
        /// The problem, and the correct form.
        what: String,
    },
}

/// One image and the digit that it shows.
#[derive(Clone, Debug, PartialEq)]
pub struct Image {
    /// 0 to 1, row by row.
    pub pixels: [f32; PIXELS],
    /// 0 to 9.
    pub digit: usize,
}

/// Images for training and images for testing; the sets are disjoint.
#[derive(Clone, Debug)]
pub struct Data {
    pub train: Vec<Image>,
    pub test: Vec<Image>,
}

impl Data {
    /// The embedded images.
    ///
    /// # Errors
    /// If the embedded file is damaged.
    pub fn load() -> Result<Self, DataError> {
        let mut text = String::new();
        GzDecoder::new(FILE).read_to_string(&mut text)?;
        Ok(Self::split(parse(&text)?))
    }

    /// One image in five is a test image. The file is ordered by writers, who wrote the digits in
    /// turn, so the images are shuffled first, always in the same way: the seed gives a test set with
    /// about as many images of each digit.
    fn split(mut images: Vec<Image>) -> Self {
        fastrand::Rng::with_seed(6).shuffle(&mut images);
        let test = images.split_off(images.len() - images.len() / TEST_SHARE);
        Self { train: images, test }
    }

    /// The numbers of the training images of `rank` of `ranks`. The parts are disjoint and
    /// complete, and their sizes differ by at most one image.
    pub fn part(&self, rank: usize, ranks: usize) -> Vec<usize> {
        (rank..self.train.len()).step_by(ranks).collect()
    }
}

fn parse(text: &str) -> Result<Vec<Image>, DataError> {
    text.lines()
        .enumerate()
        .map(|(i, line)| parse_line(line).map_err(|what| DataError::Line { line: i + 1, what }))
        .collect()
}

fn parse_line(line: &str) -> Result<Image, String> {
    let values = line
        .split(',')
        .map(|v| {
            v.trim().parse::<u8>().map_err(|_| format!("`{v}` is not a number from 0 to {WHITE}"))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let Some((&digit, raw)) = values.split_last().filter(|_| values.len() == PIXELS + 1) else {
        return Err(format!("{} columns, not {PIXELS} pixels and a digit", values.len()));
    };
    if let Some(v) = raw.iter().find(|v| **v > WHITE) {
        return Err(format!("pixel {v}, not 0 to {WHITE}"));
    }
    if usize::from(digit) >= DIGITS {
        return Err(format!("digit {digit}, not 0 to 9"));
    }
    // Sixteenths are exact.
    let pixels = std::array::from_fn(|i| f32::from(raw[i]) / f32::from(WHITE));
    Ok(Image { pixels, digit: digit.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_images_are_there_and_digits_occur_about_equally_often() {
        let data = Data::load().unwrap();
        assert_eq!((data.train.len(), data.test.len()), (1438, 359));
        for (images, least) in [(&data.train, 120), (&data.test, 25)] {
            let mut count = [0; DIGITS];
            images.iter().for_each(|i| count[i.digit] += 1);
            assert!(count.iter().all(|n| *n >= least), "{count:?}");
            assert!(images.iter().all(|i| i.pixels.iter().all(|p| (0.0..=1.0).contains(p))));
        }
        // The first image of the file, a zero, is in one of the sets.
        let zero = [0.0, 0.0, 5.0 / 16.0, 13.0 / 16.0, 9.0 / 16.0, 1.0 / 16.0];
        assert!(
            data.train
                .iter()
                .chain(&data.test)
                .any(|i| i.digit == 0 && i.pixels.starts_with(&zero))
        );
    }

    #[test]
    fn parts_are_disjoint_and_complete() {
        let data = Data::load().unwrap();
        for ranks in 1..=9 {
            let parts: Vec<_> = (0..ranks).map(|r| data.part(r, ranks)).collect();
            let mut all = parts.concat();
            all.sort();
            assert_eq!(all, (0..data.train.len()).collect::<Vec<_>>());
            let least = data.train.len() / ranks;
            assert!(parts.iter().all(|p| (least..=least + 1).contains(&p.len())));
        }
    }

    #[test]
    fn an_error_names_the_damaged_line() {
        let good = "0,".repeat(64) + "7";
        assert_eq!(parse(&good).unwrap()[0].digit, 7);
        for (bad, what) in [
            ("0,".repeat(63) + "7", "64 columns"),
            ("0,".repeat(64) + "10", "digit 10"),
            ("17,".to_owned() + &"0,".repeat(63) + "7", "pixel 17"),
            ("x,".to_owned() + &"0,".repeat(63) + "7", "`x`"),
        ] {
            let error = parse(&format!("{good}\n{bad}\n")).unwrap_err().to_string();
            assert!(error.contains("line 2") && error.contains(what), "{error}");
        }
    }
}
