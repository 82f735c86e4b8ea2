//! `netsum`: the daemon of the box, and its administration.

use std::process::ExitCode;

use clap::Parser as _;
use netsum_aggregator::cli::{self, Cli, Command};
use netsum_aggregator::config::Config;
use netsum_aggregator::daemon::run;

fn main() -> ExitCode {
    // Wrong usage ends here, with exit code 2.
    let cli = Cli::parse();
    let daemon = matches!(cli.command, Command::Run { .. });
    let level = if daemon { "info" } else { "warn" };
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or(level)).init();
    let result = match cli.command {
        Command::Run { ref config, reset } => match Config::read(config) {
            Ok(config) => run::run(&config, reset),
            Err(e) => Err(e.into()),
        },
        _ => administer(cli),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("netsum: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn administer(cli: Cli) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(cli::execute(cli, &mut std::io::stdout().lock()))
}
