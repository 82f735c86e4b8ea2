//! Man pages and shell completions, generated from the command line.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::CommandFactory as _;
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use netsum_cli::{Cli, failure};

/// Completions, and where shells look for them under /usr/share.
pub fn completions() -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let place = |shell, folder: &str, name: &str| {
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut Cli::command(), "netsum", &mut text);
        Ok((Path::new(folder).join(name), text))
    };
    [
        (Shell::Bash, "bash-completion/completions", "netsum"),
        (Shell::Zsh, "zsh/vendor-completions", "_netsum"),
        (Shell::Fish, "fish/vendor_completions.d", "netsum.fish"),
    ]
    .into_iter()
    .map(|(shell, folder, name)| place(shell, folder, name))
    .collect()
}

/// The manual: a page for `netsum`, and one for each of its commands, in section 8 like bpftool's.
pub fn man_pages() -> Result<Vec<(String, Vec<u8>)>> {
    let mut top = without_help(Cli::command());
    // The exit codes in `--help` have a section of their own here.
    let short = top.get_after_help().map(ToString::to_string).unwrap_or_default();
    top = top.after_long_help(short);
    top.build();
    let mut pages = Vec::new();
    page(&top, "netsum", true, &mut pages)?;
    Ok(pages)
}

/// A command without `help`, which gets no page.
fn without_help(command: clap::Command) -> clap::Command {
    command.disable_help_subcommand(true).mut_subcommands(without_help)
}

fn page(
    command: &clap::Command,
    name: &str,
    top: bool,
    pages: &mut Vec<(String, Vec<u8>)>,
) -> Result<()> {
    let man = Man::new(command.clone()).section("8").manual("netsum").title(name.to_uppercase());
    let mut page = Vec::new();
    man.render(&mut page)?;
    if top {
        let mut roff = Roff::new();
        roff.control("SH", ["EXIT STATUS"]);
        for line in failure::EXIT_STATUS.lines() {
            let (code, meaning) = line.split_once("  ").context("a line of the exit codes")?;
            roff.control("TP", []);
            roff.text([bold(code)]);
            roff.text([roman(meaning)]);
        }
        roff.control("SH", ["ENVIRONMENT"]);
        for (variable, meaning) in [
            ("NETSUM_SOCKET", "the daemon's administration socket, as --socket"),
            ("NO_COLOR", "no colours, also on a terminal"),
            (
                "RUST_LOG",
                "what is logged to standard error, or by a service to the journal, as \
                 env_logger(3) takes it",
            ),
        ] {
            roff.control("TP", []);
            roff.text([bold(variable)]);
            roff.text([roman(meaning)]);
        }
        roff.control("SH", ["FILES"]);
        for (file, meaning) in [
            ("/etc/netsum/netsum.toml", "the daemon's configuration"),
            ("/run/netsum/netsum.sock", "its administration socket"),
            (
                "/var/lib/netsum/jobs.json",
                "the jobs that it creates again at every start, with their tokens",
            ),
        ] {
            roff.control("TP", []);
            roff.text([bold(file)]);
            roff.text([roman(meaning)]);
        }
        roff.to_writer(&mut page)?;
    }
    pages.push((format!("{name}.8"), page));
    for sub in command.get_subcommands() {
        self::page(sub, &format!("{name}-{}", sub.get_name()), false, pages)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_and_the_first_one_the_exit_codes() {
        let pages = man_pages().unwrap();
        let text = |name: &str| {
            let (_, page) =
                pages.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no {name}"));
            String::from_utf8(page.clone()).unwrap()
        };
        for name in [
            "netsum.8",
            "netsum-job.8",
            "netsum-job-create.8",
            "netsum-stats.8",
            "netsum-slot-show.8",
        ] {
            assert!(
                text(name).contains(".SH NAME") && text(name).contains(".SH SYNOPSIS"),
                "{name}"
            );
        }
        assert!(
            text("netsum.8").contains(".SH \"EXIT STATUS\"")
                && text("netsum.8").contains("no daemon answers")
        );
        // Pages refer only to pages that exist.
        for (name, page) in &pages {
            let text = String::from_utf8_lossy(page).replace('\\', "");
            for word in text.split_whitespace().filter_map(|w| w.strip_suffix("(8)")) {
                assert!(pages.iter().any(|(n, _)| *n == format!("{word}.8")), "{name}: {word}");
            }
        }
        assert!(text("netsum-job-create.8").contains("Path MTU"));
    }

    #[test]
    fn completions_know_objects_and_options() {
        for (path, text) in completions().unwrap() {
            let text = String::from_utf8(text).unwrap();
            for word in ["ring", "diagnose", "show-token", "message-size"] {
                assert!(text.contains(word), "{}: {word}", path.display());
            }
        }
    }
}
