//! Tests of drop-ins of units, with a fake of systemd on a bus of its own.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use futures_util::StreamExt as _;
use parking_lot::Mutex;
use tokio::{net::UnixListener, runtime::Runtime};
use zbus::{Connection, Guid, Message, MessageStream, OwnedVariant, Variant, connection};

use super::*;

const UNIT: &str = "a.service";

/// A host with one unit.
struct FakeSystemd {
    tree: FakeHierarchy,
    enforcer: Enforcer,
    unit: Arc<FakeUnit>,
    _runtime: Runtime,
}

struct FakeUnit {
    root: PathBuf,
    /// Properties in the unit's own file.
    file: Mutex<BTreeMap<String, u64>>,
    /// Properties that systemd has read, or that were set.
    properties: Mutex<BTreeMap<String, u64>>,
    /// True if the unit was removed from the host.
    is_gone: AtomicBool,
}

impl FakeUnit {
    fn drop_in(&self, property: &str) -> PathBuf {
        self.root.join(format!("run/systemd/system.control/{UNIT}.d/50-{property}.conf"))
    }

    fn set(&self, property: &str, value: u64) {
        let path = self.drop_in(property);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("[Service]\n{property}={value}\n")).unwrap();
        self.properties.lock().insert(property.to_owned(), value);
        self.realize(property);
    }

    fn value(&self, property: &str) -> u64 {
        let default = if property == "MemoryMin" { 0 } else { u64::MAX };
        self.properties.lock().get(property).copied().unwrap_or(default)
    }

    /// Writes the knob.
    fn realize(&self, property: &str) {
        let knob = if property == "MemoryMin" { "memory.min" } else { "memory.max" };
        let value = Some(self.value(property)).filter(|value| *value < u64::MAX);
        let value = value.map_or_else(|| "max".to_owned(), |value| value.to_string());
        fs::write(self.root.join(UNIT).join(knob), format!("{value}\n")).unwrap();
    }

    fn daemon_reload(&self) {
        for property in ["MemoryMin", "MemoryMax"] {
            let drop_in = fs::read_to_string(self.drop_in(property)).ok();
            let says = drop_in.map(|text| text.trim().rsplit_once('=').unwrap().1.parse().unwrap());
            let value = says.or_else(|| self.file.lock().get(property).copied());
            let mut properties = self.properties.lock();
            match value {
                Some(value) => properties.insert(property.to_owned(), value),
                None => properties.remove(property),
            };
            drop(properties);
            self.realize(property);
        }
    }

    async fn serve(self: Arc<Self>, connection: Connection) {
        let mut calls = MessageStream::from(&connection);
        while let Some(Ok(call)) = calls.next().await {
            let header = call.header();
            let method = header.member().map(|member| member.as_str().to_owned()).unwrap_or_default();
            match method.as_str() {
                "Hello" => connection.reply(&header, &":1.1").await.unwrap(),
                "LoadUnit" => {
                    let path = zbus::ObjectPath::try_from("/org/freedesktop/systemd1/unit/a").unwrap();
                    connection.reply(&header, &path).await.unwrap();
                }
                "Get" => connection.reply(&header, &self.get(&call)).await.unwrap(),
                "SetUnitProperties" => {
                    let body = call.body();
                    let (_, _, set): (String, bool, Vec<(String, OwnedVariant)>) =
                        body.deserialize().unwrap();
                    for (property, value) in set {
                        self.set(&property, value.try_into().unwrap());
                    }
                    connection.reply(&header, &()).await.unwrap();
                }
                other => panic!("{other}"),
            }
        }
    }

    fn get(&self, call: &Message) -> Variant<'static> {
        let (_, property): (String, String) = call.body().deserialize().unwrap();
        match property.as_str() {
            "LoadState" if self.is_gone.load(Ordering::Relaxed) => "not-found".into(),
            "LoadState" => "loaded".into(),
            "ControlGroup" => "/a.service".into(),
            property => self.value(property).into(),
        }
    }
}

impl FakeSystemd {
    fn new() -> Self {
        let tree = FakeHierarchy::new(&["/a.service"]);
        let root = tree.root.path().to_owned();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (file, properties, is_gone) = Default::default();
        let unit = Arc::new(FakeUnit { root: root.clone(), file, properties, is_gone });
        let (bus, serving) = (root.join("bus"), unit.clone());
        let _entered = runtime.enter();
        let listener = UnixListener::bind(&bus).unwrap();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let server = connection::Builder::unix_stream(stream.into_std().unwrap())
                    .server(Guid::generate())
                    .p2p();
                tokio::spawn(serving.clone().serve(server.build().await.unwrap()));
            }
        });
        let address = format!("unix:path={}", bus.display());
        let systemd = Systemd::at(runtime.handle().clone(), &root, address);
        let options = EnforcerOptions::new("0-7".parse().unwrap(), "0-1".parse().unwrap());
        let enforcer = Enforcer::new(root, Some(systemd), options);
        Self { tree, enforcer, unit, _runtime: runtime }
    }

    fn apply(&self, applied: &AppliedSettings, change: &SettingsChange) -> AppliedSettings {
        let plan = self.enforcer.plan(applied, change).unwrap();
        let report = self.enforcer.execute(&plan).unwrap();
        plan.outcome_of(&report)
    }

    fn hold(&self) -> AppliedSettings {
        let settings = Settings { memory_max: Some(mib(64)), ..protected(8) };
        self.apply(&AppliedSettings::default(), &SettingsChange::Hold(path("/a.service"), settings))
    }

    fn max(&self) -> String {
        self.tree.get("/a.service", "memory.max")
    }

    fn has_drop_ins(&self) -> [bool; 2] {
        ["MemoryMin", "MemoryMax"].map(|property| self.unit.drop_in(property).exists())
    }
}

#[test]
fn release_removes_drop_in() {
    let fake = FakeSystemd::new();
    fake.unit.file.lock().insert("MemoryMax".to_owned(), 512 << 20);
    fake.unit.daemon_reload();
    let applied = fake.hold();
    assert_eq!((fake.max(), fake.has_drop_ins()), (bytes(64), [true, true]));
    let applied = fake.apply(&applied, &SettingsChange::Release(path("/a.service")));
    assert!(applied.is_empty());
    assert_eq!((fake.max(), fake.has_drop_ins()), (bytes(512), [false, false]));
    assert!(!fake.unit.drop_in("MemoryMax").parent().unwrap().exists());
    fake.unit.file.lock().insert("MemoryMax".to_owned(), 700 << 20);
    fake.unit.daemon_reload();
    assert_eq!(fake.max(), bytes(700));
}

#[test]
fn resize_to_original_removes_drop_in() {
    let fake = FakeSystemd::new();
    fake.unit.file.lock().insert("MemoryMax".to_owned(), 32 << 20);
    fake.unit.daemon_reload();
    let held = fake.hold();
    let settings = Settings { memory_max: Some(mib(32)), ..protected(8) };
    let resized = fake.apply(&held, &SettingsChange::Hold(path("/a.service"), settings));
    assert_eq!((fake.max(), fake.has_drop_ins()), (bytes(32), [true, true]));
    let released = fake.apply(&resized, &SettingsChange::Release(path("/a.service")));
    assert!(released.is_empty());
    assert_eq!((fake.max(), fake.has_drop_ins()), (bytes(32), [false, false]));
}

#[test]
fn keeps_drop_in_of_administrator() {
    let fake = FakeSystemd::new();
    fake.unit.set("MemoryMax", 256 << 20);
    let applied = fake.hold();
    let applied = fake.apply(&applied, &SettingsChange::Release(path("/a.service")));
    assert!(applied.is_empty());
    fake.unit.daemon_reload();
    assert_eq!((fake.max(), fake.has_drop_ins()), (bytes(256), [false, true]));

    // A drop-in that was created during the guarantee.
    let applied = fake.hold();
    fake.unit.set("MemoryMin", 5 << 20);
    fake.apply(&applied, &SettingsChange::Release(path("/a.service")));
    assert_eq!(fake.has_drop_ins(), [true, true]);
    assert_eq!(fake.tree.get("/a.service", "memory.min"), bytes(5));
}

#[test]
fn failed_change_removes_drop_in() {
    let fake = FakeSystemd::new();
    let huge = [(HugepageSize(Bytes::mib(2)), mib(4))];
    let settings = Settings { memory_max: Some(mib(64)), hugetlb: huge.into(), ..protected(8) };
    let plan = fake
        .enforcer
        .plan(&AppliedSettings::default(), &SettingsChange::Hold(path("/a.service"), settings))
        .unwrap();
    fs::remove_file(fake.unit.root.join(UNIT).join("hugetlb.2MB.max")).unwrap();
    let failure = fake.enforcer.execute(&plan).unwrap_err();
    assert_eq!(failure.report.written.len(), 2, "{failure:?}");
    assert_eq!((fake.max().as_str(), fake.has_drop_ins()), ("max", [false, false]));
}

#[test]
fn removes_drop_in_after_crash() {
    let fake = FakeSystemd::new();
    let applied = fake.hold();
    let plan = fake.enforcer.plan(&applied, &SettingsChange::Release(path("/a.service"))).unwrap();
    // systemd creates the drop-in when the plan's property is written.
    fake.unit.set("MemoryMin", 0);
    fake.unit.set("MemoryMax", u64::MAX);
    fake.apply(&plan.intent, &SettingsChange::Release(path("/a.service")));
    assert_eq!(fake.has_drop_ins(), [false, false]);
}

#[test]
fn release_of_removed_unit_removes_drop_in() {
    let fake = FakeSystemd::new();
    fake.unit.file.lock().insert("MemoryMax".to_owned(), 512 << 20);
    fake.unit.daemon_reload();
    let applied = fake.hold();
    // The package of the unit is removed, and systemd reads its files again.
    fs::remove_dir_all(fake.unit.root.join(UNIT)).unwrap();
    fake.unit.properties.lock().clear();
    fake.unit.is_gone.store(true, Ordering::Relaxed);
    let applied = fake.apply(&applied, &SettingsChange::Release(path("/a.service")));
    assert!(applied.is_empty());
    assert_eq!(fake.has_drop_ins(), [false, false]);
}

#[test]
fn restarted_unit_gets_no_limit_without_record() {
    let fake = FakeSystemd::new();
    let huge = [(HugepageSize(Bytes::mib(2)), mib(4))];
    let settings = Settings { hugetlb: huge.into(), ..protected(8) };
    let change = SettingsChange::Hold(path("/a.service"), settings);
    let plan = fake.enforcer.plan(&AppliedSettings::default(), &change).unwrap();
    // The old directory is kept, so that its inode is not reused.
    fs::rename(fake.unit.root.join(UNIT), fake.unit.root.join("old")).unwrap();
    fake.tree.make("/a.service");
    let failure = fake.enforcer.execute(&plan).unwrap_err();
    assert!(failure.error.is_gone(), "{failure}");
    assert_eq!(fake.tree.get("/a.service", "hugetlb.2MB.max"), "max");
    assert_eq!(fake.has_drop_ins(), [false, false]);
}
