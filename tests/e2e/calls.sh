
# Counts system calls of processes, with kernel tracing.
_trace=/sys/kernel/tracing
# count_calls: starts to count the calls of every process.
count_calls() {
    [ -d $_trace/events ] || mount -t tracefs tracefs $_trace
    for _event in raw_syscalls/sys_enter raw_syscalls/sys_exit; do
        echo 'hist:keys=common_pid,id.syscall:size=65536' >$_trace/events/$_event/trigger || fail "no $_event"
    done
    echo 'hist:keys=parent_pid,child_pid:size=65536' >$_trace/events/sched/sched_process_fork/trigger || fail "no fork"
}
# calls WHICH PID...: prints the calls of these processes and their descendants that were `refused` or `made`. A call that a
# filter refuses has an exit event but no entry event. The same is true for the return of a child from its parent's fork, and of a
# new thread. Exits are read before entries, because a call between the two reads would count as refused.
calls() {
    _which=$1
    shift
    awk -v which=$_which -v processes="$*" '
        $2 == "parent_pid:" { parent[$5 + 0] = $3 + 0 }
        FILENAME ~ /sys_enter/ && $2 == "common_pid:" { begun[$3 + 0 " " $5] }
        FILENAME ~ /sys_exit/ && $2 == "common_pid:" { ended[$3 + 0 " " $5] }
        function is_ours(process) {
            while (process in parent && !(process in ours)) process = parent[process]
            return process in ours
        }
        END {
            split(processes, list)
            for (i in list) ours[list[i] + 0]
            for (call in begun) if (is_ours(call + 0)) { split(call, of); made[of[2]] }
            for (call in ended) if (!(call in begun) && is_ours(call + 0)) { split(call, of); refused[of[2]] }
            # A return from a signal handler has no call number at exit.
            delete refused["unknown_syscall"]
            delete refused["sys_clone"]; delete refused["sys_fork"]; delete refused["sys_vfork"]; delete refused["sys_execve"]
            if (which == "made") for (name in made) print name
            else for (name in refused) print name
        }' $_trace/events/raw_syscalls/sys_exit/hist $_trace/events/raw_syscalls/sys_enter/hist \
        $_trace/events/sched/sched_process_fork/hist | sed 's/^sys_//' | sort
}
