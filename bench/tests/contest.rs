//! The benchmark of whole all-reduces: what it measures is right, however fast.

use netsum_bench::contest::Order;
use netsum_bench::contest::start::{Who, start};
use netsum_lab::cluster::JobSpec;

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn netsum_takes_part_with_and_without_its_box() {
    let job = JobSpec { mtu: 2048, message_size: 65_536, ..JobSpec::new("bench", 3) };
    let order = Order { together: true, ..Order::of(400_000, 3) };
    let rounds = [Who::Box, Who::Xdp, Who::Ring { offload: true }].map(|who| {
        let mut contestant = start(who, &job, 2152, None).unwrap();
        contestant.run(&Order { float: false, ..order }).unwrap();
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
