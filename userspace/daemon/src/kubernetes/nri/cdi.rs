//! Nodes of devices by the specifications of the Container Device Interface (CDI).
//!
//! A specification is a JSON or YAML file with the device files of each device. The number of a device file, or else its name, leads to
//! the device in sysfs, and so to its node.
//!
//! The files are written by drivers of the host, as root. Those of other users are ignored, and all that is read is bounded.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::Read as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use numaward_kube::nri::types::{Device, DeviceKind};
use numaward_topology::{NodeId, sysfs};
use serde::Deserialize;

use super::devices;

/// The folders of specifications, relative to the host's root.
const CDI_FOLDERS: [&str; 2] = ["etc/cdi", "var/run/cdi"];
/// The maximum number of specifications of a folder.
const MAX_FILES: usize = 512;
/// The maximum size of a file in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// The maximum size of all files in bytes.
const MAX_TOTAL_BYTES: u64 = 16 << 20;
/// The maximum number of device files of a device.
const MAX_DEVICE_FILES: usize = 64;
/// The maximum number of devices in sysfs that are compared with a name.
const MAX_SYSFS_DEVICES: usize = 16 << 10;

#[derive(Deserialize)]
struct Specification {
    /// `VENDOR/CLASS`.
    kind: String,
    #[serde(default)]
    devices: Vec<SpecifiedDevice>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecifiedDevice {
    name: String,
    #[serde(default)]
    container_edits: ContainerEdits,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContainerEdits {
    #[serde(default)]
    device_nodes: Vec<DeviceFile>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct DeviceFile {
    path: String,
    /// Path on the host, if it is another one.
    host_path: Option<String>,
    r#type: Option<String>,
    major: Option<i64>,
    minor: Option<i64>,
}

/// Returns the nodes of devices by their names, `VENDOR/CLASS=DEVICE`. Devices without a known node are not included.
pub(super) fn nodes(host_root: &Path, names: &BTreeSet<String>) -> BTreeMap<String, Vec<NodeId>> {
    let kinds: BTreeSet<&str> = names.iter().filter_map(|name| Some(name.split_once('=')?.0)).collect();
    let (mut found, mut left) = (BTreeMap::new(), MAX_TOTAL_BYTES);
    for path in CDI_FOLDERS.iter().flat_map(|folder| files(&host_root.join(folder))) {
        let Some(text) = read(&path, left) else { continue };
        left = left.saturating_sub(text.len() as u64);
        if !kinds.iter().any(|kind| text.contains(kind)) {
            continue;
        }
        let specification = match parse(&text, &path) {
            Ok(specification) => specification,
            Err(error) => {
                tracing::warn!(path = %path.display(), error, "a CDI file cannot be read, and is ignored");
                continue;
            }
        };
        for device in specification.devices {
            let name = format!("{}={}", specification.kind, device.name);
            if names.contains(&name) {
                let files = device.container_edits.device_nodes.iter().take(MAX_DEVICE_FILES);
                let nodes: BTreeSet<NodeId> = files.filter_map(|file| node(host_root, file)).collect();
                // A later folder takes precedence.
                found.insert(name, nodes.into_iter().collect());
            }
        }
    }
    found.retain(|_, nodes: &mut Vec<NodeId>| !nodes.is_empty());
    found
}

/// Returns the specifications of a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let mut paths: Vec<_> = paths
        .filter(|path| path.extension().is_some_and(|extension| extension == "json" || extension == "yaml"))
        .filter(|path| {
            fs::metadata(path)
                .is_ok_and(|file| file.is_file() && numaward_cgroup::is_trusted_user(file.uid()))
        })
        .take(MAX_FILES)
        .collect();
    paths.sort();
    paths
}

/// Returns the text of a file; `None` if it cannot be read or is too large.
fn read(path: &Path, left: u64) -> Option<String> {
    let limit = MAX_FILE_BYTES.min(left);
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(limit + 1).read_to_string(&mut text));
    match read {
        Ok(_) if text.len() as u64 <= limit => Some(text),
        Ok(_) => {
            tracing::warn!(path = %path.display(), "a CDI file is ignored: it has more than {MAX_FILE_BYTES} bytes, or the CDI files together have more than {MAX_TOTAL_BYTES} bytes");
            None
        }
        Err(error) => {
            tracing::debug!(path = %path.display(), %error, "a CDI file cannot be read");
            None
        }
    }
}

fn parse(text: &str, path: &Path) -> Result<Specification, String> {
    // JSON is YAML, too.
    let value = numaward_config::read_yaml(text, path).map_err(|problems| problems.to_string())?;
    serde_json::from_value(value).map_err(|error| error.to_string())
}

fn node(host_root: &Path, file: &DeviceFile) -> Option<NodeId> {
    let kinds: &[_] = match file.r#type.as_deref() {
        Some("b") => &[DeviceKind::Block],
        Some("c" | "u") => &[DeviceKind::Character],
        Some("p") => return None,
        _ => &[DeviceKind::Character, DeviceKind::Block],
    };
    let number = |number: Option<i64>| number.and_then(|number| u32::try_from(number).ok());
    if let (Some(major @ 1..), Some(minor)) = (number(file.major), number(file.minor)) {
        let device = |&kind| Device { path: String::new(), kind, major, minor };
        return devices::nodes(host_root, &kinds.iter().map(device).collect::<Vec<_>>()).iter().next();
    }
    let path = file.host_path.as_ref().unwrap_or(&file.path);
    let name = path.strip_prefix("/dev/")?;
    kinds.iter().find_map(|kind| node_by_name(host_root, *kind, name))
}

/// Returns the node of the device with this file below `/dev`. The daemon does not see the files of the host.
fn node_by_name(host_root: &Path, kind: DeviceKind, name: &str) -> Option<NodeId> {
    let folder = host_root.join(match kind {
        DeviceKind::Block => "sys/dev/block",
        DeviceKind::Character => "sys/dev/char",
    });
    let base = name.rsplit('/').next()?;
    let line = format!("DEVNAME={name}");
    let entries = fs::read_dir(folder).ok()?.flatten().take(MAX_SYSFS_DEVICES).map(|entry| entry.path());
    let mut named = entries.filter(|link| {
        let is_near = fs::read_link(link).is_ok_and(|to| to.file_name().is_some_and(|last| last == base));
        is_near
            && fs::read_to_string(link.join("uevent")).is_ok_and(|text| text.lines().any(|got| got == line))
    });
    sysfs::device_node(host_root, &named.next()?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn finds_nodes_of_device_files() {
        let root = tempfile::tempdir().unwrap();
        let sys = root.path().join("sys");
        for (number, path, name, node) in [
            ("226:0", "pci0000:80/0000:80:01.0/drm/card0", "dri/card0", "1"),
            ("231:192", "pci0000:00/0000:00:01.0/infiniband_verbs/uverbs0", "infiniband/uverbs0", "0"),
            ("1:3", "virtual/mem/null", "null", ""),
        ] {
            let device = sys.join("devices").join(path);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("uevent"), format!("MAJOR=1\nDEVNAME={name}\n")).unwrap();
            let parent = device.parent().unwrap().parent().unwrap();
            if !node.is_empty() {
                fs::write(parent.join("numa_node"), format!("{node}\n")).unwrap();
            }
            fs::create_dir_all(sys.join("dev/char")).unwrap();
            symlink(device, sys.join("dev/char").join(number)).unwrap();
        }
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(
            "etc/cdi/vendor.yaml",
            "cdiVersion: 0.6.0\nkind: vendor.example/gpu\ndevices:\n- name: card\n  containerEdits:\n    deviceNodes:\n    - path: \
             /dev/dri/card0\n- name: plain\n- name: moved\n  containerEdits: {deviceNodes: [{path: /dev/x, hostPath: /dev/infiniband/uverbs0}]}\n",
        );
        write(
            "var/run/cdi/claim.json",
            r#"{"cdiVersion": "0.6.0", "kind": "vendor.example/claim", "devices": [
                {"name": "u1", "containerEdits": {"env": ["A=b"], "deviceNodes": [
                    {"path": "/dev/null"}, {"path": "/dev/a", "type": "c", "major": 231, "minor": 192}]}},
                {"name": "plain"}]}"#,
        );
        write("var/run/cdi/broken.json", "{\"kind\": \"vendor.example/claim\", ");
        write("var/run/cdi/bomb.yaml", "kind: vendor.example/claim\na: &a [x]\nb: [*a, *a]\n");
        write(
            "var/run/cdi/large.json",
            &format!("{{\"kind\": \"vendor.example/claim\", \"x\": \"{}\"}}", "x".repeat(2 << 20)),
        );
        write("var/run/cdi/other.txt", "kind: vendor.example/claim\ndevices: [{name: text}]\n");
        let names = ["gpu=card", "gpu=moved", "gpu=gone", "claim=u1", "claim=plain", "claim=text", "odd"];
        let names = names.map(|name| format!("vendor.example/{name}")).into();
        let expected = [("claim=u1", 0), ("gpu=card", 1), ("gpu=moved", 0)];
        let expected = expected.map(|(name, node)| (format!("vendor.example/{name}"), vec![NodeId(node)]));
        assert_eq!(nodes(root.path(), &names), expected.clone().into());
        // Other files do not keep these from being read.
        for number in 0..MAX_FILES {
            write(&format!("etc/cdi/{number}.txt"), "");
        }
        assert_eq!(nodes(root.path(), &names), expected.into());
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(root.path().join("etc/cdi/vendor.yaml"), Some(65534), None).unwrap();
            let left = nodes(root.path(), &names);
            assert!(left.keys().eq(["vendor.example/claim=u1"]), "{left:?}");
        }
        assert_eq!(nodes(Path::new("/nowhere"), &names), [].into());
    }
}
