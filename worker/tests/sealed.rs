//! Secrets of ranks that do not agree.

use std::net::{IpAddr, Ipv4Addr};

use netsum_worker::{Bootstrap, CommConfig, Communicator, Error, Secret};

/// What each of two ranks gets for one operation.
fn ranks(place: u8, secrets: [Option<&str>; 2]) -> [Result<i32, Error>; 2] {
    let pid = std::process::id();
    let peers: [IpAddr; 2] = [0, 1].map(|rank| {
        Ipv4Addr::new(127, 1 + (pid >> 8) as u8 % 250, pid as u8, place * 2 + rank).into()
    });
    let rank = |rank: usize| {
        let bootstrap = Bootstrap::Static {
            peers: peers.to_vec(),
            mtu: 1024,
            message_size: 4096,
            window: 2,
            rings: 1,
        };
        let secret = secrets[rank].map(|text| Secret::new(text).unwrap());
        let config = CommConfig::new(rank as u32, 2, peers[rank], bootstrap);
        let mut comm = Communicator::connect(CommConfig { secret, ..config })?;
        let mut data = [i32::MAX];
        comm.all_reduce(&mut data).map(|_| data[0])
    };
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|number| scope.spawn(move || rank(number)));
        ranks.map(|rank| rank.join().unwrap())
    })
}

#[test]
fn ranks_with_the_same_secret_sum() {
    let secret = Some("the same at both ranks");
    assert_eq!(ranks(1, [secret; 2]), [Ok(-2), Ok(-2)]);
}

#[test]
fn another_secret_and_none_are_errors_that_name_it() {
    let secret = Some("the same at both ranks");
    for (place, other, found) in [
        (2, Some("another at one of them"), "NETSUM_SECRET must be the same at all ranks"),
        (3, None, "secret (NETSUM_SECRET) is"),
    ] {
        for result in ranks(place, [secret, other]) {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(found), "{error}");
        }
    }
}
