//! Reading of inotify events (inotify(7)).

use std::{mem::MaybeUninit, os::fd::OwnedFd};

use rustix::{
    fs::inotify::{ReadFlags, Reader},
    io::Errno,
};

/// An event of a watch.
pub(crate) struct InotifyEvent {
    pub(crate) watch: i32,
    pub(crate) flags: ReadFlags,
    /// The name of the entry in a watched directory; also `None` if the name is not UTF-8.
    pub(crate) name: Option<String>,
}

/// Reads all pending events. If an error occurs, the events before it are kept.
pub(crate) fn drain(fd: &OwnedFd, all: &mut Vec<InotifyEvent>) -> Result<(), Errno> {
    let mut buffer = [MaybeUninit::uninit(); 16 * 1024];
    let mut reader = Reader::new(fd, &mut buffer);
    loop {
        match reader.next() {
            Ok(event) => all.push(InotifyEvent {
                watch: event.wd(),
                flags: event.events(),
                name: event.file_name().and_then(|name| Some(name.to_str().ok()?.to_owned())),
            }),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// Returns the reason why no (further) watch can be added, and the remedy. `watches` is the number of existing watches.
pub(crate) fn watch_problem(error: Errno, watches: usize) -> String {
    match error {
        Errno::NOSPC => format!(
            "the limit of inotify watches is reached, {watches} of them by this process: raise fs.inotify.max_user_watches \
             and restart"
        ),
        Errno::MFILE => "the limit of inotify instances or open files is reached: raise \
                         fs.inotify.max_user_instances and restart"
            .into(),
        error => format!("inotify cannot be used: {error}"),
    }
}
