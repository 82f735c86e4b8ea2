//! The elements of several ranks of one host as one contribution: in a hierarchical sum, a rank
//! adds the integers of its host's ranks before it sends them. So the result has the bits of a sum
//! over all ranks by themselves.

use std::ops::{Deref, DerefMut, Range};

use super::block::{EXPONENT_BYTES, write_exponent};
use super::element::{Data, Dtype, Element, part_of};
use super::format::Format;
use super::quant::{Exponents, Underflow};
use super::reference::add_lanes;

/// A part of a vector of each of several ranks, and where the sum over all ranks of all hosts goes.
/// The job's [`summands`](crate::engine::Settings::summands) count all these ranks. Floats in 16
/// bits are rounded by other numbers than in a sum without hosts.
#[derive(Debug)]
pub struct Sources<S, O> {
    /// All have the same length.
    pub sources: Vec<S>,
    /// As long as each source; may be the same memory as one of them.
    pub output: O,
    /// 1, or for an average the number of all ranks.
    pub divisor: u32,
}

/// Bytes of a source's lanes that are added at a time.
const ADDED: usize = 4096;

impl<T: Element, S: Deref<Target = [T]>, O: DerefMut<Target = [T]>> Data for Sources<S, O> {
    fn dtype(&self) -> Dtype {
        T::DTYPE
    }
    fn len(&self) -> usize {
        self.sources.first().map_or(0, |source| source.len())
    }
    fn is_part(&self) -> bool {
        true
    }
    fn exponents(&self, range: Range<usize>) -> Exponents {
        let of_all = self.sources.iter().map(|source| T::exponents(&source[range.clone()]));
        of_all.reduce(Exponents::max).unwrap_or_default()
    }
    /// Counts each source, as ranks by themselves do, so that a scale is as coarse as theirs.
    fn write_exponent(&self, range: Range<usize>, counts: &mut [u8]) {
        counts.fill(0);
        for source in &self.sources {
            let mut own = [0; EXPONENT_BYTES];
            write_exponent(T::exponents(&source[range.clone()]).largest, &mut own);
            add_lanes(counts, &own);
        }
    }
    fn load(&self, range: Range<usize>, format: Option<Format<'_>>, out: &mut [u8]) {
        let size = format.map_or(4, Format::bytes);
        let at_once = ADDED / size;
        let mut lanes = [0; ADDED];
        for start in (0..range.len()).step_by(at_once) {
            let part = start..(start + at_once).min(range.len());
            let elements = range.start + part.start..range.start + part.end;
            let (bytes, format) = part_of(part, format);
            let out = &mut out[bytes];
            let lanes = &mut lanes[..out.len()];
            for (n, source) in self.sources.iter().enumerate() {
                let format = format.map(|format| format.of_source(n as u32));
                if n == 0 {
                    T::to_lanes(&source[elements.clone()], format, out);
                } else {
                    T::to_lanes(&source[elements.clone()], format, lanes);
                    add(out, lanes, size);
                }
            }
        }
    }
    fn underflow(&self, range: Range<usize>, format: Format<'_>) -> Underflow {
        let mut all = Underflow::default();
        for source in &self.sources {
            all += T::underflow(&source[range.clone()], format);
        }
        all
    }
    fn store(&mut self, range: Range<usize>, format: Option<Format<'_>>, sums: &[u8]) {
        T::from_lanes(sums, format, self.divisor, &mut self.output[range]);
    }
}

/// Adds lanes, or halves of lanes where an element is one: a part may begin or end with half a
/// lane.
fn add(sums: &mut [u8], lanes: &[u8], size: usize) {
    if size == 4 {
        return add_lanes(sums, lanes);
    }
    let pairs = sums.chunks_exact_mut(2).zip(lanes.chunks_exact(2));
    if size == 2 {
        for (sum, lane) in pairs {
            let [a, b] = [&*sum, lane].map(|x| u16::from_le_bytes([x[0], x[1]]));
            sum.copy_from_slice(&a.wrapping_add(b).to_le_bytes());
        }
    } else {
        add_lanes(sums, lanes);
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::super::block::{Width, read_exponent};
    use super::super::layout::{Layout, Plan};
    use super::super::number::Number;
    use super::super::reference::Reference;
    use super::*;
    use crate::call::Op;

    /// As the ranks of a ring over the hosts do it for a part.
    fn over_hosts<T: Element>(hosts: &mut [Sources<&[T], Vec<T>>], plan: &Plan, summands: u32) {
        for message in 0..plan.data_messages(0) {
            let range = plan.range(0, message);
            let buckets: Vec<u8> = plan
                .block_ranges(0, message)
                .map(|block| {
                    let mut counts = [0; EXPONENT_BYTES];
                    for host in &*hosts {
                        let mut own = [0; EXPONENT_BYTES];
                        host.write_exponent(block.clone(), &mut own);
                        add_lanes(&mut counts, &own);
                    }
                    read_exponent(&counts)
                })
                .collect();
            let format = plan.block_format(&buckets, summands).map(Format::Blocks);
            assert_eq!(format.is_some(), T::DTYPE.is_scaled());
            let bytes = (range.len() * format.map_or(4, Format::bytes)).next_multiple_of(4);
            let mut sums = vec![0; bytes];
            for (place, host) in hosts.iter().enumerate() {
                let mut lanes = vec![0; bytes];
                let format = format.map(|f| f.of_rank(place as u32, 1, range.start));
                let size = format.map_or(4, Format::bytes);
                host.load(range.clone(), format, &mut lanes[..range.len() * size]);
                add_lanes(&mut sums, &lanes);
            }
            hosts.iter_mut().for_each(|host| host.store(range.clone(), format, &sums));
        }
    }

    /// A hierarchical operation: the vector in parts that begin with a message, one after the
    /// other.
    fn hierarchical<T: Element>(
        hosts: &[Vec<Vec<T>>],
        layout: &Layout,
        width: Option<Width>,
        op: Op,
        messages_of_part: usize,
    ) -> Vec<T> {
        let summands = hosts.iter().map(Vec::len).sum::<usize>() as u32;
        let width = T::DTYPE.width(width);
        let length = hosts[0][0].len();
        let part = layout.elements(T::DTYPE, width).unwrap() * messages_of_part;
        let mut sum = Vec::new();
        for start in (0..length).step_by(part) {
            let range = start..(start + part).min(length);
            let plan = Plan::of_part(layout, T::DTYPE, width, range.len()).unwrap();
            let sources = |host: &Vec<Vec<T>>| -> Vec<_> {
                host.iter().map(|x| x[range.clone()].to_vec()).collect()
            };
            let all: Vec<_> = hosts.iter().map(sources).collect();
            let divisor = if op == Op::Average { summands } else { 1 };
            let mut parts: Vec<_> = all
                .iter()
                .map(|host| Sources {
                    sources: host.iter().map(|x| &x[..]).collect(),
                    output: vec![T::default(); range.len()],
                    divisor,
                })
                .collect();
            over_hosts(&mut parts, &plan, summands);
            assert!(parts.iter().all(|p| bits(&p.output) == bits(&parts[0].output)));
            sum.append(&mut parts[0].output);
        }
        sum
    }

    fn bits<T: Number>(x: &[T]) -> Vec<u64> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    fn check<T: Element>(hosts: &[Vec<Vec<T>>], op: Op, messages: usize) {
        let layout = Layout { message_size: 9000, window: 2, rings: 1 };
        let full = Some(Width::Full);
        let all: Vec<&[T]> = hosts.iter().flatten().map(|x| &x[..]).collect();
        let flat = Reference { op, width: full, ..Reference::new(&layout) }.of(&all);
        let sum = hierarchical(hosts, &layout, full, op, messages);
        assert_eq!(bits(&sum), bits(&flat), "{} {op}", T::DTYPE);
    }

    fn made<T>(
        hosts: &[usize],
        length: usize,
        seed: u32,
        of: impl Fn(u32) -> T,
    ) -> Vec<Vec<Vec<T>>> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            of(state)
        };
        let mut vector = || (0..length).map(|_| next()).collect::<Vec<T>>();
        hosts.iter().map(|ranks| (0..*ranks).map(|_| vector()).collect()).collect()
    }

    /// Finite floats of many magnitudes, some subnormal, some zero.
    fn float(x: u32) -> f32 {
        let exponent = (x >> 8) % 60 + (x >> 16) % 3 * 60;
        f32::from_bits(x & 0x807f_ffff | exponent << 23)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn sums_over_hosts_have_the_bits_of_sums_over_ranks(
            hosts in prop::collection::vec(1usize..5, 2..5),
            length in 4097usize..12_000,
            messages in 1usize..4,
            seed in any::<u32>(),
        ) {
            check(&made(&hosts, length, seed, |x| x as i32), Op::Sum, messages);
            check(&made(&hosts, length, seed, |x| x as u16), Op::Sum, messages);
            for op in [Op::Sum, Op::Average] {
                check(&made(&hosts, length, seed, float), op, messages);
                check(&made(&hosts, length, seed, |x| bf16::from_f32(float(x))), op, messages);
                check(&made(&hosts, length, seed, |x| f16::from_bits(x as u16 & 0xbbff)), op, messages);
            }
        }
    }

    /// A rank whose floats are 2^57 smaller than another's makes the scale coarser, on whatever host
    /// it is.
    #[test]
    fn a_scale_is_as_coarse_as_without_hosts() {
        let large = |i: u32| f32::from_bits(120 << 23 | ((i * 7919) & 0x7f_ffff));
        let large: Vec<f32> = (0..5000).map(large).collect();
        let small = vec![f32::from_bits(63 << 23); 5000];
        check(&[vec![large, small], vec![vec![0.0; 5000]]], Op::Sum, 1);
    }

    #[test]
    fn floats_in_16_bits_are_right_on_the_average() {
        let layout = Layout { message_size: 9000, window: 2, rings: 1 };
        for length in [5000, 5001] {
            // Below the unit of their block, whose largest float is 1; a third is never kept
            // exactly.
            let of_rank: Vec<f32> =
                (0..length).map(|i| if i % 1024 == 0 { 1.0 } else { 1.0 / 3e5 }).collect();
            let hosts = vec![vec![of_rank; 4]; 2];
            let sum = hierarchical(&hosts, &layout, Some(Width::Half), Op::Sum, 1);
            let (mut small, mut count) = (0.0, 0.0);
            for (i, x) in sum.iter().enumerate() {
                if i % 1024 == 0 {
                    assert!((x - 8.0).abs() < 0.01, "{x}");
                } else {
                    (small, count) = (small + f64::from(*x), count + 1.0);
                }
            }
            let mean = small / count / 8.0;
            assert!((mean * 3e5 - 1.0).abs() < 0.25, "{}", mean * 3e5);
        }
    }
}
