//! `netsum top`: jobs, ranks, rings and ports at work.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`model`] | what is known, and what keys do; pure |
//! | [`draw`] | the screen; pure |
//! | [`fabric`] | both of `netsum top --fabric` |
//!
//! What is here talks to the daemon and to the terminal.

pub mod draw;
pub mod fabric;
pub mod model;

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::{DefaultTerminal, Frame};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};

use self::model::{Key, Model, Reading};
use super::client::Client;
use super::failure::{Failure, Kind, Result};

/// Between two readings.
const EVERY: Duration = Duration::from_secs(1);
/// A daemon that is stopped, but there, takes connections and says nothing.
const PATIENCE: Duration = Duration::from_secs(3);

/// What is shown.
pub trait View: Default {
    /// What is asked for each second.
    type Reading: Send + 'static;

    /// Asks for it.
    fn ask(client: &mut Client) -> impl Future<Output = Result<Self::Reading>> + Send;

    /// Takes note of it, or why there is none; at this time, in seconds since 1970.
    fn take(&mut self, reading: std::result::Result<Self::Reading, String>, time: f64);

    /// Whether it goes on after this key.
    fn key(&mut self, key: Key) -> bool;

    fn draw(&self, frame: &mut Frame<'_>);
}

impl View for Model {
    type Reading = Reading;

    async fn ask(client: &mut Client) -> Result<Reading> {
        Ok(Reading {
            stats: client.stats(String::new()).await?,
            jobs: client.list_jobs().await?,
            rings: client.list_rings(String::new()).await?,
            ports: client.list_ports().await?,
        })
    }

    fn take(&mut self, reading: std::result::Result<Reading, String>, time: f64) {
        Model::take(self, reading, time);
    }

    fn key(&mut self, key: Key) -> bool {
        Model::key(self, key)
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        draw::draw(frame, self);
    }
}

/// The terminal, until it is dropped. A panic's hook gives it back too, before the panic is
/// printed.
#[derive(Debug)]
pub struct Screen(DefaultTerminal);

impl Screen {
    /// Takes it.
    ///
    /// # Errors
    /// If there is none.
    pub fn take() -> Result<Self> {
        if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
            let message = "top needs a terminal; `netsum stats --interval 1s` does without";
            return Err(Failure::new(Kind::Usage, message));
        }
        let terminal = ratatui::try_init();
        Ok(Self(terminal.map_err(|e| Failure::new(Kind::Failed, format!("the terminal: {e}")))?))
    }

    /// Shows what is known.
    ///
    /// # Errors
    /// If the terminal has gone.
    pub fn draw(&mut self, view: &impl View) -> Result<()> {
        self.0.draw(|frame| view.draw(frame))?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Shows what the daemon does until `q` or a signal.
///
/// # Errors
/// If there is no terminal, or you may not use the socket. A daemon that is not there is waited
/// for.
pub async fn run<V: View>(socket: &Path) -> Result<()> {
    let mut signals = [
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
        signal(SignalKind::hangup())?,
    ];
    let mut daemon = Daemon { socket: socket.to_owned(), client: None };
    // Whoever may not look is told so on a terminal that is as it was.
    if let Err(failure) = daemon.read::<V>().await
        && failure.kind == Kind::Refused
    {
        return Err(failure);
    }
    let mut screen = Screen::take()?;
    let (mut events, mut readings) = (events(), readings::<V>(daemon));
    let mut view = V::default();
    loop {
        screen.draw(&view)?;
        let [terminate, interrupt, hang_up] = &mut signals;
        tokio::select! {
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
            _ = hang_up.recv() => return Ok(()),
            event = events.recv() => match event {
                Some(Event::Key(pressed)) if pressed.kind != KeyEventKind::Release => {
                    if key(pressed).is_some_and(|key| !view.key(key)) {
                        return Ok(());
                    }
                }
                // Another size: drawn anew, as after everything.
                Some(_) => {}
                None => return Err(Failure::new(Kind::Failed, "the terminal has gone")),
            },
            reading = readings.recv() => {
                let Some(reading) = reading else {
                    return Err(Failure::new(Kind::Failed, "nobody asks the daemon any more: a defect of netsum"));
                };
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                view.take(reading.map_err(|failure| failure.message), now.as_secs_f64());
            }
        }
    }
}

/// The daemon, connected to anew whenever it has gone.
struct Daemon {
    socket: PathBuf,
    client: Option<Client>,
}

impl Daemon {
    async fn read<V: View>(&mut self) -> Result<V::Reading> {
        let answer = timeout(PATIENCE, self.ask::<V>()).await;
        let answer = answer.unwrap_or_else(|_| {
            let message = format!("the daemon has not answered for {} s", PATIENCE.as_secs());
            Err(Failure::new(Kind::NoDaemon, message))
        });
        if answer.is_err() {
            self.client = None;
        }
        answer
    }

    async fn ask<V: View>(&mut self) -> Result<V::Reading> {
        let client = match &mut self.client {
            Some(client) => client,
            none => none.insert(Client::connect(&self.socket).await?),
        };
        V::ask(client).await
    }
}

/// What the daemon says each second, asked by a task of its own, so that no key waits for it.
fn readings<V: View>(mut daemon: Daemon) -> mpsc::Receiver<Result<V::Reading>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut ticks = interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if sender.send(daemon.read::<V>().await).await.is_err() {
                return;
            }
        }
    });
    receiver
}

/// What comes from the terminal, read by a thread that ends with the process.
fn events() -> mpsc::UnboundedReceiver<Event> {
    let (sender, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.send(event).is_err() {
                return;
            }
        }
    });
    receiver
}

fn key(pressed: KeyEvent) -> Option<Key> {
    let control = pressed.modifiers.contains(KeyModifiers::CONTROL);
    Some(match pressed.code {
        KeyCode::Char('c') if control => Key::Quit,
        _ if control => return None,
        KeyCode::Char('q') => Key::Quit,
        KeyCode::Up | KeyCode::Char('k') => Key::Up,
        KeyCode::Down | KeyCode::Char('j') => Key::Down,
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Back,
        KeyCode::Char('s') => Key::Sort,
        KeyCode::Char('?' | 'h') => Key::Help,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_other_tops() {
        let pressed = |code: KeyCode| key(KeyEvent::new(code, KeyModifiers::NONE));
        assert_eq!(pressed(KeyCode::Char('q')), Some(Key::Quit));
        assert_eq!(
            (pressed(KeyCode::Up), pressed(KeyCode::Char('k'))),
            (Some(Key::Up), Some(Key::Up))
        );
        assert_eq!(
            (pressed(KeyCode::Down), pressed(KeyCode::Char('j'))),
            (Some(Key::Down), Some(Key::Down))
        );
        assert_eq!(pressed(KeyCode::Char('x')), None);
        let control = |c: char| key(KeyEvent::new(KeyCode::Char(c), KeyModifiers::CONTROL));
        assert_eq!((control('c'), control('q')), (Some(Key::Quit), None));
    }
}
