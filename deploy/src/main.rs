//! Generates files from the command line: man pages, completions, schemas, and the packages. `cargo
//! xtask dist` runs it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Parser;
use netsum_cli::schema;

mod debian;
mod dist;

/// Man pages, shell completions, the schemas of the JSON, and the Debian package.
#[derive(clap::Parser, Debug)]
#[command(name = "cargo xtask dist", bin_name = "cargo xtask dist")]
struct DistArgs {
    /// Where the man pages and completions go; target/dist by default.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Write the JSON schemas to netsum/schema instead.
    #[arg(long, conflicts_with = "out")]
    schema: bool,
    /// Make the Debian packages: the box's, which has all this, the daemon, its unit and a
    /// configuration; and the hosts'.
    #[arg(long, conflicts_with = "schema")]
    deb: bool,
    /// With --deb: the folder of programs that are built already.
    #[arg(long, value_name = "FOLDER", requires = "deb")]
    programs: Option<PathBuf>,
}

fn main() -> Result<()> {
    let args = DistArgs::parse();
    if args.schema {
        let folder = root()?.join("netsum/schema");
        fs::create_dir_all(&folder)?;
        for s in schema::all() {
            write(&folder.join(s.file), schema::text(&s.schema).as_bytes())?;
        }
        println!("schemas: {}", folder.display());
        return Ok(());
    }
    let out = match &args.out {
        Some(out) => out.clone(),
        None => root()?.join("target/dist"),
    };
    if args.deb {
        for package in debian::build(args.programs.as_deref(), &out)? {
            println!("{}", package.display());
        }
        return Ok(());
    }
    let (man, completions) = (out.join("man"), out.join("completions"));
    fs::create_dir_all(&man)?;
    fs::create_dir_all(&completions)?;
    let pages = dist::man_pages()?;
    for (name, page) in &pages {
        write(&man.join(name), page)?;
    }
    for (path, text) in dist::completions()? {
        write(&completions.join(path.file_name().context("a file")?), &text)?;
    }
    println!("{} man pages: {}", pages.len(), man.display());
    println!("completions for bash, zsh and fish: {}", completions.display());
    Ok(())
}

/// The project's folder.
fn root() -> Result<&'static Path> {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("this folder has no parent")
}

fn write(path: &Path, content: &[u8]) -> Result<()> {
    fs::write(path, content).with_context(|| path.display().to_string())
}
