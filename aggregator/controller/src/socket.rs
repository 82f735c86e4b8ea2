//! The administration socket. A user who may open it has all rights: the file's mode and group are
//! the permission.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use nix::unistd::{Gid, Group, chown};

/// Permissions of the administration socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// Mode of the socket's file; connecting requires write permission.
    pub mode: u32,
    /// Group of the socket's file; `None`: the daemon's own.
    pub group: Option<String>,
}

impl Default for Access {
    fn default() -> Self {
        Self { mode: 0o600, group: None }
    }
}

/// Removes a socket's file when the daemon ends, unless another daemon has replaced it.
pub struct SocketFile {
    path: PathBuf,
    identity: Option<(u64, i64, i64)>,
}

impl SocketFile {
    /// For the socket that exists now.
    pub fn new(path: PathBuf) -> Self {
        let identity = identity(&path);
        Self { path, identity }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.identity.is_some() && identity(&self.path) == self.identity {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Identifies a file; an inode number alone may be reused at once.
fn identity(path: &Path) -> Option<(u64, i64, i64)> {
    let of = std::fs::symlink_metadata(path).ok()?;
    Some((of.ino(), of.mtime(), of.mtime_nsec()))
}

/// Listens. A socket left by a killed daemon is replaced.
pub fn listen(path: &Path, access: &Access) -> Result<UnixListener> {
    let refused = |what: &str| format!("listen.admin = {path:?}: {what}");
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("listen.admin: cannot make {}", folder.display()))?;
    }
    if path.exists() && UnixStream::connect(path).is_ok() {
        bail!(refused("another `netsum run` listens there already"));
    }
    // It is bound under a temporary name, and renamed only after its permissions are set.
    let mut unready = path.as_os_str().to_owned();
    unready.push(format!(".{}", std::process::id()));
    let unready = PathBuf::from(unready);
    let listener = UnixListener::bind(&unready).with_context(|| refused("cannot listen"))?;
    let _file = SocketFile::new(unready.clone());
    if let Some(group) = &access.group {
        chown(&unready, None, Some(group_id(group)?)).with_context(|| {
            format!("listen.admin-group = {group:?}: cannot give the socket to it")
        })?;
    }
    std::fs::set_permissions(&unready, std::fs::Permissions::from_mode(access.mode))
        .with_context(|| refused("cannot set its mode"))?;
    std::fs::rename(&unready, path).with_context(|| refused("cannot be replaced"))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn group_id(name: &str) -> Result<Gid> {
    let found = Group::from_name(name).with_context(|| format!("listen.admin-group = {name:?}"))?;
    Ok(found.with_context(|| format!("listen.admin-group = {name:?}: there is no such group"))?.gid)
}
