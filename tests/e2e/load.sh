set -eu
leaves_nothing
mkdir /ramfs
mount -t ramfs ramfs /ramfs
thp=$(sed 's/.*\[\(.*\)\].*/\1/' /sys/kernel/mm/transparent_hugepage/enabled)
echo madvise >/sys/kernel/mm/transparent_hugepage/enabled
echo 20 >/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages

# place NAME ARGUMENTS...: prints the report of the load, and the kernel's figures for its cgroup.
place() {
    _name=$1
    shift
    load "$_name" "$@"
    section "$_name report"
    cat "/tmp/load-$_name"
    # The kernel's file does not contain hugepages.
    [ "$_name" = hugetlb ] || wait_for 30 booked "$_name" $(sed 's/.*"bytes":\([0-9]*\).*/\1/' /tmp/load-$_name)
    section "$_name numa_stat"
    cat "$cgroups/$_name/memory.numa_stat"
    section "$_name threads"
    grep -h Cpus_allowed_list /proc/$load_pid/task/*/status
    unload "$_name" $load_pid
}

place local --cpus 0
place bound --cpus 0 --policy bind:1
place preferred --cpus 2 --policy preferred:0
place interleaved --cpus 0-1,3 --policy interleave:0-1
place thp --cpus 2 --kind thp
place tmpfs --cpus 0 --kind tmpfs --policy bind:1
place file --cpus 0 --kind file --path /ramfs/file --policy bind:1
place hugetlb --cpus 0 --kind hugetlb --size 32M --policy bind:1
place walking --cpus 0,2 --walk --size 16M

section left
ls /ramfs

# refused NAME ARGUMENTS...: prints the message of a load that cannot start.
refused() {
    section "refused $1"
    shift
    must_fail numaward-load --hold 0 "$@" 2>&1
}
refused node --policy bind:7
refused hugepages --kind hugetlb --size 1G
refused pool --kind hugetlb --size 32M --policy bind:0
refused cpu --cpus 77
refused cgroup --cgroup /tmp
mkdir $cgroups/small
echo 0 >$cgroups/small/cpuset.mems
echo 0 >$cgroups/small/cpuset.cpus
refused cpuset --cgroup $cgroups/small --policy bind:1
echo never >/sys/kernel/mm/transparent_hugepage/enabled
refused thp --kind thp
umount /ramfs
echo $thp >/sys/kernel/mm/transparent_hugepage/enabled
echo 0 >/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages
tidy
