//! Filters of packet traces. Pure.

use netsum_common::abi::{
    MAX_CAPTURE, MAX_RINGS, MIN_CAPTURE, RingNumber, TraceEvent, TraceFilter, programs, traced_by,
};
use netsum_common::counters::{Counter, Kind};

use super::{Job, JobRing, Rank, Refusal};

/// A client's filter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TraceSelection {
    /// `None`: all rings.
    rings: Option<Vec<RingNumber>>,
    rank: Option<Rank>,
    program: Option<u32>,
    /// Counters, one bit each.
    counters: u64,
    /// Bytes of each frame.
    pub capture: u32,
}

impl TraceSelection {
    /// All packets of a job, or of the whole box, without further restrictions.
    ///
    /// # Errors
    /// If the job does not have this ring.
    pub fn new(job: Option<&Job>, ring: Option<JobRing>) -> Result<Self, Refusal> {
        let rings = match (job, ring) {
            (None, None) => None,
            (None, Some(_)) => {
                return Err(Refusal::Invalid("--ring requires --job".into()));
            }
            (Some(job), None) => Some(job.rings.iter().map(|r| r.id).collect()),
            (Some(job), Some(ring)) => Some(vec![job.ring(ring)?.id]),
        };
        Ok(Self { rings, counters: u64::MAX, capture: MIN_CAPTURE, ..Self::default() })
    }

    /// Restricts the filter to one rank.
    pub fn of_rank(mut self, rank: Option<Rank>) -> Self {
        self.rank = rank;
        self
    }

    /// Restricts the filter to packets that a program has met; an empty name means any program.
    ///
    /// # Errors
    /// If the program does not exist.
    pub fn seen_by_program(mut self, program: &str) -> Result<Self, Refusal> {
        if !program.is_empty() {
            let number = PROGRAMS.iter().position(|&name| name == program).ok_or_else(|| {
                Refusal::Invalid(format!("--program {program}: there are {}", PROGRAMS.join(", ")))
            })?;
            self.program = Some(number as u32);
        }
        Ok(self)
    }

    /// Restricts the filter to packets counted by any of these counters, or of these kinds.
    ///
    /// # Errors
    /// If a counter or kind does not exist.
    pub fn counted_by(mut self, names: &[String]) -> Result<Self, Refusal> {
        if !names.is_empty() {
            self.counters =
                names.iter().try_fold(0, |bits, name| Ok::<u64, Refusal>(bits | bits_of(name)?))?;
        }
        Ok(self)
    }

    /// Captures this many bytes of each frame, as far as possible.
    pub fn with_bytes(mut self, capture: u32) -> Self {
        self.capture = capture.clamp(MIN_CAPTURE, MAX_CAPTURE as u32);
        self
    }

    /// Whether a traced packet matches.
    pub fn has(&self, event: &TraceEvent) -> bool {
        self.rings.as_ref().is_none_or(|rings| rings.contains(&RingNumber(event.ring)))
            && self.rank.is_none_or(|rank| event.rank == rank.0)
            && self.program.is_none_or(|program| event.program == program)
            && self.counters & event.counters != 0
    }
}

/// The data plane's filter that matches what any client selects.
pub fn union<'a>(all: impl IntoIterator<Item = &'a TraceSelection>) -> TraceFilter {
    let mut filter = TraceFilter::NOTHING;
    for selection in all {
        match &selection.rings {
            None => filter.rings = TraceFilter::ALL.rings,
            Some(rings) => {
                for &RingNumber(ring) in rings.iter().filter(|r| r.0 < MAX_RINGS) {
                    filter.rings[ring as usize / 64] |= 1 << (ring % 64);
                }
            }
        }
        filter.counters |= selection.counters;
        filter.capture = filter.capture.max(selection.capture);
    }
    filter
}

/// Names of the programs, in the order of [`traced_by`].
const PROGRAMS: [&str; 3] = {
    let mut names = [""; 3];
    names[traced_by::INGRESS as usize] = programs::INGRESS;
    names[traced_by::AGGREGATE as usize] = programs::AGGREGATE;
    names[traced_by::EGRESS as usize] = programs::EGRESS;
    names
};

/// The name of a program in an event.
pub fn program_name(program: u32) -> &'static str {
    PROGRAMS.get(program as usize).copied().unwrap_or("unknown")
}

fn bits_of(name: &str) -> Result<u64, Refusal> {
    let kind = match name {
        "work" => Some(Kind::Work),
        "pass" => Some(Kind::Pass),
        "drop" => Some(Kind::Drop),
        _ => None,
    };
    let meant = |c: &&Counter| kind.map_or(c.name() == name, |kind| c.kind() == kind);
    match Counter::ALL.iter().filter(meant).fold(0, |bits, c| bits | c.bit()) {
        0 => Err(Refusal::Invalid(format!(
            "--verdict {name}: work, pass, drop, or a counter of `netsum stats`: {}",
            Counter::ALL.iter().map(|c| c.name()).collect::<Vec<_>>().join(", ")
        ))),
        bits => Ok(bits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(ring: u32, rank: u32, counters: u64) -> TraceEvent {
        TraceEvent {
            time: 0,
            counters,
            contributors: 0,
            ring,
            rank,
            index: 0,
            low: 0,
            expected: 0,
            slot_index: 0,
            slot_flags: 0,
            ifindex: 1,
            program: traced_by::AGGREGATE,
            len: 64,
            captured: 64,
            cpu: 0,
        }
    }

    #[test]
    fn verdicts_are_counters_or_kinds_of_them() {
        let all = TraceSelection::new(None, None).unwrap();
        let names = |names: &[&str]| names.iter().map(|&n| n.to_owned()).collect::<Vec<_>>();
        let drops = all.clone().counted_by(&names(&["drop", "stale"])).unwrap();
        assert!(drops.has(&event(1, 0, Counter::BadIcrc.bit() | Counter::EcnMarked.bit())));
        assert!(drops.has(&event(1, 0, Counter::Stale.bit())));
        assert!(!drops.has(&event(1, 0, Counter::Contributions.bit())));
        let error = all.counted_by(&names(&["bad"])).unwrap_err().to_string();
        assert!(
            error.contains("--verdict bad") && error.contains("rx_icrc_encapsulated"),
            "{error}"
        );
    }

    #[test]
    fn merged_filters_pass_what_any_of_them_passes() {
        let one = TraceSelection {
            rings: Some(vec![RingNumber(3), RingNumber(70)]),
            ..TraceSelection::new(None, None).unwrap()
        }
        .counted_by(&["contributions".into()])
        .unwrap();
        let other = TraceSelection {
            rings: Some(vec![RingNumber(255)]),
            ..TraceSelection::new(None, None).unwrap()
        }
        .counted_by(&["stale".into()])
        .unwrap()
        .with_bytes(9000);
        let filter = union([&one, &other]);
        assert_eq!(filter.rings, [1 << 3, 1 << 6, 0, 1 << 63]);
        assert_eq!(filter.counters, Counter::Contributions.bit() | Counter::Stale.bit());
        assert_eq!(filter.capture, MAX_CAPTURE as u32);
        assert!(one.has(&event(70, 0, u64::MAX)) && !one.has(&event(255, 0, u64::MAX)));
        assert_eq!(
            union([&one, &TraceSelection::new(None, None).unwrap()]).rings,
            TraceFilter::ALL.rings
        );
        assert_eq!(union([]), TraceFilter::NOTHING);
    }

    #[test]
    fn ranks_and_programs_are_told_apart() {
        let selection = TraceSelection::new(None, None)
            .unwrap()
            .of_rank(Some(Rank(2)))
            .seen_by_program("aggregate")
            .unwrap();
        assert!(selection.has(&event(1, 2, 1)) && !selection.has(&event(1, 1, 1)));
        assert!(!selection.has(&TraceEvent { program: traced_by::EGRESS, ..event(1, 2, 1) }));
        assert!(TraceSelection::default().seen_by_program("agg").is_err());
        assert!(TraceSelection::new(None, Some(JobRing(0))).is_err());
    }
}
