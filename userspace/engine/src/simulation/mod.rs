//! Replays: what a strategy would have done with pods that arrive, live and leave.
//!
//! Nothing here reads files: the caller hands in the text, already parsed.
//!
//! | part | what |
//! |---|---|
//! | [`mod@format`] | machines, configurations and pods as they are written down |
//! | [`trace`] | traces of pods, and what the kubelet did with them |
//! | [`replay`] | a replay of a trace with a strategy |
//! | [`quality`] | how well those were placed that were admitted |
//! | [`variant`] | a strategy as it is replayed |
//! | [`fleet`] | hosts alike, and a scheduler that picks one for each pod |

pub mod fleet;
pub mod format;
pub mod quality;
pub mod replay;
pub mod trace;
pub mod variant;
