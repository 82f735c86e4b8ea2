//! Logs to systemd's journal: records with their priority, their place in the sources, and the
//! objects that they concern (`NETSUM_JOB`, `NETSUM_PORT` and so on), in fields.

use std::fs;
use std::path::Path;

use env_logger::Logger;
use log::{Log, Metadata, Record};
use systemd_journal_logger::{JournalLog, connected_to_journal};

/// Sends records that pass the filter to the journal.
pub struct Journal {
    filter: Logger,
    journal: JournalLog,
}

impl Journal {
    /// Opens the journal, if standard error goes there and it can be reached. Only the logger's
    /// filter is used.
    ///
    /// # Errors
    /// The logger, if not.
    pub fn open(filter: Logger) -> Result<Self, Logger> {
        let open = || JournalLog::new().ok().filter(|_| connected_to_journal());
        let Some(mut journal) = open() else { return Err(filter) };
        // journald looks up a process's unit when it reads a record, which is too late for the last
        // ones of a process that has ended. Therefore each record names the unit; `journalctl -u`
        // accepts that from root.
        if let Some(unit) = fs::read_to_string("/proc/self/cgroup").ok().as_deref().and_then(unit) {
            journal = journal.add_extra_field("OBJECT_SYSTEMD_UNIT", unit);
        }
        Ok(Self { filter, journal })
    }
}

impl Log for Journal {
    fn enabled(&self, metadata: &Metadata) -> bool {
        self.filter.enabled(metadata)
    }

    fn log(&self, record: &Record) {
        if self.filter.matches(record) {
            self.journal.log(record);
        }
    }

    fn flush(&self) {}
}

/// The service whose control group this is.
fn unit(cgroup: &str) -> Option<&str> {
    let path = cgroup.lines().find_map(|line| line.strip_prefix("0::"))?;
    let names = Path::new(path).iter().filter_map(|name| name.to_str());
    names.rev().find(|name| name.ends_with(".service"))
}

#[cfg(test)]
mod tests {
    use super::unit;

    #[test]
    fn a_control_group_names_its_service() {
        assert_eq!(unit("0::/system.slice/netsum.service\n"), Some("netsum.service"));
        assert_eq!(
            unit("1:name=systemd:/x\n0::/system.slice/system-a.slice/a@1.service/sub\n"),
            Some("a@1.service")
        );
        assert_eq!(unit("0::/user.slice/user-0.slice/session-1.scope\n"), None);
        assert_eq!(unit(""), None);
    }
}
