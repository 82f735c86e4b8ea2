//! Compares two BPF objects by what the kernel gets: instructions, data and maps. Debug information
//! may differ.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget, SectionKind, SymbolKind};

/// A section's bytes and relocations: offset, symbol.
#[derive(PartialEq, Eq, Default)]
struct Section {
    bytes: Vec<u8>,
    relocations: BTreeSet<(u64, String)>,
}

/// The differences of the objects.
///
/// # Errors
/// If one is not an object file.
pub fn differences(old: &[u8], new: &[u8]) -> Result<Vec<String>> {
    let (old, new) =
        (sections(old).context("the old object")?, sections(new).context("the new object")?);
    let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    Ok(names
        .into_iter()
        .filter_map(|name| difference(name, old.get(name), new.get(name)))
        .collect())
}

fn difference(name: &str, old: Option<&Section>, new: Option<&Section>) -> Option<String> {
    match (old, new) {
        (Some(old), Some(new)) if old == new => None,
        (Some(old), Some(new)) => {
            let first = old.bytes.iter().zip(&new.bytes).position(|(a, b)| a != b);
            Some(match first {
                Some(at) => format!(
                    "section {name}: first difference at byte {at} (instruction {})",
                    at / 8
                ),
                None if old.bytes.len() != new.bytes.len() => {
                    format!("section {name}: {} bytes became {}", old.bytes.len(), new.bytes.len())
                }
                None => format!("section {name}: relocations name other symbols"),
            })
        }
        (Some(_), None) => Some(format!("section {name} was removed")),
        (None, _) => Some(format!("section {name} was added")),
    }
}

fn sections(file: &[u8]) -> Result<BTreeMap<String, Section>> {
    let object = object::File::parse(file)?;
    let mut sections = BTreeMap::new();
    for section in object.sections() {
        let name = section.name()?;
        if !matches!(
            section.kind(),
            SectionKind::Text
                | SectionKind::Data
                | SectionKind::ReadOnlyData
                | SectionKind::ReadOnlyString
        ) || name.starts_with(".BTF")
            || name.starts_with(".debug")
        {
            continue;
        }
        let mut relocations = BTreeSet::new();
        for (offset, relocation) in section.relocations() {
            if let RelocationTarget::Symbol(index) = relocation.target() {
                relocations.insert((offset, symbol(&object, index)?));
            }
        }
        sections.insert(name.to_owned(), Section { bytes: section.data()?.to_vec(), relocations });
    }
    Ok(sections)
}

/// A symbol's section and address. Its name may contain a hash of the compiler's.
fn symbol(object: &object::File<'_>, index: object::SymbolIndex) -> Result<String> {
    let symbol = object.symbol_by_index(index)?;
    let place = match symbol.section_index() {
        Some(section) => object.section_by_index(section)?.name()?.to_owned(),
        None => symbol.name()?.to_owned(),
    };
    let address = if symbol.kind() == SymbolKind::Section { 0 } else { symbol.address() };
    Ok(format!("{place}+{address}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn committed() -> Vec<u8> {
        std::fs::read(crate::paths::root().unwrap().join("objects/netsum.bpf.o")).unwrap()
    }

    #[test]
    fn an_object_equals_itself_and_has_programs() {
        let object = committed();
        assert_eq!(differences(&object, &object).unwrap(), Vec::<String>::new());
        let sections = sections(&object).unwrap();
        assert!(sections["xdp"].bytes.len() > 100);
        assert!(!sections["xdp"].relocations.is_empty());
        assert!(!sections.keys().any(|name| name.contains("debug") || name.contains("BTF")));
    }

    #[test]
    fn a_changed_instruction_is_found() {
        let old = committed();
        let mut new = old.clone();
        let (offset, _) = {
            let object = object::File::parse(&*old).unwrap();
            object.section_by_name("xdp").unwrap().file_range().unwrap()
        };
        new[offset as usize + 17] ^= 1;
        assert_eq!(
            differences(&old, &new).unwrap(),
            ["section xdp: first difference at byte 17 (instruction 2)"]
        );
    }

    #[test]
    fn a_file_of_another_kind_is_refused() {
        assert!(differences(b"nonsense", &committed()).is_err());
    }
}
