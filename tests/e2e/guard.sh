# Guaranteed memory that is not used yet, and a workload without a guarantee that fills the node with files of a tmpfs, which the
# kernel cannot reclaim. If a node is full, the kernel kills loads first, by their oom_score_adj. A machine without a killable
# process panics.
set -eu
leaves_nothing
# Without the guard, the workload is killed.
expect_error 'The OOM killer took "numaward-load"'
echo -900 >/proc/self/oom_score_adj
_decided() { [ -s /tmp/db.json ] || sed -n 's/^oom_kill //p' $cgroups/numaward/db/memory.events | grep -qv '^0$'; }
_is_free() { [ "$(cat $cgroups/hog/cpuset.mems)" != $((1 - node)) ]; }

# run NAME: the hog fills the node, then the workload allocates its guaranteed memory.
run() {
    begin $1
    # The free memory differs from boot to boot. The hog leaves enough for the processes of the machine, and too little for the
    # guarantee.
    parts=$((($(free_kib) / 1024 - 120) / 8))
    section "$1 parts"
    echo $parts
    mkdir -p /hog
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
    section "$1 killed"
    sed -n 's/^oom_kill //p' $cgroups/numaward/db/memory.events
    figures $1
}

export NUMAWARD_GUARD=act
run act
kill_daemon
start_daemon
sleep 3
section "act after a crash"
cat $cgroups/hog/cpuset.mems
rm /hog/*
wait_for 120 _is_free
section "act in the end"
cat $cgroups/hog/cpuset.mems
section "act last events"
ask /api/v1/events
over
umount /hog

export NUMAWARD_GUARD=off
run off
over
umount /hog
echo 0 >/proc/self/oom_score_adj
tidy
