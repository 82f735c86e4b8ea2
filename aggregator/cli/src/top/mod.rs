//! `netsum top`: jobs, ranks, rings and ports, live.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`model`] | the state, and the effect of keys; pure |
//! | [`draw`] | the screen; pure |
//! | [`fabric`] | both for `netsum top --fabric` |
//!
//! This file talks to the daemon and to the terminal.

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

/// Time between two readings.
const EVERY: Duration = Duration::from_secs(1);
/// Timeout of a request: a stopped daemon accepts connections and does not answer.
const TIMEOUT: Duration = Duration::from_secs(3);

/// The content of the screen.
pub trait View: Default {
    /// A reading, requested each second.
    type Reading: Send + 'static;

    /// Requests it.
    fn read(client: &mut Client) -> impl Future<Output = Result<Self::Reading>> + Send;

    /// Stores a reading, or the error; `time` is in seconds since 1970.
    fn take(&mut self, reading: std::result::Result<Self::Reading, String>, time: f64);

    /// Handles a key; false if it quits.
    fn key(&mut self, key: Key) -> bool;

    fn draw(&self, frame: &mut Frame<'_>);
}

impl View for Model {
    type Reading = Reading;

    async fn read(client: &mut Client) -> Result<Reading> {
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

/// The terminal, restored on drop. A panic hook also restores it, before it prints the panic.
#[derive(Debug)]
pub struct Screen(DefaultTerminal);

impl Screen {
    /// Takes over the terminal.
    ///
    /// # Errors
    /// If standard output is not a terminal.
    pub fn take() -> Result<Self> {
        if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
            let message = "top needs a terminal; `netsum stats --interval 1s` does without";
            return Err(Failure::new(Kind::Usage, message));
        }
        let terminal = ratatui::try_init();
        Ok(Self(terminal.map_err(|e| Failure::new(Kind::Failed, format!("the terminal: {e}")))?))
    }

    /// Draws the view.
    ///
    /// # Errors
    /// If the terminal is closed.
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

/// Shows the daemon's jobs until `q` or a signal.
///
/// # Errors
/// If there is no terminal, or the socket's permissions do not allow access. If the daemon does not
/// answer, this waits for it.
pub async fn run<V: View>(socket: &Path) -> Result<()> {
    let mut signals = [
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
        signal(SignalKind::hangup())?,
    ];
    let mut daemon = Daemon { socket: socket.to_owned(), client: None };
    // Missing permissions are reported before the terminal changes.
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
                // After a resize, as after every event, the screen is redrawn.
                Some(_) => {}
                None => return Err(Failure::new(Kind::Failed, "the terminal was closed")),
            },
            reading = readings.recv() => {
                let Some(reading) = reading else {
                    let message = "the task that queries the daemon has ended: a defect of netsum";
                    return Err(Failure::new(Kind::Failed, message));
                };
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                view.take(reading.map_err(|failure| failure.message), now.as_secs_f64());
            }
        }
    }
}

/// The daemon; each read reconnects if necessary.
struct Daemon {
    socket: PathBuf,
    client: Option<Client>,
}

impl Daemon {
    async fn read<V: View>(&mut self) -> Result<V::Reading> {
        let answer = timeout(TIMEOUT, self.request::<V>()).await;
        let answer = answer.unwrap_or_else(|_| {
            let message = format!("the daemon has not answered for {} s", TIMEOUT.as_secs());
            Err(Failure::new(Kind::NoDaemon, message))
        });
        if answer.is_err() {
            self.client = None;
        }
        answer
    }

    async fn request<V: View>(&mut self) -> Result<V::Reading> {
        let client = match &mut self.client {
            Some(client) => client,
            none => none.insert(Client::connect(&self.socket).await?),
        };
        V::read(client).await
    }
}

/// Readings, one per second, from a task of its own: keys do not wait for the daemon.
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

/// Events of the terminal, read by a thread that ends with the process.
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
