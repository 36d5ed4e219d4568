# Precedes every script of an end-to-end test, in the machine. A script begins with `set -eu`: a command that fails ends the
# script and the test, unless the script handles the failure.

cgroups=/sys/fs/cgroup
# File for the standard error of `exec` and `guarantee` if it is not a result: remarks about other processes on exclusive CPUs. A
# remark that CPUs are not written to the kernel is an error in every file, see `expect_error`.
remarks=/tmp/remarks.err

# NUMA balancing unmaps pages to sample accesses, and would move pages that a test has placed.
echo 0 >/proc/sys/kernel/numa_balancing

# section NAME: begins the section NAME of the report. The preceding output may lack a newline.
section() {
    _section=$1
    printf '\n=== %s\n' "$1"
}
_section=

# fail TEXT...: ends the script with a message, kills by the kernel, the last answer and the ends of the logs of the daemon and the container runtime.
fail() {
    echo "FAILED: $*"
    dmesg 2>/dev/null | grep -E 'oom-kill:|Out of memory' | tail -n 4
    tail -n 20 /tmp/answer /tmp/daemon.log /tmp/runtime.log 2>/dev/null
    exit 1
}

# wait_for SECONDS COMMAND...: repeats COMMAND until it succeeds, at intervals of 0.1 seconds and a twentieth of the time that it has
# waited: in an emulated machine, the tries of a long wait cost more than everything else in that time.
wait_for() {
    _limit=$(($1 * 10)) _waited=0
    shift
    until "$@" >/dev/null 2>&1; do
        [ $_waited -lt $_limit ] || fail "never came true: $*"
        _pause=$((1 + _waited / 20))
        sleep $((_pause / 10)).$((_pause % 10))
        _waited=$((_waited + _pause))
    done
}

# with_code COMMAND...: prints the output of the command, and its exit code. The command may fail.
with_code() { if "$@"; then echo "code 0"; else echo "code $?"; fi; }

# must_fail COMMAND...: prints the output of the command. Fails the script if the command succeeds.
must_fail() { if "$@"; then fail "it succeeded: $*"; fi; }

# quiet_guarantee ARGUMENTS...: runs `numaward guarantee` without output; it must succeed.
quiet_guarantee() { numaward guarantee "$@" >/dev/null 2>>$remarks || fail "no guarantee: $*: $(tail -n 3 $remarks)"; }

# end PID...: ends these processes and ignores their exit codes.
end() {
    kill "$@"
    wait "$@" || true
}

# samples FAMILY...: prints the samples of these metric families. Each must have at least one.
samples() {
    ask /metrics >/tmp/metrics || fail "no answer: /metrics"
    for _family; do grep "^$_family[{ ]" /tmp/metrics || fail "no samples of $_family"; done
}

# expect_error TEXT: declares that the daemon logs an error with this text, or that a command prints it to a file /tmp/*.err. The
# test fails if neither happens.
expect_error() { echo "$1" >>/tmp/expected-errors; }
# allow_error TEXT: declares the same for an error that depends on timing and may be absent.
allow_error() { echo "$1" >>/tmp/allowed-errors; }

# peak: prints the peak memory of the unit's daemon since its start, in KiB.
peak() { sed -n 's/^VmHWM:[^0-9]*\([0-9]*\) kB/\1/p' "/proc/$(systemctl show --value -p MainPID numaward)/status"; }

# leaves_nothing: declares that the script leaves no process, cgroup, mount or changed knob of the kernel. Otherwise the test
# fails.
leaves_nothing() { : >/tmp/leaves-nothing; }

# tidy: ends the daemon and all processes in cgroups, and removes the cgroups and the daemon's files: the end of a script that
# declares `leaves_nothing`.
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

# load NAME ARGUMENTS...: starts a load in the cgroup NAME, which is created if necessary, and waits until all its memory is
# touched. The report is in /tmp/load-NAME (with dashes for slashes), the process id in $load_pid.
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

# booked CGROUP BYTES: succeeds if `memory.numa_stat` shows that much memory, to within 1 %. The kernel updates the file every two
# seconds, and on a read only after many changes; changes of a single CPU may be missing until then.
booked() {
    awk -v bytes="$2" '/^(anon|file) / { for (i = 2; i <= NF; i++) { sub(/.*=/, "", $i); booked += $i } } END { exit booked < bytes * 0.99 }' \
        "$cgroups/$1/memory.numa_stat"
}

# unload NAME PID: ends a load and removes its cgroup.
unload() {
    end "$2"
    wait_for 10 rmdir "$cgroups/$1"
}

# live CGROUP: starts a process in the cgroup, which is created if necessary.
live() {
    mkdir -p "$cgroups/$1"
    sh -c "echo 0 >$cgroups/$1/cgroup.procs; exec sleep 100000" &
    wait_for 10 populated "$1"
}

# populated CGROUP: succeeds if the cgroup or a descendant has a process.
populated() { grep -q 'populated 1' "$cgroups/$1/cgroup.events"; }

# start_daemon ARGUMENTS...: starts `numaward run` and waits until it is ready. $daemon is the process id.
start_daemon() {
    numaward run "$@" 2>>/tmp/daemon.log &
    daemon=$!
    wait_for 60 ready
}

# ready: succeeds if the daemon answers over HTTP and on its control socket.
ready() { ask /readyz && { numaward explain --cpus 1 --memory 1Mi || [ $? -eq 3 ]; }; }

# stop_daemon: terminates the daemon and returns its exit code.
stop_daemon() {
    kill $daemon
    wait $daemon
}

# kill_daemon: kills the daemon, as a crash would. The shell prints a message about that into the section.
kill_daemon() {
    kill -9 $daemon
    wait $daemon || true
}

# new_log: begins a new log file for the next daemon.
new_log() {
    cat /tmp/daemon.log >>/tmp/daemon.log.before
    rm /tmp/daemon.log
}

# restore ARGUMENTS...: restores all knobs after the daemon has ended. Prints the messages only after a failure.
restore() { numaward uninstall "$@" 2>/tmp/uninstall.log || fail "not restored: $(cat /tmp/uninstall.log)"; }

# ask PATH: prints the daemon's HTTP response.
ask() { wget -q -O - "http://127.0.0.1:9560$1"; }

# allocations: prints the guarantees as JSON.
allocations() { ask /api/v1/allocations; echo; }

# no_guarantees: succeeds if no workload has a guarantee.
no_guarantees() { [ "$(numaward get)" = "there are no guarantees" ]; }

# events KIND: prints the daemon's events of this kind, one per line.
events() { ask "/api/v1/events?kind=$1" | sed 's/},{/}\n{/g'; }

# has_event TEXT: succeeds if the daemon has an event with this text.
has_event() { ask /api/v1/events | grep -q "$1"; }

# --- The end of each script -----------------------------------------------------------------------------------------

# _errors: prints the errors and panics of daemons and commands, one per line.
_errors() {
    {
        cat /tmp/daemon.log* /var/log/pods/numaward/numaward.log
        [ ! -d /run/systemd/system ] || journalctl -q --no-pager -o cat -u numaward
    } 2>/dev/null | grep -aE '^[^ ]+ +ERROR |"level":"ERROR"|panicked at' | sort -u
    grep -ahE 'panicked at|are not written to the kernel' /tmp/*.err /tmp/*.log 2>/dev/null
}

# _state: prints the processes, cgroups, mounts and changeable knobs of the machine, one per line.
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

# _end CODE LINE: prints the sections that the test checks at the end of each script.
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
# Machines are small, and their programs are in memory, so a node may have less memory than its guarantees. The tests of the guard
# assert when this is reported.
allow_error "does not have the memory that is guaranteed on it"
_state >/run/state
trap '_end $? $LINENO' EXIT
_first_line=$LINENO
