# Workloads without a guarantee, with threads on both nodes that use the same memory: once with movable memory, and once with a
# memory policy that names a node.
set -eu
cat >/tmp/config.yaml <<END
home:
  mode: place
  minMemory: 32Mi
  minRemotePercent: 10
  window: 10s
  maxAtOnce: 1
  rate: 32Mi
END
accesses() {
    section "$1"
    ask /api/v1/workloads
    echo
}
cpuset() {
    section "$1"
    cat $cgroups/$2/cpuset.cpus
    section "$1 memory"
    cat $cgroups/$2/memory.numa_stat
}
_is_free() { [ -z "$(cat $cgroups/spread/cpuset.cpus)" ] || [ "$(cat $cgroups/spread/cpuset.cpus)" = 0-3 ]; }

start_daemon --config /tmp/config.yaml
echo 1 >/proc/sys/kernel/numa_balancing
# All of its memory is bound to node 1, which has one CPU.
load bound --cpus 0,3 --size 64M --walk --shared --policy sampled:1
bound=$load_pid
wait_for 180 has_event '/bound gets no preferred node: process'
cpuset "bound in the end" bound
_left_alone() { ask /metrics | grep -q 'reason="memory_policy"} 1'; }
wait_for 60 _left_alone
section "metrics"
ask /metrics | grep '^numaward_home'
section "events of bound"
ask /api/v1/events
echo
unload bound $bound

mkdir -p $cgroups/spread
# The threads are bound to CPUs of both nodes, so the kernel's own NUMA group placement has no effect.
load spread --cpus 0,3 --size 64M --walk --shared
spread=$load_pid
_counted() { ask /api/v1/workloads | grep -q '"remotePages":[1-9][0-9][0-9]'; }
wait_for 120 _counted
wait_for 180 has_event '/spread gets preferred node 0'
wait_for 180 has_event '/spread keeps preferred node 0'
cpuset "spread at home" spread
accesses "spread at home, first"
# NUMA balancing scans local memory less and less often.
_faults() { sed -n 's/^numa_hint_faults //p' $cgroups/spread/memory.stat; }
first=$(_faults)
_sampled() { [ $(($(_faults) - first)) -ge 200 ]; }
wait_for 120 _sampled
sleep 2
accesses "spread at home, then"
section "events of spread"
ask /api/v1/events
echo
section "status"
numaward status
section "regions"
numaward regions spread -o json
section "regions for people"
numaward regions spread

# Names with the same hash, which is their position in the directory: more of them than one reading returns.
set -- ''
for _block in 1 2 3 4 5 6 7 8; do
    _names=
    for _name; do _names="$_names ${_name}ao ${_name}bd"; done
    set -- $_names
done
_sleeping=
for _name; do
    mkdir $cgroups/spread/$_name
    sleep 1000 &
    _sleeping="$_sleeping $!"
    echo $! >$cgroups/spread/$_name/cgroup.procs
done
section "regions of cgroups at one position"
numaward regions spread -o json
section "end of the cgroups at one position"
kill $_sleeping
wait $_sleeping || true
for _name; do rmdir $cgroups/spread/$_name; done

section "capabilities"
sed -n 's/^CapEff:[[:space:]]*//p' /proc/$daemon/status

kill_daemon
cpuset "spread without a daemon" spread
start_daemon --config /tmp/config.yaml
sleep 15
cpuset "spread after a crash" spread

stop_daemon
export NUMAWARD_HOME_MODE=off
start_daemon --config /tmp/config.yaml
wait_for 30 _is_free
cpuset "spread when it is off" spread
unload spread $spread
stop_daemon
section "uninstall"
numaward uninstall --config /tmp/config.yaml
