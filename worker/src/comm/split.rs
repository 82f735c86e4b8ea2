//! Splits a communicator into communicators of some of its ranks.

use super::allocator::nonce;
use super::communicator::Communicator;
use super::config::{Bootstrap, CommConfig};
use netsum_collective::error::Error;

/// Bytes of a rank's choice, as exchanged.
const BYTES: usize = 13;

/// A rank's arguments of a split.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Choice {
    color: Option<u32>,
    key: i32,
    /// The first member's is part of the group's name, which no earlier group has had.
    random: u32,
}

impl Choice {
    fn to_bytes(self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[0] = u8::from(self.color.is_some());
        bytes[1..5].copy_from_slice(&self.color.unwrap_or(0).to_le_bytes());
        bytes[5..9].copy_from_slice(&self.key.to_le_bytes());
        bytes[9..].copy_from_slice(&self.random.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; BYTES]) -> Self {
        let [has_color, c0, c1, c2, c3, k0, k1, k2, k3, r0, r1, r2, r3] = *bytes;
        Self {
            color: (has_color != 0).then_some(u32::from_le_bytes([c0, c1, c2, c3])),
            key: i32::from_le_bytes([k0, k1, k2, k3]),
            random: u32::from_le_bytes([r0, r1, r2, r3]),
        }
    }
}

/// A rank's group.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Group {
    /// The same at all its members, and of no other group of the job.
    name: String,
    /// The rank within it.
    rank: u32,
    ranks: u32,
}

/// The group of the rank that has made choice number `own`; `None` without a color.
fn group(choices: &[Choice], own: usize, split: u32) -> Option<Group> {
    let color = choices[own].color?;
    let mut members: Vec<usize> =
        (0..choices.len()).filter(|&rank| choices[rank].color == Some(color)).collect();
    // Equal keys keep the order of ranks.
    members.sort_by_key(|&rank| choices[rank].key);
    let rank = members.iter().position(|&rank| rank == own)? as u32;
    let random = choices[*members.first()?].random;
    Some(Group { name: format!("{split}.{color}-{random:08x}"), rank, ranks: members.len() as u32 })
}

impl Communicator {
    /// Makes a communicator of all ranks that pass the same `color`, as MPI_Comm_split does. They
    /// are in the order of their `key`, and of their ranks here where keys are equal. All ranks of
    /// this communicator must call it; those that pass `None`, as MPI_UNDEFINED, get `None`.
    ///
    /// The box sums for each of them, as a group of the job. If it has no room, the group's ranks
    /// sum over the hosts' ring.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce) and [`connect`](Self::connect); [`Error::Config`] for
    /// several ranks without a controller ([`Bootstrap::Static`]).
    pub fn split(&mut self, color: Option<u32>, key: i32) -> Result<Option<Self>, Error> {
        self.split_config(color, key)?.map(Self::connect).transpose()
    }

    /// The first step of [`split`](Self::split), which all ranks must call: the configuration for
    /// [`connect`](Self::connect).
    ///
    /// # Errors
    /// As [`split`](Self::split).
    pub fn split_config(
        &mut self,
        color: Option<u32>,
        key: i32,
    ) -> Result<Option<CommConfig>, Error> {
        if self.ranks() > 1 && matches!(self.config.bootstrap, Bootstrap::Static { .. }) {
            let text = "split: groups need a box: set NETSUM_CONTROLLER instead of NETSUM_PEERS";
            return Err(Error::Config(text.to_owned()));
        }
        let own = Choice { color, key, random: nonce() as u32 };
        let all = vec![0; BYTES * self.ranks() as usize];
        let ((_, all), _) = self.all_gather_async(own.to_bytes().to_vec(), all)?.wait()?;
        let choices: Vec<Choice> = all.as_chunks().0.iter().map(Choice::from_bytes).collect();
        let split = self.splits;
        self.splits += 1;
        let found = group(&choices, self.rank() as usize, split);
        let (wire, config) = (self.wire(), &self.config);
        Ok(found.map(|Group { name, rank, ranks }| CommConfig {
            rank,
            ranks,
            group: Some(name),
            wire,
            ..config.clone()
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_in_the_order_of_their_keys_and_ranks() {
        let choice = |color, key, random| Choice { color, key, random };
        let choices = [
            choice(Some(0), 5, 1),
            choice(Some(7), 0, 2),
            choice(Some(0), -1, 3),
            choice(None, 0, 4),
            choice(Some(0), 5, 5),
        ];
        let groups: Vec<_> =
            (0..5).map(|own| group(&choices, own, 2).map(|g| (g.name, g.rank, g.ranks))).collect();
        let first = "2.0-00000003".to_owned();
        assert_eq!(
            groups,
            [
                Some((first.clone(), 1, 3)),
                Some(("2.7-00000002".to_owned(), 0, 1)),
                Some((first.clone(), 0, 3)),
                None,
                Some((first, 2, 3)),
            ]
        );
    }

    #[test]
    fn choices_travel_as_bytes() {
        for color in [None, Some(0), Some(u32::MAX)] {
            let choice = Choice { color, key: i32::MIN + 1, random: 0x1234_5678 };
            assert_eq!(Choice::from_bytes(&choice.to_bytes()), choice);
        }
    }

    #[test]
    fn a_rank_alone_splits_without_a_network() {
        let bootstrap = Bootstrap::Static {
            peers: vec!["127.0.0.1".parse().unwrap()],
            mtu: 1024,
            message_size: 4096,
            window: 2,
            rings: 1,
        };
        let config = CommConfig::new(0, 1, "127.0.0.1".parse().unwrap(), bootstrap);
        let mut alone = Communicator::connect(config).unwrap();
        assert!(alone.split(None, 0).unwrap().is_none());
        let mut part = alone.split(Some(3), 1).unwrap().unwrap();
        let mut data = [1.5f32];
        part.all_reduce(&mut data).unwrap();
        assert_eq!((part.ranks(), data), (1, [1.5]));
    }
}
