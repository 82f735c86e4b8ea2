//! Texts that people write: the daemon's configuration, sizes, addresses, command lines.

use std::path::Path;

use clap::Parser as _;
use netsum_agent::config::{Config, Ports};
use netsum_cli::Cli;
use netsum_common::size::Size;
use netsum_controller::message::{mac_from_text, mac_text};

/// Parses a text.
pub fn run(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    // The first line chooses the kind of text, and mutations of the rest keep it.
    match text.split_once('\n') {
        Some(("size", text)) => size(text),
        Some(("mac", text)) => mac(text),
        Some(("command", text)) => command_line(text),
        _ => configuration(&text),
    }
}

fn configuration(text: &str) {
    let path = Path::new("netsum.toml");
    match Config::parse(path, text) {
        Ok(config) => {
            assert!(config.memory > 0);
            assert!(
                !config.heartbeat.is_zero() && config.heartbeat_timeout >= 2 * config.heartbeat
            );
            assert!(!matches!(&config.ports, Ports::List(list) if list.is_empty()));
            assert_eq!(Config::parse(path, text).ok(), Some(config));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn size(text: &str) {
    let Ok(size) = text.parse::<Size>() else { return };
    assert!(text.starts_with(|c: char| c.is_ascii_digit()));
    assert_eq!(size.0.to_string().parse::<Size>().map(|s| s.0), Ok(size.0));
    assert!(size.to_string().ends_with('B'));
}

fn mac(text: &str) {
    if let Some(mac) = mac_from_text(text) {
        assert_eq!(mac_text(mac), text.to_ascii_lowercase(), "two texts for one address");
    }
}

fn command_line(text: &str) {
    // Any command line is accepted, or refused with a reason.
    let words = ["netsum"].into_iter().chain(text.split_whitespace());
    if let Err(error) = Cli::try_parse_from(words) {
        assert!(!error.to_string().is_empty());
    }
}
