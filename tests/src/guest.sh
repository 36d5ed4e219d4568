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
