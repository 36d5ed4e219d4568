# A workload on one node and a workload on both nodes, which share a node; the second uses more than its share there. If a node is
# full, the kernel kills loads first, by their oom_score_adj. A machine without a killable process panics.
set -eu
leaves_nothing
echo -900 >/proc/self/oom_score_adj
killed() { sed -n 's/^oom_kill //p' $cgroups/numaward/single/memory.events $cgroups/numaward/wide/memory.events; }
# free_mib NODE
free_mib() { awk '/MemFree/ { print int($4 / 1024) }' /sys/devices/system/node/node$1/meminfo; }
_decided() { [ -s /tmp/single.json ] || killed | grep -qv '^0$'; }

# run NAME: runs the example, with or without budgets.
run() {
    rm -f /tmp/go /tmp/single.json /tmp/wide.json
    start_daemon --config /tmp/config.yaml
    numaward exec --cpus 2 --memory 200Mi --name single -- sh -c '
        until [ -e /tmp/go ]; do sleep 0.1; done
        (echo 0 >/proc/self/oom_score_adj; exec numaward-load --size 180M --report json >/tmp/single.json)
        # The cgroup and its count of OOM kills remain as long as it has a process.
        exec sleep 1000' 2>/tmp/single.err &
    single=$!
    wait_for 30 populated numaward/single
    node=$(cat $cgroups/numaward/single/cpuset.mems)
    # The free memory differs from boot to boot. The load leaves enough for the processes of the machine, and too little for the
    # other workload's guarantee.
    size=$(($(free_mib $node) - 120))
    numaward exec --cpus 1 --memory 1000Mi --name wide -- sh -c '
        (echo 0 >/proc/self/oom_score_adj
        exec numaward-load --size '$size'M --policy preferred:'$node' --report json >/tmp/wide.json)
        exec sleep 1000' 2>/tmp/wide.err &
    wide=$!
    wait_for 120 [ -s /tmp/wide.json ]
    section "$1 node"
    echo $node
    section "$1 guaranteed"
    allocations
    section "$1 before"
    cat /tmp/wide.json
    [ "$1" = off ] || wait_for 180 has_event 'no more than its share'
    section "$1 wide"
    cat $cgroups/numaward/wide/memory.numa_stat
    touch /tmp/go
    wait_for 120 _decided
    sleep 1
    section "$1 single"
    cat /tmp/single.json
    section "$1 killed"
    killed
    section "$1 events"
    ask /api/v1/events
    echo
    section "$1 metrics"
    sleep 3
    ask /metrics | grep -E '^numaward_(budget|numa_miss)'
    section "$1 capabilities"
    sed -n 's/^CapEff:[[:space:]]*//p' /proc/$daemon/status
    kill -9 $(cat $cgroups/numaward/*/cgroup.procs)
    wait $single $wide || true
    wait_for 30 [ ! -e $cgroups/numaward/wide -a ! -e $cgroups/numaward/single ]
    stop_daemon
}

# CPU 0 is reserved for the system, so only node 1 has two exclusive CPUs. Node 0 has the memory for the system.
cat >/tmp/config.yaml <<END
strategy: native
reservedMemory:
  - { numaNode: 0, limits: { memory: 700Mi } }
  - { numaNode: 1, limits: { memory: 100Mi } }
END
run on
export NUMAWARD_BUDGETS_ENABLED=false
run off
echo 0 >/proc/self/oom_score_adj
tidy
