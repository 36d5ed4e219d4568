//! A container image with one layer for each processor, as an archive in the OCI layout. A layer has one program and no
//! shell.
//!
//! Every object is named by its digest, so the objects are made in this order: the layer, the configuration that names
//! it, the manifest that names both, the index of the manifests of all processors, and the layout's index, which gives
//! that a name. `manifest.json` repeats the data of the first processor for `docker load`.
//!
//! Source: OCI image specification 1.1, image-layout.md, config.md.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use numaward_vm::Arch;
use serde_json::{Value, json};

use super::tree::{FileTree, gzip, sha256};
use super::{PLAIN, SUMMARY, VERSION};

/// Name of the image in container runtimes, as in deploy/.
const NAME: &str = "docker.io/library/numaward";
/// Maximum size of an image for one processor, in bytes.
const MAX_IMAGE_BYTES: u64 = 20_000_000;
const BLOBS: &str = "blobs/sha256";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// Packs one tree for each processor as an image; `layout` is an empty tree for the content of the archive.
pub(crate) fn build(
    rootfs: &[(Arch, FileTree)],
    layout: &FileTree,
    image: &Path,
    created: &str,
) -> Result<()> {
    let made = rootfs.iter().map(|(arch, tree)| of_processor(*arch, tree, layout, created));
    let made = made.collect::<Result<Vec<_>>>()?;
    let manifests: Vec<_> = made.iter().map(|of| of.manifest.clone()).collect();
    let all = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests });
    let mut all = add(layout, INDEX, &bytes(&all))?;
    all["annotations"] = json!({
        "io.containerd.image.name": format!("{NAME}:{VERSION}"),
        "org.opencontainers.image.ref.name": VERSION,
    });
    let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [all] });
    layout.file("index.json", &bytes(&index), PLAIN)?;
    layout.file("oci-layout", &bytes(&json!({ "imageLayoutVersion": "1.0.0" })), PLAIN)?;
    let docker = made.first().map(|of| {
        json!({
            "Config": path(&of.config),
            "RepoTags": [format!("numaward:{VERSION}")],
            "Layers": [path(&of.layer)],
        })
    });
    layout.file("manifest.json", &bytes(&docker.into_iter().collect()), PLAIN)?;
    layout.pack(image).map(drop)
}

/// Descriptors of one processor's objects.
struct PlatformDescriptors {
    layer: Value,
    config: Value,
    manifest: Value,
}

fn of_processor(
    arch: Arch,
    rootfs: &FileTree,
    layout: &FileTree,
    created: &str,
) -> Result<PlatformDescriptors> {
    let scratch = tempfile::Builder::new().prefix("numaward-image-").tempdir()?;
    let plain = rootfs.pack(&scratch.path().join("layer.tar"))?;
    let packed = scratch.path().join("layer.tar.gz");
    gzip(&plain, &packed)?;
    let layer = add(layout, LAYER, &fs::read(&packed)?)?;
    let labels = json!({
        "org.opencontainers.image.title": "numaward",
        "org.opencontainers.image.description": SUMMARY,
        "org.opencontainers.image.version": VERSION,
        "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
    });
    let config = json!({
        "created": created,
        "architecture": arch.name(),
        "os": "linux",
        "config": {
            "Entrypoint": ["/usr/bin/numaward"],
            "Cmd": ["run"],
            "Env": ["PATH=/usr/bin"],
            "ExposedPorts": { "9560/tcp": {} },
            "Labels": labels,
        },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", sha256(&plain)?)] },
        "history": [{ "created": created, "created_by": "cargo xtask dist" }],
    });
    let config = add(layout, CONFIG, &bytes(&config))?;
    let manifest = json!({
        "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer], "annotations": labels,
    });
    let mut manifest = add(layout, MANIFEST, &bytes(&manifest))?;
    manifest["platform"] = json!({ "architecture": arch.name(), "os": "linux" });
    Ok(PlatformDescriptors { layer, config, manifest })
}

/// Refuses an archive of images for this number of processors that is too large. Programs that were built for tests are larger than those
/// that users get.
pub(super) fn check_size(archive: &Path, processors: usize) -> Result<()> {
    let bytes = fs::metadata(archive)?.len();
    let most = MAX_IMAGE_BYTES * processors as u64;
    ensure!(bytes <= most, "{} has {bytes} bytes, more than {most}", archive.display());
    Ok(())
}

/// Adds a blob; returns its descriptor.
fn add(layout: &FileTree, media_type: &str, bytes: &[u8]) -> Result<Value> {
    let scratch = tempfile::NamedTempFile::new()?;
    fs::write(scratch.path(), bytes)?;
    let digest = sha256(scratch.path())?;
    layout.file(&format!("{BLOBS}/{digest}"), bytes, PLAIN)?;
    Ok(json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len() }))
}

/// Returns the path of a descriptor's blob in the layout.
fn path(descriptor: &Value) -> String {
    let digest = descriptor["digest"].as_str().unwrap_or_default();
    format!("blobs/{}", digest.replacen(':', "/", 1))
}

fn bytes(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::process::Command;

    use super::*;
    use crate::command;

    #[test]
    fn refuses_large_image() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (bytes, processors, is_allowed) in [
            (MAX_IMAGE_BYTES, 1, true),
            (MAX_IMAGE_BYTES + 1, 1, false),
            (MAX_IMAGE_BYTES + 1, 2, true),
            (2 * MAX_IMAGE_BYTES + 1, 2, false),
        ] {
            file.as_file().set_len(bytes).unwrap();
            assert_eq!(check_size(file.path(), processors).is_ok(), is_allowed, "{bytes}");
        }
    }

    /// Follows an unpacked layout from its index to the layers of these processors, digest by digest, as a runtime
    /// does. Each layer must have the program. Returns the content of each layer.
    pub(crate) fn check(layout: &Path, archs: &[Arch], program: &str) -> Vec<String> {
        let read =
            |path: &str| -> Value { serde_json::from_slice(&fs::read(layout.join(path)).unwrap()).unwrap() };
        let follow = |descriptor: &Value| {
            let file = layout.join(path(descriptor));
            assert_eq!(descriptor["digest"], format!("sha256:{}", sha256(&file).unwrap()));
            assert_eq!(descriptor["size"], fs::metadata(&file).unwrap().len());
            path(descriptor)
        };
        assert_eq!(read("oci-layout")["imageLayoutVersion"], "1.0.0");
        let named = read("index.json")["manifests"].as_array().unwrap().clone();
        assert_eq!(named.len(), 1);
        let manifests = read(&follow(&named[0]))["manifests"].as_array().unwrap().clone();
        let platforms: Vec<_> = manifests.iter().map(|of| of["platform"]["architecture"].clone()).collect();
        assert_eq!(platforms, archs.iter().map(|arch| arch.name()).collect::<Vec<_>>());
        let of_processor = |descriptor: &Value| {
            let manifest = read(&follow(descriptor));
            let config = read(&follow(&manifest["config"]));
            assert_eq!(config["architecture"], descriptor["platform"]["architecture"]);
            (config, follow(&manifest["layers"][0]))
        };
        let found: Vec<_> = manifests.iter().map(of_processor).collect();
        assert_eq!(read("manifest.json")[0]["Layers"][0], found[0].1);
        found.iter().map(|(config, layer)| check_layer(layout, config, layer, program)).collect()
    }

    fn check_layer(layout: &Path, config: &Value, layer: &str, program: &str) -> String {
        let plain = command::read(
            Command::new("sh").args(["-c", "gzip -dc < \"$0\" | sha256sum", layer]).current_dir(layout),
        );
        let plain = plain.unwrap();
        let digest = plain.split(' ').next().unwrap();
        assert_eq!(config["rootfs"]["diff_ids"][0], format!("sha256:{digest}"));
        assert_eq!(config["config"]["Entrypoint"][0], format!("/{program}"));
        let listing = command::read(Command::new("tar").arg("-tvzf").arg(layout.join(layer))).unwrap();
        assert!(
            listing.lines().any(|line| line.starts_with("-rwxr-xr-x 0/0 ") && line.ends_with(program)),
            "{listing}"
        );
        let mut unpack = Command::new("tar");
        command::read(unpack.arg("-xOzf").arg(layout.join(layer)).arg(program)).unwrap()
    }
}
