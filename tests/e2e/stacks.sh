# Two workloads run the same program on CPU 0: one has its memory on the same node, the other one on node 1.
set -eu
leaves_nothing
_known() { ask /api/v1/workloads | grep -q "\"$1\""; }
_filled() { [ -s "/tmp/$1.filled" ]; }

make() {
    mkdir $cgroups/$1
    echo 0 >$cgroups/$1/cpuset.cpus
    echo $2 >$cgroups/$1/cpuset.mems
    wait_for 30 _known "$1"
    rm -f /tmp/$1.filled
    sh -c "echo \$\$ >$cgroups/$1/cgroup.procs; exec /bin/fills >/tmp/$1.filled" &
    load_pid=$!
    wait_for 60 _filled "$1"
}

echo +cpuset >$cgroups/cgroup.subtree_control
start_daemon
mkdir $cgroups/remote
wait_for 30 _known remote
section "off"
must_fail numaward stacks remote 2>&1
rmdir $cgroups/remote
stop_daemon

mkdir -p /etc/numaward
printf 'observe: {callChains: {enabled: true, sampleEvery: 16}}\n' >/etc/numaward/config.yaml
start_daemon
make remote 1
remote=$load_pid
make local 0
section "remote"
numaward stacks remote 2>/tmp/remote.err
section "remote on node 0"
numaward stacks remote --node 0 2>/dev/null
section "remote as JSON"
numaward stacks remote -o json 2>/dev/null
section "remote for pprof"
numaward stacks remote -o pprof 2>/dev/null | gunzip | tr -c ' -~' '\n'
section "counted"
ask /metrics | grep -E '^numaward_(memory_allocated_bytes_total.*(remote|local)|probe_events_lost)'
section "local"
numaward stacks local 2>/dev/null
section "regions"
numaward regions remote
section "regions as JSON"
numaward regions remote -o json
section "nobody"
must_fail numaward stacks nobody 2>&1
section "status"
numaward status

# The same memory is accessed, and NUMA balancing may move it.
echo 1 >/proc/sys/kernel/numa_balancing
echo 0-1 >$cgroups/remote/cpuset.mems
_seen() { numaward stacks remote --kind accesses 2>/dev/null | grep -q fills; }
wait_for 60 _seen
section "accesses"
numaward stacks remote --kind accesses 2>/dev/null

# The names are lost with the process, without an error. The shell prints a message about the killed process.
section "killed"
kill $remote
wait $remote || true
section "ended"
numaward stacks remote 2>&1
section "log"
cat /tmp/remote.err /tmp/daemon.log
echo 0 >/proc/sys/kernel/numa_balancing
tidy
