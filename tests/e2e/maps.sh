# Ten thousand workloads on a machine with many nodes and possible CPUs: the memory of the probes' maps.
set -eu

section "possible CPUs"
cat /sys/devices/system/cpu/possible
# The kernel's own per-cgroup data would fill the machine, so the controllers are disabled.
for controller in $(cat $cgroups/cgroup.subtree_control); do echo -$controller >$cgroups/cgroup.subtree_control; done
(cd $cgroups && seq 10000 | sed 's/^/w/' | xargs mkdir)
# Slots for the workloads, and for the cgroups of the first process and of the daemon.
echo 'probes: {slots: 10010}' >/tmp/many.yaml
numaward run --config /tmp/many.yaml 2>/tmp/daemon.log &
daemon=$!
wait_for 60 ask /readyz
_all() { ask /api/v1/status | grep -q '"workloads":{"own":1000[0-9],"other":0}'; }
wait_for 600 _all
load w77 --size 16M --cpus 0 --policy bind:0
section "status"
ask /api/v1/status
section "status for people"
numaward status | grep -E 'MAP|CTR|ROOTS|memory of all maps'
section "metrics"
ask /metrics >/tmp/metrics
grep 'numaward_probe_map_memory_bytes{' /tmp/metrics
section "counted by itself"
grep 'numaward_memory_allocated_bytes_total{workload="w77"' /tmp/metrics
section "series"
grep -c 'numaward_memory_allocated_bytes_total{workload="w[0-9]*",numa_node="7",locality="remote"' /tmp/metrics
section "daemon"
grep -E '^(VmHWM|Rss)' /proc/$daemon/status
end $load_pid
section "exit code"
stop_daemon
echo $?
