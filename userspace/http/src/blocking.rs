//! Work that reads files or takes locks, on threads that may block. At most [`MAX_READERS`] at a time, so that a hanging
//! file blocks only these.

use std::sync::Arc;

use axum::http::StatusCode;
use tokio::sync::Semaphore;

use crate::problem::Failure;

/// Requests that are worked on at once; more wait.
const MAX_READERS: usize = 8;

/// Runs such work. Clones share the places.
#[derive(Clone, Debug)]
pub struct Blocking(Arc<Semaphore>);

impl Default for Blocking {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_READERS)))
    }
}

impl Blocking {
    /// Waits for a place, then for the work. It goes on, and keeps its place, where nobody waits for it any more.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        // The semaphore is never closed; without a place, the work would merely not be counted.
        let place = self.0.clone().acquire_owned().await.ok();
        let done = tokio::task::spawn_blocking(move || {
            let _place = place;
            work()
        });
        done.await.map_err(|error| {
            tracing::error!(%error, "a request failed");
            (StatusCode::INTERNAL_SERVER_ERROR, "numaward failed; its log says more".to_owned())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    #[tokio::test]
    async fn so_many_are_worked_on_at_once_also_where_nobody_waits_for_them() {
        let blocking = Blocking::default();
        let mut stuck = Vec::new();
        for _ in 0..MAX_READERS {
            let (release, released) = mpsc::channel::<()>();
            let work = blocking.run(move || released.recv().is_err());
            assert!(tokio::time::timeout(Duration::from_millis(10), work).await.is_err());
            stuck.push(release);
        }
        let waits = tokio::time::timeout(Duration::from_millis(10), blocking.run(|| ())).await;
        assert!(waits.is_err());
        stuck.pop();
        assert!(blocking.run(|| ()).await.is_ok());
    }
}
