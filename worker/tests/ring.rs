//! Communicators over UDP on loopback, without a box: the hosts' ring sums.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use netsum_worker::half::{bf16, f16};
use netsum_worker::{
    Bootstrap, CommConfig, Communicator, Error, Layout, Mode, Op, Position, Reference,
    UnreachableReason, Width, reference_sum,
};

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

fn run<T: Send>(
    test: u8,
    ranks: u32,
    layout: Layout,
    f: impl Fn(Communicator) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|s| {
        let f = &f;
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                s.spawn(
                    move || f(Communicator::connect(config(test, rank, ranks, layout)).unwrap()),
                )
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn floats(rank: u32, length: usize) -> Vec<f32> {
    (0..length as u32)
        .map(|i| ((i * 7919 + rank * 104_729) % 10_007) as f32 / 97.0 - 50.0)
        .collect()
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
                assert!(
                    x.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{length}"
                );
                let mut y: Vec<i32> =
                    (0..length as i32).map(|i| i.wrapping_mul(0x0123_4567) + rank as i32).collect();
                let report = comm.all_reduce(&mut y).unwrap();
                let n = ranks as i32;
                assert!(y.iter().enumerate().all(|(i, y)| {
                    *y == (i as i32)
                        .wrapping_mul(0x0123_4567)
                        .wrapping_mul(n)
                        .wrapping_add(n * (n - 1) / 2)
                }));
                assert_eq!(report.mode, Mode::HostRing);
            }
            comm.barrier().unwrap();
            comm.statistics()
        });
        for s in reports {
            assert_eq!((s.fallbacks, s.all_reduces), (1, 9), "{s:?}");
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
        // Leaves while the second job starts.
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
            assert!(
                copy.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()),
                "{cuts:?}"
            );
        }
        comm.all_reduce_many::<i32>(&mut []).unwrap();
        let (mut a, mut b) = ([1.0f32; 10], [2.0f32; 7]);
        b[3] = if rank == 1 { f32::NAN } else { 1.0 };
        comm.all_reduce_many(&mut [&mut a, &mut b]).unwrap();
        assert!(b[3].is_nan() && b.iter().filter(|b| **b == 6.0).count() == 6, "{b:?}");
        let mut c = vec![1.0; 4997];
        let error = comm.all_reduce_many(&mut [&mut c, &mut b]).unwrap_err();
        let Error::NonFiniteTensors { first, last } = error else { panic!("{error}") };
        // Its block is the second message's first, and ends there.
        assert_eq!((first.tensor, last), (0, Position { tensor: 1, element: 3 }));
    });
}

#[test]
fn operations_in_flight_give_the_same_sums() {
    for (test, ranks) in [(14, 2), (15, 3)] {
        run(test, ranks, LAYOUT, |mut comm| {
            let rank = comm.rank();
            let lengths = |n: usize| [1, 5000, 0, 100_000, 64][n % 5];
            // More than may be in flight, blocking ones among them; some handles are dropped.
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
                assert_eq!((sum.len(), report.mode), (lengths(n), Mode::HostRing));
            }
            assert_eq!(comm.statistics().all_reduces, 103);
        });
    }
}

#[test]
fn operations_continue_without_anybody_who_waits() {
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
fn a_dropped_communicator_completes_what_it_can_and_gives_up_the_rest() {
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
        let started: Vec<_> =
            (0..20).map(|n| comm.all_reduce_async(vec![n as f32; 3000])).collect();
        started.into_iter().map(|handle| handle.and_then(|h| h.wait()).unwrap_err()).collect()
    });
    for error in errors.into_iter().flatten() {
        // Or a rank that has learned of it has left itself.
        assert!(matches!(error, Error::RankLeft { .. }), "{error}");
    }
}

#[test]
fn a_caller_that_waits_for_room_does_not_hold_the_communicator() {
    let over = std::sync::Barrier::new(2);
    run(21, 2, LAYOUT, |mut comm| {
        if comm.rank() == 1 {
            over.wait();
        } else {
            let sums: Vec<_> = (0..Communicator::MAX_IN_FLIGHT)
                .map(|_| comm.all_reduce_async(vec![1i32]))
                .collect();
            let (room, started) = (comm.room(), Instant::now());
            let waits = std::thread::spawn(move || while !room.wait_for(Duration::from_secs(1)) {});
            for _ in 0..20 {
                assert_eq!(comm.statistics().all_reduces, 0);
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(comm);
            // Two seconds are for operations in flight, and two for the other rank.
            assert!(started.elapsed() < Duration::from_secs(6), "{:?}", started.elapsed());
            waits.join().unwrap();
            assert!(sums.into_iter().all(|sum| sum.unwrap().wait().is_err()));
            over.wait();
        }
    });
}

/// Both calls end when the operation is done: the second one also if the first has taken the
/// result.
#[test]
fn two_threads_may_wait_for_one_operation() {
    run(27, 2, LAYOUT, |mut comm| {
        let work = std::sync::Arc::new(comm.all_reduce_async(vec![1i32; 100]).unwrap());
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let work = std::sync::Arc::clone(&work);
                std::thread::spawn(move || {
                    assert!(work.wait_for(Duration::from_secs(60)));
                    work.take().is_some()
                })
            })
            .collect();
        let taken: Vec<bool> = waiters.into_iter().map(|waiter| waiter.join().unwrap()).collect();
        assert_eq!(taken.iter().filter(|taken| **taken).count(), 1, "one of them has it");
        assert!(work.is_done());
    });
}

#[test]
fn different_lengths_are_an_error_at_every_rank() {
    let errors = run(4, 3, LAYOUT, |mut comm| {
        let length = if comm.rank() == 1 { 5000 } else { 5001 };
        // A rank may learn of it in the operation before, or only after it has left this one.
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
        // Otherwise the other rank might learn that this one has left.
        both.wait();
        Some(error)
    });
    assert_eq!(
        errors,
        [Some(Error::RankLeft { rank: 2 }), Some(Error::RankLeft { rank: 2 }), None]
    );
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
    // Rank 1 is connected with rank 0, and gets its error.
    assert!(matches!(&errors[1], Error::RankDied { rank: 2, reason } if reason.contains("rank 0 \
            cannot connect")));
    assert!(started.elapsed() < Duration::from_secs(3), "sooner than by the timeout");
}

#[test]
fn a_rank_that_restarts_alone_finds_an_earlier_session() {
    let both = std::sync::Barrier::new(2);
    let errors = run(11, 2, LAYOUT, |mut comm| {
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            both.wait();
            return None;
        }
        drop(comm);
        let connect_timeout = Duration::from_secs(2);
        let again =
            Communicator::connect(CommConfig { connect_timeout, ..config(11, 0, 2, LAYOUT) });
        both.wait();
        again.err()
    });
    let reason = UnreachableReason::EarlierSession;
    assert!(
        matches!(&errors[0], Some(Error::Unreachable { rank: 1, reason: r, .. }) if *r == reason),
        "{errors:?}"
    );
}

#[test]
fn peers_in_another_order_at_one_rank_are_named() {
    let errors: Vec<Error> = std::thread::scope(|s| {
        let threads = [0, 1, 2].map(|rank| {
            s.spawn(move || {
                let mut config = config(10, rank, 3, LAYOUT);
                config.connect_timeout = Duration::from_secs(1);
                if let (1, Bootstrap::Static { peers, .. }) = (rank, &mut config.bootstrap) {
                    peers.swap(0, 2);
                }
                Communicator::connect(config).and_then(|mut comm| comm.barrier()).unwrap_err()
            })
        });
        threads.map(|thread| thread.join().unwrap()).into()
    });
    // Rank 1 takes rank 0's address for rank 2's.
    let other = UnreachableReason::MisorderedPeers(address(10, 0));
    assert!(
        matches!(&errors[1], Error::Unreachable { rank: 0, reason, .. } if *reason == other),
        "{errors:?}"
    );
    for error in errors {
        assert!(error.to_string().contains("NETSUM_PEERS"), "{error}");
    }
}

#[test]
fn a_second_communicator_with_the_same_list_is_refused() {
    run(9, 2, LAYOUT, |mut comm| {
        let error =
            Communicator::connect(config(9, comm.rank(), 2, LAYOUT)).unwrap_err().to_string();
        assert!(error.contains("UDP port 4791 of 127.") && error.contains("does not share"));
        comm.barrier().unwrap();
    });
}

#[test]
fn ranks_share_addresses() {
    // Neighbours at one address and at two, and with 4 ranks also a rank alone at its address.
    for hosts in [&[0, 0][..], &[0, 0, 1, 1, 1], &[0, 0, 1, 0]] {
        let ranks = hosts.len() as u32;
        let shared = |rank| {
            let peers: Vec<IpAddr> = hosts.iter().map(|host| address(31, 4 + *host)).collect();
            let config = config(31, rank, ranks, LAYOUT);
            let Bootstrap::Static { mtu, message_size, window, rings, .. } = config.bootstrap
            else {
                unreachable!()
            };
            let ip = peers[rank as usize];
            let bootstrap = Bootstrap::Static { peers, mtu, message_size, window, rings };
            CommConfig { ip, bootstrap, ..config }
        };
        std::thread::scope(|s| {
            for rank in 0..ranks {
                s.spawn(move || {
                    let mut comm = Communicator::connect(shared(rank)).unwrap();
                    let mut x: Vec<i32> = (0..100_000).map(|i| i + rank as i32).collect();
                    comm.all_reduce(&mut x).unwrap();
                    let (n, all) = (ranks as i32, (0..ranks as i32).sum::<i32>());
                    assert!((0..).zip(&x).all(|(i, x)| *x == n * i + all));
                });
            }
        });
    }
}

#[test]
fn non_finite_elements_are_an_error_and_the_communicator_continues() {
    run(6, 2, LAYOUT, |mut comm| {
        let mut x = floats(comm.rank(), 20_000);
        if comm.rank() == 1 {
            x[7000] = f32::NAN;
        }
        let Err(Error::NonFinite { first, end }) = comm.all_reduce(&mut x) else {
            panic!("no error")
        };
        assert!((first..end).contains(&7000));
        // Elements of its block are NaN at both ranks, all others are sums.
        let sums = floats(0, 20_000).into_iter().zip(floats(1, 20_000)).map(|(a, b)| a + b);
        for (i, (x, sum)) in x.iter().zip(sums).enumerate() {
            let is_right =
                if (first..end).contains(&i) { x.is_nan() } else { (x - sum).abs() < 1e-4 };
            assert!(is_right, "{i}: {x} for {sum}");
        }
        let mut x = [1.5f32];
        comm.all_reduce(&mut x).unwrap();
        assert_eq!(x, [3.0]);
    });
}

#[test]
fn floats_in_16_bits_are_half_the_bytes_and_the_same_at_all_ranks() {
    run(30, 3, LAYOUT, |mut comm| {
        let inputs: Vec<Vec<f32>> = (0..3).map(|rank| floats(rank, 50_000)).collect();
        let parts: Vec<&[f32]> = inputs.iter().map(|x| &x[..]).collect();
        let mut bytes = [0; 2];
        for (operation, width) in [(1, None), (2, Some(Width::Half))] {
            comm.set_wire(width);
            let before = comm.statistics().ring_bytes;
            let mut x = inputs[comm.rank() as usize].clone();
            comm.all_reduce(&mut x).unwrap();
            let reference = Reference { width, operation, ..Reference::new(&comm.layout()) };
            assert_eq!(x, reference.of(&parts), "{width:?}");
            bytes[operation as usize - 1] = comm.statistics().ring_bytes - before;
        }
        let share = bytes[1] as f64 / bytes[0] as f64;
        assert!((0.45..0.55).contains(&share), "{bytes:?}");
        // Few floats, integers and bytes do not become less exact.
        let mut x = [0.1f32, 1e9];
        comm.all_reduce(&mut x).unwrap();
        assert_eq!(x, [0.3, 3e9]);
        let mut x = vec![1 << 20; 10_000];
        comm.all_reduce(&mut x).unwrap();
        assert_eq!(x, [3 << 20; 10_000]);
    });
}

#[test]
fn halves_are_summed_in_16_bits_and_few_of_them_exactly() {
    run(29, 2, LAYOUT, |mut comm| {
        let inputs: Vec<Vec<bf16>> = (0..2)
            .map(|rank| floats(rank, 50_000).into_iter().map(bf16::from_f32).collect())
            .collect();
        let own = inputs[comm.rank() as usize].clone();
        let parts: Vec<&[bf16]> = inputs.iter().map(|x| &x[..]).collect();
        let reference = Reference { op: Op::Average, ..Reference::new(&comm.layout()) };
        let (means, _) = comm.reduce_async(own, Op::Average, None).unwrap().wait().unwrap();
        assert_eq!(means, reference.of(&parts));
        let bytes = comm.statistics().ring_bytes;
        assert!(bytes < 150_000, "{bytes} for 100,000");
        for (x, (a, b)) in means.iter().zip(inputs[0].iter().zip(&inputs[1])) {
            let exact = (a.to_f32() + b.to_f32()) / 2.0;
            // A step of bfloat16 at 50, and one of the sum.
            assert!((x.to_f32() - exact).abs() < 0.125 + 0.016, "{x} for {exact}");
        }
        comm.set_wire(Some(Width::Full));
        let own = inputs[comm.rank() as usize].clone();
        let (means, _) = comm.reduce_async(own, Op::Average, None).unwrap().wait().unwrap();
        assert_eq!(means, Reference { width: Some(Width::Full), ..reference }.of(&parts));
        assert!(comm.statistics().ring_bytes > 3 * bytes - bytes / 10);
        comm.set_wire(None);
        let mut few = [f16::from_f32(0.5), f16::MAX, f16::NEG_INFINITY];
        comm.reduce(&mut few, Op::Sum, None).unwrap();
        assert_eq!(few, [f16::ONE, f16::INFINITY, f16::NEG_INFINITY]);
        let mut largest = vec![f16::from_f32(comm.rank() as f32); 10_000];
        comm.reduce(&mut largest, Op::Max, None).unwrap();
        assert_eq!(largest, [f16::ONE; 10_000]);
    });
}

#[test]
fn a_rank_with_another_width_is_named() {
    run(31, 2, LAYOUT, |mut comm| {
        if comm.rank() == 1 {
            comm.set_wire(Some(Width::Half));
        }
        let error = comm.all_reduce(&mut floats(0, 20_000)).unwrap_err();
        let text = "all_reduce (sum) of 20000 elements of f32 in 16 bits";
        assert!(matches!(&error, Error::Mismatch(both) if both.contains(text)), "{error}");
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
    // No float loses a bit.
    let x = [4096.0, 4.1, 4.1e8, 8.2e-3, 8.2e13, 1e-45, -0.0, f32::NAN, f32::NEG_INFINITY];
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for op in [Op::Sum, Op::Average] {
        for root in [None, Some(0)] {
            let (y, report) = comm.reduce_async(x.to_vec(), op, root).unwrap().wait().unwrap();
            assert_eq!((bits(&y), report.underflow.zeroed), (bits(&x), 0));
        }
        let handle = comm.reduce_scatter_async(x.to_vec(), vec![0.0; x.len()], op).unwrap();
        assert_eq!(bits(&handle.wait().unwrap().0.1), bits(&x));
    }
    let x = [f64::from_bits(0xfff8_0000_0000_0123), -0.0, 1e-320];
    let (y, _) = comm.reduce_async(x.to_vec(), Op::Min, None).unwrap().wait().unwrap();
    assert!(y.iter().zip(x).all(|(y, x)| y.to_bits() == x.to_bits()));
    let bytes = [1, 2, 3, 4, 5];
    assert_eq!(comm.broadcast_async(bytes.to_vec(), 0).unwrap().wait().unwrap().0, bytes);
    assert_eq!(
        comm.all_gather_async(bytes.to_vec(), vec![0; 5]).unwrap().wait().unwrap().0.1,
        bytes
    );
    assert_eq!(
        comm.all_to_all_async(bytes.to_vec(), vec![0; 5]).unwrap().wait().unwrap().0.1,
        bytes
    );
}

type Caller = fn(&mut Communicator) -> Result<(), Error>;

/// Calls whose messages have the same length, and their texts.
const CALLS: [(&str, Caller); 9] = [
    ("all_reduce (sum) of 6 elements of i32", |c| c.all_reduce(&mut [1; 6]).map(drop)),
    ("all_reduce (sum) of 6 elements of i32 (tag 0x5)", |c| {
        c.set_tag(5);
        c.all_reduce(&mut [1; 6]).map(drop)
    }),
    ("reduce (sum) to rank 0 of 6 elements of i32", |c| {
        c.reduce_async(vec![1; 6], Op::Sum, Some(0))?.wait().map(drop)
    }),
    ("reduce (sum) to rank 1 of 6 elements of i32", |c| {
        c.reduce_async(vec![1; 6], Op::Sum, Some(1))?.wait().map(drop)
    }),
    ("reduce_scatter (sum) of 6 elements of i32", |c| {
        c.reduce_scatter_async(vec![1; 6], vec![0; 2], Op::Sum)?.wait().map(drop)
    }),
    ("broadcast of 24 bytes from rank 0", |c| c.broadcast_async(vec![7; 24], 0)?.wait().map(drop)),
    ("broadcast of 24 bytes from rank 2", |c| c.broadcast_async(vec![7; 24], 2)?.wait().map(drop)),
    ("all_gather of 8 bytes from each rank", |c| {
        c.all_gather_async(vec![7; 8], vec![0; 24])?.wait().map(drop)
    }),
    ("all_gather of 7 bytes from each rank", |c| {
        c.all_gather_async(vec![7; 7], vec![0; 21])?.wait().map(drop)
    }),
];

/// The same for one element, and for floats.
const MORE: [(&str, Caller); 9] = [
    ("barrier", Communicator::barrier),
    ("all_reduce (sum) of 1 elements of i32", |c| c.all_reduce(&mut [7]).map(drop)),
    ("all_reduce (sum) of 3 elements of f32", |c| c.all_reduce(&mut [1.0f32; 3]).map(drop)),
    ("all_reduce (avg) of 3 elements of f32", |c| {
        c.reduce_async(vec![1.0f32; 3], Op::Average, None)?.wait().map(drop)
    }),
    ("reduce_scatter (avg) of 3 elements of f32", |c| {
        c.reduce_scatter_async(vec![1.0f32; 3], vec![0.0; 1], Op::Average)?.wait().map(drop)
    }),
    ("all_reduce (min) of 3 elements of f32", |c| {
        c.reduce(&mut [1.0f32; 3], Op::Min, None).map(drop)
    }),
    ("all_reduce (max) of 3 elements of f32", |c| {
        c.reduce(&mut [1.0f32; 3], Op::Max, None).map(drop)
    }),
    ("all_reduce (min) of 3 elements of i32", |c| c.reduce(&mut [1; 3], Op::Min, None).map(drop)),
    ("all_reduce (min) of 3 elements of u32", |c| {
        c.reduce(&mut [1u32; 3], Op::Min, None).map(drop)
    }),
];

#[test]
fn each_pair_of_different_calls_is_an_error_that_names_both() {
    let pairs = CALLS.iter().enumerate().flat_map(|(i, a)| CALLS[..i].iter().map(move |b| (a, b)));
    let more = MORE.iter().enumerate().flat_map(|(i, a)| MORE[..i].iter().map(move |b| (a, b)));
    for (n, (a, b)) in pairs.chain(more).enumerate() {
        let odd = n as u32 % 3;
        let errors: Vec<_> = std::thread::scope(|s| {
            let rank = |rank| {
                let call = if rank == odd { a } else { b };
                // The others' error may arrive before this rank is connected.
                let connected = Communicator::connect(config(22 + n as u8 % 3, rank, 3, LAYOUT));
                connected.and_then(|mut comm| call.1(&mut comm)).expect_err("an error")
            };
            let threads: Vec<_> = (0..3).map(|r| s.spawn(move || rank(r))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for error in errors {
            let Error::Mismatch(text) = &error else { panic!("{} and {}: {error}", a.0, b.0) };
            assert!(text.contains(a.0) && text.contains(b.0), "{} and {}: {text}", a.0, b.0);
        }
    }
}

/// For each way to refuse a call: the others' operation is not summed with this rank's next call.
#[test]
fn a_call_that_one_rank_alone_refuses_is_an_error_at_the_others() {
    type Refused = fn(&mut Communicator) -> Error;
    let ways: [Refused; 8] = [
        |comm| comm.reduce_async(vec![0], Op::Sum, Some(9)).unwrap_err(),
        |comm| comm.reduce_async(vec![0], Op::Average, None).unwrap_err(),
        |comm| comm.reduce(&mut [0.0f64], Op::BitAnd, None).unwrap_err(),
        |comm| comm.reduce_scatter_async(vec![0; 5], vec![0], Op::Sum).unwrap_err(),
        |comm| comm.broadcast_async(vec![0], 9).unwrap_err(),
        |comm| comm.all_gather_async(vec![0], vec![0]).unwrap_err(),
        |comm| comm.all_to_all_async(vec![0; 3], vec![0; 3]).unwrap_err(),
        |comm| {
            comm.refuse();
            Error::Argument(String::new())
        },
    ];
    for (way, refused) in ways.into_iter().enumerate() {
        for all in [false, true] {
            let outcomes = run(28, 2, LAYOUT, |mut comm| {
                let rank = comm.rank();
                if all || rank == 1 {
                    assert!(matches!(refused(&mut comm), Error::Argument(_)));
                } else {
                    let mut x = [1, 2];
                    let outcome = comm.all_reduce(&mut x);
                    assert!(
                        matches!(outcome, Err(Error::Mismatch(_))),
                        "way {way}: {outcome:?}, {x:?}"
                    );
                }
                let mut x = [10, 20];
                comm.all_reduce(&mut x).map(|_| x)
            });
            for outcome in outcomes {
                match outcome {
                    Ok(sums) => assert!(all && sums == [20, 40], "way {way}: {sums:?}"),
                    Err(error) => {
                        assert!(
                            !all && error.to_string().contains("its own call returned an error"),
                            "way {way}: {error}"
                        );
                    }
                }
            }
        }
    }
}

/// Otherwise the rank with the shorter timeout takes others for dead.
#[test]
fn a_timeout_that_differs_is_named_to_all_ranks() {
    let errors = std::thread::scope(|s| {
        let ranks = [0, 1, 2].map(|rank| {
            s.spawn(move || {
                let mut config = config(0, rank, 3, LAYOUT);
                config.timeout = Duration::from_millis(if rank == 1 { 1500 } else { 3000 });
                Communicator::connect(config)
                    .and_then(|mut comm| comm.barrier())
                    .unwrap_err()
                    .to_string()
            })
        });
        ranks.map(|rank| rank.join().unwrap())
    });
    for error in errors {
        assert!(error.contains("timeout (NETSUM_TIMEOUT) is "), "{error}");
        assert!(error.contains("1.5s at rank 1") && error.contains("3s at rank "), "{error}");
    }
}

#[test]
fn floats_that_count_as_zero_are_counted() {
    run(26, 4, Layout { message_size: 65536, window: 4, rings: 1 }, |mut comm| {
        let mut x = vec![0.0f32; 20_000];
        x[0] = 1e10;
        // With 4 ranks in steps of 32, as 2^34 is beyond it: 2^-29 of that.
        (x[1], x[2], x[3], x[19_000]) = (16.0, 17.0, -1e-20, 1e-20);
        let report = comm.all_reduce(&mut x).unwrap();
        assert_eq!((report.underflow.zeroed, report.underflow.nonzero), (2, 5));
        assert_eq!((x[1], x[2], x[3], x[19_000]), (0.0, 128.0, 0.0, 4e-20));
        assert_eq!(comm.statistics().underflows, 2);
        // Few floats have three limbs, in steps of 2^-40 here, or two, in steps of 2^-18.
        for (few, kept, lost) in [(2, 1e-9f32, 1e-20f32), (100, 1e-3, 1e-8)] {
            let (mut x, mut y) = (vec![kept; few], vec![lost; few]);
            (x[1], y[1]) = (1e10, 1e10);
            assert_eq!(comm.all_reduce(&mut x).unwrap().underflow.zeroed, 0);
            let error = (f64::from(x[0]) / f64::from(kept) / 4.0 - 1.0).abs();
            assert!(error < 1e-2, "{few}: {error}");
            let report = comm.all_reduce(&mut y).unwrap();
            assert_eq!(report.underflow.zeroed, few as u64 - 1);
        }
        assert_eq!(comm.statistics().underflows, 2 + 1 + 99);
    });
}

/// Bytes of packets, acknowledgements among them.
#[test]
fn reduce_scatter_and_all_gather_send_half_of_an_all_reduce() {
    const RANKS: usize = 4;
    const PART: usize = 1 << 20;
    let layout = Layout { message_size: 65536, window: 8, rings: 1 };
    run(25, RANKS as u32, layout, |mut comm| {
        let own: Vec<f32> = floats(comm.rank(), 100_000).repeat(42)[..RANKS * PART].to_vec();
        comm.barrier().unwrap();
        let sent = |comm: &Communicator| {
            let s = comm.statistics();
            assert_eq!(s.fallbacks, 1);
            (s.ring_bytes, s.traffic.unwrap().bytes_sent)
        };
        let mut before = sent(&comm);
        let mut price = |comm: &Communicator| {
            let (ring, wire) = sent(comm);
            let data = (RANKS * PART * 4) as f64;
            let price = [ring - before.0, wire - before.1].map(|bytes| bytes as f64 / data);
            before = (ring, wire);
            price
        };
        let part = vec![0.0; PART];
        let work = comm.reduce_scatter_async(own.clone(), part, Op::Sum).unwrap();
        let ((_, part), _) = work.wait().unwrap();
        let scatter = price(&comm);
        let bytes: Vec<u8> = part.iter().flat_map(|x| x.to_le_bytes()).collect();
        let all = vec![0; RANKS * PART * 4];
        let ((_, all), _) = comm.all_gather_async(bytes, all).unwrap().wait().unwrap();
        let gather = price(&comm);
        let mut sums = own;
        comm.all_reduce(&mut sums).unwrap();
        let sums: Vec<u8> = sums.iter().flat_map(|x| x.to_le_bytes()).collect();
        assert!(sums == all, "the same bits");
        // Scales go to all ranks, and some messages are in two ranks' parts.
        for ([ring, wire], most) in [(scatter, 0.75 * 1.08), (gather, 0.75 * 1.005)] {
            assert!(ring < most && wire < most * 1.05, "{scatter:?} {gather:?}");
        }
    });
}
