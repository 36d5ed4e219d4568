# Common part of the guard's tests: a workload with guaranteed memory that it allocates after another process has filled the node.
# The scripts start that process: $hog, in the cgroup hog.
set -eu

# free_kib: prints the free memory of the workload's node.
free_kib() { awk '/MemFree/ { print $4 }' /sys/devices/system/node/node$node/meminfo; }

# begin NAME: starts the daemon and the workload. It gets node 1: CPU 0 is reserved for the system, so only that node has two
# exclusive CPUs.
begin() {
    rm -f /tmp/go /tmp/db.json
    start_daemon
    numaward exec --cpus 2 --memory 300Mi --name db -- sh -c '
        until [ -e /tmp/go ]; do sleep 0.1; done
        (echo 0 >/proc/self/oom_score_adj; exec numaward-load --size 280M --report json >/tmp/db.json)
        # The cgroup and its count of OOM kills remain as long as it has a process.
        exec sleep 1000' 2>/tmp/db.err &
    db=$!
    wait_for 30 populated numaward/db
    node=$(cat $cgroups/numaward/db/cpuset.mems)
    section "$1 node"
    echo $node
    mkdir -p $cgroups/hog
}

# figures NAME: prints the workload's memory and the daemon's report about it.
figures() {
    section "$1 db"
    cat /tmp/db.json
    section "$1 metrics"
    ask /metrics | grep -E '^numaward_(numa_miss|node_headroom|guard)'
    section "$1 events"
    ask /api/v1/events
}

# over: ends all processes.
over() {
    kill -9 $(cat $cgroups/numaward/db/cgroup.procs $cgroups/hog/cgroup.procs)
    wait $db $hog || true
    wait_for 30 [ ! -e $cgroups/numaward/db ]
    wait_for 10 rmdir $cgroups/hog
    stop_daemon
}
