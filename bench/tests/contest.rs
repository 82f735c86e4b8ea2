//! The benchmark of whole all-reduces measures what it should.

use netsum_bench::contest::Order;
use netsum_bench::contest::collective::Collective;
use netsum_bench::contest::link::{Link, Wire};
use netsum_bench::contest::start::{Peer, start};
use netsum_bench::contest::wire::{Part, Progress};
use netsum_lab::cluster::JobSpec;

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn netsum_takes_part_with_and_without_its_box() {
    let job = JobSpec { mtu: 2048, message_size: 65_536, ..JobSpec::new("bench", 3) };
    let order = Order { collective: Collective::AllReduce, len: 100_000, iters: 3, setting: 0 };
    let rounds = [Peer::Box, Peer::Xdp, Peer::Ring { offload: true }].map(|who| {
        let mut contestant = start(
            who,
            &job,
            Wire { mtu: 2152, rate: Link(None), loss: 0.0, uplinks: None, ranks_per_host: 1 },
        )
        .unwrap();
        let round = contestant.run(&order).unwrap();
        assert_eq!((round.answer.micros.len(), round.answer.astray), (3, 0), "{who:?}");
        round
    });
    let bytes = (order.len * 4 * order.iters as usize) as f64;
    let [by_box, by_xdp, by_ring] = rounds.map(|r| r.cost.sent as f64 / bytes);
    // Once over each link, but for headers and acknowledgements; 2 (n-1)/n times by the ring.
    assert!((1.0..1.3).contains(&by_box), "{by_box}");
    assert!((1.0..1.3).contains(&by_xdp), "{by_xdp}");
    assert!((1.33..1.7).contains(&by_ring), "{by_ring}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn every_collective_gives_the_right_result_by_the_box() {
    let job = JobSpec { message_size: 65_536, ..JobSpec::new("bench", 3) };
    let wire = Wire { mtu: 1500, rate: Link(None), loss: 0.0, uplinks: None, ranks_per_host: 1 };
    let mut contestant = start(Peer::Box, &job, wire).unwrap();
    for collective in Collective::ALL {
        let bytes = collective.sizes(&[100_000], 3)[0];
        // A wrong element is an error.
        let order = Order { collective, len: bytes / 4, iters: 2, setting: 0 };
        let answer = contestant.run(&order).unwrap().answer;
        assert_eq!((answer.micros.len(), answer.astray), (2, 0), "{collective}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn contestants_are_not_faster_than_the_links() {
    let part = Part {
        job: JobSpec { message_size: 65_536, window: 2, ..JobSpec::new("bench", 2) },
        wire: Wire {
            mtu: 1500,
            rate: "50mbit".parse().unwrap(),
            loss: 0.0,
            uplinks: None,
            ranks_per_host: 1,
        },
        collective: Collective::AllReduce,
        sizes: vec![4096, 1 << 20],
        who: vec![Peer::Box, Peer::Xdp, Peer::Ring { offload: true }],
        launches: 2,
        rounds: 1,
        round_seconds: 0.1,
    };
    let rows = part.measure(&mut Progress::of(std::slice::from_ref(&part))).unwrap();
    let found: Vec<(usize, &str)> = rows.iter().map(|row| (row.bytes, &*row.name)).collect();
    let names = ["netsum", "netsum-xdp", "netsum-ring"];
    let expected: Vec<_> =
        part.sizes.iter().flat_map(|size| names.map(|name| (*size, name))).collect();
    assert_eq!(found, expected);
    for row in rows {
        assert_eq!((row.rounds_ms.len(), row.astray), (2, 0), "{row:?}");
        // The smaller vector fits into the links' burst.
        assert!(
            row.bytes == 4096 || row.share_of_limit.is_some_and(|share| share < 1.0),
            "{row:?}"
        );
    }
}
