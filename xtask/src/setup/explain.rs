//! Advice about a failure of apt or dpkg, from its output (in the C locale).

const ADVICE: &[(&[&str], &str)] = &[
    (&["No space left on device"], "the disk is full: make room and run it again"),
    (
        &[
            "NO_PUBKEY",
            "is not signed",
            "GPG error",
            "signatures couldn't be verified",
            "no longer has a Release",
        ],
        "the archive's signature could not be checked: install or upgrade debian-archive-keyring",
    ),
    (
        &[
            "Hash Sum mismatch",
            "unexpected size",
            "Hash mismatch",
            "unexpected end of",
            "lzma error",
            "zstd error",
        ],
        "a download is truncated or damaged; it was not used: run it again, and if it stays, the mirror is at fault",
    ),
    (
        &["Could not get lock", "is another process using it"],
        "another package manager is at work: wait for it and run it again",
    ),
    (
        &[
            "Could not resolve",
            "Temporary failure resolving",
            "Could not connect",
            "Connection refused",
            "timed out",
            "Network is unreachable",
            "Connection failed",
            "Unable to connect",
        ],
        "the package mirror cannot be reached: check the network (and a proxy in apt's configuration) and run it again",
    ),
    (
        &["does not have a Release file"],
        "the mirror has no such release: use one that carries all of Debian in apt's sources",
    ),
    (
        &[
            "Unable to locate package",
            "No packages found",
            "has no installation candidate",
            "Couldn't find any package",
        ],
        "the release has no such package: the mirror may be incomplete, or Debian has renamed it",
    ),
    (&["404  Not Found", "404 Not Found"], "the mirror is between two updates: run it again"),
    (
        &["Permission denied", "are you root"],
        "this needs root: run it as root, or install the packages by hand",
    ),
];

/// Returns advice if the output has a known reason.
pub(crate) fn advice(output: &str) -> Option<&'static str> {
    ADVICE.iter().find(|(signs, _)| signs.iter().any(|sign| output.contains(sign))).map(|(_, advice)| *advice)
}
