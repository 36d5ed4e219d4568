# Guaranteed memory that is not used yet, on a node that is full of page cache of a disk.
set -eu
leaves_nothing

# scanned: prints the number of pages that kswapd and direct reclaim scanned.
scanned() { awk '/^pgscan_(kswapd|direct) / { sum += $2 } END { print sum }' /proc/vmstat; }
_is_full() { [ $(free_kib) -lt 100000 ]; }
_is_free() { [ $(free_kib) -gt 370000 ]; }

# hog NAME COMMANDS: fills the workload's node by a process that runs these commands.
hog() {
    begin "$1"
    rm -f /tmp/read
    echo $node >$cgroups/hog/cpuset.mems
    echo 3 >/proc/sys/vm/drop_caches
    sh -c "echo 0 >$cgroups/hog/cgroup.procs; $2" &
    hog=$!
}

# finish NAME: the workload allocates its guaranteed memory.
finish() {
    section "$1 hog"
    cat $cgroups/hog/memory.numa_stat
    section "$1 free"
    free_kib
    before=$(scanned)
    touch /tmp/go
    wait_for 120 [ -s /tmp/db.json ]
    section "$1 scanned"
    echo $(($(scanned) - before))
    figures $1
    over
}

# The kernel drops the page cache of a disk when it is closed.
exec 9</dev/vda
export NUMAWARD_GUARD=act
for name in off on; do
    [ $name = off ] || export NUMAWARD_GUARD_RECLAIM_ENABLED=true
    hog $name 'dd if=/dev/vda of=/dev/null bs=1M count=1000 2>/dev/null; touch /tmp/read; exec sleep 1000'
    wait_for 300 [ -e /tmp/read ]
    if [ $name = on ]; then wait_for 180 _is_free; wait_for 30 has_event 'is free again'; else wait_for 10 _is_full; sleep 10; fi
    finish $name
done

# Pages that are read repeatedly are in use, and return after each reclaim.
export NUMAWARD_LOG_LEVEL=debug
new_log
hog used 'while :; do dd if=/dev/vda of=/dev/null bs=1M count=400 2>/dev/null; sleep 0.5; done'
_is_let_be() { grep -q 'uses its page cache and is skipped' /tmp/daemon.log; }
wait_for 180 _is_let_be
wait_for 60 has_event 'has unused page cache there that can be dropped now'
finish used
tidy
