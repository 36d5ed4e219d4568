//! Access to the probes' maps, with errors that contain their names.

use std::io;

use aya::{
    Pod,
    maps::{Array, MapData, MapError},
};

use crate::MapAccessError;

pub(crate) fn set<V: Pod>(
    map: &mut Array<MapData, V>,
    name: &'static str,
    index: u32,
    value: &V,
) -> Result<(), MapAccessError> {
    map.set(index, value, 0).map_err(access_error(name, "write"))
}

pub(crate) fn access_error(map: &'static str, action: &'static str) -> impl Fn(MapError) -> MapAccessError {
    move |error| MapAccessError {
        map,
        action,
        source: match error {
            MapError::SyscallError(error) => error.io_error,
            error => io::Error::other(error),
        },
    }
}
