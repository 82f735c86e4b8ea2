//! Finds the adapter that has an IP address, in the kernel's GID tables
//! (Documentation/ABI/stable/sysfs-class-infiniband).

use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

/// The kernel's list of adapters.
pub(crate) const SYSFS: &str = "/sys/class/infiniband";

/// An entry of an adapter's GID table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct GidEntry {
    /// Name of the adapter, as `rdma link` shows it.
    pub device: String,
    /// Port, from 1.
    pub port: u8,
    /// Index of the address in the port's table.
    pub gid_index: u8,
}

/// A GID: an IPv6 address, or an IPv4 address mapped into one (IBTA annex A17.4.5.3).
pub(crate) fn gid_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// The entry that has `ip` for RoCE version 2, among the adapters under `root`. Prefers one at an
/// active port.
pub(crate) fn find(root: &Path, ip: IpAddr) -> Option<GidEntry> {
    let mut found = None;
    for device in names(root) {
        let ports = root.join(&device).join("ports");
        for port in numbers(&ports) {
            let folder = ports.join(port.to_string());
            let Some(gid_index) = index_of(&folder, ip) else { continue };
            let entry = GidEntry { device: device.clone(), port, gid_index };
            // "4: ACTIVE"
            if read(&folder.join("state")).is_some_and(|s| s.starts_with("4:")) {
                return Some(entry);
            }
            found.get_or_insert(entry);
        }
    }
    found
}

fn index_of(port: &Path, ip: IpAddr) -> Option<u8> {
    let wanted = Ipv6Addr::from(gid_of(ip));
    numbers(&port.join("gids")).into_iter().find(|index| {
        let file = |folder: &str| read(&port.join(folder).join(index.to_string()));
        let gid = file("gids").and_then(|text| text.trim().parse::<Ipv6Addr>().ok());
        // The type of an empty entry cannot be read.
        gid == Some(wanted) && file("gid_attrs/types").is_some_and(|t| t.trim() == "RoCE v2")
    })
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// Names in a folder, sorted; none if there is no such folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn numbers(folder: &Path) -> Vec<u8> {
    let mut numbers: Vec<u8> = names(folder).iter().filter_map(|n| n.parse().ok()).collect();
    numbers.sort_unstable();
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Device, port, its state, index, GID, type.
    type Entry<'a> = (&'a str, u8, &'a str, u8, &'a str, Option<&'a str>);

    /// A folder like the kernel's.
    fn sysfs(entries: &[Entry]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (device, port, state, index, gid, kind) in entries {
            let folder = root.path().join(device).join("ports").join(port.to_string());
            fs::create_dir_all(folder.join("gids")).unwrap();
            fs::create_dir_all(folder.join("gid_attrs/types")).unwrap();
            fs::write(folder.join("state"), format!("{state}\n")).unwrap();
            fs::write(folder.join("gids").join(index.to_string()), format!("{gid}\n")).unwrap();
            if let Some(kind) = kind {
                fs::write(
                    folder.join("gid_attrs/types").join(index.to_string()),
                    format!("{kind}\n"),
                )
                .unwrap();
            }
        }
        root
    }

    const LINK_LOCAL: &str = "fe80:0000:0000:0000:5054:00ff:fe00:0001";
    const MAPPED: &str = "0000:0000:0000:0000:0000:ffff:0a00:0001";
    const EMPTY: &str = "0000:0000:0000:0000:0000:0000:0000:0000";

    #[test]
    fn an_address_is_found_as_roce_version_2_alone() {
        let root = sysfs(&[
            ("mlx5_0", 1, "4: ACTIVE", 0, LINK_LOCAL, Some("IB/RoCE v1")),
            ("mlx5_0", 1, "4: ACTIVE", 1, LINK_LOCAL, Some("RoCE v2")),
            ("mlx5_0", 1, "4: ACTIVE", 2, MAPPED, Some("IB/RoCE v1")),
            ("mlx5_0", 1, "4: ACTIVE", 3, MAPPED, Some("RoCE v2")),
            ("mlx5_0", 1, "4: ACTIVE", 12, EMPTY, None),
        ]);
        let entry = |gid_index| Some(GidEntry { device: "mlx5_0".into(), port: 1, gid_index });
        assert_eq!(find(root.path(), "10.0.0.1".parse().unwrap()), entry(3));
        assert_eq!(find(root.path(), "fe80::5054:ff:fe00:1".parse().unwrap()), entry(1));
        assert_eq!(find(root.path(), "10.0.0.2".parse().unwrap()), None);
        assert_eq!(
            find(root.path(), "::".parse().unwrap()),
            None,
            "an empty entry is nobody's address"
        );
    }

    #[test]
    fn an_active_port_is_preferred() {
        let root = sysfs(&[
            ("a", 1, "1: DOWN", 0, MAPPED, Some("RoCE v2")),
            ("b", 1, "1: DOWN", 0, MAPPED, Some("RoCE v2")),
            ("b", 2, "4: ACTIVE", 5, MAPPED, Some("RoCE v2")),
        ]);
        let ip = "10.0.0.1".parse().unwrap();
        assert_eq!(
            find(root.path(), ip),
            Some(GidEntry { device: "b".into(), port: 2, gid_index: 5 })
        );
        fs::write(root.path().join("b/ports/2/state"), "1: DOWN\n").unwrap();
        assert_eq!(find(root.path(), ip).map(|p| p.device), Some("a".into()));
    }

    #[test]
    fn machines_without_adapters_have_none() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(find(root.path(), "10.0.0.1".parse().unwrap()), None);
        assert_eq!(find(&root.path().join("missing"), "10.0.0.1".parse().unwrap()), None);
    }
}
