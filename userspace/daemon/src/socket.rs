//! Unix sockets that only their owner can connect to.

use std::{
    fs, io,
    os::unix::{
        fs::{FileTypeExt as _, PermissionsExt as _},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
};

use numaward_guarantee::private_directory::{self, DirectoryError};

/// Reason why a unix socket cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another process listens on it. The fields are the path, and the configuration key that sets it.
    #[error(
        "{path}: another process, perhaps another numaward, listens on this socket; stop it, or choose another path \
         with {1} in the configuration",
        path = .0.display()
    )]
    InUse(PathBuf, &'static str),
    /// The directory cannot be created, or other users can change its contents.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The path is a file of another type.
    #[error("{path} exists and is not a socket; numaward does not replace it: choose another path with {1}", path = .0.display())]
    NoSocket(PathBuf, &'static str),
    /// Any other error. The fields are the path, the failed action, and the cause.
    #[error("{path}: cannot {1}: {2}", path = .0.display())]
    Io(PathBuf, &'static str, #[source] io::Error),
}

/// Creates a socket that only its owner can connect to, and listens on it. Replaces the socket of a daemon that died. `key` is the
/// configuration key that sets the path.
pub fn listen(path: &Path, key: &'static str) -> Result<UnixListener, SocketError> {
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        private_directory::prepare(parent)?;
    }
    listen_as(path, &path.with_added_extension("new"), key)
}

/// Like [`listen`], in a directory of another program, which is not changed. The other program sees no file before the socket is complete:
/// until then, its name begins with a dot.
pub fn listen_in_place(path: &Path, key: &'static str) -> Result<UnixListener, SocketError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    listen_as(path, &path.with_file_name(format!(".{name}.new")), key)
}

fn listen_as(path: &Path, new: &Path, key: &'static str) -> Result<UnixListener, SocketError> {
    let fail = |action| move |error| SocketError::Io(path.to_owned(), action, error);
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(fail("read its metadata")(error)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(SocketError::NoSocket(path.to_owned(), key));
        }
        Ok(_) => match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(fail("find out whether another process listens on it")(error)),
            Ok(_) => return Err(SocketError::InUse(path.to_owned(), key)),
        },
    }
    // The socket is created under another name, so that no client can connect before it has its mode.
    if let Err(error) = fs::remove_file(new)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(SocketError::Io(
            new.to_owned(),
            "remove it (an interrupted start left it behind)",
            error,
        ));
    }
    let listener = UnixListener::bind(new).map_err(fail("listen on it"))?;
    fs::set_permissions(new, fs::Permissions::from_mode(0o600)).map_err(fail("set its mode"))?;
    fs::rename(new, path).map_err(fail("put it in place"))?;
    listener.set_nonblocking(true).map_err(fail("listen on it"))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_socket_of_dead_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/control.sock");
        let listener = listen(&path, "controlSocket").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let error = listen(&path, "controlSocket").unwrap_err();
        assert!(matches!(error, SocketError::InUse { .. }), "{error}");
        drop(listener);
        listen(&path, "controlSocket").unwrap();
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn keeps_file_that_is_not_a_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(listen(&path, "controlSocket"), Err(SocketError::NoSocket { .. })));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }
}
