//! The screen of `netsum top`: a pure function of the [`Model`], for 80 columns and more.

use std::collections::VecDeque;

use netsum_common::size::Size;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Style, Stylize as _};
use ratatui::symbols::bar::NINE_LEVELS;
use ratatui::text::{Line, Span};
use ratatui::widgets::{
    Block, Cell, Clear, Padding, Paragraph, RenderDirection, Row, Sparkline, Table, TableState,
    Wrap,
};

use super::model::{DaemonState, JobRow, Model, PortRow};
use crate::rates::clock;
use crate::timing::{below, time};
use crate::view::State;

/// Least width for more columns.
const WIDE: u16 = 110;
/// Least size of the screen.
const LEAST: (u16, u16) = (60, 12);

const KEYS: [(&str, &str); 7] = [
    ("up, k", "one line up"),
    ("down, j", "one line down"),
    ("Enter", "the selected job in detail"),
    ("Esc", "back"),
    ("s", "sort jobs by name, Gb/s, p99"),
    ("?, h", "this"),
    ("q, Ctrl-C", "quit"),
];

/// Draws everything.
pub fn draw(frame: &mut Frame<'_>, model: &Model) {
    let area = frame.area();
    if area.width < LEAST.0 || area.height < LEAST.1 {
        let text = format!("netsum top needs {} columns and {} lines", LEAST.0, LEAST.1);
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), area);
        return;
    }
    let down = matches!(model.daemon, DaemonState::Down { .. });
    let [head, alarm, body, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(if down { 2 } else { 0 }),
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(area);
    header(frame, head, model);
    if let DaemonState::Down { why, since } = &model.daemon {
        no_daemon(frame, alarm, why, (model.time as u64).saturating_sub(*since));
    }
    match (model.detail, model.selected()) {
        (Some(line), Some((_, job))) => detail(frame, body, job, line),
        _ => overview(frame, body, model),
    }
    footer(frame, foot, model);
    if model.help {
        help(frame, area);
    }
}

fn header(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    let jobs = model.sorted().len();
    let (gbps_in, gbps_out) = model.totals();
    let drops = model.no_job.as_ref().map_or(0.0, |r| r.drops);
    let mut spans = vec![
        Span::from(" netsum top ").bold().reversed(),
        Span::from(format!("  {} utc", clock(model.time))),
    ];
    if model.daemon != DaemonState::Unknown {
        spans.push(format!("  jobs {jobs}  ports {}", model.ports.len()).into());
        spans.push(format!("  in {gbps_in:.2} Gb/s  out {gbps_out:.2} Gb/s").into());
    }
    if drops > 0.0 {
        spans.push(format!("  dropped, of no job {drops:.0}/s").yellow());
    }
    frame.render_widget(Line::from(spans), area);
}

fn no_daemon(frame: &mut Frame<'_>, area: Rect, why: &str, seconds: u64) {
    let text = vec![
        Line::from(format!(" no daemon for {seconds} s; waiting for it; the data below is old"))
            .bold(),
        Line::from(format!(" {why}")),
    ];
    frame.render_widget(Paragraph::new(text).red(), area);
}

fn footer(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    let keys: &[(&str, &str)] = match model.detail {
        Some(_) => &[("q", "quit"), ("Esc", "back"), ("j/k", "ranks"), ("?", "help")],
        None => {
            &[("q", "quit"), ("j/k", "select"), ("Enter", "detail"), ("s", "sort"), ("?", "help")]
        }
    };
    let mut spans = Vec::new();
    for (key, what) in keys {
        spans.push(Span::from(format!(" {key} ")).reversed());
        spans.push(Span::from(format!(" {what}  ")));
    }
    frame.render_widget(Line::from(spans), area);
    if model.detail.is_none() {
        let sort =
            Line::from(format!("sorted by {} ", model.sort.name())).alignment(Alignment::Right);
        frame.render_widget(sort, area);
    }
}

fn help(frame: &mut Frame<'_>, area: Rect) {
    let lines: Vec<Line<'_>> = KEYS
        .iter()
        .map(|(key, what)| Line::from(vec![format!("{key:<11}").bold(), Span::from(*what)]))
        .chain(
            [
                "p50, p99   half, 99 of 100 sums took less, from the first",
                "           contribution to the last; by powers of two",
                "last       the rank that sums waited for, in the last 10 s;",
                "           marked with ! if that is not by chance",
                "           One fragment in 64 is timed.",
            ]
            .map(Line::from),
        )
        .collect();
    let [middle] = Layout::horizontal([Constraint::Length(66)])
        .flex(ratatui::layout::Flex::Center)
        .areas(area);
    let height = lines.len() as u16 + 2;
    let [popup] = Layout::vertical([Constraint::Length(height)])
        .flex(ratatui::layout::Flex::Center)
        .areas(middle);
    frame.render_widget(Clear, popup);
    let block = Block::bordered().title(" keys and columns ").padding(Padding::horizontal(1));
    frame.render_widget(Paragraph::new(lines).block(block), popup);
}

fn overview(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    // The ports get what they need, and the jobs at least half.
    let ports = (model.ports.len() as u16 + 2).min(area.height / 2);
    let [above, below] =
        Layout::vertical([Constraint::Fill(1), Constraint::Length(ports)]).areas(area);
    jobs_table(frame, above, model);
    ports_table(frame, below, &model.ports);
}

fn jobs_table(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    let wide = area.width >= WIDE;
    let rows = model.sorted();
    if rows.is_empty() {
        let text = match model.daemon {
            DaemonState::Up => "No jobs. `netsum job create` makes one.",
            DaemonState::Unknown => "Asking the daemon ...",
            DaemonState::Down { .. } => "",
        };
        frame.render_widget(Paragraph::new(text).block(block("jobs".into())), area);
        return;
    }
    let mut columns: Vec<(&'static str, u16)> = vec![
        ("job", 14),
        ("state", 7),
        ("ranks", 5),
        ("in Gb/s", 7),
        ("sum p50", 9),
        ("sum p99", 9),
        ("last", 10),
    ];
    if wide {
        columns.extend([("out Gb/s", 8), ("replay/s", 8), ("drop/s", 8)]);
    }
    let graph = graph_width(&columns, area);
    let row = |row: &&JobRow| {
        let rates = row.rates.as_ref();
        let rate = |value: Option<f64>, digits: usize| match value {
            Some(value) => right(format!("{value:.digits$}")),
            None => right("-".into()),
        };
        let mut cells = vec![
            Cell::from(row.job.name.clone()).bold(),
            state(row.job.state),
            right(row.job.ranks.to_string()),
            rate(rates.map(|r| r.gbps_in), 3),
            right(below(row.sums.completion.percentile(500))),
            right(below(row.sums.completion.percentile(990))),
            last(row),
        ];
        if wide {
            cells.push(rate(rates.map(|r| r.gbps_out), 3));
            cells.push(rate(rates.map(|r| r.replays), 0));
            let drops = rate(rates.map(|r| r.drops), 0);
            cells.push(if rates.is_some_and(|r| r.drops > 0.0) { drops.yellow() } else { drops });
        }
        cells.push(Cell::from(spark(&row.history, graph)).cyan());
        Row::new(cells)
    };
    let table = graph_table(&columns, 2, graph, rows.iter().map(row))
        .row_highlight_style(Style::new().reversed())
        .block(block("jobs".into()));
    let mut selected = TableState::new().with_selected(model.selected().map(|(at, _)| at));
    frame.render_stateful_widget(table, area, &mut selected);
}

/// What columns with titles of these widths leave to a graph behind them.
fn graph_width(columns: &[(&str, u16)], area: Rect) -> u16 {
    let taken: u16 = columns.iter().map(|(_, width)| width + 1).sum();
    area.width.saturating_sub(taken + 2).max(4)
}

/// A table with these columns, of which the first `texts` are not numbers, and a graph.
fn graph_table<'a>(
    columns: &[(&'static str, u16)],
    texts: usize,
    graph: u16,
    rows: impl Iterator<Item = Row<'a>>,
) -> Table<'a> {
    let titles = columns
        .iter()
        .enumerate()
        .map(|(i, (title, _))| if i < texts { Cell::from(*title) } else { right((*title).into()) });
    let titles = titles.chain([Cell::from(format!("last {graph} s"))]);
    let widths = columns.iter().map(|(_, width)| *width).chain([graph]).map(Constraint::Length);
    Table::new(rows, widths).header(Row::new(titles).dim()).column_spacing(1)
}

/// The rank that is last, and how often; in colour if the others wait for it.
fn last(row: &JobRow) -> Cell<'static> {
    let Some((place, share)) = row.sums.last() else { return right("-".into()) };
    let text = format!("{} {:>4.0} %", row.sums.rank(place), 100.0 * share);
    if row.sums.straggler().is_some() {
        right(format!("!{text}")).yellow().bold()
    } else {
        right(text)
    }
}

fn ports_table(frame: &mut Frame<'_>, area: Rect, ports: &[PortRow]) {
    let wide = area.width >= WIDE;
    let mut columns: Vec<(&'static str, u16)> = vec![
        ("port", 15),
        ("state", 5),
        ("xdp", 6),
        ("in Gb/s", 7),
        ("out Gb/s", 8),
        ("in kpkt/s", 9),
        ("out kpkt/s", 10),
    ];
    if wide {
        columns.extend([("flows", 5), ("mtu", 5)]);
    }
    let graph = graph_width(&columns, area);
    let row = |row: &PortRow| {
        let p = &row.port;
        let mut cells = vec![
            Cell::from(p.name.clone()).bold(),
            if p.up { Cell::from("up").green() } else { Cell::from("down").red() },
            if p.xdp.is_empty() { Cell::from("none").red() } else { Cell::from(p.xdp.clone()) },
            right(format!("{:.3}", row.gbps.0)),
            right(format!("{:.3}", row.gbps.1)),
            right(format!("{:.1}", row.packets.0 / 1e3)),
            right(format!("{:.1}", row.packets.1 / 1e3)),
        ];
        if wide {
            cells.extend([right(p.flows.to_string()), right(p.mtu.to_string())]);
        }
        cells.push(Cell::from(spark(&row.history, graph)).cyan());
        Row::new(cells)
    };
    let shown = (area.height.saturating_sub(2)) as usize;
    let title = match ports.len().checked_sub(shown).filter(|&hidden| hidden > 0) {
        Some(hidden) => format!("ports, and {hidden} more"),
        None => "ports".into(),
    };
    let rows = ports.iter().take(shown).map(row);
    frame.render_widget(graph_table(&columns, 3, graph, rows).block(block(title)), area);
}

fn detail(frame: &mut Frame<'_>, area: Rect, row: &JobRow, line: usize) {
    let rings = (row.rings.len() as u16 + 2).min(area.height / 4).max(3);
    let graph = if area.height >= 30 { 7 } else { 3 };
    let drops = row.rates.as_ref().map(|r| &r.drops_by_reason).filter(|d| !d.is_empty());
    let [about, curve, ranks, below_ranks] = Layout::vertical([
        Constraint::Length(if row.job.error.is_empty() { 5 } else { 6 }),
        Constraint::Length(graph),
        Constraint::Fill(1),
        Constraint::Length(rings + u16::from(drops.is_some())),
    ])
    .areas(area);
    facts(frame, about, row);
    let highest = row.history.iter().copied().fold(0.0, f64::max);
    let newest: Vec<u64> = row.history.iter().rev().map(|gbps| (gbps * 1e6) as u64).collect();
    let curve_block = block(format!("in Gb/s by the second, at most {highest:.3}"));
    // The newest at the right edge.
    let line_of_bars = Sparkline::default().data(newest).direction(RenderDirection::RightToLeft);
    frame.render_widget(line_of_bars.cyan().block(curve_block), curve);
    ranks_table(frame, ranks, row, line);
    let [line_of_drops, of_rings] =
        Layout::vertical([Constraint::Length(u16::from(drops.is_some())), Constraint::Fill(1)])
            .areas(below_ranks);
    if let Some(drops) = drops {
        let reasons: Vec<String> =
            drops.iter().map(|(name, rate)| format!("{name} {rate:.0}/s")).collect();
        frame.render_widget(
            Line::from(format!(" dropped: {}", reasons.join("  "))).yellow(),
            line_of_drops,
        );
    }
    rings_table(frame, of_rings, row);
}

fn facts(frame: &mut Frame<'_>, area: Rect, row: &JobRow) {
    let j = &row.job;
    let h = &row.sums.completion;
    let colour = match j.state {
        State::Active => Style::new().green(),
        State::Waiting => Style::new().yellow(),
        State::Failed => Style::new().red(),
    };
    let mut lines = vec![Line::from(vec![
        format!(" {}: ", j.name).bold(),
        Span::styled(j.state.name(), colour),
    ])];
    if !j.error.is_empty() {
        lines.push(Line::from(format!(" {}", j.error)).red());
    }
    lines.push(
        format!(
            " ranks {}  mtu {}  message {}  window {}  rings {}  {}",
            j.ranks,
            j.mtu,
            Size(j.message_size.into()),
            j.window,
            j.rings,
            j.order
        )
        .into(),
    );
    lines.push(match &row.rates {
        Some(r) => Line::from(format!(
            " in {:.3} Gb/s  out {:.3} Gb/s  {:.0} contrib/s  {:.0} replays/s  {:.0} drops/s",
            r.gbps_in, r.gbps_out, r.contributions, r.replays, r.drops
        )),
        None => Line::from(" rates come with the next reading"),
    });
    let mean = h.mean().map_or_else(|| "-".into(), time);
    lines.push(Line::from(format!(
        " sums, last 10 s: p50 {}  p99 {}  max {}  mean {mean}",
        below(h.percentile(500)),
        below(h.percentile(990)),
        below(h.max())
    )));
    lines.push(match (row.sums.straggler(), row.sums.last()) {
        (Some(place), Some((_, share))) => Line::from(format!(
            " The others wait for rank {}: last in {:.0} % of the sums",
            row.sums.rank(place),
            100.0 * share
        ))
        .yellow()
        .bold(),
        (_, Some(_)) => Line::from(" No rank stands out"),
        (_, None) => Line::from(" No sum was timed"),
    });
    frame.render_widget(Paragraph::new(lines), area);
}

fn ranks_table(frame: &mut Frame<'_>, area: Rect, row: &JobRow, line: usize) {
    let straggler = row.sums.straggler();
    let of_rank = |(place, rank): (usize, u32)| {
        let part = row.sums.ranks.get(place).copied().unwrap_or_default();
        let (port, address) = row.place(rank).unwrap_or(("-", "-"));
        let (used, credit) = row.credit(place);
        let cells = vec![
            right(rank.to_string()),
            Cell::from(address.to_owned()),
            Cell::from(port.to_owned()),
            right(format!("{:.0} %", 100.0 * row.sums.share(place))),
            right(below(part.late.percentile(500))),
            right(below(part.late.percentile(990))),
            right(format!("{used}/{credit}")),
            Cell::from(if straggler == Some(place) { "<- the last" } else { "" }),
        ];
        let of_rank = Row::new(cells);
        if straggler == Some(place) { of_rank.yellow().bold() } else { of_rank }
    };
    let address = if area.width >= WIDE { 39 } else { 15 };
    let widths = [4, address, 12, 5, 9, 9, 11, 11].map(Constraint::Length);
    let titles = ["rank", "address", "port", "last", "late p50", "late p99", "credit used", ""];
    let titles = titles.iter().enumerate().map(|(i, title)| match i {
        1 | 2 | 7 => Cell::from(*title),
        _ => right((*title).into()),
    });
    let table = Table::new(row.senders().into_iter().enumerate().map(of_rank), widths)
        .header(Row::new(titles).dim())
        .column_spacing(1)
        .row_highlight_style(Style::new().reversed())
        .block(block("ranks".into()));
    let mut state = TableState::new().with_selected(Some(line));
    frame.render_stateful_widget(table, area, &mut state);
}

fn rings_table(frame: &mut Frame<'_>, area: Rect, row: &JobRow) {
    let shown = area.height.saturating_sub(2) as usize;
    let of_ring = |r: &netsum_api::v1::Ring| {
        let stalled =
            r.stalled_ms.map_or_else(|| "nothing pending".into(), |ms| format!("{ms} ms"));
        Row::new(vec![
            right(r.ring.to_string()),
            right(r.cpu.to_string()),
            right(format!("{}/{}", r.slots_used, r.slots)),
            right(r.low.to_string()),
            Cell::from(stalled),
        ])
    };
    let widths = [4, 4, 16, 15, 20].map(Constraint::Length);
    let titles = ["ring", "cpu", "unreleased slots", "lowest index", "stalled"];
    let titles = titles.iter().enumerate().map(|(i, title)| match i {
        4 => Cell::from(*title),
        _ => right((*title).into()),
    });
    let title = match row.rings.len().checked_sub(shown).filter(|&hidden| hidden > 0) {
        Some(hidden) => format!("rings, and {hidden} more"),
        None => "rings".into(),
    };
    let table = Table::new(row.rings.iter().take(shown).map(of_ring), widths)
        .header(Row::new(titles).dim())
        .column_spacing(2)
        .block(block(title));
    frame.render_widget(table, area);
}

/// A line above with a title; no lines at the sides, where a small terminal has no room.
fn block(title: String) -> Block<'static> {
    Block::new()
        .borders(ratatui::widgets::Borders::TOP)
        .title(format!(" {title} "))
        .padding(Padding::horizontal(1))
}

fn right(text: String) -> Cell<'static> {
    Cell::from(Line::from(text).alignment(Alignment::Right))
}

fn state(state: State) -> Cell<'static> {
    let cell = Cell::from(state.name());
    match state {
        State::Active => cell.green(),
        State::Waiting => cell.yellow(),
        State::Failed => cell.red(),
    }
}

/// The newest values as bars, the newest last; the highest value fills the height.
fn spark(history: &VecDeque<f64>, width: u16) -> String {
    let newest = history.iter().skip(history.len().saturating_sub(width as usize));
    let highest = newest.clone().copied().fold(0.0, f64::max);
    let bars = [
        NINE_LEVELS.empty,
        NINE_LEVELS.one_eighth,
        NINE_LEVELS.one_quarter,
        NINE_LEVELS.three_eighths,
        NINE_LEVELS.half,
        NINE_LEVELS.five_eighths,
        NINE_LEVELS.three_quarters,
        NINE_LEVELS.seven_eighths,
        NINE_LEVELS.full,
    ];
    let bar = |value: &f64| {
        if highest > 0.0 { bars[(value / highest * 8.0).ceil() as usize] } else { bars[0] }
    };
    newest.map(bar).collect()
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::model::tests::{model, reading};
    use super::super::model::{Key, Reading};
    use super::*;

    fn screen(model: &Model, (width, height): (u16, u16)) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, model)).unwrap();
        terminal.backend().to_string()
    }

    /// On the smallest supported screen, and on a larger one.
    fn both(name: &str, model: &Model) {
        for size in [(80, 24), (120, 40)] {
            insta::assert_snapshot!(format!("{name}-{}x{}", size.0, size.1), screen(model, size));
        }
    }

    #[test]
    fn the_overview() {
        both("overview", &model(40));
    }

    #[test]
    fn a_job_in_detail_with_its_straggler() {
        let mut model = model(40);
        model.selected = Some("train".into());
        model.key(Key::Enter);
        model.key(Key::Down);
        both("detail", &model);
    }

    #[test]
    fn help_is_over_everything() {
        let mut model = model(3);
        model.key(Key::Help);
        both("help", &model);
    }

    #[test]
    fn before_the_first_answer_without_jobs_and_without_a_daemon() {
        both("first", &Model::default());
        let mut empty = Model::default();
        let nothing = Reading { jobs: Vec::new(), rings: Vec::new(), ..reading(1) };
        empty.take(Ok(nothing), 0.0);
        both("no-jobs", &empty);
        let mut gone = model(8);
        for second in [0.0, 75.0] {
            gone.take(
                Err("no daemon at /run/netsum/admin.sock: is `netsum run` running?".into()),
                2e6 + second,
            );
        }
        both("no-daemon", &gone);
    }

    #[test]
    fn a_failed_job_of_many_ranks_scrolls_to_the_line_that_is_selected() {
        let mut many = reading(1);
        many.jobs[1].ranks = 64;
        many.jobs[1].state = netsum_api::v1::JobState::Failed.into();
        many.jobs[1].error = "rank 63: no heartbeat for 10 s".into();
        let mut model = Model::default();
        model.take(Ok(many), 0.0);
        model.selected = Some("train".into());
        model.key(Key::Enter);
        (0..63).for_each(|_| assert!(model.key(Key::Down)));
        let screen = screen(&model, (80, 24));
        let ranks = |n: u32| {
            screen.lines().any(|l| l.trim_start_matches(['"', ' ']).starts_with(&format!("{n} ")))
        };
        assert!(ranks(63) && !ranks(20) && screen.contains("no heartbeat for 10 s"), "{screen}");
    }

    #[test]
    fn no_screen_is_too_small_to_say_so() {
        for size in [(1, 1), (20, 5), (59, 30), (60, 12), (200, 100)] {
            let mut model = model(8);
            screen(&model, size);
            model.key(Key::Enter);
            screen(&model, size);
        }
        assert!(screen(&model(8), (40, 10)).contains("needs 60 columns"));
    }

    #[test]
    fn bars_are_of_the_newest_and_by_the_highest_of_them() {
        let values = VecDeque::from([100.0, 0.0, 4.0, 8.0]);
        assert_eq!(spark(&values, 3), " ▄█");
        assert_eq!(spark(&VecDeque::from([0.0, 0.0]), 9), "  ");
        assert_eq!(spark(&VecDeque::new(), 9), "");
    }
}
