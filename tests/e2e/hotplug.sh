set -eu
counters() {
    section "$1 counters"
    ask /metrics | sed -n "s/^numaward_memory_allocated_bytes_total{workload=\"$2\",numa_node=\"\([0-9]*\)\",locality=\"\([a-z]*\)\"} /\1 \2 /p"
}
unknown() { ask /metrics | sed -n 's/^numaward_unknown_node_allocated_bytes_total //p'; }
allowed_nodes() { sed -n 's/^Mems_allowed_list:[[:space:]]*//p' "/proc/$1/status"; }
blocks() { ls -d /sys/devices/system/node/node$1/memory[0-9]* 2>/dev/null | wc -l; }
# Memory of a node as the kernel reports it, and as the daemon reports it.
total() { sed -n 's/.*MemTotal: *\([0-9]*\) kB/\1/p' /sys/devices/system/node/node$1/meminfo; }
noticed() { ask /api/v1/topology | grep -q "\"memoryBytes\":$(($(total $1) * 1024))[,}]"; }

# Without BTF, the probe derives the node of a page from its address.
[ $mode = tp_btf ] || mount -o bind /dev/null /sys/kernel/btf/vmlinux
echo +cpuset >$cgroups/cgroup.subtree_control
for name in late filling released; do
    mkdir $cgroups/$name
done
# The daemon has to notice the change by an event, not by its periodic check.
echo 'observe: {topologyInterval: 1h}' >/tmp/config.yaml
start_daemon --config /tmp/config.yaml
section probes
ask /metrics | grep '^numaward_probe_info{probe="alloc"'
section before
ask /api/v1/nodes
load released --size 16M
released=$load_pid
quiet_guarantee /released --memory 32Mi --node 1
section "nodes with guarantee"
allowed_nodes $(cat $cgroups/released/cgroup.procs)
numaward release /released
wait_for 20 no_guarantees
section "nodes after release"
allowed_nodes $(cat $cgroups/released/cgroup.procs)
section "blocks of node 1"
blocks 1

before=$(blocks 1)
section "plug memory now"
wait_for 60 sh -c "[ \$(ls -d /sys/devices/system/node/node1/memory[0-9]* | wc -l) -ge $((before + plugged)) ]"
wait_for 60 sh -c "[ \$(ls -d /sys/devices/system/node/node2/memory[0-9]* | wc -l) -ge $plugged ]"
# The kernel puts blocks online by itself, unless configured otherwise, and refuses this for a block that it has put online.
for state in /sys/devices/system/memory/memory*/state; do
    grep -qx online $state || echo online_movable >$state || grep -qx online $state || fail "cannot put ${state%/state} online"
done

wait_for 30 noticed 2
wait_for 30 noticed 1
section "nodes after plugging"
allowed_nodes $(cat $cgroups/released/cgroup.procs)
unload released $released
section unknown
unknown
load late --cpus 0 --policy bind:2
counters late late
wait_for 30 booked late 67108864
section "late numa_stat"
grep '^anon ' $cgroups/late/memory.numa_stat
unload late $load_pid
# More memory than node 1 had before.
load filling --cpus 2 --size 288M --policy bind:1
counters filling filling
wait_for 30 booked filling $((288 << 20))
section "filling numa_stat"
grep '^anon ' $cgroups/filling/memory.numa_stat
unload filling $load_pid
section "unknown at the end"
unknown
section after
ask /api/v1/nodes
section status
ask /api/v1/status
section log
cat /tmp/daemon.log
stop_daemon
