//! A VM that has booted Debian 12 from a disk: systemd, udev, journald, dpkg, as on a machine that
//! one is given.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::Vm;
use crate::netns::output;

/// What its kernel is told. Cards are named as they are found, not by their places.
pub(super) const LINE: &str = " lab_disk=/dev/vda net.ifnames=0";

/// QEMU's arguments for a disk, from which nothing is written back. A machine without one ends
/// where it would boot again.
pub(super) fn disk(image: Option<&Path>) -> Vec<String> {
    match image {
        Some(image) => {
            let drive =
                format!("file={},format=raw,if=virtio,snapshot=on,cache=unsafe", image.display());
            vec!["-drive".into(), drive]
        }
        None => vec!["-no-reboot".into()],
    }
}

/// How long it may take to boot on a busy machine; 15 s are usual.
const BOOT: Duration = Duration::from_secs(240);

/// Such a VM.
#[derive(Clone, Copy, Debug)]
pub struct Debian<'a>(&'a Vm);

impl<'a> Debian<'a> {
    /// One that has booted.
    pub fn of(vm: &'a Vm) -> Self {
        Self(vm)
    }

    /// One that has been started. Waits until it has started all its services.
    ///
    /// # Errors
    /// What systemd could not start.
    pub fn new(vm: &'a Vm) -> Result<Self> {
        let debian = Self(vm);
        debian.wait()?;
        Ok(debian)
    }

    /// Runs a shell script in root's home, to the first command that fails, and returns what it
    /// printed; an error holds what it said.
    pub fn run(&self, script: &str) -> Result<String> {
        output(self.0.command("/bin/sh").args(["-euc", script]))
    }

    pub fn property(&self, unit: &str, name: &str) -> Result<String> {
        Ok(self.run(&format!("systemctl show --value -p {name} {unit}"))?.trim().to_owned())
    }

    /// Boots it again, and waits until it has.
    ///
    /// # Errors
    /// What systemd could not start.
    pub fn reboot(&self) -> Result<()> {
        let before = self.boot()?;
        // The connection ends with the agent, at some moment.
        drop(self.run("systemctl reboot"));
        let start = Instant::now();
        while self.boot().map_or(true, |id| id == before) {
            ensure!(
                start.elapsed() < BOOT,
                "not booted again within {BOOT:?}\n{}",
                self.0.console()
            );
            std::thread::sleep(Duration::from_millis(100));
        }
        self.wait()
    }

    /// Which of its boots this is.
    fn boot(&self) -> Result<String> {
        output(self.0.command("cat").arg("/proc/sys/kernel/random/boot_id"))
    }

    fn wait(&self) -> Result<()> {
        // Exit code 1 for any state but "running".
        let state = self
            .run("systemctl is-system-running --wait || true")
            .with_context(|| format!("while it boots: {}", self.0.console()))?;
        if state.trim() != "running" {
            let failed =
                self.run("systemctl --failed --no-legend; journalctl -b -p warning --no-pager")?;
            bail!("systemd is {}: {failed}", state.trim());
        }
        Ok(())
    }

    /// What the unit has logged since the machine was installed, with priorities: `<3> text`.
    ///
    /// # Errors
    /// If there is no journal.
    pub fn journal(&self, unit: &str) -> Result<String> {
        let lines = self.run(&format!(
            "journalctl -u {unit} --no-pager -o json --output-fields=PRIORITY,MESSAGE"
        ))?;
        let mut text = String::new();
        for line in lines.lines() {
            let entry: serde_json::Value =
                serde_json::from_str(line).with_context(|| line.to_owned())?;
            let field = |name: &str| entry[name].as_str().unwrap_or("?").to_owned();
            text += &format!("<{}> {}\n", field("PRIORITY"), field("MESSAGE"));
        }
        Ok(text)
    }
}
