//! Checks the tables of modules at the top of crates: each names all its modules.

use std::path::Path;

/// The crates with such a table, and the module of `netsum-worker` that has one.
const TABLES: [&str; 15] = [
    "aggregator-ebpf/src/lib.rs",
    "aggregator/agent/src/lib.rs",
    "aggregator/cli/src/lib.rs",
    "aggregator/controller/src/lib.rs",
    "aggregator/core/src/lib.rs",
    "aggregator/dataplane/src/lib.rs",
    "common/src/lib.rs",
    "fabric/src/lib.rs",
    "lab/src/lib.rs",
    "papers/src/lib.rs",
    "plan/src/lib.rs",
    "worker/collective/src/lib.rs",
    "worker/rc/src/lib.rs",
    "worker/src/comm/mod.rs",
    "worker/src/lib.rs",
];

/// Modules that the table does not name, except those of tests.
fn missing(source: &str) -> Vec<&str> {
    let table: String = source.lines().filter(|line| line.starts_with("//! |")).collect();
    let lines: Vec<&str> = source.lines().collect();
    let modules = lines.windows(2).filter(|pair| !pair[0].starts_with("#[cfg(test)]"));
    modules
        .filter(|pair| pair[1].starts_with("mod ") || pair[1].starts_with("pub"))
        .filter_map(|pair| Some(pair[1].split_once("mod ")?.1))
        .filter_map(|rest| rest.strip_suffix(';'))
        .filter(|name| !table.contains(&format!("`{name}`")))
        .collect()
}

#[test]
fn tables_name_all_modules() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for file in TABLES {
        let source = std::fs::read_to_string(root.join(file)).unwrap();
        assert_eq!(missing(&source), [""; 0], "{file}");
    }
}

#[test]
fn a_module_that_the_table_lacks_is_found() {
    let source =
        "//! | `a` | first |\n\nmod a;\npub mod b;\npub(crate) mod c;\n#[cfg(test)]\nmod tests;\n";
    assert_eq!(missing(source), ["b", "c"]);
}
