//! Lines of text: an object has one line, its attributes lines of their own, indented; columns are
//! aligned over all objects.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};

/// Names of objects.
pub const NAME: Style = AnsiColor::Cyan.on_default().bold();
/// All is well.
pub const GOOD: Style = AnsiColor::Green.on_default();
/// Not yet, or not quite.
pub const FAIR: Style = AnsiColor::Yellow.on_default();
/// Broken.
pub const BAD: Style = AnsiColor::Red.on_default();
/// Without a colour.
pub const PLAIN: Style = Style::new();

/// A cell of a line.
#[derive(Clone, Debug)]
pub struct Cell {
    text: String,
    style: Style,
}

pub fn plain(text: impl Into<String>) -> Cell {
    styled(text, PLAIN)
}

pub fn styled(text: impl Into<String>, style: Style) -> Cell {
    Cell { text: text.into(), style }
}

pub fn attribute(key: &str, value: impl std::fmt::Display) -> Cell {
    plain(format!("{key} {value}"))
}

/// An object.
#[derive(Clone, Debug)]
pub struct Entry {
    head: Vec<Cell>,
    /// Lines of attributes; those with the same number are aligned with each other.
    attributes: Vec<(usize, Vec<Cell>)>,
}

impl Entry {
    /// An object's first line.
    pub fn new(head: Vec<Cell>) -> Self {
        Self { head, attributes: Vec::new() }
    }

    /// A line of attributes of some kind.
    pub fn attributes(&mut self, kind: usize, cells: Vec<Cell>) {
        self.attributes.push((kind, cells));
    }
}

/// Prints objects.
pub fn print(out: &mut impl Write, entries: &[Entry]) -> io::Result<()> {
    let heads = widths(entries.iter().map(|e| &e.head));
    let kinds =
        entries.iter().flat_map(|e| &e.attributes).map(|(kind, _)| kind + 1).max().unwrap_or(0);
    let of_kind = |kind: usize| {
        let lines = entries.iter().flat_map(|e| &e.attributes);
        widths(lines.filter(move |(k, _)| *k == kind).map(|(_, cells)| cells))
    };
    let attributes: Vec<Vec<usize>> = (0..kinds).map(of_kind).collect();
    for entry in entries {
        line(out, "", &entry.head, &heads)?;
        for (kind, cells) in &entry.attributes {
            line(out, "\t", cells, &attributes[*kind])?;
        }
    }
    Ok(())
}

fn widths<'a>(lines: impl Iterator<Item = &'a Vec<Cell>>) -> Vec<usize> {
    let mut widths = Vec::new();
    for cells in lines {
        widths.resize(widths.len().max(cells.len()), 0);
        for (width, cell) in widths.iter_mut().zip(cells) {
            *width = cell.text.chars().count().max(*width);
        }
    }
    widths
}

fn line(out: &mut impl Write, indent: &str, cells: &[Cell], widths: &[usize]) -> io::Result<()> {
    write!(out, "{indent}")?;
    for (i, (cell, width)) in cells.iter().zip(widths).enumerate() {
        let Cell { text, style } = cell;
        write!(out, "{style}{text}{style:#}")?;
        // Nothing behind the last one.
        if i + 1 < cells.len() {
            let gap = if text.ends_with(':') { 1 } else { 2 };
            write!(out, "{:1$}", "", width - text.chars().count() + gap)?;
        }
    }
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_over_objects_and_nothing_trails() {
        let entry = |name: &str, mtu: u32| {
            let mut entry =
                Entry::new(vec![styled(name, NAME), attribute("mtu", mtu), plain("end")]);
            entry.attributes(0, vec![attribute("memory", mtu), plain("x")]);
            entry
        };
        let mut out = anstream::StripStream::new(Vec::new());
        print(&mut out, &[entry("a:", 256), entry("longer:", 1024)]).unwrap();
        let text = String::from_utf8(out.into_inner()).unwrap();
        assert_eq!(
            text,
            "a:      mtu 256   end\n\tmemory 256   x\nlonger: mtu 1024  end\n\tmemory 1024  x\n"
        );
    }
}
