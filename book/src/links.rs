//! Checks that links lead to a file of the book, and to a place in it.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The result of a check.
#[derive(Debug, Default)]
pub struct Links {
    /// Number of links checked.
    pub checked: usize,
    /// Broken links: page and link.
    pub broken: Vec<String>,
}

/// Checks all links within a folder of HTML pages. External addresses are skipped: a test needs no
/// network.
///
/// # Errors
/// If a file cannot be read.
pub fn check(folder: &Path) -> Result<Links> {
    let mut pages = HashMap::new();
    read(folder, &mut pages)?;
    let mut links = Links::default();
    for (path, page) in &pages {
        // These two are generated from other pages, or served at any path, so their relative links
        // do not resolve.
        if path.file_name().is_some_and(|name| name == "print.html" || name == "404.html") {
            continue;
        }
        for link in values(page, "href").chain(values(page, "src")) {
            if link.contains("://") || link.starts_with("mailto:") || link.starts_with("data:") {
                continue;
            }
            links.checked += 1;
            let (file, place) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => path.clone(),
                file => normal(&path.parent().context("a page without a folder")?.join(file)),
            };
            let found = match pages.get(&target) {
                Some(page) => place.is_empty() || values(page, "id").any(|id| id == place),
                None => target.is_file() || target.join("index.html").is_file(),
            };
            if !found {
                links.broken.push(format!("{}: {link}", path.strip_prefix(folder)?.display()));
            }
        }
    }
    links.broken.sort();
    Ok(links)
}

fn read(folder: &Path, pages: &mut HashMap<PathBuf, String>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            read(&path, pages)?;
        } else if path.extension().is_some_and(|e| e == "html") {
            pages.insert(path.clone(), fs::read_to_string(&path)?);
        }
    }
    Ok(())
}

/// A path without `.` and `..`, whether or not the file exists.
fn normal(path: &Path) -> PathBuf {
    use std::path::Component;
    let mut out = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => drop(out.pop()),
            other => out.push(other),
        }
    }
    out
}

/// Values of an attribute, each once.
fn values<'a>(page: &'a str, attribute: &str) -> impl Iterator<Item = &'a str> + use<'a> {
    let start = format!(" {attribute}=\"");
    let values: HashSet<&str> =
        page.split(start.as_str()).skip(1).filter_map(|rest| rest.split('"').next()).collect();
    values.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_links_are_found_and_others_not() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("a")).unwrap();
        fs::write(folder.path().join("x.css"), "").unwrap();
        fs::write(folder.path().join("a/b.html"), "<h2 id=\"here\">b</h2>").unwrap();
        let page = "<a href=\"a/b.html#here\"></a> <a href=\"a/../x.css\"></a> <a \
            href=\"#top\"></a> <p id=\"top\">\
                    <a href=\"https://example.org/nothing\"></a> <img src=\"none.svg\"> <a \
                    href=\"a/b.html#there\"></a>";
        fs::write(folder.path().join("index.html"), page).unwrap();
        let links = check(folder.path()).unwrap();
        assert_eq!(links.broken, ["index.html: a/b.html#there", "index.html: none.svg"]);
        assert_eq!(links.checked, 5);
    }
}
