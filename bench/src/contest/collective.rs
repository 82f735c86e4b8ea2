//! The collectives of `bench wire --collectives`, as netsum and Gloo do them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A collective, with nccl-tests' name. Its root is rank 0, and its size as nccl-tests define it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collective {
    #[default]
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    #[serde(rename = "alltoall")]
    AllToAll,
    Barrier,
}

impl Collective {
    pub const ALL: [Self; 7] = [
        Self::AllReduce,
        Self::Reduce,
        Self::Broadcast,
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllToAll,
        Self::Barrier,
    ];

    /// These sizes, cut to whole elements for each rank; a barrier has none.
    pub fn sizes(self, sizes: &[usize], ranks: u32) -> Vec<usize> {
        let part = 4 * ranks as usize;
        match self {
            Self::Barrier => vec![0],
            Self::AllGather | Self::ReduceScatter | Self::AllToAll => {
                sizes.iter().map(|size| size.max(&part) / part * part).collect()
            }
            Self::AllReduce | Self::Reduce | Self::Broadcast => sizes.to_vec(),
        }
    }

    /// Bytes that rank 0 must send, and receive, whatever the algorithm.
    pub fn least(self, bytes: u64, ranks: u64) -> [u64; 2] {
        let part = bytes / ranks;
        match self {
            Self::AllReduce => [bytes, bytes],
            Self::Reduce => [0, bytes],
            Self::Broadcast => [bytes, 0],
            Self::AllGather => [part, bytes - part],
            Self::ReduceScatter => [bytes - part, part],
            Self::AllToAll => [bytes - part; 2],
            Self::Barrier => [0, 0],
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::AllReduce => "all_reduce",
            Self::Reduce => "reduce",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "alltoall",
            Self::Barrier => "barrier",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_same_in_tables_and_orders() {
        for collective in Collective::ALL {
            let json = serde_json::to_string(&collective).unwrap();
            assert_eq!(json, format!("\"{collective}\""));
        }
    }

    #[test]
    fn sizes_have_whole_elements_for_each_rank() {
        assert_eq!(Collective::AllGather.sizes(&[4, 100], 3), [12, 96]);
        assert_eq!(Collective::Reduce.sizes(&[4, 100], 3), [4, 100]);
        assert_eq!(Collective::Barrier.sizes(&[4, 100], 3), [0]);
    }
}
