# What the tests of packages share: a daemon of the package, and a unit that holds memory.
set -eu
_loaded() { [ -s /run/load.json ]; }
load=$cgroups/system.slice/load.service
# there PATH...: which of these there are.
there() {
    for _path in "$@"; do
        [ ! -e "$_path" ] || echo "$_path"
    done
}
# state: whether the daemon is enabled, and whether it runs.
state() {
    systemctl is-enabled numaward || true
    systemctl is-active numaward || true
}
# add_load: systemd knows the unit.
add_load() {
    cat >/run/systemd/system/load.service <<'END'
[Service]
ExecStart=/bin/numaward-load --size 32M --report json
StandardOutput=file:/run/load.json
END
    systemctl daemon-reload
}

