//! Communicators over UDP on loopback, without a box: the ranks sum by themselves.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use netsum_worker::{Bootstrap, CommConfig, Communicator, Error, Layout, Mode, reference_sum};

/// A rank's address of 127.0.0.0/8, that no other test and no other test run uses at the same time.
fn address(test: u8, rank: u32) -> IpAddr {
    let pid = std::process::id();
    Ipv4Addr::new(127, 1 + (pid >> 8) as u8 % 250, pid as u8, test * 16 + rank as u8 + 1).into()
}

fn config(test: u8, rank: u32, ranks: u32, layout: Layout) -> CommConfig {
    let peers: Vec<IpAddr> = (0..ranks).map(|r| address(test, r)).collect();
    let ip = peers[rank as usize];
    let Layout { message_size, window, rings } = layout;
    let bootstrap = Bootstrap::Static { peers, mtu: 1024, message_size, window, rings };
    CommConfig { timeout: Duration::from_secs(3), ..CommConfig::new(rank, ranks, ip, bootstrap) }
}

fn run<T: Send>(test: u8, ranks: u32, layout: Layout, f: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    std::thread::scope(|s| {
        let f = &f;
        let threads: Vec<_> = (0..ranks)
            .map(|rank| s.spawn(move || f(Communicator::connect(config(test, rank, ranks, layout)).unwrap())))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn floats(rank: u32, length: usize) -> Vec<f32> {
    (0..length as u32).map(|i| ((i * 7919 + rank * 104_729) % 10_007) as f32 / 97.0 - 50.0).collect()
}

const LAYOUT: Layout = Layout { message_size: 16384, window: 2, rings: 2 };

#[test]
fn without_a_box_the_ranks_get_the_same_sums() {
    for (test, ranks) in [(1, 2), (2, 3), (3, 4)] {
        let reports = run(test, ranks, LAYOUT, |mut comm| {
            for length in [1, 0, 1000, 100_000] {
                let rank = comm.rank();
                let mut x = floats(rank, length);
                let all: Vec<_> = (0..ranks).map(|r| floats(r, length)).collect();
                let all: Vec<_> = all.iter().map(|v| &v[..]).collect();
                comm.all_reduce(&mut x).unwrap();
                let expected = reference_sum(&all, &comm.layout());
                assert!(x.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{length}");
                let mut y: Vec<i32> =
                    (0..length as i32).map(|i| i.wrapping_mul(0x0123_4567) + rank as i32).collect();
                let report = comm.all_reduce(&mut y).unwrap();
                let n = ranks as i32;
                assert!(y.iter().enumerate().all(|(i, y)| {
                    *y == (i as i32).wrapping_mul(0x0123_4567).wrapping_mul(n).wrapping_add(n * (n - 1) / 2)
                }));
                assert_eq!(report.mode, Mode::Ring);
            }
            comm.barrier().unwrap();
            comm.statistics()
        });
        for s in reports {
            assert_eq!((s.fall_backs, s.all_reduces), (1, 9), "{s:?}");
        }
    }
}

#[test]
fn different_lengths_are_an_error_at_every_rank() {
    let errors = run(4, 3, LAYOUT, |mut comm| {
        let length = if comm.rank() == 1 { 5000 } else { 5001 };
        // A rank may hear of it in the operation before, or only after it has left this one.
        let barrier = comm.barrier().err();
        barrier
            .or_else(|| (0..5).find_map(|_| comm.all_reduce(&mut vec![1.0f32; length]).err()))
            .expect("an error")
    });
    for error in errors {
        assert!(
            matches!(&error, Error::Mismatch(text) if text.contains("5000") && text.contains("5001")),
            "{error}"
        );
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    let both = std::sync::Barrier::new(2);
    let errors = run(5, 3, LAYOUT, |mut comm| {
        comm.barrier().unwrap();
        if comm.rank() == 2 {
            return None;
        }
        let started = Instant::now();
        let error = comm.all_reduce(&mut [1, 2, 3]).unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(3));
        // Or the other one would hear that this rank has left.
        both.wait();
        Some(error)
    });
    assert_eq!(errors, [Some(Error::RankLeft { rank: 2 }), Some(Error::RankLeft { rank: 2 }), None]);
}

#[test]
fn a_rank_that_never_comes_is_named_by_all_others() {
    let started = Instant::now();
    let errors: Vec<Error> = std::thread::scope(|s| {
        let threads = [0, 1].map(|rank| {
            s.spawn(move || {
                let connect_timeout = Duration::from_secs(1);
                let config = CommConfig { connect_timeout, ..config(12, rank, 3, LAYOUT) };
                match Communicator::connect(config) {
                    Ok(mut comm) => comm.all_reduce(&mut [1i32]).unwrap_err(),
                    Err(error) => error,
                }
            })
        });
        threads.map(|t| t.join().unwrap()).into()
    });
    assert!(matches!(errors[0], Error::Unreachable { rank: 2, .. }), "{:?}", errors[0]);
    // Rank 1 has met rank 0, and learns from it.
    assert!(
        matches!(&errors[1], Error::RankDied { rank: 2, reason } if reason.contains("rank 0 could not connect"))
    );
    assert!(started.elapsed() < Duration::from_secs(3), "sooner than by silence");
}

#[test]
fn non_finite_elements_are_an_error_and_the_communicator_goes_on() {
    run(6, 2, LAYOUT, |mut comm| {
        let mut x = floats(comm.rank(), 20_000);
        if comm.rank() == 1 {
            x[7000] = f32::NAN;
        }
        let Err(Error::NonFinite { first, end }) = comm.all_reduce(&mut x) else { panic!("no error") };
        assert!((first..end).contains(&7000));
        let mut x = [1.5f32];
        comm.all_reduce(&mut x).unwrap();
        assert_eq!(x, [3.0]);
    });
}

#[test]
fn a_rank_may_compute_for_longer_than_the_timeout() {
    run(7, 2, LAYOUT, |mut comm| {
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_secs(4));
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn a_single_rank_is_its_own_sum() {
    let mut comm = Communicator::connect(config(8, 0, 1, LAYOUT)).unwrap();
    let mut x = [1, 2, 3];
    comm.all_reduce(&mut x).unwrap();
    assert_eq!(x, [1, 2, 3]);
    comm.barrier().unwrap();
}
