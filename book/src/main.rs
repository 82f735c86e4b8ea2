//! `netsum-book [FOLDER]`: builds the book.

use std::path::PathBuf;

use clap::Parser;

/// Builds the book, and checks its links.
#[derive(Parser)]
struct Arguments {
    /// Where it goes.
    #[arg(default_value = "target/book")]
    folder: PathBuf,
}

fn main() -> anyhow::Result<()> {
    let Arguments { folder } = Arguments::parse();
    let links = netsum_book::build(&folder)?;
    println!("{links} links checked: {}", folder.join("index.html").display());
    Ok(())
}
