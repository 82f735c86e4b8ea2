//! Checks SECURITY.md: every test that it names must exist.

use std::path::Path;

/// The tests that a text names: `path/to/file.rs::name`, in backquotes.
fn named(text: &str) -> Vec<(&str, &str)> {
    text.split('`')
        .filter_map(|word| word.split_once("::"))
        .filter(|(file, _)| file.ends_with(".rs"))
        .collect()
}

/// Whether a source has a test function of this name.
fn has_test(source: &str, name: &str) -> bool {
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let function = format!("fn {name}(");
    let at = lines.iter().position(|l| l.trim_start_matches("async ").starts_with(&function));
    // Its attributes are directly above.
    at.is_some_and(|at| {
        let above = lines[..at].iter().rev().take_while(|l| l.starts_with("#["));
        above.into_iter().any(|l| l.contains("test"))
    })
}

#[test]
fn every_test_that_the_threat_model_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = std::fs::read_to_string(root.join("SECURITY.md")).unwrap();
    let named = named(&text);
    assert!(named.len() > 30, "{} tests are named", named.len());
    for (file, name) in named {
        let source =
            std::fs::read_to_string(root.join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
        assert!(has_test(&source, name), "{file} has no test {name}");
    }
    // Every line of a table of attacks names a test.
    let tables = text.split("\n\n").filter(|t| t.starts_with("| what it tries"));
    for line in tables.flat_map(|t| t.lines().skip(2)) {
        assert!(line.contains(".rs::"), "no test: {line}");
    }
}

#[test]
fn a_function_without_a_test_attribute_does_not_count() {
    let source =
        "#[test]\n#[ignore]\nfn one() {}\nfn two() {}\n#[tokio::test]\nasync fn three() {}";
    assert!(has_test(source, "one") && has_test(source, "three"));
    assert!(!has_test(source, "two") && !has_test(source, "on") && !has_test(source, "four"));
}
