//! Unix sockets that are for their owner alone.

use std::{
    fs, io,
    os::unix::{
        fs::{FileTypeExt as _, PermissionsExt as _},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
};

use numaward_guarantee::private_directory::{self, DirectoryError};

/// A unix socket cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another daemon has it, at the path that this key of the configuration sets.
    #[error(
        "{path}: somebody answers on this socket, perhaps another numaward; stop that one, or choose another path \
         with {1} in the configuration",
        path = .0.display()
    )]
    InUse(PathBuf, &'static str),
    /// Its directory cannot be made, or other users can change what is in it.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// Something else is there.
    #[error("{path}: this is no socket, and it is left alone; choose another path with {1}", path = .0.display())]
    NoSocket(PathBuf, &'static str),
    /// It cannot be made: at which path what could not be done, and why.
    #[error("{path}: cannot {1}: {2}", path = .0.display())]
    Io(PathBuf, &'static str, #[source] io::Error),
}

/// Makes a socket for its owner alone. That of a daemon that died is replaced. `key` is what sets its path.
pub fn listen(path: &Path, key: &'static str) -> Result<UnixListener, SocketError> {
    let fail = |action| move |error| SocketError::Io(path.to_owned(), action, error);
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        private_directory::prepare(parent)?;
    }
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(fail("look at it")(error)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(SocketError::NoSocket(path.to_owned(), key));
        }
        Ok(_) => match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(fail("find out whether somebody answers on it")(error)),
            Ok(_) => return Err(SocketError::InUse(path.to_owned(), key)),
        },
    }
    // Made under another name, so that nobody finds it before it has its mode.
    let new = path.with_added_extension("new");
    if let Err(error) = fs::remove_file(&new)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(SocketError::Io(new, "remove the rest of an earlier start", error));
    }
    let listener = UnixListener::bind(&new).map_err(fail("listen on it"))?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).map_err(fail("set its mode"))?;
    fs::rename(&new, path).map_err(fail("put it in place"))?;
    listener.set_nonblocking(true).map_err(fail("listen on it"))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_made_for_its_owner_and_that_of_the_dead_is_replaced() {
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
    fn what_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(listen(&path, "controlSocket"), Err(SocketError::NoSocket { .. })));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }
}
