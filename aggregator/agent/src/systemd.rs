//! Notifies systemd, if the daemon runs under it, by sd_notify(3).

use std::time::Duration;

use sd_notify::NotifyState;

use super::agent::Shared;

/// Reports that the daemon serves requests.
pub fn ready() {
    notify(&[NotifyState::Ready]);
}

/// Reports that the daemon is stopping.
pub fn stopping() {
    notify(&[NotifyState::Stopping]);
}

/// Sets the line in `systemctl status`.
pub fn status(line: &str) {
    notify(&[NotifyState::Status(line)]);
}

/// Feeds systemd's watchdog, if enabled. Each notification shows that this task is scheduled and
/// gets the lock that every request takes.
pub async fn keep_alive(shared: Shared) {
    let Some(limit) = sd_notify::watchdog_enabled() else { return };
    let mut tick = tokio::time::interval((limit / 4).max(Duration::from_millis(10)));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        drop(shared.lock());
        notify(&[NotifyState::Watchdog]);
    }
}

/// Does nothing without systemd.
fn notify(state: &[NotifyState]) {
    sd_notify::notify(state)
        .unwrap_or_else(|e| log::warn!("cannot send {state:?} to systemd: {e}"));
}
