//! The commands: nccl-tests' names, sizes and factors.

/// A command, as the table shows it.
pub struct Collective {
    pub kind: Kind,
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    pub about: &'static str,
    /// A size is that of one part for each rank.
    pub has_parts: bool,
    /// Bus bandwidth divided by algorithm bandwidth, by the number of ranks.
    pub bus_factor: fn(f64) -> f64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    AllToAll,
    Barrier,
}

pub const COMMANDS: [Collective; 7] = [
    Collective {
        kind: Kind::AllReduce,
        name: "all_reduce",
        aliases: &["all-reduce"],
        about: "Reduce over all ranks, in place",
        has_parts: false,
        bus_factor: |n| 2.0 * (n - 1.0) / n,
    },
    Collective {
        kind: Kind::Reduce,
        name: "reduce",
        aliases: &[],
        about: "Reduce over all ranks, in place at the root",
        has_parts: false,
        bus_factor: |_| 1.0,
    },
    Collective {
        kind: Kind::Broadcast,
        name: "broadcast",
        aliases: &[],
        about: "Copy the root's data to all ranks",
        has_parts: false,
        bus_factor: |_| 1.0,
    },
    Collective {
        kind: Kind::AllGather,
        name: "all_gather",
        aliases: &["all-gather"],
        about: "Give all ranks the data of each; sizes are those of the output",
        has_parts: true,
        bus_factor: |n| (n - 1.0) / n,
    },
    Collective {
        kind: Kind::ReduceScatter,
        name: "reduce_scatter",
        aliases: &["reduce-scatter"],
        about: "Reduce, and give each rank one part; sizes are those of the input",
        has_parts: true,
        bus_factor: |n| (n - 1.0) / n,
    },
    Collective {
        kind: Kind::AllToAll,
        name: "alltoall",
        aliases: &["all_to_all", "all-to-all"],
        about: "Give each rank one part of each rank's data; sizes are those of a rank's input",
        has_parts: true,
        bus_factor: |n| (n - 1.0) / n,
    },
    Collective {
        kind: Kind::Barrier,
        name: "barrier",
        aliases: &[],
        about: "Wait for all ranks",
        has_parts: false,
        bus_factor: |_| 1.0,
    },
];

impl Kind {
    pub fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce | Self::ReduceScatter)
    }

    pub fn has_root(self) -> bool {
        matches!(self, Self::Reduce | Self::Broadcast)
    }

    /// Whether the command has this option, which is named by its field in `Options`.
    pub fn takes(self, option: &str) -> bool {
        match option {
            "op" | "wire" => self.reduces(),
            "root" => self.has_root(),
            "tensors" => self == Self::AllReduce,
            "begin" | "end" | "factor" | "dtype" | "inflight" | "check" => self != Self::Barrier,
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        let factors = COMMANDS.map(|c| (c.name, (c.bus_factor)(4.0)));
        let expected = [
            ("all_reduce", 1.5),
            ("reduce", 1.0),
            ("broadcast", 1.0),
            ("all_gather", 0.75),
            ("reduce_scatter", 0.75),
            ("alltoall", 0.75),
            ("barrier", 1.0),
        ];
        assert_eq!(factors, expected);
    }
}
