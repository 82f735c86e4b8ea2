//! Cleans up after a lab, however its owner ends: by a drop, a panic, Ctrl-C or `kill -9`.
//!
//! The janitor is a shell that waits for the end of a pipe whose other end only the owner holds.
//! The kernel closes that end whatever happens to the owner, so there is one way to clean up, and
//! no signal handler that could be missed.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use crate::netns::RUN_NETNS;

/// Where daemons in a lab may pin, each in a folder named like the lab.
pub const PINS: &str = "/sys/fs/bpf";

/// `$1` is the lab's prefix, `$2` is [`PINS`]. It first ends what still runs in the lab's
/// namespaces, with a second's time to end by itself, then removes them, and what a test's daemon
/// has pinned.
const SCRIPT: &str = r#"
trap '' INT TERM HUP
read -r word
[ "$word" = keep ] && exit 0
for path in /run/netns/"$1"-*; do
    [ -e "$path" ] || continue
    name=${path##*/}
    for pid in $(ip netns pids "$name" 2>/dev/null); do kill "$pid" 2>/dev/null; done
    for try in 1 2 3 4 5 6 7 8 9 10; do
        [ -z "$(ip netns pids "$name" 2>/dev/null)" ] && break
        sleep 0.1
    done
    for pid in $(ip netns pids "$name" 2>/dev/null); do kill -9 "$pid" 2>/dev/null; done
    ip netns del "$name" 2>/dev/null
done
case $1 in ns[0-9]*) rm -rf "$2/$1" ;; esac
exit 0
"#;

/// Removes the namespaces of one lab when it is dropped or its process ends.
#[derive(Debug)]
pub struct Janitor {
    shell: Child,
}

impl Janitor {
    /// Starts to watch over the namespaces `prefix-*`.
    pub fn start(prefix: &str) -> Result<Self> {
        let shell = Command::new("sh")
            .args(["-c", SCRIPT, "netsum-lab-janitor", prefix, PINS])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Of its own, so that Ctrl-C in the owner's terminal does not reach it.
            .process_group(0)
            .spawn()
            .context("cannot start sh")?;
        Ok(Self { shell })
    }

    /// Leaves the lab alone from now on.
    pub fn dismiss(mut self) {
        if let Some(mut stdin) = self.shell.stdin.take() {
            // A janitor that has gone is as good as one that is told to.
            let _ = stdin.write_all(b"keep\n");
        }
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

/// Removes the lab of this prefix now.
pub fn clean(prefix: &str) -> Result<()> {
    drop(Janitor::start(prefix)?);
    Ok(())
}

/// Prefixes of all labs that there are, of any process.
pub fn labs() -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(RUN_NETNS) else { return Vec::new() };
    let mut labs: Vec<String> = entries
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .filter_map(|name| name.rsplit_once('-').map(|(prefix, _)| prefix.to_owned()))
        .collect();
    labs.sort();
    labs.dedup();
    labs
}

/// The process that a lab's prefix names: `ns<pid>-<n>`.
pub fn owner(prefix: &str) -> Option<u32> {
    let (pid, number) = prefix.strip_prefix("ns")?.split_once('-')?;
    number.parse::<u32>().ok()?;
    pid.parse().ok()
}

/// Removes labs whose process and janitor are both gone.
pub fn clean_stale() -> Result<()> {
    for lab in labs() {
        if let Some(pid) = owner(&lab)
            && !std::fs::exists(format!("/proc/{pid}")).unwrap_or(true)
        {
            log::info!("lab {lab} has been left behind by process {pid}: removing it");
            clean(&lab)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_is_read_from_the_prefix() {
        assert_eq!(owner("ns123-0"), Some(123));
        assert_eq!(owner("netsum"), None);
        assert_eq!(owner("ns-0"), None);
        assert_eq!(owner("nsx-0"), None);
        assert_eq!(owner("ns12-x"), None);
    }
}
