//! Writes a benchmark's figures to files.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

/// Options of all benchmarks.
#[derive(clap::Args, Debug)]
pub struct Keep {
    /// Also write all figures to this file; `-` prints them instead of the tables.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Also draw the figures into this file.
    #[arg(long)]
    svg: Option<PathBuf>,
}

impl Keep {
    fn prints_json(&self) -> bool {
        self.json.as_deref() == Some(Path::new("-"))
    }

    /// Prints a part of the tables, unless JSON is printed instead.
    pub fn print(&self, text: impl std::fmt::Display) {
        if !self.prints_json() {
            print!("{text}");
        }
    }

    /// Writes the files that were asked for.
    ///
    /// # Errors
    /// If it cannot be written or drawn.
    pub fn write(
        &self,
        figures: &impl Serialize,
        picture: impl FnOnce() -> Result<String>,
    ) -> Result<()> {
        if let Some(path) = &self.json {
            let json = serde_json::to_string_pretty(figures)? + "\n";
            if self.prints_json() {
                print!("{json}");
            } else {
                std::fs::write(path, json).with_context(|| path.display().to_string())?;
            }
        }
        if let Some(path) = &self.svg {
            std::fs::write(path, picture()?).with_context(|| path.display().to_string())?;
        }
        Ok(())
    }
}
