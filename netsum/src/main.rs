//! `netsum`: the daemon of the box, and its administration.

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;
use netsum_agent::config::Config;
use netsum_agent::run;
use netsum_cli::args::FabricCommand;
use netsum_cli::failure::{Failure, Kind, Result};
use netsum_cli::{Cli, Command};
use netsum_program::execute;
use netsum_program::journal::Journal;

fn main() -> ExitCode {
    // Wrong usage exits here, with exit code 2.
    let cli = Cli::parse();
    let daemon =
        matches!(cli.command, Command::Run { .. } | Command::Fabric(FabricCommand::Run { .. }));
    let level = if daemon { "info" } else { "warn" };
    let filter = env_logger::Env::default().default_filter_or(level);
    let logger = env_logger::Builder::from_env(filter).build();
    log::set_max_level(logger.filter());
    let journal = if daemon { Journal::open(logger) } else { Err(logger) };
    let to_journal = journal.is_ok();
    let logger =
        journal.map_or_else(|terminal| Box::new(terminal) as Box<dyn log::Log>, |j| Box::new(j));
    // This fails only if there is a logger already, and this is the first one.
    log::set_boxed_logger(logger).unwrap_or_else(|e| eprintln!("netsum: {e}"));
    let result = match cli.command {
        Command::Run { ref config, reset, detach_now } => match Config::read(config) {
            Ok(read) => run::run(config, &read, reset, detach_now).map_err(Failure::from),
            Err(e) => Err(Failure::from(anyhow::Error::from(e))),
        },
        Command::Fabric(FabricCommand::Run { ref config }) => {
            let read = netsum_fabric::config::Config::read(config);
            read.and_then(|read| netsum_fabric::run::run(&read)).map_err(Failure::from)
        }
        _ => administer(cli),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            match &*failure.message {
                "" => {}
                _ if to_journal => log::error!("{failure}"),
                _ => eprintln!("netsum: {failure}"),
            }
            ExitCode::from(failure.kind as u8)
        }
    }
}

fn administer(cli: Cli) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::new(Kind::Failed, e.to_string()))?;
    // Colours if the terminal shows them and NO_COLOR is not set.
    let mut out = anstream::stdout().lock();
    let result = runtime.block_on(execute(cli, &mut out)).and_then(|()| Ok(out.flush()?));
    match result {
        // A closed pipe, as in `netsum ... | head`, is not an error.
        Err(e) if e.kind == Kind::Failed && e.is_broken_pipe() => Ok(()),
        result => result,
    }
}
