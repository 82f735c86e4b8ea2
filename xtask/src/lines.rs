//! `cargo xtask lines`: counts lines of code, without comments, blank lines and generated files.

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::Result;

use crate::paths;

/// Folders of the product. Everything else is tests, benchmarks, tools and documentation.
const PRODUCT: [&str; 10] = [
    "aggregator",
    "aggregator-ebpf",
    "api",
    "common",
    "fabric",
    "netsum",
    "plan",
    "python/netsum",
    "python/src",
    "worker",
];
/// Folders and files inside those that are not part of the product.
const APART: [&str; 4] = ["/tests/", "/benches/", "/examples/", "/tests.rs"];
/// Generated files.
const GENERATED: [&str; 2] = ["/bindings.rs", "/netsum.h"];

/// Runs `cargo xtask lines`.
///
/// # Errors
/// If git or a file cannot be read.
pub fn run() -> Result<()> {
    let root = paths::root()?;
    let files = paths::output(Command::new("git").arg("ls-files").current_dir(&root))?;
    let mut folders: BTreeMap<&str, [usize; 2]> = BTreeMap::new();
    for file in files.lines().filter(|file| !GENERATED.iter().any(|end| file.ends_with(end))) {
        let Some((_, extension)) = file.rsplit_once('.') else { continue };
        let Some(comment) = comment_of(extension) else { continue };
        let (mut code, mut tests) = count(&std::fs::read_to_string(root.join(file))?, comment);
        let is_product = PRODUCT.iter().any(|folder| file.starts_with(&format!("{folder}/")))
            && !APART.iter().any(|part| file.contains(part));
        if !is_product {
            (code, tests) = (0, code + tests);
        }
        let folder = file.split_once('/').map_or(".", |(folder, _)| folder);
        let [product, other] = folders.entry(folder).or_default();
        (*product, *other) = (*product + code, *other + tests);
    }
    println!("{:<16} {:>8} {:>8}", "folder", "product", "other");
    let mut total = [0, 0];
    for (folder, [product, other]) in folders {
        println!("{folder:<16} {product:>8} {other:>8}");
        total = [total[0] + product, total[1] + other];
    }
    println!("{:<16} {:>8} {:>8}", "all", total[0], total[1]);
    Ok(())
}

/// The mark of a comment in files with this extension; None for files that are not code.
fn comment_of(extension: &str) -> Option<&'static str> {
    match extension {
        "rs" | "c" | "h" | "proto" => Some("//"),
        "py" | "sh" => Some("#"),
        _ => None,
    }
}

/// Lines of code outside and inside the file's module of unit tests, which is at its end.
fn count(text: &str, comment: &str) -> (usize, usize) {
    let (mut code, mut tests) = (0, 0);
    // The mark that ends the comment of several lines, or docstring, that the line is in.
    let (mut until, mut in_tests) = (None, false);
    let mut lines = text.lines().map(str::trim).peekable();
    while let Some(line) = lines.next() {
        if let Some(end) = until {
            until = (!line.contains(end)).then_some(end);
            continue;
        }
        in_tests |= line == "#[cfg(test)]"
            && lines.peek().is_some_and(|next| next.starts_with("mod ") && next.ends_with('{'));
        let start = if comment == "#" { ("\"\"\"", "\"\"\"") } else { ("/*", "*/") };
        if let Some(rest) = line.strip_prefix(start.0) {
            until = (!rest.contains(start.1)).then_some(start.1);
        } else if !line.is_empty() && !line.starts_with(comment) || line.starts_with("#[") {
            *(if in_tests { &mut tests } else { &mut code }) += 1;
        }
    }
    (code, tests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_blank_lines_and_unit_tests_are_told_apart_from_code() {
        let rust = "//! Doc.\n\n#[inline]\nfn a() {} // code\n/* one\n two */\n\
                    #[cfg(test)]\nmod tests {\n    // why\n    fn b() {}\n}\n";
        assert_eq!(count(rust, "//"), (2, 4));
        let python =
            "# why\n\"\"\"Doc.\"\"\"\ndef a():\n    \"\"\"Doc\n    more.\n    \"\"\"\n    b()\n";
        assert_eq!(count(python, "#"), (2, 0));
    }
}
