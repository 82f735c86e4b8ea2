//! Boxes and links, as their manager knows them: a pure function of its last answer.

use netsum_api::v1 as api;
use netsum_core::rate::Rate;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::Stylize as _;
use ratatui::text::Line;
use ratatui::widgets::{Cell, Row, Table};

use super::View;
use super::model::Key;
use crate::client::Client;
use crate::failure::Result;

/// The view of a fabric.
#[derive(Debug, Default)]
pub struct Fabric {
    last: Option<api::Fabric>,
    /// Why there is no newer answer.
    problem: Option<String>,
    /// Lines scrolled past at the top.
    above: usize,
}

/// A line of the table; faults are red.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    name: String,
    state: String,
    is_well: bool,
    has: String,
    /// Bytes per second.
    carries: [u64; 2],
    rate: u64,
}

fn boxes(fabric: &api::Fabric) -> impl Iterator<Item = Entry> {
    fabric.boxes.iter().map(|b| {
        let mine =
            |port: &&api::FabricPort| port.port.split_once('/').is_some_and(|(of, _)| of == b.name);
        let ports = fabric.ports.iter().filter(mine);
        let sum = ports.fold([0; 2], |[rx, tx], port| [rx + port.rx_rate, tx + port.tx_rate]);
        let state = match (b.answers, &b.drain, b.drained) {
            (false, ..) => "silent".to_owned(),
            (_, Some(_), true) => "drained".to_owned(),
            (_, Some(reason), false) => format!("draining: {reason}"),
            _ => "answers".to_owned(),
        };
        Entry {
            name: b.name.clone(),
            is_well: b.answers && b.drain.is_none(),
            state,
            has: b.jobs.join(", "),
            carries: sum,
            rate: 0,
        }
    })
}

fn links(fabric: &api::Fabric) -> impl Iterator<Item = Entry> {
    fabric.links.iter().map(|link| {
        let port = fabric.ports.iter().find(|port| port.port == link.below);
        let state = if link.up { "up" } else { "down" };
        Entry {
            name: format!("{} to {}", link.below, link.above),
            state: link.problem.as_ref().map_or(state.to_owned(), |why| format!("{state}: {why}")),
            is_well: link.up && link.problem.is_none(),
            has: if link.rate == 0 { String::new() } else { Rate(link.rate).to_string() },
            // The lower end receives the traffic from above.
            carries: port.map_or([0; 2], |port| [port.rx_rate, port.tx_rate]),
            rate: link.rate,
        }
    })
}

impl Entry {
    fn row(self) -> Row<'static> {
        let carries = self.carries.map(|bytes| {
            let bits = bytes as f64 * 8.0;
            let part = if self.rate == 0 {
                String::new()
            } else {
                format!(" {:3.0} %", 100.0 * bits / self.rate as f64)
            };
            Cell::from(Line::from(format!("{:.3}{part}", bits / 1e9)).right_aligned())
        });
        let state =
            if self.is_well { Cell::from(self.state) } else { Cell::from(self.state.red()) };
        let [down, up] = carries;
        Row::new([Cell::from(self.name.bold()), state, Cell::from(self.has), down, up])
    }
}

impl View for Fabric {
    type Reading = api::Fabric;

    async fn read(client: &mut Client) -> Result<api::Fabric> {
        client.show_fabric(false, false).await
    }

    fn take(&mut self, reading: std::result::Result<api::Fabric, String>, _: f64) {
        match reading {
            Ok(fabric) => {
                self.above =
                    self.above.min((fabric.boxes.len() + fabric.links.len()).saturating_sub(1));
                (self.last, self.problem) = (Some(fabric), None);
            }
            Err(why) => self.problem = Some(why),
        }
    }

    fn key(&mut self, key: Key) -> bool {
        let lines = self.last.as_ref().map_or(0, |fabric| fabric.boxes.len() + fabric.links.len());
        match key {
            Key::Quit => return false,
            Key::Up => self.above = self.above.saturating_sub(1),
            Key::Down => self.above = (self.above + 1).min(lines.saturating_sub(1)),
            _ => {}
        }
        true
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let [head, body, foot] =
            Layout::vertical([Constraint::Length(1), Constraint::Fill(1), Constraint::Length(1)])
                .areas(frame.area());
        match (&self.problem, &self.last) {
            (Some(why), _) => frame.render_widget(Line::from(why.clone()).red(), head),
            (None, Some(f)) => {
                let answer = f.boxes.iter().filter(|b| b.answers).count();
                let up = f.links.iter().filter(|link| link.up).count();
                let text = format!(
                    "{answer} of {} boxes answer, {up} of {} links are up",
                    f.boxes.len(),
                    f.links.len()
                );
                frame.render_widget(Line::from(text), head);
            }
            (None, None) => frame.render_widget(Line::from("querying the manager"), head),
        }
        frame.render_widget(
            Line::from("Gb/s, over the last half second   up, down: scroll   q: quit").dim(),
            foot,
        );
        let Some(fabric) = &self.last else { return };
        let widths = [
            Constraint::Fill(3),
            Constraint::Fill(2),
            Constraint::Fill(2),
            Constraint::Length(13),
            Constraint::Length(13),
        ];
        let [down, up] =
            ["IN, DOWN", "OUT, UP"].map(|text| Cell::from(Line::from(text).right_aligned()));
        let names =
            Row::new([Cell::from("BOX, LINK"), "STATE".into(), "JOBS, RATE".into(), down, up]);
        let rows = boxes(fabric).chain(links(fabric)).skip(self.above).map(Entry::row);
        frame.render_widget(Table::new(rows, widths).header(names.dim()), body);
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn fabric() -> api::Fabric {
        let node = |name: &str| api::FabricBox {
            name: name.into(),
            answers: true,
            jobs: vec!["train".into()],
            ..Default::default()
        };
        let link = |below: &str, above: &str| api::FabricLink {
            below: below.into(),
            above: above.into(),
            up: true,
            rate: 1_000_000_000,
            ..Default::default()
        };
        let port = |name: &str, rx: u64, tx: u64| api::FabricPort {
            port: name.into(),
            rx_rate: rx,
            tx_rate: tx,
            ..Default::default()
        };
        api::Fabric {
            boxes: vec![node("leaf0"), node("leaf1"), node("spine0")],
            links: vec![link("leaf0/up", "spine0/1"), link("leaf1/up", "spine0/2")],
            ports: vec![
                port("leaf0/1", 5_000_000, 7_000_000),
                port("leaf0/up", 62_500_000, 125_000_000),
            ],
            jobs: Vec::new(),
        }
    }

    fn screen(view: &Fabric) -> String {
        let mut terminal = Terminal::new(TestBackend::new(100, 10)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn boxes_and_links_with_what_they_carry() {
        let mut view = Fabric::default();
        assert!(screen(&view).contains("querying the manager"));
        let mut fabric = fabric();
        fabric.boxes[2].answers = false;
        fabric.links[1].up = false;
        fabric.links[1].problem = Some("leaf1/up receives no LLDP from spine0/2".into());
        view.take(Ok(fabric), 0.0);
        insta::assert_snapshot!(screen(&view));
        view.take(Err("nobody is there".into()), 1.0);
        assert!(screen(&view).contains("nobody is there") && screen(&view).contains("leaf0"));
    }

    #[test]
    fn keys_scroll_and_quit() {
        let mut view = Fabric::default();
        view.take(Ok(fabric()), 0.0);
        assert!((0..9).all(|_| view.key(Key::Down)));
        assert_eq!(view.above, 4, "the last line stays");
        assert!(screen(&view).contains("leaf1/up to spine0/2") && !screen(&view).contains("leaf0"));
        assert!(view.key(Key::Up) && view.above == 3 && !view.key(Key::Quit));
    }
}
