numaward run --log-level debug >/tmp/daemon.log 2>&1 &
daemon=$!
ask() { wget -q -O - "http://127.0.0.1:9560$1"; }
wait_for 60 ask /readyz

# measure NAME ARGUMENTS...: the workload's counters after its load, and the kernel's book.
measure() {
    _name=$1
    mkdir -p "$cgroups/$_name"
    # It has counters of its own before its first page.
    wait_for 30 sh -c "wget -q -O - http://127.0.0.1:9560/metrics | grep memory_allocated | grep -q 'workload=\"$_name\"'"
    shift
    load "${_inner:-$_name}" "$@"
    section "$_name load"
    cat "/tmp/load-$(echo "${_inner:-$_name}" | tr / -)"
    section "$_name numa_stat"
    cat "$cgroups/$_name/memory.numa_stat"
    counters "$_name"
    unload "${_inner:-$_name}" $load_pid
}

# counters NAME: node, locality and bytes of a workload, a line each.
counters() {
    section "$1 counters"
    ask /metrics | sed -n "s/^numaward_memory_allocated_bytes_total{workload=\"$1\",node=\"\([0-9]*\)\",locality=\"\([a-z]*\)\"} /\1 \2 /p"
}

measure local --cpus 0
measure bound --cpus 0 --policy bind:1
measure interleaved --cpus 0 --policy interleave:0-1
measure thp --cpus 2 --kind thp
measure tmpfs --cpus 0 --kind tmpfs --policy bind:1
_inner=nested/a/b measure nested --cpus 0 --policy bind:1

section topology
numaward topology -o json
section nodes
ask /api/v1/nodes
section doctor
numaward doctor -o json || true
section probes
ask /metrics | grep '^numaward_probe{'

kill $daemon
wait $daemon
section "exit code"
echo $?
