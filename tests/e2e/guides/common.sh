# Precedes the scripts of the guides: installs the daemon as its package does, and prints numaward's figures of a workload.
export PATH=/usr/sbin:/usr/bin:/bin:/numaward-vm/bin
# Under emulation on a busy host, systemd is slow.
export SYSTEMD_BUS_TIMEOUT=600

# The applets of busybox have fewer options than the programs of a user.
dd() { /usr/bin/dd "$@"; }
taskset() { /usr/bin/taskset "$@"; }

_active() { [ "$(systemctl show --value -p ActiveState "$1")" = active ]; }
cgroup_of() { systemctl show --value -p ControlGroup "$1"; }

# The guides add further settings to the configuration.
mkdir -p /etc/numaward
cat >/etc/numaward/config.yaml <<'END'
observe:
  residencyInterval: 5s
  remoteEstimate:
    enabled: true
END
systemctl daemon-reload

# start_numaward: starts only numaward, and waits until it answers.
start_numaward() {
    systemctl start numaward || fail "numaward does not start"
    wait_for 120 ready
}

# _series: prints the metrics of the workload $unit, or of $workload if it is observed under another name.
_series() { ask /metrics | grep -F "workload=\"${workload:-$unit}\""; }

# look NAME: prints numaward's current figures of the workload $unit.
look() {
    section "$1"
    ask /api/v1/workloads
    section "$1 metrics"
    _series
}

# _estimated PATTERN: succeeds if the estimated share of remote accesses of $unit matches the pattern.
_estimated() { _series | grep -qE "^numaward_remote_access_estimated_ratio\\{workload=\"[^\"]*\"\\} ($1)"; }

# settle: waits until resident memory was read twice.
settle() { sleep 12; }

# log: prints the daemon's log at the end of a script.
log() {
    section "log"
    journalctl -q --no-pager -o cat -u numaward | grep -E 'WARN|ERROR' | tail -n 40
    section "end"
}
