//! Cleans up after a lab, however its owner ends: by a drop, a panic, Ctrl-C or `kill -9`.
//!
//! The cleaner is a shell that waits for the end of a pipe whose other end only the owner holds.
//! The kernel closes that end however the owner ends, and so there is one way to clean up, without
//! a signal handler that could be missed.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use crate::netns::RUN_NETNS;

/// Folder where the daemons of a lab pin, each in a subfolder named like the lab.
pub const PINS: &str = "/sys/fs/bpf";

/// `$1` is the lab's prefix, `$2` is [`PINS`]. The script ends programs that still run in the lab's
/// namespaces, and kills them if they have not ended within a second. Then it removes the
/// namespaces and the pins of a test's daemon.
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
pub struct Cleaner {
    shell: Child,
}

impl Cleaner {
    /// Starts to watch the namespaces `prefix-*`.
    pub fn start(prefix: &str) -> Result<Self> {
        let shell = Command::new("sh")
            .args(["-c", SCRIPT, "netsum-lab-cleaner", prefix, PINS])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A process group of its own: Ctrl-C in the owner's terminal must not reach it.
            .process_group(0)
            .spawn()
            .context("cannot start sh")?;
        Ok(Self { shell })
    }

    /// Makes the cleaner leave the lab alone.
    pub fn dismiss(mut self) {
        if let Some(mut stdin) = self.shell.stdin.take() {
            // A write fails only if the cleaner has ended, and then it does nothing either.
            let _ = stdin.write_all(b"keep\n");
        }
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

/// Removes the lab of this prefix now.
pub fn clean(prefix: &str) -> Result<()> {
    drop(Cleaner::start(prefix)?);
    Ok(())
}

/// Prefixes of the labs of all processes.
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

/// The ID of the process in a lab's prefix: `ns<pid>-<n>`.
pub fn owner(prefix: &str) -> Option<u32> {
    let (pid, number) = prefix.strip_prefix("ns")?.split_once('-')?;
    number.parse::<u32>().ok()?;
    pid.parse().ok()
}

/// Removes labs whose process and cleaner are both gone.
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
