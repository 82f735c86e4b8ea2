//! A VM that has booted Debian 12 from a disk, with systemd, udev, journald and dpkg, like an
//! ordinary server.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::Vm;
use crate::netns::output;

/// Further kernel command line. Cards are named in the order of discovery, not by their slots.
pub(super) const LINE: &str = " lab_disk=/dev/vda net.ifnames=0";

/// QEMU's arguments for a disk whose changes are discarded. A machine without a disk ends instead
/// of rebooting.
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

/// Timeout for booting on a busy machine; 15 s are usual.
const BOOT: Duration = Duration::from_secs(240);

/// A VM with Debian.
#[derive(Clone, Copy, Debug)]
pub struct Debian<'a>(&'a Vm);

impl<'a> Debian<'a> {
    /// A VM that has booted.
    pub fn of(vm: &'a Vm) -> Self {
        Self(vm)
    }

    /// A VM that has been started. Waits until it has started all its services.
    ///
    /// # Errors
    /// The services that systemd could not start.
    pub fn new(vm: &'a Vm) -> Result<Self> {
        let debian = Self(vm);
        debian.wait()?;
        Ok(debian)
    }

    /// Runs a shell script in root's home, up to the first command that fails, and returns its
    /// output; an error contains its messages.
    pub fn run(&self, script: &str) -> Result<String> {
        output(self.0.command("/bin/sh").args(["-euc", script]))
    }

    pub fn property(&self, unit: &str, name: &str) -> Result<String> {
        Ok(self.run(&format!("systemctl show --value -p {name} {unit}"))?.trim().to_owned())
    }

    /// Reboots the VM, and waits until it has booted.
    ///
    /// # Errors
    /// The services that systemd could not start.
    pub fn reboot(&self) -> Result<()> {
        let before = self.boot()?;
        // The connection breaks at some moment, when the agent ends.
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

    /// The ID of the present boot.
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

    /// The unit's log since the machine was installed, with priorities: `<3> text`.
    ///
    /// # Errors
    /// If the VM has no journal.
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
