# Memory that is promised and not used yet, and a workload without a guarantee that fills the node with page cache: files
# of a tmpfs, which the kernel cannot drop.
# Where a node is full, loads are killed first: they give this up again. A machine on which nobody may be killed panics.
echo -900 >/proc/self/oom_score_adj
socket=/run/numaward/control.sock
_ready() { wget -qO- http://127.0.0.1:9560/readyz && [ -S $socket ] && numaward explain --cpus 1 --memory 1Mi; }
_event() { wget -qO- http://127.0.0.1:9560/api/v1/events | grep -q "$1"; }
_decided() { [ -s /tmp/db.json ] || sed -n 's/^oom_kill //p' $cgroups/numaward/db/memory.events | grep -qv '^0$'; }
_is_free() { [ "$(cat $cgroups/hog/cpuset.mems)" != $((1 - node)) ]; }
start_daemon() {
    numaward run 2>>/tmp/daemon.log &
    daemon=$!
    wait_for 30 _ready
}

# run NAME: the hog fills the node, then the workload asks for what it was promised. That is on node 1: CPU 0 is kept for
# the system, so only that node has two CPUs to give.
run() {
    rm -f /tmp/go /tmp/db.json
    start_daemon
    numaward exec --cpus 2 --memory 300Mi --name db -- sh -c '
        until [ -e /tmp/go ]; do sleep 0.1; done
        (echo 0 >/proc/self/oom_score_adj; exec numaward-load --size 280M --report json >/tmp/db.json)
        # The cgroup, and with it the count of what was killed, stays while somebody is in it.
        exec sleep 1000' 2>/tmp/db.err &
    db=$!
    wait_for 30 grep -q 'populated 1' $cgroups/numaward/db/cgroup.events
    node=$(cat $cgroups/numaward/db/cpuset.mems)
    section "$1 node"
    echo $node
    # What the machine itself has there differs from boot to boot. So much is left that its processes run, and that what is
    # promised does not fit.
    parts=$((($(awk '/MemFree/ { print int($4 / 1024) }' /sys/devices/system/node/node$node/meminfo) - 120) / 8))
    section "$1 parts"
    echo $parts
    mkdir -p $cgroups/hog /hog
    cat /sys/devices/system/node/node$node/cpulist >$cgroups/hog/cpuset.cpus
    mount -t tmpfs -o size=90% none /hog
    sh -c 'echo 0 >'$cgroups'/hog/cgroup.procs
        for part in $(seq 1 '$parts'); do dd if=/dev/zero of=/hog/$part bs=1M count=8 2>/dev/null; sleep 0.6; done
        exec sleep 1000' &
    hog=$!
    wait_for 180 [ -e /hog/$parts ]
    sleep 1
    section "$1 hog"
    cat $cgroups/hog/memory.numa_stat
    section "$1 meminfo"
    cat /sys/devices/system/node/node$node/meminfo
    section "$1 mems"
    cat $cgroups/hog/cpuset.mems
    touch /tmp/go
    wait_for 120 _decided
    sleep 1
    section "$1 db"
    cat /tmp/db.json
    section "$1 killed"
    sed -n 's/^oom_kill //p' $cgroups/numaward/db/memory.events
    section "$1 metrics"
    wget -qO- http://127.0.0.1:9560/metrics | grep -E '^numaward_(numa_miss|node_headroom|guard)'
}

# over: ends it all.
over() {
    kill -9 $(cat $cgroups/numaward/db/cgroup.procs) $hog
    wait $db $hog
    umount /hog
    wait_for 30 [ ! -e $cgroups/numaward/db ]
    wait_for 10 rmdir $cgroups/hog
    kill $daemon
    wait $daemon
}

export NUMAWARD_GUARD=act
run act
section "act events"
wget -qO- http://127.0.0.1:9560/api/v1/events
echo
kill -9 $daemon
wait $daemon
start_daemon
sleep 3
section "act after a crash"
cat $cgroups/hog/cpuset.mems
rm /hog/*
wait_for 120 _is_free
section "act in the end"
cat $cgroups/hog/cpuset.mems
section "act last events"
wget -qO- http://127.0.0.1:9560/api/v1/events
echo
over

export NUMAWARD_GUARD=off
run off
section "off events"
wget -qO- http://127.0.0.1:9560/api/v1/events
echo
over
