//! Parser of numactl(8)'s lists of nodes and CPUs: `0-1,3`, `all`, `!0`, `+0`, `netdev:eth0`.

use std::path::Path;

use anyhow::{Context as _, bail};
use numaward_topology::{
    NodeSet,
    set::{Id, IdSet},
};

use crate::device;

/// Parses a list of allowed ids. `resolve` looks up names.
///
/// A leading `!` selects all other allowed ids. With `+`, numbers are indices into the allowed ids. Both ends of a
/// range must be allowed; between them, ids that are not allowed are skipped.
pub(super) fn parse_list<T: Id>(
    subject: &str,
    text: &str,
    allowed: &IdSet<T>,
    resolve: impl Fn(&str) -> anyhow::Result<Option<IdSet<T>>>,
) -> anyhow::Result<IdSet<T>> {
    let (inverted, rest) = strip_sign(text, '!');
    let (relative, rest) = strip_sign(rest, '+');
    let mut found = IdSet::new();
    for part in rest.split(',').filter(|_| !rest.is_empty()) {
        if part == "all" {
            found = allowed.clone();
            continue;
        }
        if let Some(named) = resolve(part)? {
            if let Some(outside) = named.iter().find(|id| !allowed.contains(*id)) {
                bail!(
                    "{subject} {text:?}: {part} is on {subject} {}, which this process may not use",
                    outside.as_u32()
                );
            }
            found.extend(named.iter());
            continue;
        }
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let [first, last] = [first, last].map(|number| parse_id(subject, text, number, relative, allowed));
        let (first, last) = (first?, last?);
        if last < first {
            bail!("{subject} {text:?}: the end of the range {part} is before its beginning");
        }
        if let Some(end) = [first, last].into_iter().find(|end| !allowed.contains(T::from_u32(*end))) {
            bail!(
                "{subject} {text:?}: {subject} {end} does not exist, or this process may not use it ({allowed})"
            );
        }
        found.extend(allowed.iter().filter(|id| (first..=last).contains(&id.as_u32())));
    }
    Ok(if inverted { allowed.iter().filter(|id| !found.contains(*id)).collect() } else { found })
}

fn strip_sign(text: &str, sign: char) -> (bool, &str) {
    text.strip_prefix(sign).map_or((false, text), |rest| (true, rest))
}

/// Parses a number like strtoul(3), also hexadecimal and octal ones. A relative number is an index into the allowed
/// ids.
fn parse_id<T: Id>(
    subject: &str,
    text: &str,
    number: &str,
    relative: bool,
    allowed: &IdSet<T>,
) -> anyhow::Result<u32> {
    let (digits, radix) = match number.strip_prefix("0x").or_else(|| number.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None if number.len() > 1 && number.starts_with('0') => (&number[1..], 8),
        None => (number, 10),
    };
    let read = Some(digits).filter(|digits| digits.chars().all(|c| c.is_ascii_alphanumeric()));
    let read = read.and_then(|digits| u32::from_str_radix(digits, radix).ok());
    let read = read.with_context(|| {
        format!("{subject} {text:?}: {number:?} is not a number; write a list such as 0-1,3, all, !0 or +0")
    })?;
    if !relative {
        return Ok(read);
    }
    let counted = allowed.iter().nth(read as usize).map(Id::as_u32);
    counted.with_context(|| format!("{subject} {text:?}: this process may use only {}", allowed.len()))
}

/// Returns the node of a name such as `netdev:eth0`; `None` if the text is no name.
pub(super) fn named_node(root: &Path, part: &str) -> anyhow::Result<Option<NodeSet>> {
    let Some((kind, name)) = part.split_once(':') else { return Ok(None) };
    let node = match kind {
        "netdev" | "block" => device::node(root, name)?,
        "pci" => device::node(root, &pci_address(name).unwrap_or_else(|| name.to_owned()))?,
        "file" => device::node_of_file(root, Path::new(name))?,
        "ip" => bail!("{part:?}: routes are not looked up; name the network interface, as in netdev:eth0"),
        _ => bail!("{part:?}: unknown kind of device; there are netdev:, block:, pci: and file:"),
    };
    Ok(Some(NodeSet::single(node)))
}

/// Converts a PCI address of numactl, `[SEGMENT:]BUS:DEVICE[.FUNCTION]` in hexadecimal numbers of any width, to the
/// kernel's notation.
fn pci_address(text: &str) -> Option<String> {
    let (device, function) = text.split_once('.').unwrap_or((text, "0"));
    let parts: Vec<_> = device.split(':').collect();
    let [segment, bus, device] = match parts.as_slice() {
        [bus, device] => ["0", bus, device],
        [segment, bus, device] => [*segment, *bus, *device],
        _ => return None,
    };
    let [segment, bus, device, function] =
        [segment, bus, device, function].map(|digits| u32::from_str_radix(digits, 16).ok());
    Some(format!("{:04x}:{:02x}:{:02x}.{:x}", segment?, bus?, device?, function?))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use numaward_topology::NodeId;

    use super::*;

    #[test]
    fn parses_lists_like_numactl() {
        let allowed: NodeSet = "0-1,3,9".parse().unwrap();
        let read = |text: &str| {
            let named = |part: &str| Ok((part == "netdev:eth0").then(|| NodeSet::single(NodeId(3))));
            parse_list("node", text, &allowed, named).map(|nodes| nodes.to_string())
        };
        for (text, expected) in [
            ("0", "0"),
            ("0,3", "0,3"),
            ("0-1", "0-1"),
            ("all", "0-1,3,9"),
            ("!0", "1,3,9"),
            ("!all", ""),
            ("!0-1,9", "3"),
            ("+2", "3"),
            ("!+3", "0-1,3"),
            ("+0-1", "0-1"),
            ("0-3", "0-1,3"),
            ("+1-3", "1,3,9"),
            ("0x9", "9"),
            ("011", "9"),
            ("netdev:eth0,0", "0,3"),
            ("", ""),
        ] {
            assert_eq!(read(text).unwrap(), expected, "{text}");
        }
        for (text, words) in [
            ("2", "node 2 does not exist"),
            ("0-2", "node 2 does not exist"),
            ("1-0", "is before its beginning"),
            ("x", "\"x\" is not a number"),
            ("0-", "\"\" is not a number"),
            ("0,", "\"\" is not a number"),
            (",", "\"\" is not a number"),
            ("+4", "may use only 4"),
            ("-1", "\"\" is not a number"),
            ("0x", "\"0x\" is not a number"),
            ("99999999999", "is not a number"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn parses_pci_addresses_like_numactl() {
        let root = tempfile::tempdir().unwrap();
        for (address, node) in [("0000:80:00.0", "1"), ("0001:0a:1f.7", "2")] {
            let device = root.path().join("sys/bus/pci/devices").join(address);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("numa_node"), node).unwrap();
        }
        for (text, node) in [
            ("pci:0000:80:00.0", 1),
            ("pci:80:00.0", 1),
            ("pci:80:0.0", 1),
            ("pci:80:0", 1),
            ("pci:0:80:00", 1),
            ("pci:1:a:1F.7", 2),
            ("pci:0001:0a:1f.7", 2),
        ] {
            assert_eq!(named_node(root.path(), text).unwrap(), Some(NodeSet::single(NodeId(node))), "{text}");
        }
        for text in
            ["pci:", "pci:80", "pci:80:00.1", "pci:x:00.0", "pci:0:0:80:00.0", "pci:80:00.0.0", "pci:../80"]
        {
            assert!(named_node(root.path(), text).is_err(), "{text}");
        }
        assert_eq!(named_node(root.path(), "80").unwrap(), None);
    }
}
