set -eu
leaves_nothing
export NUMAWARD_CONFIG=/tmp/config.yaml
echo 'strategy: native' >$NUMAWARD_CONFIG
knobs() { cat $cgroups/numaward/held/cpuset.cpus $cgroups/numaward/held/cpuset.mems; }
misses() { samples numaward_numa_miss_bytes_total | grep -F 'workload="numaward/held"'; }

start_daemon
# The only exclusive CPU of node 0 is occupied when the workload starts, so the workload is placed on node 1.
numaward exec --cpus 1 --memory 64Mi --preferred-nodes 0 --name blocker -- sleep 1000 2>>$remarks &
wait_for 20 populated numaward/blocker
# One process writes to its memory continuously, another one forks continuously.
numaward exec --cpus 1 --memory 320Mi --name held -- sh -c '
    numaward-load --size 256M --walk --report json >/tmp/held.json 2>/tmp/held.err &
    while [ ! -e /tmp/stop ]; do dd if=/dev/zero of=/dev/null bs=4M count=1 2>/dev/null; sleep 0.05; done
    kill $!' 2>>$remarks &
held=$!
wait_for 120 [ -s /tmp/held.json ]
kill $(cat $cgroups/numaward/blocker/cgroup.procs)
wait_for 20 [ ! -e $cgroups/numaward/blocker ]
section "before"
knobs
section "numa_stat before"
cat $cgroups/numaward/held/memory.numa_stat
section "zero metrics"
ask /metrics | grep -E '^numaward_rebalance'
section "refused"
with_code numaward exec --cpus 2 --memory 64Mi -- true 2>&1

section "plan"
numaward plan --cpus 2 --memory 64Mi -o json
section "plan for people"
numaward plan --cpus 2 --memory 64Mi
section "no plan"
with_code numaward plan --cpus 2 --memory 64Mi --bytes 64Mi 2>&1

section "cancelled"
rm -f /tmp/rebalance.err
numaward rebalance --cpus 2 --memory 64Mi --apply >/tmp/rebalance.out 2>/tmp/rebalance.err &
rebalance=$!
wait_for 60 grep -q 'moves from node 1 to 0' /tmp/rebalance.err
kill -INT $rebalance
with_code wait $rebalance
cat /tmp/rebalance.out
section "after cancel"
knobs
section "numa_stat after cancel"
cat $cgroups/numaward/held/memory.numa_stat
section "allocations after cancel"
allocations

# The shell prints a message about the killed daemon.
section "the daemon is killed"
rm /tmp/rebalance.err
numaward rebalance --cpus 2 --memory 64Mi --apply >/tmp/rebalance.out 2>/tmp/rebalance.err &
wait_for 60 grep -q 'moves from node 1 to 0' /tmp/rebalance.err
kill_daemon
start_daemon
_rolled_back() { ask /metrics | grep -q '^numaward_rebalances_total{outcome="failed"} 1'; }
wait_for 120 _rolled_back
section "killed"
knobs
section "allocations after kill"
allocations

section "rebalance"
with_code numaward rebalance --cpus 2 --memory 64Mi --apply 2>/tmp/rebalance.err
section "progress"
cat /tmp/rebalance.err
section "after"
knobs
section "numa_stat after"
cat $cgroups/numaward/held/memory.numa_stat
section "misses"
sleep 5
misses
section "figures"
ask /metrics | grep -E '^numaward_rebalance'
section "fits"
with_code numaward exec --cpus 2 --memory 64Mi -- sh -c 'grep -E "^(Cpus|Mems)_allowed_list" /proc/self/status' 2>>$remarks
section "measured"
numaward plan --cpus 1 --memory 64Mi -o json
section "events"
ask '/api/v1/events?kind=rebalance'
section "end"
touch /tmp/stop
wait $held
wait_for 30 [ ! -e $cgroups/numaward/held ]
allocations
tidy
