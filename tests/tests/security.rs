//! Hosts that are in no job, or in another one, attack a running job: every sum stays right, bit by
//! bit.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use netsum_lab::attacker::{Seen, TAGS, advertisement, arp_claim, extended, from_host, tagged};
use netsum_lab::cluster::{Cluster, Group, JobSpec, Outcome, one_on_each_host};
use netsum_lab::frames::{FrameSpec, lanes};
use netsum_lab::tap::Tap;
use netsum_lab::{Host, LabSpec};

/// The foreign host, which is in no job. The ranks are on the hosts before it.
const FOREIGN: usize = 3;
const LEN: usize = 500_000;

/// A job of three ranks, and a foreign host on a fourth port.
struct Siege {
    group: Group,
    seen: Vec<Seen>,
    cluster: Cluster,
}

impl Siege {
    fn new() -> Self {
        Self::over(false)
    }

    /// The same, over IPv4 or IPv6.
    fn over(v6: bool) -> Self {
        let spec = LabSpec { ipv6: v6, ..LabSpec::hosts(FOREIGN + 1) };
        let mut cluster = Cluster::without_daemon(spec).unwrap();
        cluster.pin();
        cluster.start_daemon().unwrap();
        let job = JobSpec { window: 4, ..JobSpec::new("besieged", FOREIGN as u32) };
        let token = cluster.create_job(&job).unwrap();
        let places = one_on_each_host(job.ranks);
        let ranks = if v6 {
            cluster.ranks_v6(&job, &token, &places)
        } else {
            cluster.ranks(&job, &token, &places)
        };
        let mut group = ranks.unwrap();
        // The test measures the network, not the time in which ranks make up their data.
        group.start_together();
        let taps: Vec<Tap> = (0..FOREIGN)
            .map(|h| Tap::open(cluster.lab().host(h), Host::INTERFACE).unwrap())
            .collect();
        // The attacker's knowledge, which really only the ranks' hosts have.
        let seen = std::thread::scope(|s| {
            let watchers: Vec<_> = taps.iter().map(|tap| s.spawn(|| Seen::watch(tap))).collect();
            assert_box(&group.all_reduce("i32", LEN, 0).unwrap());
            // The hosts are quiet except for keep-alives, for which the watchers must not wait.
            watchers.into_iter().map(|w| w.join().unwrap()).collect()
        });
        Self { group, seen, cluster }
    }

    fn tap(&self, host: usize) -> Tap {
        Tap::open(self.cluster.lab().host(host), Host::INTERFACE).unwrap()
    }

    /// Runs all-reduces while a host keeps sending these frames. Returns the last outcomes.
    fn besiege(&mut self, host: usize, frames: &[Vec<u8>]) -> Vec<Outcome> {
        let tap = self.tap(host);
        let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|s| {
            let _stop = Stop(&stop);
            s.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for frame in frames {
                        tap.send(frame).unwrap();
                        sent.fetch_add(1, Ordering::Relaxed);
                    }
                    // This leaves time for others on a machine with few cores.
                    std::thread::yield_now();
                }
            });
            let attempt = (|| {
                let mut outcomes = Vec::new();
                let start = Instant::now();
                for seed in 1.. {
                    outcomes = self.group.all_reduce(
                        if seed % 2 == 0 { "f32" } else { "i32" },
                        LEN,
                        seed,
                    )?;
                    // Each frame is sent at least twice while the job is running.
                    if sent.load(Ordering::Relaxed) > 2 * frames.len() as u64
                        && start.elapsed() > Duration::from_millis(500)
                    {
                        break;
                    }
                }
                anyhow::Ok(outcomes)
            })();
            stop.store(true, Ordering::Relaxed);
            attempt.unwrap_or_else(|e| {
                panic!("{e:#}\n{}{}", self.group.log(), self.cluster.daemon_log())
            })
        })
    }

    /// A counter of the job and of packets outside any job.
    fn count(&self, name: &str) -> u64 {
        self.cluster.counter(None, name).unwrap()
    }

    /// All frames that the foreign host can forge in the names of ranks.
    fn forgeries(&self) -> Vec<FrameSpec> {
        (0..FOREIGN).flat_map(|rank| self.seen[rank].forgeries(rank as u8)).collect()
    }
}

fn assert_box(outcomes: &[Outcome]) {
    for (rank, outcome) in outcomes.iter().enumerate() {
        assert_eq!(outcome.mode, "box", "rank {rank}: {outcome:?}");
        assert_eq!((outcome.wrong, outcome.fallbacks), (0, 0), "rank {rank}: {outcome:?}");
    }
}

fn build(specs: impl IntoIterator<Item = FrameSpec>) -> Vec<Vec<u8>> {
    specs.into_iter().map(|spec| spec.build()).collect()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn forged_data_and_acknowledgements_are_dropped() {
    let mut siege = Siege::new();
    let forged = siege.forgeries();
    assert!(
        siege.seen.iter().all(|s| !s.acks.is_empty() && !s.data.is_empty()),
        "nothing to forge was seen"
    );
    let outcomes = siege.besiege(FOREIGN, &build(forged));
    assert_box(&outcomes);
    assert!(siege.count("wrong_port") > 0, "data");
    assert!(siege.count("spoofed") > 0, "acknowledgements");
    assert_eq!(siege.count("internal_error"), 0);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn forged_frames_with_a_ranks_ip_or_mac_alone_are_dropped() {
    let mut siege = Siege::new();
    let own = siege.forgeries().into_iter().map(|spec| from_host(spec, FOREIGN as u8));
    let mut frames = Vec::new();
    for (spec, own) in siege.forgeries().into_iter().zip(own) {
        frames.push(FrameSpec { src: own.src.clone(), ..spec.clone() }.build());
        frames.push(FrameSpec { macs: own.macs, ..spec }.build());
    }
    let outcomes = siege.besiege(FOREIGN, &frames);
    assert_box(&outcomes);
    assert!(siege.count("wrong_port") > 0 && siege.count("spoofed") > 0);
}

/// All frames that can be forged, with the foreign host's own MAC address, which is not a rank's.
fn in_its_own_frames(siege: &Siege, v6: bool) -> Vec<Vec<u8>> {
    let foreign = siege.cluster.lab().host(FOREIGN);
    let mut frames: Vec<Vec<u8>> = siege
        .forgeries()
        .into_iter()
        .map(|mut spec| {
            spec.macs.1[5] = FOREIGN as u8 + 1;
            if v6 { spec.v6().build() } else { spec.build() }
        })
        .collect();
    for (rank, next) in [(0, 1), (1, 2), (2, 0)] {
        frames.push(arp_claim([10, 0, 0, rank + 1], foreign));
        frames.push(advertisement(rank, next, FOREIGN as u8));
    }
    frames
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn forgeries_behind_tags_and_extension_headers_reach_nobody() {
    for v6 in [false, true] {
        let mut siege = Siege::over(v6);
        let plain = in_its_own_frames(&siege, v6);
        let mut frames: Vec<Vec<u8>> =
            TAGS.iter().flat_map(|(tags, _)| plain.iter().map(|f| tagged(f, tags))).collect();
        for extensions in [&[0][..], &[60], &[0, 60], &[43], &[44], &[60; 8]] {
            let six = plain.iter().filter(|f| v6 && f[12] == 0x86);
            frames.extend(six.map(|f| extended(f, extensions)));
        }
        // Frames of the other address family do not concern the job's addresses.
        frames.retain(|f| v6 || !f.windows(2).any(|w| w == [0x86, 0xdd]));
        frames.retain(|f| !v6 || !f.windows(4).any(|w| w == [0x08, 0x06, 0, 1]));
        let taps: Vec<Tap> = (0..FOREIGN).map(|host| siege.tap(host)).collect();
        let (before, foreign) = (siege.count("spoofed"), siege.tap(FOREIGN));
        for frame in &frames {
            foreign.send(frame).unwrap();
        }
        let mut arrived = Vec::new();
        for (host, tap) in taps.iter().enumerate() {
            while let Ok(f) =
                tap.receive(Duration::from_millis(200), |f| frames.iter().any(|g| g == f))
            {
                arrived.push(format!("at host {host}: {:02x?}", &f[..40]));
            }
        }
        let (first, sent) = (arrived.first(), frames.len());
        assert!(first.is_none(), "{} of {sent} frames, the first {first:?}", arrived.len());
        assert!(siege.count("spoofed") > before && siege.count("unparsed_headers") > 0);
        let outcomes = siege.besiege(FOREIGN, &frames);
        assert_box(&outcomes);
        for host in 0..FOREIGN {
            let mut neigh = siege.cluster.lab().host(host).command("ip");
            let neighbours = netsum_lab::netns::output(neigh.args(["neigh", "show"])).unwrap();
            let foreign = siege.cluster.lab().host(FOREIGN).mac();
            assert!(
                !neighbours.contains(&foreign),
                "rank {host} believes the foreign host: {neighbours}"
            );
        }
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_foreign_hosts_own_packets_are_not_taken_for_a_ranks() {
    let mut siege = Siege::new();
    let frames = build(siege.forgeries().into_iter().map(|spec| from_host(spec, FOREIGN as u8)));
    let outcomes = siege.besiege(FOREIGN, &frames);
    assert_box(&outcomes);
    assert!(siege.count("wrong_port") > 0, "data goes no farther than the box");
    assert_eq!(siege.count("spoofed"), 0, "the foreign host may send under its own address");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn replayed_frames_change_no_sum_wherever_they_come_from() {
    let mut siege = Siege::new();
    // Recorded packets, byte by byte: sent from the foreign host's port, and from the port of the
    // rank that had sent them.
    let frames: Vec<Vec<u8>> = siege.seen.iter().flat_map(|s| s.frames.clone()).collect();
    assert!(frames.len() > 100, "{} frames were seen", frames.len());
    let outcomes = siege.besiege(FOREIGN, &frames);
    assert_box(&outcomes);
    assert!(siege.count("wrong_port") > 0);
    let of_rank_0 = siege.seen[1].frames.clone();
    let before = siege.count("duplicate_request") + siege.count("stale") + siege.count("replays");
    let outcomes = siege.besiege(0, &of_rank_0);
    for outcome in &outcomes {
        assert_eq!((outcome.wrong, outcome.fallbacks), (0, 0), "{outcome:?}");
    }
    let after = siege.count("duplicate_request") + siege.count("stale") + siege.count("replays");
    assert!(after + siege.count("credit_violation") > before, "{before} before, {after} after");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_foreign_host_cannot_take_a_ranks_address_over() {
    let mut siege = Siege::new();
    let foreign = siege.cluster.lab().host(FOREIGN);
    let claims: Vec<Vec<u8>> = (0..FOREIGN as u8)
        .flat_map(|rank| {
            // By ARP, and by frames with the rank's MAC address, from which a bridge learns where
            // the rank is.
            let mut learned = FrameSpec::send(rank + 1, 99, 7, 7, lanes(0, 64)).build();
            learned[..6].fill(0xff);
            [arp_claim([10, 0, 0, rank + 1], foreign), learned]
        })
        .collect();
    let table = |siege: &Siege| {
        let mut bridge = siege.cluster.lab().box_().command("bridge");
        let text = netsum_lab::netns::output(bridge.args(["fdb", "show", "br", "br0"])).unwrap();
        let mut lines: Vec<String> = (0..FOREIGN)
            .map(|h| {
                let mac = siege.cluster.lab().host(h).mac();
                let line = text
                    .lines()
                    .find(|l| l.starts_with(&mac))
                    .map(|l| l.split(" master").next().unwrap());
                line.unwrap_or_default().to_owned()
            })
            .collect();
        lines.sort();
        lines
    };
    let before = table(&siege);
    let outcomes = siege.besiege(FOREIGN, &claims);
    assert_box(&outcomes);
    assert!(siege.count("spoofed") > 0);
    assert_eq!(table(&siege), before, "the bridge believes the foreign host");
    let mut neigh = siege.cluster.lab().host(0).command("ip");
    let neighbours = netsum_lab::netns::output(neigh.args(["neigh", "show"])).unwrap();
    let foreign = siege.cluster.lab().host(FOREIGN).mac();
    assert!(!neighbours.contains(&foreign), "rank 0 believes the foreign host: {neighbours}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_foreign_host_cannot_take_the_boxs_own_address_over() {
    let mut siege = Siege::over(true);
    let foreign = siege.cluster.lab().host(FOREIGN);
    let of_box = [10, 0, 0, 254];
    let mac = || -> [u8; 6] {
        let mut ip = siege.cluster.lab().box_().command("ip");
        let text = netsum_lab::netns::output(ip.args(["-br", "link", "show", "br0"])).unwrap();
        let mac: Vec<u8> = text
            .split_whitespace()
            .nth(2)
            .unwrap()
            .split(':')
            .map(|b| u8::from_str_radix(b, 16).unwrap())
            .collect();
        mac.try_into().unwrap()
    };
    let mut learned = FrameSpec::send(FOREIGN as u8 + 1, 99, 7, 7, lanes(0, 64)).build();
    learned[..6].fill(0xff);
    learned[6..12].copy_from_slice(&mac());
    let mut packet = FrameSpec::send(FOREIGN as u8 + 1, 1, 7, 7, lanes(0, 64));
    packet.src = of_box.to_vec();
    let plain = vec![
        arp_claim(of_box, foreign),
        advertisement(253, 0, FOREIGN as u8),
        learned,
        packet.build(),
    ];
    let mut frames = plain.clone();
    frames.extend(TAGS.iter().flat_map(|(tags, _)| plain.iter().map(|f| tagged(f, tags))));
    let (tap, target) = (siege.tap(FOREIGN), siege.tap(0));
    let round = AtomicU64::new(0);
    let arrives = |frames: &[Vec<u8>]| -> Vec<String> {
        frames.iter().for_each(|frame| tap.send(frame).unwrap());
        // A frame with the foreign host's own address follows all of them.
        let psn = round.fetch_add(1, Ordering::Relaxed) as u32;
        let last = FrameSpec::send(FOREIGN as u8 + 1, 1, 0x77, psn, lanes(1, 64)).build();
        tap.send(&last).unwrap();
        let mut arrived = Vec::new();
        loop {
            let is_one = |f: &[u8]| f == last || frames.iter().any(|g| g == f);
            let frame =
                target.receive(Duration::from_secs(5), is_one).expect("its own frame passes");
            if frame == last {
                return arrived;
            }
            arrived.push(format!("{:02x?}", &frame[..frame.len().min(60)]));
        }
    };
    assert_eq!(arrives(&frames), [""; 0], "nothing in the box's name comes in by a port");
    // Addresses that the box gets later on a port's link are protected, too. A router may bring
    // packets of others to a port.
    for line in [
        "link add beside type veth peer name other",
        "address add 10.8.0.253/16 dev beside",
        "address add 10.0.0.253/16 dev br0",
        "link add link br0 name tenants type macvlan",
        "address add 10.7.0.253/16 dev tenants",
    ] {
        let mut ip = siege.cluster.lab().box_().command("ip");
        netsum_lab::netns::output(ip.args(line.split(' '))).unwrap();
    }
    let end = Instant::now() + Duration::from_secs(5);
    let later = [[10, 0, 0, 253], [10, 7, 0, 253]].map(|ip| arp_claim(ip, foreign));
    while !arrives(&later).is_empty() {
        assert!(Instant::now() < end, "a new address of the box is taken over");
    }
    assert_eq!(arrives(&[arp_claim([10, 8, 0, 253], foreign)]).len(), 1, "beside the ports");
    // The frames do not arrive without a job either, when ranks are still to join. A daemon that
    // takes over protects the addresses at once.
    siege.cluster.netsum(&["job", "delete", "besieged"]).unwrap();
    assert_eq!(arrives(&frames), [""; 0], "without a job");
    siege.cluster.kill_daemon().unwrap();
    assert_eq!(arrives(&frames), [""; 0], "without a daemon");
    siege.cluster.start_daemon().unwrap();
    assert_eq!(arrives(&frames), [""; 0], "with the next daemon");
    let mut neigh = siege.cluster.lab().host(0).command("ip");
    let neighbours = netsum_lab::netns::output(neigh.args(["neigh", "show"])).unwrap();
    let foreign = siege.cluster.lab().host(FOREIGN).mac();
    let is_of_box =
        |l: &&str| ["10.0.0.254 ", "10.0.0.253 ", "fd00::fe "].iter().any(|ip| l.starts_with(ip));
    let believes = neighbours.lines().filter(is_of_box).find(|line| line.contains(&foreign));
    assert_eq!(believes, None, "rank 0 believes the foreign host");
    assert!(siege.count("spoofed") > 0);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn addresses_are_free_again_when_a_job_has_gone() {
    let mut siege = Siege::new();
    let forged = build(siege.forgeries());
    siege.besiege(FOREIGN, &forged);
    siege.cluster.netsum(&["job", "delete", "besieged"]).unwrap();
    let (before, tap, target) = (siege.count("spoofed"), siege.tap(FOREIGN), siege.tap(0));
    // As if the machine had moved to another port.
    let moved = FrameSpec::send(2, 1, 0x77, 7, lanes(0, 64)).build();
    tap.send(&moved).unwrap();
    target.receive(Duration::from_secs(1), |f| f == moved).expect("a plain bridge passes it on");
    assert_eq!(siege.count("spoofed"), before);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn addresses_stay_a_ranks_while_the_daemon_is_killed_and_started_again() {
    let mut siege = Siege::new();
    let forged = build(siege.forgeries());
    siege.cluster.kill_daemon().unwrap();
    assert_box(&siege.besiege(FOREIGN, &forged));
    siege.cluster.start_daemon().unwrap();
    let before = siege.count("spoofed");
    assert_box(&siege.besiege(FOREIGN, &forged));
    assert!(before > 0 && siege.count("spoofed") > before);
    siege.cluster.netsum(&["job", "delete", "besieged"]).unwrap();
    let (tap, target) = (siege.tap(FOREIGN), siege.tap(0));
    let moved = FrameSpec::send(2, 1, 0x77, 7, lanes(0, 64)).build();
    tap.send(&moved).unwrap();
    target.receive(Duration::from_secs(1), |f| f == moved).expect("a plain bridge passes it on");
}

/// Ends a flood, even if the test has failed.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs all-reduces while a host sends these frames as fast as it can. Returns the shortest time in
/// seconds, the frames per second, and the last mode.
fn flood(
    siege: &mut Siege,
    host: usize,
    interface: &str,
    frames: &[Vec<u8>],
) -> (f64, f64, String) {
    let tap = Tap::open(siege.cluster.lab().host(host), interface).unwrap();
    let (stop, sent) = (AtomicBool::new(frames.is_empty()), AtomicU64::new(0));
    std::thread::scope(|s| {
        s.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for frame in frames {
                    if tap.send(frame).is_ok() {
                        sent.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        });
        let _stop = Stop(&stop);
        let start = Instant::now();
        let (mut least, mut mode) = (f64::MAX, String::new());
        for seed in 0..5 {
            let outcomes = siege.group.all_reduce("i32", 4 * LEN, seed);
            let outcomes = outcomes.unwrap_or_else(|e| panic!("{e:#}\n{}", siege.group.log()));
            assert!(outcomes.iter().all(|o| o.wrong == 0), "{outcomes:?}");
            let last = outcomes.iter().map(|o| o.micros as f64 * 1e-6).fold(0.0, f64::max);
            (least, mode) = (least.min(last), outcomes[0].mode.clone());
        }
        let rate = sent.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64();
        (least, rate, mode)
    })
}

/// Prints what a flood costs a running job; SECURITY.md has the figures.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn floods_slow_a_job_down_but_do_no_harm() {
    println!(
        "flood, and where it comes from                       frames/s  the job's Gb/s  summed by"
    );
    let gigabits = |seconds: f64| 4.0 * 8e-9 * (4 * LEN) as f64 / seconds;
    type Frames = fn(&Siege) -> Vec<Vec<u8>>;
    fn other(_: &Siege) -> Vec<Vec<u8>> {
        build((0..64).map(|i| FrameSpec::send(FOREIGN as u8 + 1, 1, 0x77, i, lanes(i, 256))))
    }
    fn data(siege: &Siege) -> Vec<FrameSpec> {
        siege.forgeries().into_iter().filter(|s| s.payload.len() > 4).collect()
    }
    fn strange(siege: &Siege) -> Vec<Vec<u8>> {
        build(data(siege).into_iter().map(|spec| from_host(spec, FOREIGN as u8)))
    }
    fn broken(siege: &Siege) -> Vec<Vec<u8>> {
        let mut frames = build(data(siege).into_iter().filter(|s| s.src[3] == 1));
        frames.iter_mut().for_each(|f| *f.last_mut().unwrap() ^= 1);
        frames
    }
    let none: Frames = |_| Vec::new();
    for (what, host, interface, frames, counter) in [
        ("none", FOREIGN, "eth0", none, "released"),
        ("the same work, on the foreign host's own loopback", FOREIGN, "lo", other, "released"),
        ("RoCE of no flow, the foreign host's port", FOREIGN, "eth0", other, "no_flow"),
        (
            "data of the job's flows, the foreign host's port",
            FOREIGN,
            "eth0",
            strange,
            "wrong_port",
        ),
        ("data with a wrong ICRC, rank 0's own port", 0, "eth0", broken, "rx_icrc_encapsulated"),
    ] {
        // A job that has fallen back to its ring stays there, so each flood gets a new job.
        let mut siege = Siege::new();
        let frames = frames(&siege);
        let (least, rate, mode) = flood(&mut siege, host, interface, &frames);
        println!("{what:50}  {rate:9.0}  {:14.2}  {mode}", gigabits(least));
        assert!(siege.count(counter) > 0, "{counter}");
    }
}
