//! All operators and types, by the hosts' ring of three ranks over UDP on loopback.

use std::net::{IpAddr, Ipv4Addr};

use netsum_worker::numeric::operators::encoding;
use netsum_worker::{Bootstrap, CommConfig, Communicator, Element, Op, Secret};

const RANKS: u32 = 3;

/// Joins a job whose messages are short, so that they divide groups of lanes.
fn connect(rank: u32, secret: Option<&str>) -> Communicator {
    let (pid, first) = (std::process::id(), if secret.is_some() { 210 } else { 200 });
    let address = |rank: u32| {
        Ipv4Addr::new(127, 1 + (pid >> 8) as u8 % 250, pid as u8, first + rank as u8).into()
    };
    let peers: Vec<IpAddr> = (0..RANKS).map(address).collect();
    let ip = peers[rank as usize];
    let bootstrap = Bootstrap::Static { peers, mtu: 1024, message_size: 412, window: 2, rings: 2 };
    let mut config = CommConfig::new(rank, RANKS, ip, bootstrap);
    config.secret = secret.map(|text| Secret::new(text).unwrap());
    let comm = Communicator::connect(config).unwrap();
    assert_eq!(comm.is_sealed(), secret.is_some());
    comm
}

/// In place, to a root, in parts, blocking, and of several tensors.
fn check<T: Element>(
    comm: &mut Communicator,
    op: Op,
    of: impl Fn(u32, u32) -> T,
    by: fn(&[T]) -> T,
) {
    if encoding(T::DTYPE, op).is_none() {
        assert!(comm.reduce(&mut [of(0, 0)], op, None).is_err());
        return;
    }
    let rank = comm.rank();
    let own: Vec<T> = (0..171).map(|i| of(rank, i)).collect();
    let column = |i| [0, 1, 2].map(|rank| of(rank, i));
    let expected: Vec<T> = (0..171).map(|i| by(&column(i))).collect();
    let name = format!("{op} of {}", T::DTYPE);
    let part = rank as usize * 57..(rank as usize + 1) * 57;
    let all = comm.reduce_async(own.clone(), op, None).unwrap();
    let to_root = comm.reduce_async(own.clone(), op, Some(1)).unwrap();
    let scattered = vec![T::default(); 57];
    let scattered = comm.reduce_scatter_async(own.clone(), scattered, op).unwrap();
    let tensors = vec![own[..5].to_vec(), own[5..].to_vec()];
    let tensors = comm.reduce_many_async(tensors, op).unwrap();
    let mut blocking = own.clone();
    comm.reduce(&mut blocking, op, None).unwrap();
    assert_eq!(all.wait().unwrap().0, expected, "{name}");
    let right = if rank == 1 { &expected } else { &own };
    assert_eq!(&to_root.wait().unwrap().0, right, "{name}");
    assert_eq!(scattered.wait().unwrap().0.1, expected[part], "{name}");
    assert_eq!(tensors.wait().unwrap().0.concat(), expected, "{name}");
    assert_eq!(blocking, expected, "{name}");
}

macro_rules! integers {
    ($comm:ident, $($type:ty),*) => {$({
        let of = |rank: u32, i: u32| {
            u64::from(rank * 31 + i + 7).wrapping_mul(0x9e37_79b9_7f4a_7c15) as $type
        };
        check(&mut $comm, Op::Sum, of, |x| x[0].wrapping_add(x[1]).wrapping_add(x[2]));
        check(&mut $comm, Op::Average, of, |x| x[0]);
        check(&mut $comm, Op::Min, of, |x| x[0].min(x[1]).min(x[2]));
        check(&mut $comm, Op::Max, of, |x| x[0].max(x[1]).max(x[2]));
        check(&mut $comm, Op::Product, of, |x| x[0].wrapping_mul(x[1]).wrapping_mul(x[2]));
        check(&mut $comm, Op::BitAnd, of, |x| x[0] & x[1] & x[2]);
        check(&mut $comm, Op::BitOr, of, |x| x[0] | x[1] | x[2]);
        check(&mut $comm, Op::BitXor, of, |x| x[0] ^ x[1] ^ x[2]);
    })*};
}

macro_rules! floats {
    ($comm:ident, $($type:ty),*) => {$({
        // Sums of these are exact.
        let of = |rank: u32, i: u32| ((i * 7 + rank * 13) % 64) as $type / 8.0 - 3.0;
        check(&mut $comm, Op::Sum, of, |x| x[0] + x[1] + x[2]);
        check(&mut $comm, Op::Min, of, |x| x[0].min(x[1]).min(x[2]));
        check(&mut $comm, Op::Max, of, |x| x[0].max(x[1]).max(x[2]));
        check(&mut $comm, Op::Product, of, |x| x[0] * x[1] * x[2]);
        check(&mut $comm, Op::BitXor, of, |x| x[0]);
    })*};
}

#[test]
fn all_operators_and_types_give_the_result_at_every_rank() {
    with_secret(None);
}

#[test]
fn all_operators_and_types_give_the_same_if_sealed() {
    with_secret(Some("0123456789abcdef"));
}

fn with_secret(secret: Option<&str>) {
    std::thread::scope(|s| {
        for rank in 0..RANKS {
            s.spawn(move || {
                let mut comm = connect(rank, secret);
                integers!(comm, i8, u8, i16, u16, i32, u32, i64, u64);
                floats!(comm, f32, f64);
                let average = |x: &[f64]| (x[0] + x[1] + x[2]) / 3.0;
                check(&mut comm, Op::Average, |rank, i| f64::from(rank * i), average);
                let bit = |rank: u32, i: u32| i >> rank & 1 == 1;
                for op in [Op::Sum, Op::Max, Op::BitOr] {
                    check(&mut comm, op, bit, |x| x[0] | x[1] | x[2]);
                }
                for op in [Op::Product, Op::Min, Op::BitAnd] {
                    check(&mut comm, op, bit, |x| x[0] & x[1] & x[2]);
                }
                check(&mut comm, Op::BitXor, bit, |x| x[0] ^ x[1] ^ x[2]);
                comm.barrier().unwrap();
            });
        }
    });
}
