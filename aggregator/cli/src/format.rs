//! Text or JSON.

use std::io::Write;

use serde::Serialize;

use super::failure::Result;
use super::layout::{self, Entry};

/// How to print.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// For people.
    Text,
    /// For programs.
    Json,
    /// For both.
    Pretty,
}

impl Format {
    /// From the options `-j` and `-p`.
    pub fn new(json: bool, pretty: bool) -> Self {
        match (json, pretty) {
            (_, true) => Self::Pretty,
            (true, false) => Self::Json,
            (false, false) => Self::Text,
        }
    }

    /// Prints a value as JSON, or its items as text.
    pub fn show<T>(
        self,
        out: &mut impl Write,
        value: &impl Serialize,
        items: &[T],
        entry: impl FnMut(&T) -> Entry,
    ) -> Result<()> {
        if !self.json(out, value)? {
            layout::print(out, &items.iter().map(entry).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// Prints JSON, if that is the format.
    pub fn json(self, out: &mut impl Write, value: &impl Serialize) -> Result<bool> {
        match self {
            Self::Text => return Ok(false),
            Self::Json => {
                writeln!(out, "{}", serde_json::to_string(value).map_err(anyhow::Error::from)?)?
            }
            Self::Pretty => {
                writeln!(
                    out,
                    "{}",
                    serde_json::to_string_pretty(value).map_err(anyhow::Error::from)?
                )?;
            }
        }
        Ok(true)
    }
}
