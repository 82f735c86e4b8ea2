//! The default measurements of `bench wire`.

use super::link::{Link, Wire};

/// Sizes of vectors, with one number of hosts, over links of one kind.
#[derive(Clone, Debug)]
pub struct Slice {
    pub hosts: u32,
    pub wire: Wire,
    pub sizes: Vec<usize>,
    /// Names of contestants; if empty, all usual ones.
    pub who: Vec<String>,
}

const MTU: u32 = 1500;
/// Fits a path MTU of 2048.
const LARGE_MTU: u32 = 2200;
const RATES: [&str; 6] = ["100mbit", "250mbit", "500mbit", "1gbit", "2.5gbit", "none"];
/// At these rates AF_XDP takes part, and small vectors are measured.
const FAST: [&str; 2] = ["1gbit", "none"];
/// The limit for all hosts' vectors together, as one machine holds them all.
const BYTES: usize = 128 << 20;

fn slice(hosts: u32, rate: &str, mtu: u32, sizes: &[usize], who: &[&str]) -> Slice {
    let rate = rate.parse().expect("a rate");
    let who = who.iter().map(|name| (*name).to_owned()).collect();
    Slice {
        hosts,
        wire: Wire { rate, mtu, loss: 0.0, uplinks: None, ranks_per_host: 1 },
        sizes: sizes.to_vec(),
        who,
    }
}

/// Bytes of a vector that is large for such links, within the machine's limit.
fn large(hosts: u32, rate: &str) -> usize {
    let link: Link = rate.parse().expect("a rate");
    link.usual_size().min(BYTES / hosts as usize)
}

/// Large vectors with 2 to 16 hosts at each rate, also over links with a larger MTU; vectors of 4
/// KiB to 256 MiB; and all peers once.
pub fn usual() -> Vec<Slice> {
    let mut all = Vec::new();
    for hosts in [2, 4, 8, 16] {
        for rate in RATES {
            let mut who = vec!["netsum", "netsum-ring", "gloo", "openmpi"];
            if FAST.contains(&rate) {
                who.push("netsum-xdp");
            }
            all.push(slice(hosts, rate, MTU, &[large(hosts, rate)], &who));
        }
    }
    for hosts in [4, 8] {
        for rate in &RATES[..4] {
            let who = ["netsum", "netsum-ring", "gloo"];
            all.push(slice(hosts, rate, LARGE_MTU, &[large(hosts, rate)], &who));
        }
    }
    for hosts in [4, 8] {
        for rate in FAST {
            let mut sizes = vec![4 << 10, 16 << 10, 64 << 10, 256 << 10];
            if (hosts, rate) == (4, FAST[0]) {
                sizes.extend([16 << 20, 256 << 20]);
            }
            let who = ["netsum", "netsum-xdp", "netsum-ring", "gloo", "openmpi"];
            all.push(slice(hosts, rate, MTU, &sizes, &who));
        }
    }
    all.push(slice(4, RATES[1], MTU, &[large(4, RATES[1])], &[]));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_has_every_rate_number_of_hosts_size_and_peer() {
        let plan = usual();
        let has = |hosts, rate: &str| {
            plan.iter()
                .any(|s| s.hosts == hosts && s.wire.rate.to_string() == rate && s.wire.mtu == MTU)
        };
        for rate in RATES {
            assert!([2, 4, 8, 16].iter().all(|&hosts| has(hosts, rate)), "{rate}");
        }
        let sizes: Vec<usize> = plan.iter().flat_map(|s| s.sizes.clone()).collect();
        assert_eq!(
            (sizes.iter().min(), sizes.iter().max()),
            (Some(&(4 << 10)), Some(&(256 << 20)))
        );
        assert!(plan.iter().any(|s| s.who.is_empty()), "all usual ones");
        assert_eq!(
            [large(2, "none"), large(16, "none"), large(16, "100mbit")],
            [64 << 20, 8 << 20, 8 << 20]
        );
    }
}
