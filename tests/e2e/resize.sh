set -eu
leaves_nothing
export NUMAWARD_STRATEGY=native
knobs() { for knob in cpuset.cpus cpuset.mems memory.min memory.max; do echo "$knob $(cat $cgroups/numaward/$1/$knob)"; done; }

start_daemon
# Memory alone, and a fraction of a CPU: the nodes are guaranteed, and CPUs stay shared.
numaward exec --memory 256Mi --name memory -- numaward-load --size 128M --report json >/tmp/memory.json 2>>$remarks &
memory=$!
numaward exec --cpus 500m --memory 64Mi --name part -- sleep 1000 2>>$remarks &
part=$!
numaward exec --cpus 2 --memory 128Mi --name held -- sleep 1000 2>>$remarks &
held=$!
wait_for 60 [ -s /tmp/memory.json ]
for name in part held; do wait_for 20 populated numaward/$name; done
section "memory alone"
knobs memory
wait_for 30 booked numaward/memory $((128 << 20))
section "memory alone numa_stat"
cat $cgroups/numaward/memory/memory.numa_stat
section "a part of a CPU"
knobs part
section "held"
knobs held

section "dry"
with_code numaward resize held --cpus 1 --dry-run
section "after dry"
knobs held
section "shrink"
with_code numaward resize held --cpus 1
section "shrunk"
knobs held
section "grow"
with_code numaward resize held --cpus 2 --memory 192Mi
section "grown"
knobs held
section "refused"
with_code numaward resize held --memory 64Gi 2>&1
section "below what is used"
with_code numaward resize memory --memory 64Mi 2>&1
section "after refusals"
knobs held
knobs memory

kill_daemon
start_daemon
section "adopted"
allocations
section "adopted knobs"
knobs held

for process in $(cat $cgroups/numaward/*/cgroup.procs); do kill $process; done
wait $memory $part $held || true
wait_for 20 [ ! -e $cgroups/numaward/held ]
section "released"
allocations
tidy
