//! Fault points: named places at which a test can make the daemon crash, like a power failure or `kill -9`.
//!
//! `NUMAWARD_FAULT=NAME` aborts the process at the point with that name, `NUMAWARD_FAULT=NAME@3` when it passes the
//! point for the third time, `any@3` at the third point of any name. A single-threaded test can register a callback
//! instead. Compiled only for tests and with the feature `fault-points`.

/// Marks a fault point; does nothing in this build.
#[cfg(not(any(test, feature = "fault-points")))]
pub const fn point(_name: &str) {}

/// A function that is called with the name of each point.
#[cfg(any(test, feature = "fault-points"))]
pub type PointCallback = Box<dyn Fn(&'static str)>;

#[cfg(any(test, feature = "fault-points"))]
thread_local! {
    static CALLBACK: std::cell::RefCell<Option<PointCallback>> = const { std::cell::RefCell::new(None) };
}

/// Registers a function that is called with the name of each point that this thread passes. It may unwind.
#[cfg(any(test, feature = "fault-points"))]
pub fn watch(callback: Option<PointCallback>) {
    CALLBACK.set(callback);
}

/// Marks a fault point. Aborts if `NUMAWARD_FAULT` selects it.
#[cfg(any(test, feature = "fault-points"))]
pub fn point(name: &'static str) {
    use std::{
        collections::HashMap,
        sync::{Mutex, PoisonError},
    };
    static PASSED: Mutex<Option<HashMap<&'static str, u32>>> = Mutex::new(None);

    CALLBACK.with_borrow(|callback| callback.iter().for_each(|watch| watch(name)));
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
