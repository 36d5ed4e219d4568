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
section end
stop_daemon
echo $?
tidy
