//! Knobs of units, written through systemd's manager on the system bus.
//!
//! systemd writes the knobs of its units itself, and repeats this at its own times. A value that has to survive
//! `daemon-reload` and restarts of the unit must therefore be a property of the unit. The properties are set with
//! `SetUnitProperties(runtime = true)`, so they end with the next boot, as a guarantee does.
//!
//! systemd answers before it has written the knob, and only logs a refusal by the kernel: a caller that sets a property
//! has to check the knob afterwards.
//!
//! For each property that is set, systemd keeps a drop-in file, which overrides the unit's own file until the next
//! boot, even after the old value was restored and the administrator edited that file. The drop-in is therefore removed
//! with the guarantee, if there was none before. systemd keeps the restored value until its next `daemon-reload`. The
//! daemon does not request a reload, because this would also apply all other edits. systemd creates the cgroup of a
//! stopped unit whose properties are set, and removes it when the unit has run and stops.
//!
//! Source: org.freedesktop.systemd1(5), systemd.resource-control(5).

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, KnobValue, Limit},
};
use numaward_model::health;
use numaward_topology::{
    Bytes,
    set::{Id, IdSet},
};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use zbus::{
    Connection, DynamicType, Message, ObjectPath, OwnedObjectPath, OwnedVariant, Variant, connection,
};

use super::EnforceError;

const MANAGER: &str = "org.freedesktop.systemd1";
const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
const MANAGER_INTERFACE: &str = "org.freedesktop.systemd1.Manager";
const PROPERTIES_INTERFACE: &str = "org.freedesktop.DBus.Properties";
/// Directory of properties that last until the next boot, from the host's root.
const RUNTIME_CONTROL: &str = "run/systemd/system.control";
/// The time limit of a call. An answer takes milliseconds unless systemd is busy with a `daemon-reload`.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Client of the manager of the host's units.
///
/// Calls block, so they must not run in a task of the async runtime.
#[derive(Debug)]
pub struct Systemd {
    runtime: Handle,
    /// Address of the bus; `None` for the system bus of this host.
    address: Option<String>,
    /// Created at the first call, and again after it broke.
    connection: Mutex<Option<Connection>>,
    /// Directory of the drop-ins of all units.
    drop_ins: PathBuf,
}

/// Returns whether systemd is the init of the host with this root (`sd_booted(3)`).
pub fn is_init(root: &Path) -> bool {
    root.join("run/systemd/system").is_dir()
}

/// Returns the property of a unit that sets this knob; `None` if there is none.
pub(super) fn property(knob: Knob) -> Option<&'static str> {
    match knob {
        Knob::CpusetCpus => Some("AllowedCPUs"),
        Knob::CpusetMems => Some("AllowedMemoryNodes"),
        Knob::MemoryMin => Some("MemoryMin"),
        Knob::MemoryLow => Some("MemoryLow"),
        Knob::MemoryHigh => Some("MemoryHigh"),
        Knob::MemoryMax => Some("MemoryMax"),
        _ => None,
    }
}

impl Systemd {
    /// Creates a client for the host with this root on the system bus; the runtime drives the connection.
    pub fn new(runtime: Handle, root: &Path) -> Self {
        Self { runtime, address: None, connection: Mutex::new(None), drop_ins: root.join(RUNTIME_CONTROL) }
    }

    /// Creates a client for the bus with this address, such as `unix:path=/host/run/dbus/system_bus_socket`.
    pub fn at(runtime: Handle, root: &Path, address: String) -> Self {
        Self { address: Some(address), ..Self::new(runtime, root) }
    }

    /// Returns the path of a system unit's cgroup; empty if the unit is not running.
    pub(super) fn cgroup_of(&self, unit: &str) -> Result<String, EnforceError> {
        let text = |interface: &str, property: &str| {
            String::try_from(self.property(unit, interface, property)?).map_err(|error| refused(unit, error))
        };
        if text("Unit", "LoadState")? == "not-found" {
            return Err(EnforceError::UnknownUnit { unit: unit.to_owned() });
        }
        text(interface_of(unit), "ControlGroup")
    }

    /// Returns whether a unit has a file, even if it is not running.
    pub(super) fn is_loaded(&self, unit: &str) -> Result<bool, EnforceError> {
        let state = self.property(unit, "Unit", "LoadState")?;
        String::try_from(state).map(|state| state == "loaded").map_err(|error| refused(unit, error))
    }

    /// Refuses a cgroup that has the name of a unit but is not the unit's.
    pub(super) fn check_owns(&self, unit: &str, cgroup: &CgroupPath) -> Result<(), EnforceError> {
        let own = self.cgroup_of(unit)?;
        if own != cgroup.as_str() {
            let message = format!("its cgroup is {own:?}, not {cgroup}");
            return Err(EnforceError::Systemd { unit: unit.to_owned(), message });
        }
        Ok(())
    }

    /// Returns the value of the unit's property that sets this knob.
    pub(super) fn read(&self, unit: &str, knob: Knob, property: &str) -> Result<KnobValue, EnforceError> {
        from_bus(knob, self.property(unit, interface_of(unit), property)?).ok_or_else(|| {
            let message = format!("{property} has a type that is not known here");
            EnforceError::Systemd { unit: unit.to_owned(), message }
        })
    }

    fn property(&self, unit: &str, interface: &str, property: &str) -> Result<OwnedVariant, EnforceError> {
        // `LoadUnit` also finds units that are not running.
        let path: OwnedObjectPath = self
            .call(unit, MANAGER_PATH.try_into(), MANAGER_INTERFACE, "LoadUnit", &(unit,))?
            .body()
            .deserialize()
            .map_err(|error| refused(unit, error))?;
        let interface = format!("{MANAGER}.{interface}");
        self.call(unit, Ok(path.as_ref()), PROPERTIES_INTERFACE, "Get", &(interface.as_str(), property))?
            .body()
            .deserialize()
            .map_err(|error| refused(unit, error))
    }

    /// Sets properties of a unit until the next boot. Knobs without a property are skipped.
    pub(super) fn write(&self, unit: &str, values: &[(Knob, &KnobValue)]) -> Result<(), EnforceError> {
        let properties: Vec<(&str, Variant<'_>)> =
            values.iter().filter_map(|(knob, value)| Some((property(*knob)?, to_bus(value)?))).collect();
        let runtime = true;
        self.call(
            unit,
            MANAGER_PATH.try_into(),
            MANAGER_INTERFACE,
            "SetUnitProperties",
            &(unit, runtime, properties),
        )
        .map(drop)
    }

    /// Returns whether a knob's property of a unit has a drop-in that is visible to the daemon.
    pub(super) fn has_drop_in(&self, unit: &str, knob: Knob) -> bool {
        self.drop_in(unit, knob).is_some_and(|path| path.symlink_metadata().is_ok())
    }

    /// Removes the drop-in of a knob's property, if there is one. Its value stays in effect until systemd reads its
    /// files again.
    pub(super) fn remove_drop_in(&self, unit: &str, knob: Knob) {
        let Some(path) = self.drop_in(unit, knob) else { return };
        match fs::remove_file(&path) {
            Ok(()) => {
                // Fails if the folder has other drop-ins.
                let _ = path.parent().map(fs::remove_dir);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let path = path.display();
                tracing::warn!(%path, %error, "cannot remove a drop-in: it overrides the unit's own file until it is removed or the host restarts");
            }
        }
    }

    /// Returns the path of the drop-in of a knob's property.
    fn drop_in(&self, unit: &str, knob: Knob) -> Option<PathBuf> {
        Some(self.drop_ins.join(format!("{unit}.d/50-{}.conf", property(knob)?)))
    }

    fn call<B: serde::Serialize + DynamicType>(
        &self,
        unit: &str,
        path: Result<ObjectPath<'_>, zbus::Error>,
        interface: &str,
        method: &str,
        body: &B,
    ) -> Result<Message, EnforceError> {
        health::beat();
        let path = path.map_err(|error| refused(unit, error))?;
        let mut held = self.connection.lock();
        let kept = held.as_ref().filter(|connection| !connection.is_closed()).cloned();
        self.runtime.block_on(async {
            let connection = if let Some(connection) = kept {
                connection
            } else {
                let bus = match &self.address {
                    Some(address) => connection::Builder::address(address.as_str()),
                    None => connection::Builder::system(),
                };
                // The time limit of method calls does not cover the handshake.
                let new = tokio::time::timeout(TIMEOUT, bus.method_timeout(TIMEOUT).build()).await;
                let silent =
                    |_| format!("the bus accepts connections but does not answer within {TIMEOUT:?}");
                let new = new.map_err(silent).and_then(|new| new.map_err(|error| error.to_string()));
                new.map_err(|message| EnforceError::NoBus { message })?
            };
            let answer = connection.call_method(Some(MANAGER), path, Some(interface), method, body).await;
            *held = Some(connection);
            answer.map_err(|error| {
                let error = refused(unit, error);
                if matches!(error, EnforceError::NoBus { .. }) {
                    *held = None;
                }
                error
            })
        })
    }
}

/// Returns the last part of the name of the D-Bus interface with a unit's resource properties.
fn interface_of(unit: &str) -> &'static str {
    match unit.rsplit_once('.') {
        Some((_, "slice")) => "Slice",
        Some((_, "scope")) => "Scope",
        Some((_, "socket")) => "Socket",
        Some((_, "mount")) => "Mount",
        Some((_, "swap")) => "Swap",
        _ => "Service",
    }
}

fn refused(unit: &str, error: zbus::Error) -> EnforceError {
    let unit = unit.to_owned();
    match error {
        zbus::Error::MethodError(name, message, _) => {
            let message = message.unwrap_or_default();
            match name.as_str() {
                "org.freedesktop.systemd1.NoSuchUnit" => EnforceError::UnknownUnit { unit },
                _ => EnforceError::Systemd { unit, message: format!("{name}: {message}") },
            }
        }
        zbus::Error::FDO(error) => match *error {
            zbus::fdo::Error::AccessDenied(message)
            | zbus::fdo::Error::AuthFailed(message)
            | zbus::fdo::Error::InteractiveAuthorizationRequired(message) => {
                EnforceError::AccessDenied { unit, message }
            }
            // systemd's answer if the unit's type does not match its name.
            zbus::fdo::Error::UnknownObject(_) | zbus::fdo::Error::UnknownInterface(_) => {
                EnforceError::UnknownUnit { unit }
            }
            zbus::fdo::Error::ServiceUnknown(message)
            | zbus::fdo::Error::NameHasNoOwner(message)
            | zbus::fdo::Error::Disconnected(message)
            | zbus::fdo::Error::NoReply(message) => EnforceError::NoBus { message },
            error => EnforceError::Systemd { unit, message: error.to_string() },
        },
        zbus::Error::InputOutput(error) => EnforceError::NoBus { message: error.to_string() },
        error => EnforceError::Systemd { unit, message: error.to_string() },
    }
}

/// Encodes a set as systemd does on the bus: one bit per id, least significant byte first, no trailing zeros.
fn mask<T: Id>(set: &IdSet<T>) -> Vec<u8> {
    let mut bytes: Vec<u8> = set.words().iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.truncate(bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1));
    bytes
}

fn unmask<T: Id>(bytes: &[u8]) -> IdSet<T> {
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    IdSet::from_words(bytes.chunks(8).map(word).collect::<Vec<_>>())
}

/// systemd's `infinity`.
const INFINITY: u64 = u64::MAX;

fn to_bus(value: &KnobValue) -> Option<Variant<'static>> {
    match value {
        KnobValue::Cpus(cpus) => Some(mask(cpus).into()),
        KnobValue::Nodes(nodes) => Some(mask(nodes).into()),
        KnobValue::Limit(Limit::Bytes(Bytes(bytes))) => Some((*bytes).into()),
        KnobValue::Limit(Limit::Max) => Some(INFINITY.into()),
        KnobValue::Quota(_)
        | KnobValue::Partition(_)
        | KnobValue::Controllers(_)
        | KnobValue::Processes(_) => None,
    }
}

fn from_bus(knob: Knob, value: OwnedVariant) -> Option<KnobValue> {
    match knob {
        Knob::CpusetCpus => Vec::try_from(value).ok().map(|bytes: Vec<u8>| KnobValue::Cpus(unmask(&bytes))),
        Knob::CpusetMems => Vec::try_from(value).ok().map(|bytes: Vec<u8>| KnobValue::Nodes(unmask(&bytes))),
        _ => u64::try_from(value).ok().map(|bytes| {
            KnobValue::Limit(if bytes == INFINITY { Limit::Max } else { Limit::Bytes(Bytes(bytes)) })
        }),
    }
}

#[cfg(test)]
mod tests {
    use numaward_topology::CpuSet;

    use super::*;

    #[test]
    fn encodes_sets_as_little_endian_masks() {
        for (list, bytes) in
            [("", &[][..]), ("2-3", &[12]), ("0,9", &[1, 2]), ("64", &[0, 0, 0, 0, 0, 0, 0, 0, 1])]
        {
            let set: CpuSet = list.parse().unwrap();
            assert_eq!(mask(&set), bytes, "{list}");
            assert_eq!(unmask(bytes), set, "{list}");
        }
        assert_eq!(unmask(&[1, 0, 0]), "0".parse::<CpuSet>().unwrap(), "zeros at the end");
    }

    #[test]
    fn bus_values_round_trip() {
        for (knob, text) in [
            (Knob::CpusetCpus, "0-3,70"),
            (Knob::CpusetMems, "1"),
            (Knob::CpusetCpus, ""),
            (Knob::MemoryMin, "4096"),
            (Knob::MemoryMax, "max"),
        ] {
            let value = knob.parse(text).unwrap();
            let sent: OwnedVariant = to_bus(&value).unwrap().try_into().unwrap();
            assert_eq!(from_bus(knob, sent), Some(value), "{knob} {text}");
        }
        assert_eq!(from_bus(Knob::CpusetCpus, OwnedVariant::from(1u64)), None);
    }

    #[test]
    fn reports_missing_bus() {
        let root = tempfile::tempdir().unwrap();
        assert!(!is_init(root.path()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let address = format!("unix:path={}/bus", root.path().display());
        let systemd = Systemd::at(runtime.handle().clone(), root.path(), address);
        let error = systemd.read("a.service", Knob::MemoryMin, "MemoryMin").unwrap_err();
        assert!(matches!(error, EnforceError::NoBus { .. }), "{error}");
    }
}
