# Precedes every script of an end-to-end test, inside the machine.

cgroups=/sys/fs/cgroup

# Its scans unmap pages for a while, and would move those that a test has placed.
echo 0 >/proc/sys/kernel/numa_balancing

# section NAME: what is printed from here on is the report's section NAME. What was before may have no end of line.
section() { printf '\n=== %s\n' "$1"; }

# fail TEXT...: ends the machine's script; the daemon's last answer and log may say why.
fail() {
    echo "FAILED: $*"
    tail -n 20 /tmp/answer /tmp/daemon.log 2>/dev/null
    exit 1
}

# wait_for SECONDS COMMAND...: until COMMAND succeeds.
wait_for() {
    _tries=$(($1 * 10))
    shift
    until "$@" >/dev/null 2>&1; do
        _tries=$((_tries - 1))
        [ $_tries -gt 0 ] || fail "never came true: $*"
        sleep 0.1
    done
}

# load NAME ARGUMENTS...: a load in the cgroup NAME (made if need be), started and all its memory touched.
# Its report is in /tmp/load-NAME (slashes become dashes), its process in $load_pid.
load() {
    _cgroup=$cgroups/$1
    _report=/tmp/load-$(echo "$1" | tr / -)
    shift
    mkdir -p "$_cgroup"
    rm -f "$_report"
    numaward-load --report json --cgroup "$_cgroup" "$@" >"$_report" 2>"$_report.err" &
    load_pid=$!
    wait_for 60 _loaded
    [ -s "$_report" ] || fail "numaward-load $*: $(cat "$_report.err")"
}
_loaded() { [ -s "$_report" ] || ! kill -0 $load_pid; }

# booked CGROUP BYTES: the kernel has that much of a cgroup's memory in its books, to within 1 %. It brings them up to
# date every two seconds, and at a read only if it knows of enough changes: those of one CPU may not be among them.
booked() {
    awk -v bytes="$2" '/^(anon|file) / { for (i = 2; i <= NF; i++) { sub(/.*=/, "", $i); booked += $i } } END { exit booked < bytes * 0.99 }' \
        "$cgroups/$1/memory.numa_stat"
}

# unload NAME PID: ends a load and removes its cgroup.
unload() {
    kill "$2"
    wait "$2"
    wait_for 10 rmdir "$cgroups/$1"
}

# live CGROUP: a process in the cgroup, which is made if need be.
live() {
    mkdir -p "$cgroups/$1"
    sh -c "echo 0 >$cgroups/$1/cgroup.procs; exec sleep 100000" &
    wait_for 10 populated "$1"
}

# populated CGROUP: there is a process in it or below it.
populated() { grep -q 'populated 1' "$cgroups/$1/cgroup.events"; }

# start_daemon ARGUMENTS...: `numaward run` with these, until it is ready. $daemon is its process.
start_daemon() {
    numaward run "$@" 2>>/tmp/daemon.log &
    daemon=$!
    wait_for 60 ready
}

# ready: the daemon answers over HTTP, and on its control socket.
ready() { ask /readyz && numaward explain --cpus 1 --memory 1Mi; }

# stop_daemon: asks the daemon to end. The exit code is the daemon's.
stop_daemon() {
    kill $daemon
    wait $daemon
}

# kill_daemon: ends the daemon as a crash does. The shell reports that in the section.
kill_daemon() {
    kill -9 $daemon
    wait $daemon
}

# restore ARGUMENTS...: takes back what the daemon wrote, once it is gone. Its messages are shown only if that fails.
restore() { numaward uninstall --restore "$@" 2>/tmp/uninstall.log || fail "not restored: $(cat /tmp/uninstall.log)"; }

# ask PATH: what the daemon answers over HTTP.
ask() { wget -q -O - "http://127.0.0.1:9560$1"; }

# allocations: what is promised, as JSON.
allocations() { ask /api/v1/allocations; echo; }

# nothing_promised: no workload has a guarantee.
nothing_promised() { [ "$(numaward get)" = "nothing is promised" ]; }

# events KIND: the daemon's events of this kind, a line each.
events() { ask "/api/v1/events?kind=$1" | sed 's/},{/}\n{/g'; }

# has_event TEXT: the daemon has an event with this text.
has_event() { ask /api/v1/events | grep -q "$1"; }
