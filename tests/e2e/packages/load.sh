# Common part of the package tests: the daemon of the package, and a unit that uses memory.
set -eu
_loaded() { [ -s /run/load.json ]; }
load=$cgroups/system.slice/load.service
# there PATH...: prints the existing ones of these paths.
there() {
    for _path in "$@"; do
        [ ! -e "$_path" ] || echo "$_path"
    done
}
# state: prints whether the daemon is enabled, and whether it runs.
state() {
    systemctl is-enabled numaward || true
    systemctl is-active numaward || true
}
# add_load: defines the unit of the load.
add_load() {
    cat >/run/systemd/system/load.service <<'END'
[Service]
ExecStart=/bin/numaward-load --size 32M --report json
StandardOutput=file:/run/load.json
END
    systemctl daemon-reload
}

