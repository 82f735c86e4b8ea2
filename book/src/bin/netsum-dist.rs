//! What is made of the command line: man pages, completions, schemas, and the package. `cargo xtask dist` runs it.

use clap::Parser;
use netsum_book::dist;

fn main() -> anyhow::Result<()> {
    dist::run(&dist::DistArgs::parse())
}
