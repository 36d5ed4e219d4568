# Memory that is promised and not used yet, on a node that is full of page cache: blocks of a disk, which somebody has read.
socket=/run/numaward/control.sock
_ready() { wget -qO- http://127.0.0.1:9560/readyz && [ -S $socket ] && numaward explain --cpus 1 --memory 1Mi; }
_event() { wget -qO- http://127.0.0.1:9560/api/v1/events | grep -q "$1"; }
# What was looked at in order to reclaim it, by kswapd and by those who asked for memory.
scanned() { awk '/^pgscan_(kswapd|direct) / { sum += $2 } END { print sum }' /proc/vmstat; }
free_kib() { awk '/MemFree/ { print $4 }' /sys/devices/system/node/node$node/meminfo; }
_is_full() { [ $(free_kib) -lt 100000 ]; }
_is_free() { [ $(free_kib) -gt 370000 ]; }

# begin NAME: the daemon, and a workload that is promised memory. It is on node 1: CPU 0 is kept for the system, so only that
# node has two CPUs to give.
begin() {
    rm -f /tmp/go /tmp/db.json /tmp/read
    numaward run 2>>/tmp/daemon.log &
    daemon=$!
    wait_for 30 _ready
    numaward exec --cpus 2 --memory 300Mi --name db -- sh -c '
        until [ -e /tmp/go ]; do sleep 0.1; done
        numaward-load --size 280M --report json >/tmp/db.json
        exec sleep 1000' 2>/tmp/db.err &
    db=$!
    wait_for 30 grep -q 'populated 1' $cgroups/numaward/db/cgroup.events
    node=$(cat $cgroups/numaward/db/cpuset.mems)
    section "$1 node"
    echo $node
    mkdir -p $cgroups/hog
    echo $node >$cgroups/hog/cpuset.mems
    echo 3 >/proc/sys/vm/drop_caches
}

# end NAME: the workload asks for what it was promised.
end() {
    section "$1 hog"
    cat $cgroups/hog/memory.numa_stat
    section "$1 free"
    free_kib
    before=$(scanned)
    touch /tmp/go
    wait_for 120 [ -s /tmp/db.json ]
    section "$1 scanned"
    echo $(($(scanned) - before))
    section "$1 db"
    cat /tmp/db.json
    section "$1 events"
    wget -qO- http://127.0.0.1:9560/api/v1/events
    echo
    section "$1 metrics"
    wget -qO- http://127.0.0.1:9560/metrics | grep -E '^numaward_(numa_miss|node_headroom|guard)'
    kill -9 $(cat $cgroups/numaward/db/cgroup.procs) $(cat $cgroups/hog/cgroup.procs)
    wait $db $hog
    wait_for 30 [ ! -e $cgroups/numaward/db ]
    wait_for 10 rmdir $cgroups/hog
    kill $daemon
    wait $daemon
}

# The kernel drops the blocks of a disk that nobody has open.
exec 9</dev/vda
export NUMAWARD_GUARD=act
for name in off on; do
    [ $name = off ] || export NUMAWARD_GUARD_RECLAIM_ENABLED=true
    begin $name
    sh -c 'echo 0 >'$cgroups'/hog/cgroup.procs
        dd if=/dev/vda of=/dev/null bs=1M count=1000 2>/dev/null
        touch /tmp/read
        exec sleep 1000' &
    hog=$!
    wait_for 300 [ -e /tmp/read ]
    if [ $name = on ]; then wait_for 180 _is_free; wait_for 30 _event 'is free again'; else wait_for 10 _is_full; sleep 10; fi
    end $name
done

# What is read again and again is in use: it comes back each time.
export NUMAWARD_LOG_LEVEL=debug
: >/tmp/daemon.log
begin used
sh -c 'echo 0 >'$cgroups'/hog/cgroup.procs
    while :; do dd if=/dev/vda of=/dev/null bs=1M count=400 2>/dev/null; sleep 0.5; done' &
hog=$!
_is_let_be() { grep -q 'uses its page cache, and is left alone' /tmp/daemon.log; }
wait_for 180 _is_let_be
wait_for 60 _event 'that it does not use'
end used
