//! How vectors are cut into chunks and parts, and where these are in the shared memory.

use std::ops::Range;

use netsum_collective::error::Error;
use netsum_collective::numeric::block::Width;
use netsum_collective::numeric::element::Dtype;
use netsum_collective::numeric::layout::Layout;

use crate::local::progress::CONTROL_BYTES;

/// Bytes of a ring's part of a chunk, unless messages are longer. Two chunks are in memory.
const PART_BYTES: usize = 512 << 10;

/// Where chunks are in the shared memory: two of each rank.
#[derive(Debug)]
pub(super) struct Areas {
    pub rings: usize,
    layout: Layout,
    /// Of a ring's part of a chunk.
    part_bytes: usize,
}

impl Areas {
    pub fn new(rings: usize, layout: &Layout) -> Self {
        // A message in 16 bits has up to half as many floats as bytes.
        let part_bytes = PART_BYTES.max(2 * layout.message_size as usize);
        Self { rings, layout: *layout, part_bytes: part_bytes.next_multiple_of(4096) }
    }

    fn chunk_bytes(&self) -> usize {
        self.rings * self.part_bytes
    }

    pub fn bytes(&self, local_ranks: usize) -> usize {
        2 * local_ranks * self.chunk_bytes()
    }

    /// Where a rank's chunk begins.
    pub fn start(&self, chunk: u64, local_ranks: usize, place: usize) -> usize {
        CONTROL_BYTES + ((chunk % 2) as usize * local_ranks + place) * self.chunk_bytes()
    }

    /// How vectors of this type are cut.
    pub fn cut(&self, dtype: Dtype, width: Width) -> Result<Cut, Error> {
        let message = self
            .layout
            .elements(dtype, width)
            .map_err(|reason| Error::MessageSize { dtype, reason })?;
        let messages = (self.part_bytes / (message * dtype.bytes())).max(1);
        Ok(Cut { rings: self.rings, message, chunk: self.rings * messages * message })
    }
}

/// How vectors are cut: chunks and parts begin where messages of a flat sum do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    pub rings: usize,
    /// Elements of a message.
    message: usize,
    /// Elements of a chunk.
    pub chunk: usize,
}

impl Cut {
    /// A ring's part of a chunk.
    pub fn part(&self, elements: usize, ring: usize) -> Range<usize> {
        let messages = elements.div_ceil(self.message);
        let at = |ring: usize| (messages * ring / self.rings * self.message).min(elements);
        at(ring)..at(ring + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_begin_with_messages_and_cover_the_chunk() {
        let layout = Layout { message_size: 16384, window: 2, rings: 1 };
        let areas = Areas::new(3, &layout);
        for (dtype, width) in
            [(Dtype::F32, Width::Full), (Dtype::F32, Width::Half), (Dtype::I16, Width::Full)]
        {
            let cut = areas.cut(dtype, width).unwrap();
            assert!(
                cut.chunk * dtype.bytes() <= areas.chunk_bytes()
                    && cut.chunk.is_multiple_of(cut.message)
            );
            for elements in [1, cut.message, cut.message + 1, 7 * cut.message - 1, cut.chunk] {
                let parts: Vec<_> = (0..3).map(|ring| cut.part(elements, ring)).collect();
                assert_eq!((parts[0].start, parts[2].end), (0, elements));
                for (a, b) in parts.iter().zip(&parts[1..]) {
                    assert!(a.end == b.start && (b.start % cut.message == 0 || b.is_empty()));
                }
            }
        }
    }
}
