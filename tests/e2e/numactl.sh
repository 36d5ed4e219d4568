# The same command with numactl and with `numaward numactl`, on four nodes of which one has no CPUs.
socket=/run/numaward/control.sock
_ready() { [ -S $socket ] && numaward get; }
numactl() { /numactl/ld-linux-x86-64.so.2 --library-path /numactl /numactl/numactl "$@"; }

# What a command has: its CPUs and nodes, and the policy of its stack as the kernel has it.
cat >/probe <<'END'
grep -E '^(Cpus|Mems)_allowed_list' /proc/self/status
awk '/ \[?stack/ { print $2; exit }' /proc/self/numa_maps
END

# compare OPTIONS...: both, and their exit codes. What the programs print of themselves is no result.
compare() {
    section "$*"
    numactl "$@" sh /probe 2>/dev/null
    echo "code $?"
    echo --
    numaward numactl "$@" sh /probe 2>/dev/null
    echo "code $?"
}
all() {
    compare -N 0
    compare -N 1,2
    compare -N '!0'
    compare -N all
    compare -N 3
    compare -C 0,2
    compare -C '!1-2'
    compare -C +1
    compare -m 1
    compare -m 1-2
    compare -m '!1'
    compare -m all
    compare -m 3
    compare -m 4
    compare -p 2
    compare -p 1,2
    compare -p all
    compare -P 1-2
    compare -i 0,3
    compare -i all
    compare -i '!0'
    compare -l
    compare -N 1 -m 2
    compare -w 0-1
    compare -w all
}

mkdir /sys/fs/cgroup/narrow
echo +cpuset >/sys/fs/cgroup/cgroup.subtree_control
echo 1-2 >/sys/fs/cgroup/narrow/cpuset.mems
echo 2-5 >/sys/fs/cgroup/narrow/cpuset.cpus

all
(
    echo 0 >/sys/fs/cgroup/narrow/cgroup.procs
    for options in "-m +1" "-m 0" "-N +0" "-C +3" "-C 0" "-m all" "-i all" "-a -m 1" "-a -N 0"; do
        section "narrow $options"
        numactl $options sh /probe 2>/dev/null
        echo "code $?"
        echo --
        numaward numactl $options sh /probe 2>/dev/null
        echo "code $?"
    done
)
section "weighted"
numaward numactl -w 0 true 2>&1
echo "code $?"
section "hardware"
numactl -H | grep -v free
section "our hardware"
numaward numactl -H | grep -v free

section "alone"
numaward numactl -m 1 cat /proc/self/cgroup 2>&1

numaward run 2>/tmp/daemon.log &
wait_for 30 _ready
section "registered"
numaward numactl -N 1 -m 2 sh -c 'cat /proc/self/cgroup; sh /probe; echo $$; exit 7' 2>&1
echo "code $?"
numaward numactl -m 1 sleep 1000 &
command=$!
_registered() { numaward get sleep-$command; }
wait_for 20 _registered
section "process"
cat /proc/$command/comm
cat /proc/$command/cgroup
section "counted"
_counted() { wget -qO- http://127.0.0.1:9560/metrics | grep -q "workload=\"numaward/sleep-$command\""; }
wait_for 30 _counted
echo "$command"
section "described"
numaward describe sleep-$command
kill $command
wait $command
_released() { [ ! -e $cgroups/numaward/sleep-$command ]; }
wait_for 30 _released
section "left"
numaward get

# CPUs alone, on the only node that is allowed; others are moved off them as this one asks for it.
section "isolated"
numaward exec --cpus 2 --node 2 --isolate --name alone -- sh -c '
    grep -E "^(Cpus|Mems)_allowed_list" /proc/self/status
    cat /sys/fs/cgroup/narrow/cpuset.cpus' 2>/dev/null
echo "code $?"
_given_back() { [ "$(cat $cgroups/narrow/cpuset.cpus)" = 2-5 ]; }
wait_for 20 _given_back
section "log"
cat /tmp/daemon.log
exit 0
