//! The program `netsum`: the daemon and its command line, and the two commands that inspect this
//! machine themselves.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`check`] | `netsum check`: a machine before the first start |
//! | [`journal`] | the daemon's log where systemd reads it |
//! | [`simulate`] | `netsum simulate`: captured frames through a copy of the programs |

pub mod check;
pub mod journal;
pub mod simulate;

use std::io::Write;

use netsum_cli::client::Client;
use netsum_cli::command::one;
use netsum_cli::failure::{Failure, Result};
use netsum_cli::format::Format;
use netsum_cli::{Cli, Command, plan, top, trace, view};

/// Runs a command other than `run`, and prints the daemon's answer.
///
/// # Errors
/// Why it failed. With `--json` that is printed already, and the message is empty.
pub async fn execute(cli: Cli, out: &mut impl Write) -> Result<()> {
    let format = Format::new(cli.json, cli.pretty);
    let done = async {
        if let Command::Check { config, bridge } = cli.command {
            return check::run(out, format, config.as_deref(), bridge).await;
        }
        if let Command::Plan(args) = &cli.command {
            return plan::run(args, format, out);
        }
        match cli.command {
            Command::Top { fabric: false } => {
                return top::run::<top::model::Model>(&cli.socket).await;
            }
            Command::Top { fabric: true } => {
                return top::run::<top::fabric::Fabric>(&cli.socket).await;
            }
            _ => {}
        }
        let mut client = Client::connect(&cli.socket).await?;
        match cli.command {
            Command::Trace(args) => trace::run(args, format, &mut client, out).await,
            Command::Simulate(args) => simulate::run(args, format, &mut client, out).await,
            command => one(command, format, &mut client, out).await,
        }
    };
    let Err(failure) = done.await else { return Ok(()) };
    let error = view::Error { error: failure.message.clone(), exit: failure.kind as u8 };
    if !failure.message.is_empty() && format.json(out, &error)? {
        return Err(Failure::new(failure.kind, ""));
    }
    Err(failure)
}
