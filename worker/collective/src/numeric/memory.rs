//! The memory that operations use. Callers from other languages may pass the same memory to two
//! operations.

use std::ops::Range;

/// A slice of the caller.
#[derive(Clone, Debug)]
struct Stretch {
    place: Range<usize>,
    /// Whether the result goes there, at this rank or another: all ranks must detect the same
    /// collisions.
    written: bool,
}

/// All memory of one operation.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    stretches: Vec<Stretch>,
    /// The range from the first to the last slice.
    hull: Range<usize>,
}

impl Memory {
    /// Adds an input; its part `own` may be the output, for operations in place.
    pub fn with_input<T>(self, input: &[T], own: Range<usize>, result: &[T]) -> Self {
        let place =
            if input[own.clone()].as_ptr_range() == result.as_ptr_range() { own } else { 0..0 };
        self.with(&input[..place.start], false).with(&input[place.end..], false)
    }

    /// Adds a slice.
    pub fn with<T>(mut self, slice: &[T], written: bool) -> Self {
        let Range { start, end } = slice.as_ptr_range();
        let place = start.addr()..end.addr();
        if !place.is_empty() {
            let first = self.stretches.is_empty();
            let Range { start, end } = if first { place.clone() } else { self.hull };
            self.hull = start.min(place.start)..end.max(place.end);
            self.stretches.push(Stretch { place, written });
        }
        self
    }

    /// Whether an operation writes memory that it also uses for something else.
    pub fn overlaps_itself(&self) -> bool {
        let mut all: Vec<&Stretch> = self.stretches.iter().collect();
        all.sort_by_key(|stretch| stretch.place.start);
        // The ends of the slices before, read and written.
        let mut ends = [0; 2];
        all.into_iter().any(|Stretch { place, written }| {
            let [read, write] = ends;
            let end = &mut ends[usize::from(*written)];
            *end = place.end.max(*end);
            write > place.start || *written && read > place.start
        })
    }

    /// Whether one of two operations writes memory that the other one uses.
    pub fn collides(&self, other: &Self) -> bool {
        if self.hull.start >= other.hull.end || other.hull.start >= self.hull.end {
            return false;
        }
        let [own, others] =
            [(self, 0), (other, 1)].map(|(m, whose)| m.stretches.iter().map(move |s| (s, whose)));
        let mut all: Vec<(&Stretch, usize)> = own.chain(others).collect();
        all.sort_by_key(|(stretch, _)| stretch.place.start);
        // The ends of the slices before, of each operation, read and written.
        let mut ends = [[0; 2]; 2];
        all.into_iter().any(|(Stretch { place, written }, whose)| {
            let end = &mut ends[whose][usize::from(*written)];
            *end = place.end.max(*end);
            let [read, write] = ends[1 - whose];
            write > place.start || *written && read > place.start
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn overlapping_parts_are_found(parts in prop::collection::vec((0usize..60, 0usize..9, any::<bool>(), any::<bool>()), 0..12)) {
            let array = [0u8; 80];
            let of = |whose| parts.iter().filter(move |p| p.3 == whose);
            let memory = |whose| of(whose).fold(Memory::default(), |m, (at, len, written, _)| m.with(&array[*at..at + len], *written));
            let right = of(true).any(|a| of(false).any(|b| {
                a.0.max(b.0) < (a.0 + a.1).min(b.0 + b.1) && (a.2 || b.2)
            }));
            prop_assert_eq!(memory(true).collides(&memory(false)), right);
            prop_assert_eq!(memory(false).collides(&memory(true)), right);
            let own: Vec<_> = of(true).collect();
            let right = own.iter().enumerate().any(|(i, a)| own[..i].iter().any(|b| {
                a.0.max(b.0) < (a.0 + a.1).min(b.0 + b.1) && (a.2 || b.2)
            }));
            prop_assert_eq!(memory(true).overlaps_itself(), right);
        }
    }
}
