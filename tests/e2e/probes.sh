# Causes accesses, stalls, OOM kills and intruders, and compares them with the kernel's own counters. $pages_of_load is the number
# of pages of a load.
set -eu

# stop SECTION: prints the daemon's warnings and its exit code.
stop() {
    section "$1 log"
    grep -E "WARN|ERROR" /tmp/daemon.log | head -40
    section "$1 exit code"
    with_code stop_daemon
    new_log
}
metric() { ask /metrics | grep -F "$1"; }

export NUMAWARD_OBSERVE_RESIDENCY_INTERVAL=5s
NUMAWARD_PROBES_STALLS_EVENT_FROM=1ns NUMAWARD_OBSERVE_REMOTE_ESTIMATE_ENABLED=true start_daemon --log-level debug

# A client that receives all events until the daemon ends.
ask /api/v1/stream >/tmp/stream 2>/dev/null &
stream=$!

section probes
metric 'numaward_probe_info{'
section "memory of maps"
metric 'numaward_probe_map_memory_bytes{'
# The kernel measures each run of the probes while this setting is on.
section cost
numaward status --cost 2s -o json

# --- CPU time -------------------------------------------------------------------------------------------------------
# One load runs on node 1, and one in a nested cgroup on node 0.
load spinner --size 1M --walk --cpus 2
outer=$load_pid
load spinner/inner --size 1M --walk --cpus 1
inner=$load_pid
usage_of() { sed -n 's/^usage_usec //p' "$cgroups/$1/cpu.stat"; }
_spun() { [ "$(usage_of spinner/inner)" -ge 3000000 ] && [ "$(usage_of spinner)" -ge 6000000 ]; }
wait_for 240 _spun
kill -STOP $outer $inner
section "CPU time"
metric 'numaward_cpu_seconds_total{workload="spinner"'
section "CPU time of cpu.stat"
usage_of spinner
usage_of spinner/inner
kill -CONT $outer $inner
unload spinner/inner $inner
section "CPU time without inner"
metric 'numaward_cpu_seconds_total{workload="spinner"'
unload spinner $outer

# --- Sampled accesses ------------------------------------------------------------------------------------------------
echo 1 >/proc/sys/kernel/numa_balancing

# walker NAME CPUS MEMS ARGUMENTS...: starts a load in a cgroup with this cpuset, after the cgroup has its own counters.
walker() {
    _walker=$1
    mkdir -p "$cgroups/$_walker"
    echo "$2" >"$cgroups/$_walker/cpuset.cpus"
    echo "$3" >"$cgroups/$_walker/cpuset.mems"
    wait_for 30 _has_counters
    shift 3
    load "$_walker" --walk "$@"
}
_has_counters() { metric "numaward_memory_allocated_bytes_total{workload=\"$_walker\""; }
_remote() {
    metric "numaward_remote_access_pages_total{workload=\"$_walker\"" | awk -v all="$pages_of_load" '{ sum += $2 } END { exit !(sum >= all) }'
}
_is_sampled() { metric "numaward_remote_sampling_info{workload=\"$_walker\",state=\"$_wanted\"}"; }
report() {
    section "$1"
    metric "workload=\"$_walker\"" | grep -E 'remote_access|remote_sampling|migrated'
}

# remote_hint_faults: prints how often the kernel sampled an access to another node.
remote_hint_faults() { awk '/^numa_hint_faults / { all = $2 } /^numa_hint_faults_local / { local = $2 } END { print all - local }' /proc/vmstat; }

# Touched on node 1, then accessed from node 0.
before=$(remote_hint_faults)
walker moved 2-3 0-1
echo 0-1 >$cgroups/moved/cpuset.cpus
if metric 'numaward_probe_info{probe="hint",mode="fentry"' >/dev/null; then wait_for 120 _remote; fi
_wanted=on
wait_for 120 _is_sampled
report moved
section "moved as sampled by the kernel"
echo $(($(remote_hint_faults) - before))
section "moved memory.stat"
grep numa_ $cgroups/moved/memory.stat || true
unload moved $load_pid

walker bound 0 0-1 --cpus 0 --policy bind:1
_wanted=bound
wait_for 120 _is_sampled
report bound
section "bound memory.stat"
grep numa_ $cgroups/bound/memory.stat || true
section "bound API"
ask /api/v1/nodes
section "all accesses"
metric 'numaward_remote_access_pages_total{'
section "bound workload"
# Bound to the other node and running on this one: only the estimate shows these accesses.
_estimated() { ask /api/v1/workloads | grep -q '"estimatedRemotePercent":9[0-9]\|"estimatedRemotePercent":100'; }
wait_for 60 _estimated
metric numaward_remote_access_estimated_ratio
unload bound $load_pid

# Pinned to one node: some kernels sample it, some do not.
walker pinned 0 1 --cpus 0
_pinned() { for _wanted in on skipped_cpuset; do _is_sampled && return; done; return 1; }
wait_for 120 _pinned
_wanted=on
if _is_sampled; then wait_for 120 _remote; fi
report pinned

# The mode for memory tiers exists since Linux 5.18.
if echo 2 2>/dev/null >/proc/sys/kernel/numa_balancing; then
    _wanted=mode2
    wait_for 60 _is_sampled
fi
echo 0 >/proc/sys/kernel/numa_balancing
_wanted=off
wait_for 60 _is_sampled
report off
unload pinned $load_pid

# --- Migrated pages --------------------------------------------------------------------------------------------------
migrations() {
    section "migrations $1"
    metric 'numaward_migrated_bytes_total{' || true
}
mkdir $cgroups/driven
echo 0 >$cgroups/driven/cpuset.cpus
echo 0 >$cgroups/driven/cpuset.mems
load driven --cpus 0
migrated_by_kernel() { sed -n 's/^pgmigrate_success //p' /proc/vmstat; }
migrations "before cpuset"
before=$(migrated_by_kernel)
# The kernel moves the pages before the write returns, by a thread of its own.
echo 1 >$cgroups/driven/cpuset.mems
section "pages moved by cpuset"
echo $(($(migrated_by_kernel) - before))
migrations "after cpuset"
unload driven $load_pid

migrations "before compaction"
before=$(migrated_by_kernel)
echo 1 >/proc/sys/vm/compact_memory
section "pages moved by compaction"
echo $(($(migrated_by_kernel) - before))
migrations "after compaction"

# --- Stalls and kills -----------------------------------------------------------------------------------------------
mkdir $cgroups/tight
_walker=tight
wait_for 30 _has_counters
echo 24M >$cgroups/tight/memory.high
numaward-load --cgroup $cgroups/tight --size 48M --hold 600 >/tmp/tight.log 2>&1 &
tight=$!
_high() { [ "$(sed -n 's/^high //p' $cgroups/tight/memory.events)" -ge 20 ]; }
wait_for 120 _high
kill -9 $tight
wait $tight || true
section "tight events"
cat $cgroups/tight/memory.events
section "tight stalls"
metric 'numaward_reclaim_stall_seconds' | grep 'workload="tight"'
section "stall events"
_reported() { ask "/api/v1/events?kind=stall&workload=tight" | grep -q message; }
wait_for 30 _reported
ask "/api/v1/events?kind=stall&workload=tight"

# killed NAME ARGUMENTS...: starts a load that the OOM killer kills.
killed() {
    _walker=$1
    shift
    section "killed $_walker code"
    with_code numaward-load --cgroup "$cgroups/$_walker" "$@" 2>/tmp/killed.log
    _reported() { ask "/api/v1/events?kind=oom_kill&workload=$_walker" | grep -q message; }
    if metric 'numaward_probe_info{probe="oom_kill",mode="fentry"' >/dev/null; then wait_for 30 _reported; fi
    section "killed $_walker metrics"
    metric "numaward_oom_kills_total{workload=\"$_walker\""
    section "killed $_walker events"
    ask "/api/v1/events?kind=oom_kill&workload=$_walker"
}
expect_error "the nodes that its cpuset allows were full"
expect_error "the nodes that its memory policy allows were full"
for name in limited cpuset policy; do
    mkdir $cgroups/$name
    _walker=$name
    wait_for 30 _has_counters
done
echo 16M >$cgroups/limited/memory.max
killed limited --size 64M
echo 1 >$cgroups/cpuset/cpuset.mems
killed cpuset --size 700M
killed policy --size 700M --policy bind:1

# --- Intruders ------------------------------------------------------------------------------------------------------
# The script's own commands and the daemon stay on the CPU that is not exclusive.
for task in /proc/$$/task/* /proc/$daemon/task/*; do taskset -p 1 ${task##*/} >/dev/null || [ ! -d $task ]; done
numaward exec --cpus 1 --memory 64Mi --name owner -- sleep 1000 2>>$remarks &
exec=$!
_owner=$cgroups/numaward/owner
wait_for 30 populated numaward/owner
cpu=$(cat $_owner/cpuset.cpus)
_watched() { metric "numaward_exclusive_cpu_intruder_seconds_total{cpu=\"$cpu\",class=\"host\"}"; }
wait_for 30 _watched
section "clean"
metric numaward_exclusive_cpu_
# Two intruders: a process of the root cgroup, which cannot be confined, and a process of another workload.
mkdir $cgroups/neighbour
_walker=neighbour
wait_for 30 _has_counters
numaward-load --cpus $cpu --size 4M --walk >/dev/null 2>&1 &
one=$!
numaward-load --cgroup $cgroups/neighbour --cpus $cpu --size 4M --walk >/dev/null 2>&1 &
two=$!
# CPU time of the first in clock ticks of 10 ms, and of the second in microseconds.
ticks() { cat /proc/$one/task/*/stat | sed 's/.*) //' | awk '{ sum += $12 + $13 } END { print sum }'; }
usage() { sed -n 's/^usage_usec //p' $cgroups/neighbour/cpu.stat; }
# used SECONDS WHEN: prints the used and the reported CPU time as soon as each intruder has run for this time.
used() {
    _centi=$(($1 * 100))
    wait_for 240 _busy
    kill -STOP $one $two
    section "intruder ticks $2"
    ticks
    section "neighbour usage $2"
    usage
    section "intruder metrics $2"
    metric numaward_exclusive_cpu_
}
_busy() { [ "$(ticks)" -ge $_centi ] && [ "$(usage)" -ge $((_centi * 10000)) ]; }
# They start on another CPU.
used 1 before
kill -CONT $one $two
used 4 after
section "intruders"
ask /api/v1/workloads/numaward%2Fowner/intruders
section "status"
ask /api/v1/status
section "status for people"
numaward status
section "intruder events"
kill -CONT $one $two
_reported() { ask "/api/v1/events?kind=intruder" | grep -q 'numaward-load'; }
wait_for 180 _reported
ask "/api/v1/events?kind=intruder"
section "intruded workloads"
ask /api/v1/workloads
section "guarantees"
numaward get guarantees
end $one $two
end $exec
stop first
wait $stream || true
section "stream"
sed -n 's/^data: //p' /tmp/stream

# --- More workloads than slots --------------------------------------------------------------------------------------
for name in tight limited cpuset policy neighbour; do wait_for 10 rmdir $cgroups/$name; done
printf 'probes: {slots: 3}\nenforcement: {mode: dry-run}\n' >/tmp/few.yaml
mkdir $cgroups/early $cgroups/lazy
start_daemon --log-level debug --config /tmp/few.yaml
_full() { metric 'numaward_probe_map_entries{map="ROOTS"} 3'; }
wait_for 30 _full
mkdir $cgroups/late $cgroups/busy
_waiting() { metric 'numaward_workloads{counters="other"} 2'; }
wait_for 30 _waiting
_walker=late
section "counters of those that came late"
if _has_counters; then echo late; fi
# A workload with a guarantee has its own counters at once.
section "guaranteed"
expect_error "are not written to the kernel: enforcement.mode"
numaward guarantee /late --cpus 1 --memory 64Mi -o json 2>/tmp/late.err
wait_for 30 _has_counters
# Nothing is enforced, so pages follow the policy: one node is guaranteed, the other is not.
for _other in 0 1; do
    load late --size 16M --policy bind:$_other
    end $load_pid
done
section "miss events"
_reported() { ask "/api/v1/events?kind=miss&workload=late" | grep -q message; }
wait_for 30 _reported
ask "/api/v1/events?kind=miss"
section "misses"
metric 'numaward_numa_miss_bytes_total{'
# A busy workload gets its own counters after two readings.
load busy --size 16M --walk --cpus 0
busy=$load_pid
_walker=busy
wait_for 240 _has_counters
section "busy counters"
_has_counters
section "few workloads"
ask /api/v1/workloads
section "few slots"
metric 'numaward_workloads{'
metric 'numaward_probe_map_entries{'
# Workloads without a slot are counted in one sum.
rest() { metric 'numaward_memory_allocated_bytes_total{workload="other"'; }
section "other before"
rest
load early --size 32M
one=$load_pid
load lazy --size 32M
two=$load_pid
section "other after"
rest
section "few workloads then"
ask /api/v1/workloads
end $busy $one $two
stop few
