//! What the service manager is told, where there is one: systemd, by sd_notify(3).

use std::time::Duration;

use sd_notify::NotifyState;

use super::state::Shared;

/// The daemon answers.
pub fn ready() {
    tell(&[NotifyState::Ready]);
}

/// The daemon ends.
pub fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// A line for `systemctl status`.
pub fn status(line: &str) {
    tell(&[NotifyState::Status(line)]);
}

/// Says again and again that the daemon is alive, if that is waited for: that it gets a turn, and
/// the lock that every request takes.
pub async fn keep_alive(shared: Shared) {
    let Some(limit) = sd_notify::watchdog_enabled() else { return };
    let mut tick = tokio::time::interval((limit / 4).max(Duration::from_millis(10)));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        drop(shared.lock());
        tell(&[NotifyState::Watchdog]);
    }
}

/// Without a manager nothing happens.
fn tell(state: &[NotifyState]) {
    sd_notify::notify(state)
        .unwrap_or_else(|e| log::warn!("the service manager cannot be told {state:?}: {e}"));
}
