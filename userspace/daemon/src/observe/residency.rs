//! Reads where each workload's memory lies.

use std::thread;

use tokio_util::sync::CancellationToken;

use super::Observer;

pub(super) fn keep_reading(_observer: &Observer, stop: &CancellationToken) {
    while !stop.is_cancelled() {
        thread::sleep(std::time::Duration::from_millis(250));
    }
}
