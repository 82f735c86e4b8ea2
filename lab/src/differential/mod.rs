//! Compares the XDP programs with a model of them in user space: every packet of a sequence goes
//! through both, and verdict, bytes and counters must match.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`generate`] | from bytes to packets |
//! | [`model`] | the expected behaviour of the box |
//! | `rules` | the part of it that decides about a fragment |
//!
//! Needs root and BPF. The programs run one packet at a time, with BPF_PROG_TEST_RUN. As on a box,
//! a CPU processes a batch of packets before the redirected ones leave.

pub mod generate;
pub mod model;
mod rules;

use std::collections::{BTreeMap, HashMap, VecDeque};

use anyhow::{Context, Result, bail, ensure};
use arbitrary::Unstructured;
use netsum_common::abi::{MIN_CAPTURE, ReleaseTag, RingNumber, TraceEvent, TraceFilter, traced_by};
use netsum_common::counters::{Counter, of_bits};
use netsum_common::slot::Slot;
use netsum_common::timing::RankTiming;
use netsum_core::plane::FirstPacket;
use netsum_dataplane::{DataPlane, Traced};

use self::generate::{BOND, Hint, STARTS, Setting, Step};
use self::model::Model;
use crate::programs::{Bench, LOOPBACK, Outcome, tag};

/// Longest frame of a test run that can also be redirected: a page without the kernel's overhead.
const LONGEST: usize = 3000;
/// Most steps in a sequence.
const STEPS: usize = 600;

/// XDP verdict.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// `XDP_DROP`.
    Drop = 1,
    /// `XDP_PASS`.
    Pass = 2,
    /// `XDP_REDIRECT`.
    Redirect = 4,
}

/// Packet counts of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Packets that arrived.
    pub packets: u64,
    /// Packets whose sum was sent to all ranks.
    pub released: u64,
    /// Clones and replays that left, or were dropped in egress.
    pub clones: u64,
}

/// The programs and their model.
pub struct Differential {
    bench: Bench,
    settings: Vec<Setting>,
    model: Model,
    /// Counters of the programs before the present sequence, by ring. The model starts at zero.
    before: Vec<Vec<u64>>,
    /// Compares after every packet, not only at the end.
    careful: bool,
    /// Totals of the programs' counters over all sequences, by counter.
    counted: Vec<u64>,
    /// Whether the present sequence's packets are traced.
    traced: bool,
    /// Whether its packets arrive on the rings' CPU.
    on_rings_cpu: bool,
}

impl Differential {
    /// Loads the programs and makes rings of all kinds.
    pub fn new() -> Result<Self> {
        let settings = generate::settings();
        let first = &settings[0];
        let mut bench = Bench::with_flows(first.ring.clone(), first.flows.clone())?;
        bench.plane.set_slaves(HashMap::from([(LOOPBACK, BOND)]))?;
        for setting in &settings[1..] {
            bench.plane.create_ring(&setting.ring)?;
        }
        Ok(Self {
            bench,
            settings,
            model: Model::default(),
            before: Vec::new(),
            careful: false,
            counted: vec![0; Counter::ALL.len()],
            traced: false,
            on_rings_cpu: false,
        })
    }

    /// Runs a sequence.
    ///
    /// # Errors
    /// If program and model disagree: names the packet, its kind and its result.
    pub fn run(&mut self, input: &[u8]) -> Result<Summary> {
        match self.sequence(input) {
            Ok(summary) => Ok(summary),
            Err(first) => {
                // Runs the sequence again to find the first packet that differs.
                self.careful = true;
                let again = self.sequence(input);
                self.careful = false;
                Err(again
                    .err()
                    .unwrap_or_else(|| first.context("not seen when every packet is looked at")))
            }
        }
    }

    /// The programs' counter, over all sequences without an error.
    pub fn counted(&self, counter: Counter) -> u64 {
        self.counted[counter as usize]
    }

    fn sequence(&mut self, input: &[u8]) -> Result<Summary> {
        // Every other sequence is traced; this takes no byte of the input.
        self.traced = input.len() % 2 == 1;
        self.on_rings_cpu = input.len() / 2 % 2 == 1;
        self.bench.plane.trace(self.traced.then_some(&TraceFilter::ALL))?;
        let mut u = Unstructured::new(input);
        let start = *u.choose(&STARTS)?;
        // Only two rings at a time: slots fill up, and confusing the two rings would show.
        let (a, b) = (u.choose_index(self.settings.len())?, u.choose_index(self.settings.len())?);
        let mut few = vec![self.settings[a].clone()];
        few.extend((a != b).then(|| self.settings[b].clone()));
        self.begin(start, &few)?;
        let mut summary = Summary::default();
        let (mut sent, mut waiting) = (VecDeque::<Vec<u8>>::new(), Vec::new());
        for number in 0..STEPS {
            if u.is_empty() {
                break;
            }
            let model = &self.model;
            let hint = |ring: RingNumber| {
                let state = &model.ring(ring).state;
                Hint { low: state.low, expected: state.expected.to_vec() }
            };
            let (frame, last) = match generate::step(&mut u, &few, hint)? {
                Step::Packet { frame, last_of_batch } => (frame, last_of_batch),
                Step::Again(ago) => match sent.get(ago) {
                    Some(frame) => (frame.clone(), true),
                    None => continue,
                },
            };
            if frame.len() < netsum_common::wire::EthHdr::LEN || frame.len() > LONGEST {
                continue;
            }
            summary.packets += 1;
            let released =
                self.packet(&frame).with_context(|| format!("packet {number}: {}", hex(&frame)))?;
            sent.push_front(frame);
            sent.truncate(41);
            waiting.extend(released);
            // A CPU map's batch has at most eight packets.
            if last || waiting.len() == 8 {
                for packet in waiting.drain(..) {
                    summary.released += (tag(&packet).rank == ReleaseTag::ALL) as u64;
                    summary.clones +=
                        self.leave(&packet).with_context(|| format!("after packet {number}"))?;
                }
            }
            if self.careful {
                self.compare(&few).with_context(|| format!("after packet {number}"))?;
            }
        }
        for packet in waiting {
            summary.clones += self.leave(&packet).context("at the end")?;
        }
        self.compare(&few)?;
        for (total, &counter) in self.counted.iter_mut().zip(Counter::ALL) {
            let of = |ring: RingNumber| self.model.counter(ring, counter);
            *total += of(RingNumber::NONE) + rings(&few).into_iter().map(of).sum::<u64>();
        }
        Ok(summary)
    }

    /// Resets both.
    fn begin(&mut self, start: u32, settings: &[Setting]) -> Result<()> {
        self.model = Model::default();
        let plane = &mut self.bench.plane;
        for Setting { ring, flows, active } in settings {
            plane.empty_ring(ring, start)?;
            self.model.add_ring(ring, *active, start);
            for flow in flows {
                plane.add_flow(flow)?;
                self.model.add_flow(flow);
            }
            if *active {
                plane.activate_ring(ring, &vec![LOOPBACK; ring.config.members as usize])?;
            }
        }
        // Unregisters the flows of rings that are not in this sequence.
        for setting in &self.settings {
            if settings.iter().all(|s| s.ring.id != setting.ring.id) {
                setting.flows.iter().try_for_each(|flow| plane.forget_flow(flow.key()))?;
            }
            if let Some((token, _)) = setting.in_band() {
                plane.remove_in_band_token(token)?;
            }
        }
        // Removes connections that waited in the last sequence.
        let ended: Vec<_> = plane.ended_flows()?.iter().map(|flow| flow.key).collect();
        plane.forget_ended(&ended)?;
        for (token, job) in settings.iter().filter_map(Setting::in_band) {
            plane.add_in_band_token(token, job)?;
            self.model.add_in_band_token(token, job);
        }
        plane.first_packets()?;
        self.before = [RingNumber::NONE]
            .iter()
            .chain(&rings(settings))
            .map(|&r| plane.counters(r))
            .collect::<Result<_>>()?;
        Ok(())
    }

    /// Runs `ingress`, and `aggregate` unless the packet is summed inline; returns the packet to be
    /// sent.
    fn packet(&mut self, frame: &[u8]) -> Result<Option<Vec<u8>>> {
        let mut out = if self.on_rings_cpu {
            self.bench.at_home(frame)?
        } else {
            self.bench.run("ingress", frame)?
        };
        let mut events = self.bench.plane.traced(3)?.into_iter();
        let mut passed = frame.to_vec();
        let first = self.model.ingress(&mut passed, self.on_rings_cpu);
        self.compare_trace(traced_by::INGRESS, frame, events.next())?;
        if let Some(verdict) = first {
            agree("ingress", &out, verdict, &passed)?;
            ensure!(events.next().is_none(), "traced by `ingress` twice");
            out = self.bench.aggregate(frame)?;
            events = self.bench.plane.traced(2)?.into_iter();
        }
        let mut expected_frame = frame.to_vec();
        let expected = self.model.aggregate(&mut expected_frame);
        agree("aggregate", &out, expected, &expected_frame)?;
        self.compare_trace(traced_by::AGGREGATE, frame, events.next())?;
        ensure!(events.next().is_none(), "traced by `aggregate` twice");
        Ok((expected == Verdict::Redirect).then_some(out.packet))
    }

    /// Runs `egress` once for each clone; returns the number of clones.
    fn leave(&mut self, packet: &[u8]) -> Result<u64> {
        let tag = tag(packet);
        let clones = if tag.rank == ReleaseTag::ALL {
            let setting = self.settings.iter().find(|s| s.ring.id.0 == tag.ring);
            setting.with_context(|| format!("a tag with ring {}", tag.ring))?.ring.config.members
        } else {
            1
        };
        for clone in 0..clones {
            let out = self.bench.egress(packet)?;
            let (verdict, frame) = self.model.egress(packet);
            agree("egress", &out, verdict, &frame)
                .with_context(|| format!("clone {clone} of {tag:?}"))?;
            let mut events = self.bench.plane.traced(2)?.into_iter();
            let left: &[u8] = if verdict == Verdict::Pass { &frame } else { &[] };
            self.compare_trace(traced_by::EGRESS, left, events.next())?;
            ensure!(events.next().is_none(), "traced by `egress` twice");
        }
        Ok(clones as u64)
    }

    /// Checks that a program has traced its packet as the model counted it last, if packets are
    /// traced. `frame` is the packet that the trace shows.
    fn compare_trace(&mut self, program: u32, frame: &[u8], traced: Option<Traced>) -> Result<()> {
        let (ring, counters) = self.model.take_counted();
        if !self.traced {
            ensure!(traced.is_none(), "traced while that is off: {traced:?}");
            return Ok(());
        }
        let Traced { event, frame: captured } = traced.context("no event for a packet")?;
        ensure!((event.program, event.ifindex) == (program, BOND), "{event:?}");
        let names = |bits| of_bits(bits).map(Counter::name).collect::<Vec<_>>();
        ensure!(
            (RingNumber(event.ring), event.counters) == (ring, counters),
            "traced: ring {} {:?}, should be {ring} {:?}",
            event.ring,
            names(event.counters),
            names(counters)
        );
        if !frame.is_empty() {
            let expected = &frame[..frame.len().min(MIN_CAPTURE as usize)];
            ensure!(
                (event.len as usize, &captured[..]) == (frame.len(), expected),
                "{event:?}: {}",
                hex(&captured)
            );
        }
        if event.rank != TraceEvent::NONE {
            let ring = self.model.ring(RingNumber(event.ring));
            let slot = ring.slots[event.index as usize % ring.slots.len()];
            // The program sets these later: when it saves a header with a tag, and when it adds.
            let flags = |flags: u32| flags & !(Slot::TAGGED | Slot::NOT_FINITE);
            ensure!(
                (
                    event.low,
                    event.expected,
                    event.slot_index,
                    event.contributors,
                    flags(event.slot_flags)
                ) == (
                    ring.state.low,
                    ring.state.expected[event.rank as usize],
                    slot.index,
                    slot.contributors,
                    flags(slot.flags)
                ),
                "traced: {event:?}, should be {slot:?}"
            );
        }
        Ok(())
    }

    fn compare(&mut self, settings: &[Setting]) -> Result<()> {
        let noted = self.bench.plane.first_packets()?.into_iter();
        let place = |p: &FirstPacket| {
            let job =
                settings.iter().filter_map(Setting::in_band).find(|(_, job)| job.job == p.job);
            let (_, job) = job.with_context(|| format!("no job {}", p.job))?;
            anyhow::Ok((p.job, p.header.ring.min(job.rings), p.header.rank.min(job.ranks)))
        };
        let noted =
            noted.map(|p| anyhow::Ok((place(&p)?, p))).collect::<Result<BTreeMap<_, _>>>()?;
        let expected = std::mem::take(&mut self.model.claims);
        ensure!(noted == expected, "first packets noted: {noted:02x?}, should be {expected:02x?}");
        for (&ring, before) in [RingNumber::NONE].iter().chain(&rings(settings)).zip(&self.before) {
            let now = self.bench.plane.counters(ring)?;
            for (i, &counter) in Counter::ALL.iter().enumerate() {
                let (got, expected) = (now[i] - before[i], self.model.counter(ring, counter));
                ensure!(
                    got == expected,
                    "ring {ring}: {} is {got}, should be {expected}",
                    counter.name()
                );
            }
        }
        for Setting { ring, flows, .. } in settings {
            let (expected, state) =
                (self.model.ring(ring.id), self.bench.plane.ring_state(ring.id)?);
            ensure!(
                state == expected.state,
                "ring {}: {state:?}, should be {:?}",
                ring.id,
                expected.state
            );
            let slots = self.bench.plane.slots(ring.id)?;
            for (i, (got, expected)) in slots.iter().zip(&expected.slots).enumerate() {
                ensure!(
                    got == expected,
                    "ring {}, slot {i}: {got:?}, should be {expected:?}",
                    ring.id
                );
            }
            // Durations vary between runs; their number does not.
            let timing = self.bench.plane.timing(ring.id)?;
            let of_rank = |r: &RankTiming| (r.late.count(), r.last);
            let timed: Vec<_> =
                timing.ranks[..ring.config.members as usize].iter().map(of_rank).collect();
            ensure!(
                timed == expected.timed,
                "ring {}: timed {timed:?}, should be {:?}",
                ring.id,
                expected.timed
            );
            let (got, expected) =
                (timing.completion.count(), expected.timed.iter().map(|t| t.1).sum::<u64>());
            ensure!(got == expected, "ring {}: timed {got} sums, should be {expected}", ring.id);
            for flow in flows {
                let (got, expected) =
                    (self.bench.plane.flow_stats(flow.key())?, self.model.flow_stats(&flow.key()));
                ensure!(
                    Some(got) == expected,
                    "rank {}: {got:02x?}, should be {expected:02x?}",
                    flow.member
                );
            }
        }
        Ok(())
    }
}

fn rings(settings: &[Setting]) -> Vec<RingNumber> {
    settings.iter().map(|s| s.ring.id).collect()
}

fn agree(program: &str, out: &Outcome, verdict: Verdict, frame: &[u8]) -> Result<()> {
    ensure!(
        out.action == verdict as u32,
        "{program}: verdict {}, should be {verdict:?}",
        out.action
    );
    // A dropped packet is not visible.
    if verdict != Verdict::Drop && out.packet != frame {
        let at = out.packet.iter().zip(frame).position(|(a, b)| a != b).unwrap_or(frame.len());
        bail!(
            "{program}: byte {at} differs:\n  is        {}\n  should be {}",
            hex(&out.packet),
            hex(frame)
        );
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
