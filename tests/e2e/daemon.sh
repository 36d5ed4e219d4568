# $rounds contains the names of the rounds: conditions under which the daemon's figures must be right.
set -eu
leaves_nothing

# start COMMAND...: starts the daemon under COMMAND and waits until it is ready.
start() {
    "$@" >/tmp/daemon.log 2>&1 &
    daemon=$!
    wait_for 60 ask /readyz
}

# stop: stops the daemon and prints its exit code.
stop() {
    section "$round exit code"
    stop_daemon
    echo $?
    new_log
}

# measure NAME ARGUMENTS...: runs a load in the cgroup NAME, and prints the kernel's figures for the topmost cgroup of NAME.
measure() {
    _name=${1%%/*}
    _inner=$1
    shift
    load "$_inner" "$@"
    wait_for 30 booked "$_name" 67108864
    section "$round $_name numa_stat"
    grep -E '^(anon|file) ' "$cgroups/$_name/memory.numa_stat"
    counters "$_name"
    unload "$_inner" $load_pid
}

# counters NAME: prints node, locality and bytes of a workload, one line each.
counters() {
    section "$round $1 counters"
    ask /metrics | sed -n "s/^numaward_memory_allocated_bytes_total{workload=\"$1\",numa_node=\"\([0-9]*\)\",locality=\"\([a-z]*\)\"} /\1 \2 /p"
}

# truth COMMAND...: runs a daemon under COMMAND, and one workload after the other.
truth() {
    # Workloads that exist when the daemon starts have counters before it is ready.
    for _name in local bound interleaved thp tmpfs nested third expander; do
        mkdir $cgroups/$_name
    done
    start "$@" numaward run
    measure local --cpus 0
    measure bound --cpus 0 --policy bind:1
    measure interleaved --cpus 0 --policy interleave:0-1
    measure thp --cpus 2 --kind thp
    measure tmpfs --cpus 0 --kind tmpfs --policy bind:1
    measure nested/a/b --cpus 0 --policy bind:1
    measure third --cpus 4
    measure expander --cpus 4 --policy bind:3
    section "$round probes"
    ask /metrics | grep '^numaward_probe_\(info\|events_lost_total\){'
    rmdir $cgroups/nested/a $cgroups/nested
}

# sample NAME: prints all counters.
sample() {
    section "sample $1"
    ask /metrics | grep '^numaward_.*_total[{ ]'
}

has() { ask /metrics | grep -q "$1"; }

# Three slots for four workloads, including the daemon's own cgroup, and a workload name that is reused.
slots() {
    echo 'probes: {slots: 3}' >/tmp/slots.yaml
    mkdir $cgroups/first $cgroups/filler
    start numaward run --config /tmp/slots.yaml
    wait_for 30 has '^numaward_probe_map_entries{map="ROOTS"} 3$'
    load first --cpus 0
    sample 1
    unload first $load_pid
    wait_for 30 has '^numaward_probe_map_entries{map="ROOTS"} 2$'
    sample 2
    mkdir $cgroups/heir
    wait_for 30 has '^numaward_memory_allocated_bytes_total{workload="heir"'
    sample 3
    load heir --cpus 2 --size 32M
    sample 4
    unload heir $load_pid
    mkdir $cgroups/first
    wait_for 30 has '^numaward_probe_map_entries{map="ROOTS"} 3$'
    load first --cpus 0
    sample 5
    unload first $load_pid
    rmdir $cgroups/filler
}

# A second daemon fails because the port is in use; the first is not disturbed.
port_in_use() {
    section "second daemon"
    must_fail env NUMAWARD_STATE_DIRECTORY=/tmp/second NUMAWARD_CONTROL_SOCKET=/run/second/control.sock numaward run 2>&1
    ask /livez >/dev/null || fail "the first daemon is gone"
}

machine() {
    for _node in /sys/devices/system/node/node*; do
        section "${_node##*/} MemTotal"
        sed -n 's/.*MemTotal: *\([0-9]*\) kB/\1/p' $_node/meminfo
    done
    section topology
    numaward topology -o json
    section "topology for people"
    numaward topology
    section nodes
    ask /api/v1/nodes
}

# said: prints the status of a daemon that misses a feature.
said() {
    section "$round status"
    ask /api/v1/status
    section "$round workloads"
    ask /api/v1/workloads
    section "$round log"
    cat /tmp/daemon.log
}

echo 16 >/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages
for round in $rounds; do
    case $round in
    plain)
        truth
        machine
        port_in_use
        ;;
    unprivileged) truth numaward-capabilities BPF,PERFMON ;;
    without-btf)
        mount -o bind /dev/null /sys/kernel/btf/vmlinux
        truth
        umount /sys/kernel/btf/vmlinux
        ;;
    slots) slots ;;
    nobody)
        mkdir $cgroups/watched
        start numaward-capabilities nobody numaward run
        said
        section "nobody doctor"
        numaward-capabilities nobody numaward doctor -o json || true
        rmdir $cgroups/watched
        ;;
    without-cgroups)
        start unshare -m sh -c 'umount /sys/fs/cgroup && exec numaward run'
        said
        ;;
    lockdown)
        section lockdown
        cat /sys/kernel/security/lockdown
        truth
        section doctor
        numaward doctor -o json || true
        ;;
    *) fail "no round is called $round" ;;
    esac
    stop
done
echo 0 >/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages
tidy
