# Precedes the scripts of the guides: the daemon as its package installs it, and what numaward shows of a workload.
export PATH=/usr/sbin:/usr/bin:/bin:/numaward-vm/bin
# On a busy host, an emulated systemd takes its time.
export SYSTEMD_BUS_TIMEOUT=600

# This shell has applets of these names, with fewer options than what a user has.
dd() { /usr/bin/dd "$@"; }
taskset() { /usr/bin/taskset "$@"; }

_active() { [ "$(systemctl show --value -p ActiveState "$1")" = active ]; }
cgroup_of() { systemctl show --value -p ControlGroup "$1"; }

# Only what the guides have in the configuration.
mkdir -p /etc/numaward
cat >/etc/numaward/config.yaml <<'END'
observe:
  residencyInterval: 5s
  remoteEstimate:
    enabled: true
END
systemctl daemon-reload

# start_numaward: and nothing else, until it answers.
start_numaward() {
    systemctl start numaward || fail "numaward does not start"
    wait_for 120 ready
}

# _series: the metrics of the workload $unit, or of $workload where it is observed under another name.
_series() { ask /metrics | grep -F "workload=\"${workload:-$unit}\""; }

# look NAME: what numaward knows of the workload $unit by now.
look() {
    section "$1"
    ask /api/v1/workloads
    section "$1 metrics"
    _series
}

# _estimated PATTERN: the share of accesses to other nodes that numaward estimates for $unit by now.
_estimated() { _series | grep -qE "^numaward_remote_access_estimated_ratio\\{workload=\"[^\"]*\"\\} ($1)"; }

# settle: until where memory lies was read twice.
settle() { sleep 12; }

# log: the end of a script.
log() {
    section "log"
    journalctl -q --no-pager -o cat -u numaward | grep -E 'WARN|ERROR' | tail -n 40
    section "end"
}
