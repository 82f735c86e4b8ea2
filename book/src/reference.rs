//! Pages of the reference that are made from the programs.

use std::fmt::Write as _;

use clap::CommandFactory as _;
use netsum_cli::{Cli, failure};
use netsum_common::counters::{Counter, Kind};

/// Their names and texts.
pub fn pages() -> [(&'static str, String); 2] {
    [("cli.md", command_line()), ("counters.md", counters())]
}

fn command_line() -> String {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let mut text = String::from(
        "# Command line\n\n`netsum OBJECT COMMAND`, as in bpftool; `netsum-perf` is described in its `--help`. Man pages have the same.\n\n\
         ## Exit codes\n\n| code | meaning |\n| --- | --- |\n",
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
        "# Counters\n\nWhat the data plane counts, for each job, and under no job for packets that belong to none. `netsum stats` shows \
         them; names are those of `rdma statistic` where the meaning is the same. What the programs refuse of a flow has one of these.\n",
    );
    for (kind, title) in
        [(Kind::Work, "Work"), (Kind::Pass, "Passed on to the bridge"), (Kind::Drop, "Dropped, and why")]
    {
        let _ = write!(text, "\n## {title}\n\n| counter | what it counts |\n| --- | --- |\n");
        for counter in Counter::ALL.iter().filter(|counter| counter.kind() == kind) {
            let _ = writeln!(text, "| `{}` | {} |", counter.name(), counter.help());
        }
    }
    text
}
