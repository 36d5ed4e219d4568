//! Points where a test makes the daemon die, as a power failure or `kill -9` would.
//!
//! `NUMAWARD_FAULT=NAME` aborts at the point of that name, `NUMAWARD_FAULT=NAME@3` when it is passed the third
//! time, `any@3` at the third point of any name. A test of one thread may have a function of its own called instead.
//! Compiled only for tests and with the feature `fault-points`.

/// Names a point.
#[cfg(not(any(test, feature = "fault-points")))]
pub const fn point(_name: &str) {}

/// Called with the name of a point.
#[cfg(any(test, feature = "fault-points"))]
pub type PointCallback = Box<dyn Fn(&'static str)>;

#[cfg(any(test, feature = "fault-points"))]
thread_local! {
    static WATCHER: std::cell::RefCell<Option<PointCallback>> = const { std::cell::RefCell::new(None) };
}

/// From now on this is called with the name of each point that this thread passes. It may unwind.
#[cfg(any(test, feature = "fault-points"))]
pub fn watch(watcher: Option<PointCallback>) {
    WATCHER.set(watcher);
}

/// Aborts here if a test wants it.
#[cfg(any(test, feature = "fault-points"))]
pub fn point(name: &'static str) {
    use std::{
        collections::HashMap,
        sync::{Mutex, PoisonError},
    };
    static PASSED: Mutex<Option<HashMap<&'static str, u32>>> = Mutex::new(None);

    WATCHER.with_borrow(|watcher| watcher.iter().for_each(|watch| watch(name)));
    let Ok(wanted) = std::env::var("NUMAWARD_FAULT") else { return };
    let (wanted, count) = wanted.split_once('@').unwrap_or((&wanted, "1"));
    let mut passed = PASSED.lock().unwrap_or_else(PoisonError::into_inner);
    let passed = passed.get_or_insert_default();
    let key = if wanted == "any" { "any" } else { name };
    let times = passed.entry(key).or_default();
    *times += 1;
    if key == wanted && times.to_string() == count {
        eprintln!("fault point {name}");
        std::process::abort();
    }
}
