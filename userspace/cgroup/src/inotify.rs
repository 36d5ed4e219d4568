//! What inotify reports (inotify(7)), for those who watch cgroups.

use std::{mem::MaybeUninit, os::fd::OwnedFd};

use rustix::{
    fs::inotify::{ReadFlags, Reader},
    io::Errno,
};

/// What happened to something watched.
pub(crate) struct Reported {
    pub(crate) watch: i32,
    pub(crate) flags: ReadFlags,
    /// What it happened to in a watched directory. `None` also for a name that is not text.
    pub(crate) name: Option<String>,
}

/// All that there is to report. What was reported before an error is kept.
pub(crate) fn drain(fd: &OwnedFd, all: &mut Vec<Reported>) -> Result<(), Errno> {
    let mut buffer = [MaybeUninit::uninit(); 16 * 1024];
    let mut reader = Reader::new(fd, &mut buffer);
    loop {
        match reader.next() {
            Ok(event) => all.push(Reported {
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

/// Why nothing (more) can be watched, and what to do. `watches` are there already.
pub(crate) fn why_unwatched(error: Errno, watches: usize) -> String {
    match error {
        Errno::NOSPC => format!(
            "the limit of inotify watches was reached with {watches} of ours: raise fs.inotify.max_user_watches \
             and restart"
        ),
        Errno::MFILE => "the limit of inotify instances or open files is reached: raise \
                         fs.inotify.max_user_instances and restart"
            .into(),
        error => format!("inotify cannot be used: {error}"),
    }
}
