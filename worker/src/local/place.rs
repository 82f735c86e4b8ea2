//! Which ranks can share memory: those of one machine, in the same namespaces of network and
//! processes.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::linux::fs::MetadataExt;
use std::path::Path;

/// Bytes of an encoded [`Place`].
pub(crate) const PLACE_BYTES: usize = 24;

/// Where a rank runs, and its file for shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    /// Of the machine and its namespaces.
    pub host: u64,
    pub pid: u32,
    /// The descriptor in that process.
    pub file: u32,
    /// Whether this rank can share memory and may.
    pub is_willing: bool,
    /// Whether it wants hierarchical sums of few bytes, too.
    pub wants_short: bool,
}

impl Place {
    pub fn encode(self) -> [u8; PLACE_BYTES] {
        let mut out = [0; PLACE_BYTES];
        out[..8].copy_from_slice(&self.host.to_le_bytes());
        let rest = [self.pid, self.file, self.is_willing.into(), self.wants_short.into()];
        for (out, word) in out[8..].as_chunks_mut().0.iter_mut().zip(rest) {
            *out = word.to_le_bytes();
        }
        out
    }

    pub fn decode(bytes: &[u8; PLACE_BYTES]) -> Self {
        let word = |i: usize| u32::from_le_bytes(bytes.as_chunks().0[i]);
        let host = u64::from(word(0)) | u64::from(word(1)) << 32;
        let [is_willing, wants_short] = [4, 5].map(|i| word(i) != 0);
        Self { host, pid: word(2), file: word(3), is_willing, wants_short }
    }
}

/// A number of this machine since its boot, and of this process's namespaces.
pub(crate) fn host() -> io::Result<u64> {
    let mut hasher = DefaultHasher::new();
    fs::read("/proc/sys/kernel/random/boot_id")?.hash(&mut hasher);
    for namespace in ["net", "pid"] {
        let file = fs::metadata(Path::new("/proc/self/ns").join(namespace))?;
        (file.st_dev(), file.st_ino()).hash(&mut hasher);
    }
    Ok(hasher.finish())
}

/// The ranks by their hosts: hosts in the order of their first ranks, ranks in their order.
pub(crate) fn by_host(hosts: &[u64]) -> Vec<Vec<u32>> {
    let mut groups: Vec<(u64, Vec<u32>)> = Vec::new();
    for (rank, host) in hosts.iter().enumerate() {
        match groups.iter_mut().find(|(other, _)| other == host) {
            Some((_, ranks)) => ranks.push(rank as u32),
            None => groups.push((*host, vec![rank as u32])),
        }
    }
    groups.into_iter().map(|(_, ranks)| ranks).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_grouped_by_their_hosts() {
        assert_eq!(by_host(&[7, 7, 9, 7, 9]), [vec![0, 1, 3], vec![2, 4]]);
        assert_eq!(host().unwrap(), host().unwrap());
        for (is_willing, wants_short) in [(true, false), (false, true)] {
            let place = Place { host: u64::MAX - 5, pid: 77, file: 3, is_willing, wants_short };
            assert_eq!(Place::decode(&place.encode()), place);
        }
    }
}
