//! Reference pages that are generated from the programs, and from the results of tests.

use std::fmt::Write as _;

use clap::CommandFactory as _;
use netsum_cli::{Cli, failure};
use netsum_collective::call::Op;
use netsum_collective::numeric::element::Dtype;
use netsum_collective::numeric::operators::{Encoding, encoding};
use netsum_common::counters::{Counter, Kind};

/// Names and texts of the pages.
pub fn pages() -> [(&'static str, String); 4] {
    [
        ("cli.md", command_line()),
        ("counters.md", counters()),
        ("operators.md", operators()),
        ("conformance.md", conformance()),
    ]
}

fn command_line() -> String {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let mut text = String::from(
        "# Command line\n\n`netsum OBJECT COMMAND`, as in bpftool. The man pages have the same \
         text. `netsum-perf --help` describes `netsum-perf`.\n\n## Exit codes\n\n\
         | code | meaning |\n| --- | --- |\n",
    );
    for (code, meaning) in failure::EXIT_STATUS.lines().filter_map(|line| line.split_once("  ")) {
        let _ = writeln!(text, "| {} | {} |", code.trim(), meaning.trim());
    }
    page(&mut command, "netsum", &mut text);
    text
}

fn page(command: &mut clap::Command, name: &str, text: &mut String) {
    let help = command.render_long_help();
    let _ = write!(text, "\n## {name}\n\n```text\n{}\n```\n", help.to_string().trim());
    for sub in command.get_subcommands_mut().filter(|sub| sub.get_name() != "help") {
        let name = format!("{name} {}", sub.get_name());
        page(sub, &name, text);
    }
}

fn counters() -> String {
    let mut text = String::from(
        "# Counters\n\nThe data plane's counters, for each job and for packets outside jobs. \
         `netsum stats` shows them. Names are those of `rdma statistic` where the meaning is the \
         same. Whatever the programs refuse of a flow is counted.\n",
    );
    for (kind, title) in [
        (Kind::Work, "Work"),
        (Kind::Pass, "Passed on to the bridge"),
        (Kind::Drop, "Dropped, and why"),
    ] {
        let _ = write!(text, "\n## {title}\n\n| counter | what it counts |\n| --- | --- |\n");
        for counter in Counter::ALL.iter().filter(|counter| counter.kind() == kind) {
            let _ = writeln!(text, "| `{}` | {} |", counter.name(), counter.help());
        }
    }
    text
}

/// What each operator sends on each type, from the function that decides it.
fn operators() -> String {
    let mut text = String::from(
        "# Operators and types\n\nThe box adds 32-bit integers. Each rank encodes its elements as \
         such integers, so that from their sums every rank computes the result, with the same bits \
         at every rank: by the box, and by the hosts' ring. The table says how many bytes a rank \
         sends for each byte of its elements.\n\n| type |",
    );
    for op in Op::ALL {
        let _ = write!(text, " {op} |");
    }
    let _ = write!(text, "\n| --- |{}\n", " --- |".repeat(Op::ALL.len()));
    for dtype in Dtype::ALL {
        let _ = write!(text, "| {dtype} |");
        for op in Op::ALL {
            let cost = match (encoding(dtype, op), dtype.bytes()) {
                (None, _) => "",
                (Some(Encoding::Lanes), 2) if !dtype.is_scaled() => "2",
                (Some(Encoding::Halves), _) => "2",
                (Some(Encoding::Lanes), _) => "1",
                (Some(Encoding::Limbs), _) => "1.5",
                (Some(Encoding::Bits), _) if dtype == Dtype::Bool => "B / 8",
                (Some(Encoding::Bits), _) => "B",
                (Some(Encoding::Gather), _) => "N",
            };
            let _ = write!(text, " {cost} |");
        }
        text.push('\n');
    }
    text.push_str(
        "\n- N is the number of ranks: each gets the values of all, and combines them in the order \
         of the ranks. With many ranks that is slow; use it for few elements.\n\
         - B is 32 / F, where a lane has F fields that count up to N: 2 with 2 or 3 ranks, 3.2 \
         with 4 to 7, 4 with 8 to 15, 5.3 with 16 to 31, 6.4 with 32 to 63, and 8 with 64.\n\
         - An empty cell is an error. PyTorch's averages of integers are sums as int64 that \
         netsum's backend divides.\n\
         - Sums and products of integers wrap. A sum of bool is the or, a product the and.\n\
         - Products of floats and sums of f64 are rounded after each rank, in the order of the \
         ranks. Sums of f32, f16 and bf16 have [a scale for each block of \
         1,024](../concepts/numbers.md), and up to 4,096 elements take 8 to 16 bytes each.\n\
         - In a minimum or maximum a NaN of any rank is the result, and -0 is less than +0.\n\
         - Python and PyTorch call the types int8 to uint64, float16, bfloat16, float32, float64 and bool, C \
         `NETSUM_INT8` and so on.\n",
    );
    text
}

/// Results of `python -m conformance --write`: a version, then topic, case, Gloo's and netsum's
/// outcome.
const CONFORMANCE: &str = include_str!("../../python/tests/conformance/table.tsv");

fn conformance() -> String {
    let (version, rows) = CONFORMANCE.split_once('\n').unwrap_or_default();
    let rows: Vec<Vec<&str>> = rows.lines().map(|row| row.split('\t').collect()).collect();
    let count = |backend: usize, kind: &str| {
        rows.iter().filter(|row| row[backend].starts_with(kind)).count()
    };
    let mut text = format!(
        "# PyTorch, case by case\n\nCalls of `torch.distributed`, and models that train with \
         them, on Gloo and on netsum without a box: {} cases with {version}, 4 ranks, CPU. \
         `python -m conformance --write` in `python/tests` runs the cases and writes the table \
         for this page. `cargo xtask test --torch pypi` checks netsum's column. A case in which \
         Gloo hangs may crash it the next time.\n\nWith PyTorch 2.7 the cases end alike, except \
         four that it lacks, ten in which Gloo or PyTorch itself fails too (`reduce` of complex \
         numbers, `monitored_barrier` over another backend than Gloo, `Schedule1F1B`), and FSDP2 \
         on a mesh of 2 x 2, where an assertion fails and Gloo is refused.\n\n\
         | outcome | meaning | Gloo | netsum |\n| --- | --- | --- | --- |\n",
        rows.len()
    );
    for (kind, meaning) in [
        ("right", "the result is correct"),
        ("refused", "an error, whose first words follow; correct for a mistaken call"),
        ("differs", "the numbers differ from Gloo's, for the reason that follows"),
        (
            "wrong",
            "wrong numbers without an error, an accepted mistake, or an error without a cause",
        ),
        ("hang", "ranks did not return"),
        ("crash", "a process ended"),
        ("skipped", "for the reason that follows"),
    ] {
        let _ = writeln!(text, "| {kind} | {meaning} | {} | {} |", count(2, kind), count(3, kind));
    }
    let cell = |text: &str| match text.split_once(": ") {
        Some((kind, more)) => format!("{kind}: `{}`", more.replace('`', "'")),
        None => text.to_owned(),
    };
    let mut topic = "";
    for row in &rows {
        if row[0] != topic {
            topic = row[0];
            let _ = write!(text, "\n## {topic}\n\n| case | Gloo | netsum |\n| --- | --- | --- |\n");
        }
        let _ = writeln!(
            text,
            "| {} | {} | {} |",
            row[1].replace('_', "\\_"),
            cell(row[2]),
            cell(row[3])
        );
    }
    text
}
