//! Ranks are threads, and hosts are addresses of loopback. No box sums.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use half::bf16;
use netsum_collective::call::Op;
use netsum_collective::numeric::block::Width;
use netsum_collective::numeric::element::Element;
use netsum_collective::numeric::layout::Layout;
use netsum_collective::numeric::number::Number;
use netsum_collective::numeric::reference::Reference;

use super::super::{Bootstrap, Communicator, Hierarchy};
use super::*;

const LAYOUT: Layout = Layout { message_size: 16384, window: 2, rings: 1 };

fn address(test: u8, host: usize) -> IpAddr {
    let pid = std::process::id();
    Ipv4Addr::new(127, 1 + (pid >> 8) as u8 % 250, pid as u8, 100 + test * 4 + host as u8).into()
}

/// A rank on each of these hosts.
fn run<T: Send>(
    test: u8,
    hosts: &[usize],
    hierarchy: Hierarchy,
    f: impl Fn(Communicator) -> T + Sync,
) -> Vec<T> {
    run_with(test, hosts, &vec![hierarchy; hosts.len()], f)
}

/// The same with a setting for each rank.
fn run_with<T: Send>(
    test: u8,
    hosts: &[usize],
    settings: &[Hierarchy],
    f: impl Fn(Communicator) -> T + Sync,
) -> Vec<T> {
    let peers: Vec<IpAddr> = hosts.iter().map(|host| address(test, *host)).collect();
    let Layout { message_size, window, rings } = LAYOUT;
    std::thread::scope(|s| {
        let (f, peers) = (&f, &peers);
        let thread = |(rank, ip): (usize, &IpAddr)| {
            let bootstrap =
                Bootstrap::Static { peers: peers.clone(), mtu: 1024, message_size, window, rings };
            let config = CommConfig {
                hierarchy: settings[rank],
                timeout: Duration::from_secs(5),
                ..CommConfig::new(rank as u32, peers.len() as u32, *ip, bootstrap)
            };
            s.spawn(move || f(Communicator::connect(config).unwrap()))
        };
        let threads: Vec<_> = peers.iter().enumerate().map(thread).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn floats(rank: u32, length: usize) -> Vec<f32> {
    let of = |i: u32| {
        let x = (i.wrapping_mul(7919) ^ rank.wrapping_mul(104_729)).wrapping_mul(0x9e37_79b9);
        (x >> 8) as f32 * 2f32.powi((x % 40) as i32 - 40)
    };
    (0..length as u32).map(of).collect()
}

fn bits<T: Number>(x: &[T]) -> Vec<u64> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn check<T: Element>(comm: &mut Communicator, op: Op, of_rank: impl Fn(u32) -> Vec<T>) {
    let all: Vec<Vec<T>> = (0..comm.ranks()).map(&of_rank).collect();
    let all: Vec<&[T]> = all.iter().map(|x| &x[..]).collect();
    let width = Some(Width::Full);
    let right = Reference { op, width, ..Reference::new(&comm.layout()) }.of(&all);
    comm.set_wire(width);
    let mut x = of_rank(comm.rank());
    let report = comm.reduce(&mut x, op, None).unwrap();
    assert!(report.hierarchical, "{} {op} of {}", T::DTYPE, x.len());
    assert!(bits(&x) == bits(&right), "{} {op} of {}", T::DTYPE, x.len());
}

#[test]
fn sums_have_the_bits_of_flat_ones() {
    for (test, hosts) in [&[0, 0, 1, 1][..], &[0, 1, 0, 1, 2], &[0, 0, 0, 1]].iter().enumerate() {
        let statistics = run(test as u8, hosts, Hierarchy::On, |mut comm| {
            for length in [4097, 100_000, 1_300_001] {
                for op in [Op::Sum, Op::Average] {
                    check(&mut comm, op, |rank| floats(rank, length));
                }
            }
            check(&mut comm, Op::Sum, |rank| {
                floats(rank, 9000).iter().map(|x| *x as i32).collect()
            });
            check(&mut comm, Op::Sum, |rank| (0..99_999).map(|i| (i * rank) as u16).collect());
            let halves = |x: Vec<f32>| x.into_iter().map(bf16::from_f32).collect::<Vec<_>>();
            check(&mut comm, Op::Average, |rank| halves(floats(rank, 50_000)));
            // Flat.
            let mut x = floats(comm.rank(), 4096);
            assert!(!comm.all_reduce(&mut x).unwrap().hierarchical);
            assert!(!comm.reduce(&mut x, Op::Max, None).unwrap().hierarchical);
            comm.barrier().unwrap();
            comm.statistics()
        });
        for s in statistics {
            assert_eq!((s.all_reduces, s.hierarchical, s.wrong), (12, 9, 0));
        }
    }
}

#[test]
fn operations_in_flight_keep_their_order() {
    run(3, &[0, 0, 1, 1], Hierarchy::Auto, |mut comm| {
        let (rank, ranks, layout) = (comm.rank(), comm.ranks(), comm.layout());
        let length = |n: usize| [100_000, 50, 300_001, 70_000][n % 4];
        let data = |rank: u32, n: usize| floats(rank * 100 + n as u32, length(n));
        let open: Vec<_> = (0..12).map(|n| comm.all_reduce_async(data(rank, n)).unwrap()).collect();
        let (mut a, mut b) = (data(rank, 20), data(rank, 22));
        // A blocking one comes after them.
        comm.all_reduce_many(&mut [&mut a, &mut b]).unwrap();
        assert!(open.iter().all(Pending::is_done));
        let right = |n| {
            let all: Vec<_> = (0..ranks).map(|r| data(r, n)).collect();
            let all: Vec<&[f32]> = all.iter().map(|x| &x[..]).collect();
            Reference::new(&layout).of(&all)
        };
        // So does a barrier.
        let before_barrier = comm.all_reduce_async(data(rank, 2)).unwrap();
        comm.barrier().unwrap();
        assert!(before_barrier.is_done());
        let before_barrier = comm.all_reduce_async(data(rank, 2)).unwrap();
        comm.barrier_async().unwrap().wait().unwrap();
        assert!(before_barrier.is_done());
        // The memory of one that is complete is free at once.
        let mut again = Some(vec![0f32; 70_000]);
        for _ in 0..20 {
            let sum = comm.all_reduce_async(again.take().unwrap()).unwrap();
            again = Some(sum.wait().unwrap().0);
        }
        for (n, sum) in open.into_iter().enumerate() {
            let (sum, report) = sum.wait().unwrap();
            assert_eq!(report.hierarchical, length(n) * 4 >= LEAST_BYTES);
            assert!(bits(&sum) == bits(&right(n)), "operation {n}");
        }
    });
}

#[test]
fn ranks_agree_if_their_settings_differ() {
    use Hierarchy::{Auto, Off, On};
    for (test, settings, expected) in [
        (10, [Auto, Off, Auto, Auto], [false, false]),
        (11, [On, On, Off, On], [false, false]),
        (12, [Auto, Auto, On, Auto], [true, true]),
        (13, [Auto; 4], [false, true]),
    ] {
        run_with(test, &[0, 0, 1, 1], &settings, |mut comm| {
            let is_hierarchical = [5000, 100_000].map(|length| {
                let mut x = floats(comm.rank(), length);
                comm.all_reduce(&mut x).unwrap().hierarchical
            });
            assert_eq!(is_hierarchical, expected, "{settings:?}");
            comm.barrier().unwrap();
        });
    }
}

#[test]
fn bytes_are_those_of_one_rank_of_each_host() {
    let bytes = |test, hierarchy| {
        let all = run(test, &[0, 0, 1, 1], hierarchy, |mut comm| {
            let mut x = floats(comm.rank(), 1 << 20);
            let report = comm.all_reduce(&mut x).unwrap();
            assert_eq!(report.hierarchical, hierarchy != Hierarchy::Off);
            comm.barrier().unwrap();
            comm.statistics().ring_bytes
        });
        all.iter().sum::<u64>()
    };
    // 2 (N - 1) vectors by 4 ranks, and 2 (2 - 1) by the ranks of 2 hosts.
    let (flat, hierarchical) = (bytes(4, Hierarchy::Off), bytes(5, Hierarchy::Auto));
    let ratio = flat as f64 / hierarchical as f64;
    assert!((2.8..3.2).contains(&ratio), "{flat} {hierarchical}");
}

#[test]
fn errors_reach_all_ranks() {
    run(6, &[0, 0, 1, 1], Hierarchy::Auto, |mut comm| {
        // An infinity of one rank, in the second part.
        let mut x = vec![1.0f32; 200_000];
        if comm.rank() == 1 {
            x[150_000] = f32::INFINITY;
        }
        let error = comm.all_reduce(&mut x).unwrap_err();
        let Error::NonFinite { first, end } = error else { panic!("{error}") };
        assert!((first..end).contains(&150_000) && end - first <= 1024, "{error}");
        assert!(x[150_000].is_nan() && x[first - 1] == 4.0 && x[end] == 4.0);
        // It can still be used, until calls differ.
        let mut x = vec![1.0f32; 200_000 + usize::from(comm.rank() == 3)];
        let error = comm.all_reduce(&mut x).unwrap_err();
        assert!(matches!(error, Error::Mismatch(_)), "{error}");
    });
}

#[test]
fn a_rank_leaves_although_no_other_makes_its_call() {
    let all = std::sync::Barrier::new(4);
    run(8, &[0, 0, 1, 1], Hierarchy::Auto, |mut comm| {
        if comm.rank() == 0 {
            let sum = comm.all_reduce_async(vec![1.0f32; 200_000]).unwrap();
            let begun = Instant::now();
            drop(comm);
            assert!(begun.elapsed() < 10 * Duration::from_secs(1), "{:?}", begun.elapsed());
            assert!(sum.wait().is_err());
        }
        all.wait();
    });
}

#[test]
fn a_rank_that_leaves_is_named() {
    run(7, &[0, 0, 1, 1], Hierarchy::Auto, |mut comm| {
        let mut x = vec![1.0f32; 200_000];
        comm.all_reduce(&mut x).unwrap();
        if comm.rank() != 2 {
            let error = comm.all_reduce(&mut x).unwrap_err();
            assert_eq!(error, Error::RankLeft { rank: 2 });
        }
    });
}
