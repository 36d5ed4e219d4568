# Precedes every script of an end-to-end test, inside the machine. A script begins with `set -eu`: a command that fails ends it, and
# with it the test, unless the script says what is to happen then.

cgroups=/sys/fs/cgroup
# Takes the standard error of `exec` and `guarantee` where it is no result: the remarks about other processes on exclusive CPUs. That
# CPUs are not written to the kernel counts as an error wherever it is said, see `expect_error`.
remarks=/tmp/remarks.err

# Its scans unmap pages for a while, and would move those that a test has placed.
echo 0 >/proc/sys/kernel/numa_balancing

# section NAME: what is printed from here on is the report's section NAME. What was before may have no end of line.
section() {
    _section=$1
    printf '\n=== %s\n' "$1"
}
_section=

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

# with_code COMMAND...: what the command prints, and its exit code. It may fail.
with_code() { if "$@"; then echo "code 0"; else echo "code $?"; fi; }

# must_fail COMMAND...: what the command prints. It fails the script if it succeeds.
must_fail() { if "$@"; then fail "it succeeded: $*"; fi; }

# quiet_guarantee ARGUMENTS...: `numaward guarantee`, which must succeed, without what it prints.
quiet_guarantee() { numaward guarantee "$@" >/dev/null 2>>$remarks || fail "no guarantee: $*: $(tail -n 3 $remarks)"; }

# end PID...: ends these processes, whatever their exit codes are.
end() {
    kill "$@"
    wait "$@" || true
}

# samples FAMILY...: the samples of these metric families, of each at least one.
samples() {
    ask /metrics >/tmp/metrics || fail "no answer: /metrics"
    for _family; do grep "^$_family[{ ]" /tmp/metrics || fail "no samples of $_family"; done
}

# expect_error TEXT: the daemon logs an error that contains the text, or a command remarks it in a file /tmp/*.err. The test fails if
# none does.
expect_error() { echo "$1" >>/tmp/expected-errors; }
# allow_error TEXT: the same, if it is a matter of time whether one does.
allow_error() { echo "$1" >>/tmp/allowed-errors; }

# leaves_nothing: the script fails if it leaves a process, a cgroup, a mount or a changed knob of the kernel.
leaves_nothing() { : >/tmp/leaves-nothing; }

# tidy: ends the daemon and all processes in cgroups, and removes the cgroups and the daemon's files: the end of a script that
# leaves nothing.
tidy() {
    section "tidy"
    if [ -n "${daemon:-}" ] && kill -0 $daemon 2>/dev/null; then stop_daemon; fi
    for _cgroup in $(find $cgroups -mindepth 1 -depth -type d); do
        kill -9 $(cat $_cgroup/cgroup.procs) 2>/dev/null || true
        wait_for 10 rmdir $_cgroup
    done
    wait_for 10 _no_jobs
    rm -rf /etc/numaward /var/lib/numaward /run/numaward
}
_no_jobs() { jobs >/tmp/jobs && [ ! -s /tmp/jobs ]; }

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
    end "$2"
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
    wait $daemon || true
}

# new_log: what the next daemon logs is in a file of its own.
new_log() {
    cat /tmp/daemon.log >>/tmp/daemon.log.before
    rm /tmp/daemon.log
}

# restore ARGUMENTS...: takes back what the daemon wrote, once it is gone. Its messages are shown only if that fails.
restore() { numaward uninstall --restore "$@" 2>/tmp/uninstall.log || fail "not restored: $(cat /tmp/uninstall.log)"; }

# ask PATH: what the daemon answers over HTTP.
ask() { wget -q -O - "http://127.0.0.1:9560$1"; }

# allocations: what is promised, as JSON.
allocations() { ask /api/v1/allocations; echo; }

# nothing_promised: no workload has a guarantee.
nothing_promised() { [ "$(numaward get)" = "there are no guarantees" ]; }

# events KIND: the daemon's events of this kind, a line each.
events() { ask "/api/v1/events?kind=$1" | sed 's/},{/}\n{/g'; }

# has_event TEXT: the daemon has an event with this text.
has_event() { ask /api/v1/events | grep -q "$1"; }

# --- The end of each script -----------------------------------------------------------------------------------------

# _errors: the errors and panics of daemons and commands, a line each.
_errors() {
    {
        cat /tmp/daemon.log* /var/log/pods/numaward/numaward.log
        [ ! -d /run/systemd/system ] || journalctl -q --no-pager -o cat -u numaward
    } 2>/dev/null | grep -aE '^[^ ]+ +ERROR |"level":"ERROR"|panicked at' | sort -u
    grep -ahE 'panicked at|are not written to the kernel' /tmp/*.err /tmp/*.log 2>/dev/null
}

# _state: the processes, cgroups and mounts of the machine, and the knobs that scripts change, a line each.
_state() {
    ps -o pid,ppid,args >/tmp/ps
    awk -v shell=$$ 'NR > 1 && $1 > 2 && $2 != 2 && $1 != shell && !/ ps -o / { sub(/^ *[0-9]+ +[0-9]+ /, ""); print "process " $0 }' /tmp/ps
    find /sys/fs/cgroup -mindepth 1 -type d | sed 's/^/cgroup /'
    sed 's/^/mount /' /proc/mounts
    find /etc/numaward /var/lib/numaward /run/numaward -type f 2>/dev/null | sed 's/^/file /'
    echo "mask $(umask), oom_score_adj $(cat /proc/self/oom_score_adj)"
    grep -s '' /sys/fs/cgroup/cgroup.subtree_control /proc/sys/kernel/numa_balancing /sys/kernel/mm/transparent_hugepage/enabled \
        /sys/kernel/mm/numa/demotion_enabled /sys/kernel/mm/mempolicy/weighted_interleave/node* \
        /sys/devices/system/cpu/online /sys/devices/system/node/has_memory \
        /sys/devices/system/node/node*/hugepages/*/nr_hugepages /sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds |
        sed 's/^/knob /'
}

# _end CODE LINE: what the script leaves behind, for the test to judge.
_end() {
    trap - EXIT
    case $- in *e*) _errors_are=unexpected ;; *) _errors_are=unchecked ;; esac
    set +eu
    [ "$1" = 0 ] || echo "FAILED: code $1 in section \"$_section\", line $(($2 - _first_line - 1)) of the script"
    touch /tmp/expected-errors /tmp/allowed-errors
    _errors >/tmp/errors
    section "$_errors_are errors"
    cat /tmp/expected-errors /tmp/allowed-errors >/tmp/known-errors
    grep -vF -f /tmp/known-errors /tmp/errors
    section "errors that did not occur"
    while read -r _text; do grep -qF "$_text" /tmp/errors || echo "$_text"; done </tmp/expected-errors
    _state >/tmp/state
    section "left over"
    if [ -e /tmp/leaves-nothing ]; then section "left over, but declared clean"; fi
    grep -vxF -f /run/state /tmp/state | sed 's/^/left: /'
    grep -vxF -f /tmp/state /run/state | sed 's/^/gone: /'
    exit "$1"
}
# Machines are small, and their programs lie in their memory: a node may have less than what is promised on it. The tests of the
# guard assert when that is reported.
allow_error "does not have what is promised on it"
_state >/run/state
trap '_end $? $LINENO' EXIT
_first_line=$LINENO
