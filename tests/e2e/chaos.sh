# and 2 stay open, so every other free descriptor is above the limit.
set -eu

dir=/run/numaward
mkdir -p $dir
# Fewer slots than workloads.
printf '%s\n' "stateDirectory: $dir/state" 'probes: {slots: 8}' >$dir/config.yaml
_gone() { ! numaward get -o name | grep -qx "$1"; }
printf '%s\n' '[Service]' 'ExecStart=/bin/sleep 1000000' >/run/systemd/system/chaos-unit.service
start_daemon --config $dir/config.yaml

# agrees WHAT: waits until the daemon, its ledger, its metrics and the kernel agree, and prints the duration.
agrees() {
    section "$1"
    numaward-crash-check agree $dir --within 60 || fail "$1"
    kill -0 $daemon || fail "$1: the daemon is gone"
}
# answers NAME: a command gets an exclusive CPU, and ends. The kernel's free memory follows a moment later.
answers() {
    wait_for 20 numaward exec --cpus 1 --memory 16Mi --name "$1" -- true
    wait_for 20 _gone "$1"
}

for name in one two; do
    numaward exec --cpus 1 --memory 64Mi --name $name -- numaward-load --size 16M --report json >/tmp/$name 2>&1 &
    wait_for 60 [ -s /tmp/$name ]
done
agrees "at the beginning"

# Memory is exhausted: the kernel kills the process that caused it.
mkdir $cgroups/hog
numaward-load --cgroup $cgroups/hog --size 4G --report json >/tmp/hog 2>&1 &
hog=$!
wait_for 120 grep -q '^oom_kill [1-9]' $cgroups/hog/memory.events
wait $hog || true
agrees "after memory ran out"
answers after-memory

# No file descriptors: operations that open files fail, without other effects. The limit applies to the number of a descriptor,
# and 0,
numaward-crash-check files $daemon 3 || fail "no limit"
section "without descriptors"
must_fail numaward exec --cpus 1 --memory 16Mi --name refused -- true 2>&1
for _ in 1 2 3; do
    # The daemon accepts no connection either.
    must_fail timeout 2 wget -q -O /dev/null http://127.0.0.1:9560/metrics
done
numaward-crash-check files $daemon 1024 || fail "no limit"
agrees "with descriptors again"
answers after-descriptors

# The clock jumps.
for seconds in 86400 -172800 86400; do
    date -s "@$(($(date +%s) + seconds))" >/dev/null || fail "no clock"
    agrees "after the clock went by $seconds s"
    answers "after-clock$seconds"
done

# CPUs go offline and online: a shared CPU and an exclusive CPU.
for number in $(seq 0 5); do
    [ -e /sys/devices/system/cpu/cpu$number/online ] || continue
    echo 0 >/sys/devices/system/cpu/cpu$number/online || fail "CPU $number stays"
    sleep 2
    echo 1 >/sys/devices/system/cpu/cpu$number/online || fail "CPU $number does not come back"
    agrees "after CPU $number was away"
done
answers after-cpus

# Memory blocks of a node go offline and online, as many as the kernel can empty.
offline=
for state in /sys/devices/system/node/node1/memory*/state; do
    echo offline 2>/dev/null >$state && offline="$offline $state"
done
section "memory that went"
echo "$offline" | wc -w
agrees "while memory is away"
for state in $offline; do echo online >$state || fail "$state does not come back"; done
agrees "after memory was away"

# More workloads than slots of the probes.
for number in $(seq 12); do
    mkdir -p $cgroups/many/w$number
    quiet_guarantee /many/w$number --memory 1Mi --name w$number
done
_full() { samples numaward_probe_map_entries | grep -q '{map="ROOTS"} 8$'; }
wait_for 60 _full
section "slots"
ask /metrics | grep -E '^numaward_probe_map_(entries|capacity)\{map="ROOTS"'
agrees "with more workloads than slots"
for number in $(seq 12); do numaward release w$number || fail "w$number stays"; done
agrees "with slots again"

# NUMA balancing is switched on and off.
for _ in $(seq 20); do
    echo 1 >/proc/sys/kernel/numa_balancing
    echo 0 >/proc/sys/kernel/numa_balancing
done
agrees "after NUMA balancing was switched"

# The daemon is suspended while workloads end and requests arrive.
kill -STOP $daemon
rmdir $cgroups/many/w1 $cgroups/many/w2
numaward exec --cpus 1 --memory 16Mi --name patient -- true 2>>$remarks &
patient=$!
sleep 10
kill -CONT $daemon
wait $patient || fail "it did not get its answer"
wait_for 20 _gone patient
agrees "after the daemon stood still"

# The bus is suspended.
systemctl start chaos-unit.service || fail "no unit"
bus=$(pidof dbus-daemon) || fail "no bus"
kill -STOP $bus
section "without an answer of the bus"
must_fail timeout 100 numaward guarantee chaos-unit.service --cpus 1 --memory 16Mi 2>&1
agrees "while the bus hangs"
kill -CONT $bus
wait_for 60 numaward guarantee chaos-unit.service --cpus 1 --memory 16Mi
agrees "after the bus hung"
numaward release chaos-unit.service || fail "the unit stays"

# The daemon's cgroups are removed.
echo 1 >$cgroups/numaward/cgroup.kill
# The daemon removes cgroups of ended workloads itself.
for name in one two; do wait_for 20 sh -c "rmdir $cgroups/numaward/$name; [ ! -e $cgroups/numaward/$name ]"; done
rmdir $cgroups/numaward || fail "the cgroup of commands stays"
wait_for 60 _gone one
wait_for 60 _gone two
numaward exec --cpus 1 --memory 16Mi --name again -- sleep 1000000 2>>$remarks &
wait_for 60 populated numaward/again
agrees "after its cgroups were removed"
section "errors"
samples numaward_cpu_manager_pinning_errors_total numaward_memory_manager_pinning_errors_total
exit 0
