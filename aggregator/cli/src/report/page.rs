//! The file of a report: HTML that is also XML, with style and pictures inline and without external
//! resources. Pure.

use std::fmt::Write as _;

use netsum_common::size::Size;
use netsum_common::timing::Histogram;

use super::WatchedJob;
use super::plot::{self, COLOURS, Result};
use crate::timing::{below, time};

const STYLE: &str = "
:root { color-scheme: light dark; --page: #ffffff; --text: #1a1a1a; --faint: #666666; --line: #d0d0d0; --mark: #fff3dc; }
body { background: var(--page); color: var(--text); font: 15px/1.45 sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0; } h2 { font-size: 1.15em; margin: 2em 0 0.3em; }
p, figcaption { color: var(--faint); margin: 0.3em 0; } p.said \
{ color: var(--text); font-weight: bold; }
figure { margin: 0; } svg { max-width: 100%; height: auto; display: block; }
table { border-collapse: collapse; margin: 0.6em 0; } th \
{ text-align: left; font-weight: normal; color: var(--faint); }
th, td { padding: 0.15em 1.2em 0.15em 0; border-bottom: 1px solid var(--line); } td.n, th.n \
{ text-align: right; }
tr.straggler td { background: var(--mark); } .scroll { overflow-x: auto; }
@media (prefers-color-scheme: dark) {
:root { --page: #16181c; --text: #e4e4e4; --faint: #a0a0a0; --line: #3a3d42; --mark: #43340f; }
";

/// Text escaped for use between tags and in attributes.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A table; the first `left` columns are text, the others numbers.
fn table(id: &str, left: usize, head: &[&str], rows: &[(Vec<String>, bool)]) -> String {
    let cells = |tag: &str, cells: &[String]| {
        let cell = |(i, text): (usize, &String)| {
            let class = if i < left { "" } else { " class=\"n\"" };
            format!("<{tag}{class}>{}</{tag}>", escaped(text))
        };
        cells.iter().enumerate().map(cell).collect::<String>()
    };
    let head: Vec<String> = head.iter().map(|h| (*h).to_owned()).collect();
    let mut table =
        format!("<div class=\"scroll\"><table id=\"{id}\">\n<tr>{}</tr>\n", cells("th", &head));
    for (row, marked) in rows {
        let class = if *marked { " class=\"straggler\"" } else { "" };
        let _ = writeln!(table, "<tr{class}>{}</tr>", cells("td", row));
    }
    table + "</table></div>\n"
}

fn figure(title: &str, picture: &str, caption: &str) -> String {
    format!("<h2>{title}</h2>\n<figure>\n{picture}<figcaption>{caption}</figcaption>\n</figure>\n")
}

fn properties(report: &WatchedJob) -> String {
    let j = &report.job;
    let said = |name: &str, value: String| (vec![name.to_owned(), value], false);
    let mut rows = vec![
        said("state", j.state.name().into()),
        said("ranks", j.ranks.to_string()),
        said("rings", j.rings.to_string()),
        said("type of a lane", j.dtype.clone()),
        said("path MTU", format!("{} bytes", j.mtu)),
        said("message", Size(j.message_size.into()).to_string()),
        said("window", format!("{} messages", j.window)),
        said("order of release", j.order.clone()),
        said("ICRC of contributions", j.icrc.clone()),
        said("memory on the box", format!("{}, {} slots in each ring", Size(j.memory), j.slots)),
        said("epoch", j.epoch.to_string()),
    ];
    if !j.error.is_empty() {
        rows.insert(1, said("error", j.error.clone()));
    }
    table("properties", 2, &["property", "value"], &rows)
}

fn throughput(report: &WatchedJob) -> Result<String> {
    let count = |name: &str| report.counters.get(name).copied().unwrap_or(0);
    let mean = |of: fn(&(f64, f64)) -> f64| {
        let mut before = 0.0;
        let gigabits: f64 = report
            .points
            .iter()
            .map(|p| {
                let length = p.time - before;
                before = p.time;
                of(&p.gbps) * length
            })
            .sum();
        if report.seconds > 0.0 { gigabits / report.seconds } else { 0.0 }
    };
    let caption = "Payload of contributions in, of results out; each fragment counts as one of a \
                   full message.";
    let counters = ["fragments", "completed", "released", "results", "replay", "out_of_sequence"];
    let rows: Vec<_> =
        counters.iter().map(|c| (vec![(*c).to_owned(), count(c).to_string()], false)).collect();
    Ok(figure("Throughput", &plot::throughput(report)?, caption)
        + &format!("<p>Mean: in {:.3} Gb/s, out {:.3} Gb/s.</p>\n", mean(|g| g.0), mean(|g| g.1))
        + &table("counters", 1, &["counter", "in the watch"], &rows))
}

/// How long sums took, how late ranks came and who was last.
fn sums(report: &WatchedJob) -> Result<String> {
    let h = &report.sums.completion;
    let Some(mean) = h.mean() else {
        return Ok("<h2>How long sums take</h2>\n<p class=\"said\">No sum was timed.</p>\n".into());
    };
    let caption = format!(
        "One fragment in {} is timed, {} of them here. Bounds are powers of two: half took less \
         than {}, 99 of 100 less than {}, all less than {}; mean {}. A complete sum may then still \
         wait for an earlier one, which does not count here.",
        report.sampled,
        h.count(),
        bare(h.percentile(500)),
        bare(h.percentile(990)),
        bare(h.max()),
        time(mean)
    );
    let bucket =
        |(b, n): (usize, &u64)| (vec![below(Some(Histogram::bound(b))), n.to_string()], false);
    let buckets: Vec<_> =
        h.counts.iter().enumerate().filter(|(_, n)| **n > 0).map(bucket).collect();
    let straggler = report.sums.straggler();
    let rank = |(place, part): (usize, &crate::timing::Part)| {
        let cells = vec![
            part.rank.to_string(),
            part.last.to_string(),
            format!("{:.1} %", 100.0 * report.sums.share(place)),
            below(part.late.percentile(500)),
            below(part.late.percentile(990)),
            below(part.late.max()),
            part.late.mean().map_or_else(|| "-".into(), time),
        ];
        (cells, straggler == Some(place))
    };
    let ranks: Vec<_> = report.sums.ranks.iter().enumerate().map(rank).collect();
    let head = ["rank", "last", "of the sums", "late p50", "late p99", "late max", "late mean"];
    let verdict = match straggler {
        Some(place) => {
            let (rank, share) = (report.sums.rank(place), 100.0 * report.sums.share(place));
            format!(
                "<p class=\"said\">The others wait for rank {rank}: it is the last in {share:.0} % \
                 of the sums.</p>\n"
            )
        }
        None => "<p class=\"said\">No rank stands out.</p>\n".into(),
    };
    Ok(figure("How long sums take", &plot::completion(report)?, &caption)
        + &table("completion", 0, &["took", "sums"], &buckets)
        + &figure(
            "How late each rank comes",
            &plot::lateness(report)?,
            "Delay after a sum's first contribution. Half of a rank's contributions came before \
             the line, 99 of 100 before the bar's end.",
        )
        + &figure(
            "Last rank",
            &plot::last(report)?,
            "The rank that a sum waited for. Dashed: equal shares.",
        )
        + &verdict
        + &table("ranks", 1, &head, &ranks))
}

/// A bound for a sentence that says "less than".
fn bare(bound: Option<u64>) -> String {
    bound.map_or_else(|| "-".into(), time)
}

fn drops(report: &WatchedJob) -> String {
    let row = |(name, count, help): &(&str, u64, &str)| {
        (vec![(*name).to_owned(), (*help).to_owned(), count.to_string()], false)
    };
    let rows: Vec<_> = report.drops().iter().map(row).collect();
    let dropped = if rows.is_empty() {
        "<p class=\"said\">No packet was dropped.</p>\n".into()
    } else {
        table("drops", 2, &["reason", "what that is", "packets"], &rows)
    };
    format!("<h2>Dropped packets</h2>\n{dropped}")
}

/// The whole file.
///
/// # Errors
/// If a picture cannot be drawn.
pub fn page(report: &WatchedJob) -> Result<String> {
    let name = escaped(&report.job.name);
    let began = std::time::UNIX_EPOCH + std::time::Duration::from_secs(report.began);
    let mut style = STYLE.to_owned();
    for (light, dark) in COLOURS {
        let _ = writeln!(
            style,
            "svg [fill=\"{light}\"] {{ fill: {dark}; }} \
             svg [stroke=\"{light}\"] {{ stroke: {dark}; }}"
        );
    }
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <title>netsum: job {name}</title>\n<style>{style}}}\n</style>\n</head>\n<body>\n\
         <h1>Job {name}</h1>\n<p>watched for {:.1} s from {}, by netsum \
         {}</p>\n{}{}{}{}</body>\n</html>\n",
        report.seconds,
        humantime::format_rfc3339_seconds(began),
        env!("CARGO_PKG_VERSION"),
        throughput(report)?,
        sums(report)?,
        drops(report),
        format_args!("<h2>The job</h2>\n{}", properties(report)),
    ))
}

#[cfg(test)]
mod tests {
    use roxmltree::{Document, Node, ParsingOptions};

    use super::super::tests::report;
    use super::*;
    use crate::timing::Sums;

    fn parsed(page: &str) -> Document<'_> {
        let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
        Document::parse_with_options(page, options).unwrap_or_else(|e| panic!("{e}: {page}"))
    }

    /// The cells of a table, row by row, without its head.
    fn cells(document: &Document<'_>, id: &str) -> Vec<Vec<String>> {
        let table = document.descendants().find(|n| n.attribute("id") == Some(id)).unwrap();
        let rows = table.children().filter(|n| n.has_tag_name("tr")).skip(1);
        let text = |n: Node<'_, '_>| n.text().unwrap_or_default().to_owned();
        rows.map(|row| row.children().filter(|n| n.has_tag_name("td")).map(text).collect())
            .collect()
    }

    #[test]
    fn a_page_is_xml_has_all_values_and_fetches_nothing() {
        let report = report();
        let text = page(&report).unwrap();
        let document = parsed(&text);
        let counters = cells(&document, "counters");
        assert_eq!(counters[0], ["fragments", &report.counters["fragments"].to_string()]);
        let ranks = cells(&document, "ranks");
        assert_eq!((ranks.len(), &ranks[2][1]), (4, &report.sums.ranks[2].last.to_string()));
        assert_eq!(ranks[2][2], "100.0 %");
        assert_eq!(
            cells(&document, "completion"),
            [["< 65.5 us", &report.sums.completion.count().to_string()]]
        );
        assert_eq!(cells(&document, "drops")[0][2], "44");
        assert!(text.contains("The others wait for rank 2"));
        assert_eq!(document.descendants().filter(|n| n.tag_name().name() == "svg").count(), 4);
        for node in document.descendants() {
            assert!(
                !["script", "link", "img", "iframe", "object", "image", "use"]
                    .contains(&node.tag_name().name())
            );
            for attribute in node.attributes() {
                assert!(
                    !["href", "src", "srcset", "data"].contains(&attribute.name()),
                    "{attribute:?}"
                );
            }
        }
        assert!(!text.contains("url(") && !text.contains("@import"));
        assert_eq!(
            text.matches("http").count(),
            text.matches("xmlns=\"http://www.w3.org/2000/svg\"").count()
        );
    }

    #[test]
    fn a_job_that_did_nothing_has_a_page_that_says_so() {
        let mut report = report();
        report.sums = Sums::default();
        report.points.clear();
        report.counters.clear();
        let text = page(&report).unwrap();
        parsed(&text);
        assert!(text.contains("No sum was timed") && text.contains("No packet was dropped"));
    }

    #[test]
    fn what_others_have_written_stays_text() {
        let mut report = report();
        report.job.error = "</td><script>alert(\"1\") & 'more'</script>".into();
        let text = page(&report).unwrap();
        let document = parsed(&text);
        assert_eq!(cells(&document, "properties")[1], ["error", &report.job.error]);
        assert!(document.descendants().all(|n| !n.has_tag_name("script")));
    }

    #[test]
    fn every_colour_has_a_twin_on_a_dark_screen() {
        let text = page(&report()).unwrap();
        let dark = text.split("prefers-color-scheme: dark").nth(1).unwrap();
        for (light, twin) in COLOURS {
            assert!(dark.contains(&format!("svg [fill=\"{light}\"] {{ fill: {twin}; }}")));
        }
    }
}
