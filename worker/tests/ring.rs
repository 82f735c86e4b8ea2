//! Communicators over UDP on loopback, without a box: the ranks sum by themselves.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use netsum_worker::{Bootstrap, CommConfig, Communicator, Error, Layout, Mode, Position, reference_sum};

/// A rank's address of 127.0.0.0/8, that no other test and no other test run uses at the same time.
fn address(test: u8, rank: u32) -> IpAddr {
    let pid = std::process::id();
    Ipv4Addr::new(127, 1 + (pid >> 8) as u8 % 250, pid as u8, test * 8 + rank as u8 + 1).into()
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
fn a_job_may_follow_another_on_the_same_addresses_while_that_ends() {
    let layout = Layout { message_size: 65_536, window: 4, rings: 1 };
    let connect = |rank| Communicator::connect(config(20, rank, 2, layout)).unwrap();
    std::thread::scope(|s| {
        let first = [0, 1].map(|rank| {
            s.spawn(move || {
                let mut comm = connect(rank);
                comm.barrier().unwrap();
                comm
            })
        });
        let [a, b] = first.map(|thread| thread.join().unwrap());
        drop(b);
        let sum = |mut comm: Communicator| {
            let mut x = vec![1.0f32; 1_000_000];
            comm.all_reduce(&mut x).map(|_| x == vec![2.0; 1_000_000])
        };
        let second = s.spawn(move || sum(connect(1)));
        std::thread::sleep(Duration::from_millis(100));
        // Says goodbye to the second job's rank 1.
        drop(a);
        assert_eq!((sum(connect(0)), second.join().unwrap()), (Ok(true), Ok(true)));
    });
}

#[test]
fn tensors_in_one_operation_are_their_concatenation() {
    run(13, 3, LAYOUT, |mut comm| {
        let rank = comm.rank();
        let whole = floats(rank, 30_000);
        for cuts in [&[0, 1, 1, 64, 20_000][..], &[29_999], &[]] {
            let mut expected = whole.clone();
            comm.all_reduce(&mut expected).unwrap();
            let mut copy = whole.clone();
            let mut tensors = Vec::new();
            let (mut rest, mut at) = (&mut copy[..], 0);
            for cut in cuts {
                let (tensor, behind) = rest.split_at_mut(cut - at);
                tensors.push(tensor);
                (rest, at) = (behind, *cut);
            }
            tensors.push(rest);
            let verified = comm.all_reduce_many(&mut tensors).unwrap().verified;
            assert!(verified > 0);
            assert!(copy.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{cuts:?}");
        }
        comm.all_reduce_many::<i32>(&mut []).unwrap();
        let (mut a, mut b) = ([1.0f32; 10], [2.0f32; 7]);
        b[3] = if rank == 1 { f32::NAN } else { 1.0 };
        let error = comm.all_reduce_many(&mut [&mut a, &mut b]).unwrap_err();
        let place = |tensor, element| Position { tensor, element };
        assert_eq!(error, Error::NonFiniteTensors { first: place(0, 0), last: place(1, 6) });
    });
}

#[test]
fn operations_in_flight_give_the_same_sums() {
    for (test, ranks) in [(14, 2), (15, 3)] {
        run(test, ranks, LAYOUT, |mut comm| {
            let rank = comm.rank();
            let lengths = |n: usize| [1, 5000, 0, 100_000, 64][n % 5];
            // More than may be in flight, with blocking ones among them; some handles are dropped.
            let mut pending = Vec::new();
            for n in 0..100 {
                let handle = comm.all_reduce_async(floats(rank, lengths(n))).unwrap();
                if n % 7 != 3 {
                    pending.push((n, handle));
                }
                if n % 30 == 29 {
                    let mut x = [rank as i32 + 1, n as i32];
                    comm.all_reduce(&mut x).unwrap();
                    let count = ranks as i32;
                    assert_eq!(x, [count * (count + 1) / 2, n as i32 * count]);
                    assert!(pending.iter().all(|(_, handle)| handle.is_done()));
                }
            }
            for (n, handle) in pending {
                let (sum, report) = handle.wait().unwrap();
                let all: Vec<_> = (0..ranks).map(|r| floats(r, lengths(n))).collect();
                let all: Vec<_> = all.iter().map(|v| &v[..]).collect();
                let expected = reference_sum(&all, &comm.layout());
                assert!(sum.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{n}");
                assert_eq!((sum.len(), report.mode), (lengths(n), Mode::Ring));
            }
            assert_eq!(comm.statistics().all_reduces, 103);
        });
    }
}

#[test]
fn operations_go_on_without_anybody_who_waits() {
    run(16, 2, LAYOUT, |mut comm| {
        let handle = comm.all_reduce_async(floats(comm.rank(), 300_000)).unwrap();
        let started = Instant::now();
        while !handle.is_done() {
            assert!(started.elapsed() < Duration::from_secs(10), "nobody drives");
            std::thread::sleep(Duration::from_millis(1));
        }
        handle.wait().unwrap();
    });
}

#[test]
fn handles_may_be_waited_for_by_other_threads() {
    run(17, 3, LAYOUT, |mut comm| {
        std::thread::scope(|s| {
            for n in 0..10usize {
                let handle = comm.all_reduce_async(vec![n as i32; 20_000]).unwrap();
                s.spawn(move || assert_eq!(handle.wait().unwrap().0, vec![n as i32 * 3; 20_000]));
                let mut x = [n as i32];
                comm.all_reduce(&mut x).unwrap();
                assert_eq!(x, [n as i32 * 3]);
            }
        });
    });
}

#[test]
fn a_communicator_that_is_dropped_completes_what_it_can_and_gives_up_the_rest() {
    let started = Instant::now();
    let outcomes = run(18, 3, LAYOUT, |mut comm| {
        let rank = comm.rank();
        let first = comm.all_reduce_async(vec![1i32; 50_000]).unwrap();
        let second = (rank != 1).then(|| comm.all_reduce_async(vec![1i32; 50_000]).unwrap());
        drop(comm);
        (first.wait().map(|(x, _)| x[49_999]), second.map(|s| s.wait().map(|(x, _)| x[0])))
    });
    assert!(started.elapsed() < Duration::from_secs(12));
    for (rank, (first, second)) in outcomes.into_iter().enumerate() {
        assert_eq!(first, Ok(3), "rank {rank}");
        match second {
            None => assert_eq!(rank, 1),
            // Rank 1 leaves without it.
            Some(second) => {
                let error = second.unwrap_err();
                assert!(matches!(error, Error::Closed | Error::RankLeft { rank: 1 }), "{error}");
            }
        }
    }
}

#[test]
fn every_handle_hears_of_a_rank_that_leaves() {
    let errors = run(19, 3, LAYOUT, |mut comm| {
        comm.barrier().unwrap();
        if comm.rank() == 2 {
            return Vec::new();
        }
        let started: Vec<_> = (0..20).map(|n| comm.all_reduce_async(vec![n as f32; 3000])).collect();
        started.into_iter().map(|handle| handle.and_then(|h| h.wait()).unwrap_err()).collect()
    });
    for error in errors.into_iter().flatten() {
        // Or one that has heard of it has left itself.
        assert!(matches!(error, Error::RankLeft { .. }), "{error}");
    }
}

#[test]
fn who_waits_for_room_leaves_the_communicator_to_others() {
    let over = std::sync::Barrier::new(2);
    run(21, 2, LAYOUT, |mut comm| {
        if comm.rank() == 1 {
            over.wait();
        } else {
            let sums: Vec<_> =
                (0..Communicator::MAX_IN_FLIGHT).map(|_| comm.all_reduce_async(vec![1i32])).collect();
            let (room, started) = (comm.room(), Instant::now());
            let waits = std::thread::spawn(move || while !room.wait_for(Duration::from_secs(1)) {});
            for _ in 0..20 {
                assert_eq!(comm.statistics().all_reduces, 0);
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(comm);
            // Of which two seconds are for operations in flight, and two for the other rank.
            assert!(started.elapsed() < Duration::from_secs(6), "{:?}", started.elapsed());
            waits.join().unwrap();
            assert!(sums.into_iter().all(|sum| sum.unwrap().wait().is_err()));
            over.wait();
        }
    });
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
    let (mut a, mut b) = ([1.5f32], [2.5f32, 3.5]);
    comm.all_reduce_many(&mut [&mut a, &mut b]).unwrap();
    assert_eq!((a, b), ([1.5], [2.5, 3.5]));
    let handle = comm.all_reduce_async(vec![4, 5]).unwrap();
    assert!(handle.is_done());
    assert_eq!(handle.wait().unwrap().0, [4, 5]);
    assert!(comm.all_reduce_async(vec![f32::NAN]).unwrap().wait().is_err());
}
