# A workload on node 0 with all of its memory on node 1, which accesses the first quarter of it.
set -eu
_known() { ask /api/v1/workloads | grep -q '"uses"'; }
monitors() { cat /sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds; }

start_daemon
load uses --cpus 0 --size 64M --walk --walk-size 16M --policy bind:1
wait_for 30 _known
# DAMON clears accessed bits without a TLB flush, and an emulated TLB may keep all entries. A switch to another process flushes
# the TLB.
taskset -c 0 sh -c 'while :; do :; done' &

section "hot"
numaward regions uses --hot
section "hot as JSON"
numaward regions uses --hot -o json
section "afterwards"
monitors
section "interrupted"
with_code timeout -s INT 5 numaward regions uses --hot --for 1h
section "after an interrupt"
monitors
echo 1 >/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds
section "in use"
must_fail numaward regions uses --hot 2>&1
section "after that"
monitors
section "nobody"
must_fail numaward regions nobody --hot 2>&1
section "log"
cat /tmp/daemon.log
