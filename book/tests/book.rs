//! The book is built, and all its links lead somewhere.

#[test]
fn the_book_is_whole() {
    let out = tempfile::tempdir().unwrap();
    let links = netsum_book::build(out.path()).unwrap();
    assert!(links > 200, "{links} links");
    let page = |name: &str| std::fs::read_to_string(out.path().join(name)).unwrap();
    // What is made and what is included has found its way.
    for (name, words) in [
        ("reference/counters.html", "credit_violation"),
        ("reference/cli.html", "netsum job create"),
        ("reference/config.html", "stall-ms"),
        ("reference/conformance.html", "FSDP2"),
        ("reference/api.html", "service Worker"),
        ("howto/deploy.html", "netsum check --bridge br0"),
        ("howto/library.html", "Communicator::connect"),
    ] {
        assert!(page(name).contains(words), "{name}: {words}");
    }
    for entry in std::fs::read_dir(out.path().join("howto")).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        assert!(!text.contains("{{#"), "an include that mdBook did not carry out");
    }
}
