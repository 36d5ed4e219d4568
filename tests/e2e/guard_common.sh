# What the tests of the guard share: a workload that is promised memory, and asks for it once somebody else has filled the
# node. The scripts start who fills it: $hog, a process in the cgroup hog.
set -eu

# free_kib: memory that is free on the workload's node.
free_kib() { awk '/MemFree/ { print $4 }' /sys/devices/system/node/node$node/meminfo; }

# begin NAME: the daemon, and the workload. It is on node 1: CPU 0 is kept for the system, so only that node has two CPUs to
# give.
begin() {
    rm -f /tmp/go /tmp/db.json
    start_daemon
    numaward exec --cpus 2 --memory 300Mi --name db -- sh -c '
        until [ -e /tmp/go ]; do sleep 0.1; done
        (echo 0 >/proc/self/oom_score_adj; exec numaward-load --size 280M --report json >/tmp/db.json)
        # The cgroup, and with it the count of what was killed, stays while somebody is in it.
        exec sleep 1000' 2>/tmp/db.err &
    db=$!
    wait_for 30 populated numaward/db
    node=$(cat $cgroups/numaward/db/cpuset.mems)
    section "$1 node"
    echo $node
    mkdir -p $cgroups/hog
}

# figures NAME: what the workload got, and what the daemon says about it.
figures() {
    section "$1 db"
    cat /tmp/db.json
    section "$1 metrics"
    ask /metrics | grep -E '^numaward_(numa_miss|node_headroom|guard)'
    section "$1 events"
    ask /api/v1/events
}

# over: ends it all.
over() {
    kill -9 $(cat $cgroups/numaward/db/cgroup.procs $cgroups/hog/cgroup.procs)
    wait $db $hog || true
    wait_for 30 [ ! -e $cgroups/numaward/db ]
    wait_for 10 rmdir $cgroups/hog
    stop_daemon
}
