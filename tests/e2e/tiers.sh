# Node 2 is slow. A load fills a fast node with two workloads, one with a guarantee and one without.
set -eu
_loaded() { [ -s "/tmp/$1.json" ]; }
metrics() {
    # The daemon reads memory periodically while a client reads its metrics.
    ask /metrics >/dev/null
    sleep 12
    section "$1"
    ask /metrics | grep -E '^numaward_(tiering_bytes|memory_resident)'
}
echo 1 >/sys/kernel/mm/numa/demotion_enabled
echo 2 >/proc/sys/kernel/numa_balancing
mkdir -p /etc/numaward
printf 'strategy: native\nobserve: {residencyInterval: 5s}\n' >/etc/numaward/config.yaml
start_daemon
section "doctor"
numaward doctor | grep -A 2 ' memory tiers ' | tr -s ' \n' ' '

numaward exec --cpus 1 --memory 160Mi --memory-tier dram --name kept -- \
    sh -c 'numaward-load --size 128M --report json >/tmp/kept.json' 2>/tmp/kept.err &
wait_for 60 _loaded kept
node=$(cat $cgroups/numaward/kept/cpuset.mems)
mkdir $cgroups/idle $cgroups/greedy $cgroups/busy
# The pages of this cgroup are reclaimed last, so that pages of the idle load are demoted.
echo max >$cgroups/greedy/memory.low
cat /sys/devices/system/node/node$node/cpulist | tee $cgroups/idle/cpuset.cpus >$cgroups/busy/cpuset.cpus
numaward-load --size 128M --cgroup $cgroups/idle --report json >/tmp/idle.json &
idle=$!
wait_for 60 _loaded idle
metrics before

# More than the free memory of the node, and less than that of the machine.
free=$(awk '/MemFree/ { print int($4 / 1024) }' /sys/devices/system/node/node$node/meminfo)
# It is bound by its policy and not by its cpuset: Linux 6.12 counts pages that a process without the slow node in its cpuset
# moves within the fast node as demoted (alloc_demote_folio allocates on behalf of that process).
numaward-load --size $((free + 160))M --policy bind:$node --cgroup $cgroups/greedy --report json >/tmp/greedy.json &
greedy=$!
wait_for 120 _loaded greedy
# The kernel may first demote files of the machine itself: more loads, until it demotes the idle one.
_demoted() { [ "$(awk '/^pgdemote_/ { pages += $2 } END { print pages + 0 }' $cgroups/idle/memory.stat)" -gt 4096 ]; }
for more in 1 2 3 4 5 6; do
    _demoted && break
    numaward-load --size 32M --policy bind:$node --cgroup $cgroups/greedy --report json >/tmp/more$more.json &
    greedy="$greedy $!"
    wait_for 60 _loaded more$more
done
metrics short
section "short numa_stat"
cat $cgroups/idle/memory.numa_stat
section "short maps"
cat /proc/$idle/numa_maps

# Tasks that reclaim memory allocated these pages, and have no share in them.
section "reclaimed"
ask /metrics | grep '^numaward_unattributed_allocated_bytes_total'

section "described"
numaward describe idle

# The node has free memory again, and another workload uses memory on the slow node.
end $greedy $idle
echo 2 >$cgroups/busy/cpuset.mems
numaward-load --size 64M --cgroup $cgroups/busy --walk --report json >/tmp/busy.json &
busy=$!
wait_for 60 _loaded busy
echo 0-2 >$cgroups/busy/cpuset.mems
_promoted() { [ "$(sed -n 's/^pgpromote_success //p' $cgroups/busy/memory.stat)" -gt 4096 ]; }
wait_for 120 _promoted
# Stopping idle programs saves the machine's CPU time.
kill -STOP $busy
metrics used
kill -CONT $busy
end $busy
numaward release kept
wait_for 20 no_guarantees

rm -f /tmp/slow.json /tmp/weighted.json
section "slow"
numaward exec --cpus 1 --memory 64Mi --memory-tier cxl --name slow -- numaward-load --size 32M --hold 0 --report json 2>/tmp/slow.err
wait_for 20 no_guarantees
weights=/sys/kernel/mm/mempolicy/weighted_interleave
echo 3 >$weights/node$node && echo 1 >$weights/node2
section "weighted"
numaward exec --cpus 1 --memory 900Mi --node $node,2 --memory-policy weighted-interleave --name weighted -- \
    numaward-load --size 128M --hold 0 --report json 2>/tmp/weighted.err
section "errors"
cat /tmp/kept.err /tmp/slow.err /tmp/weighted.err
section "log"
cat /tmp/daemon.log
