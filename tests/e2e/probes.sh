# Accesses, stalls, kills and intruders, each made on purpose and held against what the kernel says of it.

NUMAWARD_PROBES_INTRUDERS_ENABLED=true NUMAWARD_PROBES_STALLS_EVENT_FROM=1ns \
    NUMAWARD_OBSERVE_REMOTE_ESTIMATE_ENABLED=true NUMAWARD_OBSERVE_RESIDENCY_INTERVAL=5s numaward run --log-level debug 2>/tmp/daemon.log &
daemon=$!
socket=/run/numaward/control.sock
ask() { wget -q -O - "http://127.0.0.1:9560$1"; }
_ready() { ask /readyz && [ -S $socket ]; }
wait_for 60 _ready
metric() { ask /metrics | grep -F "$1"; }

section probes
metric 'numaward_probe{'

# --- Whose accesses are sampled -------------------------------------------------------------------------------------
echo 1 >/proc/sys/kernel/numa_balancing

# walker NAME CPUS MEMS ARGUMENTS...: a load in a cgroup with this cpuset, once that has counters of its own.
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
    metric "numaward_remote_access_pages_total{workload=\"$_walker\"" | awk '{ sum += $2 } END { exit !(sum >= 16384) }'
}
_state() { metric "numaward_remote_sampling{workload=\"$_walker\",state=\"$_wanted\"}"; }
told() {
    section "$1"
    metric "workload=\"$_walker\"" | grep -E 'remote_access|remote_sampling|migrated'
}

# Touched on node 1, then walked from node 0.
walker moved 2-3 0-1
echo 0-1 >$cgroups/moved/cpuset.cpus
if metric 'numaward_probe{probe="hint",mode="fentry"'; then wait_for 120 _remote; fi
_wanted=on
wait_for 120 _state
told moved
section "moved memory.stat"
grep numa_ $cgroups/moved/memory.stat || true
unload moved $load_pid

walker bound 0 0-1 --cpus 0 --policy bind:1
_wanted=bound
wait_for 120 _state
told bound
section "bound API"
ask /api/v1/nodes
section "bound workload"
# Bound to the other node, and running on this one: nothing else tells of it.
_estimated() { ask /api/v1/workloads | grep -q '"estimatedRemotePercent":9[0-9]\|"estimatedRemotePercent":100'; }
wait_for 60 _estimated
metric numaward_remote_access_estimated_ratio
unload bound $load_pid

# Pinned to one node: some kernels sample it, others do not.
walker pinned 0 1 --cpus 0
_pinned() { for _wanted in on skipped_cpuset; do _state && return; done; return 1; }
wait_for 120 _pinned
_wanted=on
if _state; then wait_for 120 _remote; fi
told pinned

echo 2 >/proc/sys/kernel/numa_balancing
_wanted=mode2
wait_for 60 _state
echo 0 >/proc/sys/kernel/numa_balancing
_wanted=off
wait_for 60 _state
told off
unload pinned $load_pid

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
wait $tight
section "tight events"
cat $cgroups/tight/memory.events
section "tight stalls"
metric 'numaward_reclaim_stall_seconds' | grep 'workload="tight"'
section "stall events"
_told() { ask "/api/v1/events?kind=stall&workload=tight" | grep -q message; }
wait_for 30 _told
ask "/api/v1/events?kind=stall&workload=tight"

# killed NAME ARGUMENTS...: a load that the OOM killer takes.
killed() {
    _walker=$1
    shift
    numaward-load --cgroup "$cgroups/$_walker" "$@" >/tmp/killed.log 2>&1
    _told() { ask "/api/v1/events?kind=oom_kill&workload=$_walker" | grep -q message; }
    if metric 'numaward_probe{probe="oom_kill",mode="fentry"'; then wait_for 30 _told; fi
    section "killed $_walker metrics"
    metric "numaward_oom_kills_total{workload=\"$_walker\""
    section "killed $_walker events"
    ask "/api/v1/events?kind=oom_kill&workload=$_walker"
}
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
numaward exec --cpus 1 --memory 64Mi --name owner -- sleep 1000 &
exec=$!
_owner=$cgroups/numaward/owner
wait_for 30 grep -q 'populated 1' $_owner/cgroup.events
cpu=$(cat $_owner/cpuset.cpus)
_watched() { metric "numaward_exclusive_cpu_intruder_seconds_total{cpu=\"$cpu\",class=\"host\"}"; }
wait_for 30 _watched
section "clean"
metric numaward_exclusive_cpu_
# Two that run there nevertheless: the root cgroup cannot be kept off.
numaward-load --cpus $cpu --size 4M --walk >/dev/null 2>&1 &
one=$!
numaward-load --cpus $cpu --size 4M --walk >/dev/null 2>&1 &
two=$!
# Their time in clock ticks of a hundredth of a second.
ticks() { cat /proc/$one/task/*/stat /proc/$two/task/*/stat | sed 's/.*) //' | awk '{ sum += $12 + $13 } END { print sum }'; }
_busy() { [ "$(ticks)" -ge 300 ]; }
wait_for 240 _busy
kill -STOP $one $two
section "intruder ticks"
ticks
section "intruder metrics"
metric numaward_exclusive_cpu_
section "intruders"
ask /api/v1/workloads/numaward%2Fowner/intruders
section "status"
ask /api/v1/status
section "status for people"
numaward status
section "intruder events"
kill -CONT $one $two
_told() { ask "/api/v1/events?kind=intruder" | grep -q 'numaward-load'; }
wait_for 180 _told
ask "/api/v1/events?kind=intruder"
kill -9 $one $two
kill $exec
wait $exec
section "daemon log"
grep -E "WARN|ERROR" /tmp/daemon.log | head -40
kill $daemon
wait $daemon
section "exit code"
echo $?
