//! What a request may take.

use std::time::Duration;

/// Largest body that is taken. Only requests for allocations need one, of some hundred bytes.
pub const MAX_BODY_BYTES: usize = 16 << 10;
/// A request is answered, or given up, within this time; a response is taken by the client within it.
pub const TIME_LIMIT: Duration = Duration::from_secs(30);
