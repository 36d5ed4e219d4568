set -eu
leaves_nothing
section release
cat /proc/sys/kernel/osrelease

# can NAME COMMAND...: prints whether the kernel permits the command.
can() {
    _name=$1
    shift
    if "$@" 2>/tmp/refused; then echo "$_name: yes"; else echo "$_name: no"; fi
}
put() { echo "$2" >"$1"; }
on_node_1() { awk '/^anon / {split($3, n, "="); print n[2]}' "$1/memory.numa_stat"; }

# A cgroup below the root has all interface files.
mkdir $cgroups/seen
section doctor
# It fails if a check fails.
numaward doctor -o json || true

section tried
mkdir $cgroups/isolated
put $cgroups/isolated/cpuset.cpus 1
can "cpuset.cpus.partition: isolated" put $cgroups/isolated/cpuset.cpus.partition isolated
rmdir $cgroups/isolated
can "hugetlb.SIZE.numa_stat" test -e $cgroups/seen/hugetlb.2MB.numa_stat
can "memory.reclaim" test -e $cgroups/seen/memory.reclaim
can "cpuset.cpus.exclusive" test -e $cgroups/seen/cpuset.cpus.exclusive
can "memory tiers" test -e /sys/devices/virtual/memory_tiering
load moved --size 32M --cpus 2
put $cgroups/moved/cpuset.mems 0
# The file may lag behind by seconds.
_left() {
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        [ "$(on_node_1 $cgroups/moved)" -lt 4194304 ] && return
        sleep 1
    done
    cat $cgroups/moved/memory.numa_stat
    return 1
}
can "pages follow cpuset.mems" _left

# The daemon moves pages on every kernel: from the node of these CPUs to the other node.
section daemon
start_daemon
load held --size 32M --cpus 2
numaward guarantee /held --memory 64Mi --cpus 1 --node 0 -o json >/tmp/held 2>>$remarks
# If the pages take long to move, as under emulation, the move continues after the response.
_moved() { [ "$(on_node_1 $cgroups/held)" -lt 1048576 ]; }
wait_for 60 _moved
section guarantee
cat /tmp/held
section held
cat $cgroups/held/cpuset.mems
section "held numa_stat"
cat $cgroups/held/memory.numa_stat
section kept
grep CapEff /proc/$daemon/status
section status
numaward status -o json
numaward release held >>$remarks
unload held $load_pid
section end
stop_daemon
echo $?

# Misses are booked to the owner of the pages, whichever task asks for them. Nothing is enforced: pages follow their policy, or are
# on the node of the CPU.
new_log
echo 'enforcement: {mode: dry-run}' >/tmp/dry.yaml
expect_error "are not written to the kernel: enforcement.mode"
start_daemon --config /tmp/dry.yaml
section "dry status"
numaward status -o json
mkdir $cgroups/owner $cgroups/guest
section "owner"
numaward guarantee /owner --memory 128Mi --cpus 1 --node 0 -o json 2>/tmp/owner.err
missed() {
    section "missed $1"
    ask /metrics | sed -n 's/^numaward_numa_miss_bytes_total{workload="owner",numa_node="1"} //p'
    section "missed $1 numa_stat"
    cat $cgroups/owner/memory.numa_stat
}
# poke CGROUP: a process of the cgroup, on node 1, writes to the memory of the load, which nobody has touched yet.
poke() {
    _address=$(sed -n 's/.*"address":\([0-9]*\).*/\1/p' "$_report")
    sh -c "echo 0 >$cgroups/$1/cgroup.procs && exec taskset 4 dd if=/dev/zero of=/proc/$load_pid/mem bs=4096 \
        seek=$((_address / 4096)) count=16384 conv=notrunc" 2>>$remarks
}
# Linux 5.10 holds back up to 32 pages for each CPU.
enough=67108864
case $(cat /proc/sys/kernel/osrelease) in 5.10.*) enough=66060288 ;; esac
_charged() { [ "$(on_node_1 $cgroups/$1)" -ge $enough ]; }
missed before
load owner --size 64M --policy bind:1
wait_for 30 _charged owner
missed "by itself"
section "miss events"
_reported() { ask "/api/v1/events?kind=miss&workload=owner" | grep -q message; }
wait_for 30 _reported
ask "/api/v1/events?kind=miss&workload=owner"
end $load_pid
load owner --size 64M --untouched
missed "before guest"
poke guest
wait_for 30 _charged owner
missed "by guest"
end $load_pid
load guest --size 64M --untouched
missed "before host"
poke owner
wait_for 30 _charged guest
missed "for guest"
unload guest $load_pid
tidy
