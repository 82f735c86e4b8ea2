//! The committed header matches the sources, and the library has the header's functions.

use std::path::Path;

use object::Endianness;
use object::elf::FileHeader64;
use object::read::elf::{ElfFile64, FileHeader, Sym};

mod library;

fn header() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("include/netsum.h"))
        .unwrap_or_default()
}

#[test]
fn the_header_is_that_of_the_sources() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let builder = cbindgen::Builder::new().with_config(config).with_src(folder.join("src/lib.rs"));
    let mut made = Vec::new();
    builder.generate().unwrap().write(&mut made);
    let made =
        String::from_utf8(made).unwrap().replace("// # Safety\n", "// The caller promises:\n");
    if header() != made {
        let new = Path::new(env!("CARGO_TARGET_TMPDIR")).join("netsum.h");
        std::fs::write(&new, made).unwrap();
        panic!(
            "worker/c/include/netsum.h does not match the sources: replace it by {}",
            new.display()
        );
    }
}

/// Its functions: names before a bracket, at the end of their type.
fn functions() -> Vec<String> {
    let header = header();
    let code = header.lines().filter(|line| !line.trim_start().starts_with("//"));
    let name = |line: &str| {
        let name = line.split_once('(')?.0.rsplit([' ', '*']).next()?;
        name.starts_with("netsum_").then(|| name.to_owned())
    };
    code.filter_map(name).collect()
}

#[test]
#[cfg_attr(
    not(all(target_arch = "x86_64", target_os = "linux")),
    ignore = "the linker there does not support symbol versions"
)]
fn every_function_is_there_with_its_version() {
    let bytes = std::fs::read(library::path()).unwrap();
    let file = ElfFile64::<Endianness>::parse(&*bytes).unwrap();
    let header = FileHeader64::<Endianness>::parse(&*bytes).unwrap();
    let endian = header.endian().unwrap();
    let sections = header.sections(endian, &*bytes).unwrap();
    let versions = sections.versions(endian, &*bytes).unwrap().expect("versions of symbols");
    let symbols = file.elf_dynamic_symbol_table();
    let mut found: Vec<(String, String)> = Vec::new();
    for (index, symbol) in symbols.enumerate() {
        let name =
            String::from_utf8_lossy(symbols.symbol_name(endian, symbol).unwrap()).into_owned();
        if symbol.st_shndx(endian) != object::elf::SHN_UNDEF {
            let version = versions.version(versions.version_index(endian, index)).unwrap();
            let version = version.map(|v| String::from_utf8_lossy(v.name()).into_owned());
            found.push((name, version.unwrap_or_default()));
        }
    }
    found.sort();
    let mut wanted: Vec<_> =
        functions().into_iter().map(|name| (name, "NETSUM_1".to_owned())).collect();
    wanted.sort();
    assert_eq!(found, wanted);
}
