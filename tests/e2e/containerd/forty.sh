# Forty containers are created at the same time, on a machine with fewer CPUs. CRI-O refuses limits below 12 MiB.
set -eu
echo "+cpuset +cpu +memory +hugetlb +pids" >$cgroups/cgroup.subtree_control || fail "no controllers"
start_plugin
pod=$(numaward-cri pod many) || fail "pod"
started() {
    _id=$(numaward-cri create $pod many --container c$1 --millicpus 1000 --mebibytes 16 -- sleep 1000000) || return 0
    numaward-cri start $_id
    echo $_id >/tmp/started-$1
}
all=
for i in $(seq 40); do
    started $i 2>/tmp/failed-$i &
    all="$all $!"
done
wait $all
section "cpus"
for container in $(cat /tmp/started-*); do
    cgroup=$cgroups/kubepods/podmany/$(container_group)
    echo "$(cat $cgroup/cpuset.cpus) $(sed -n 's/^Cpus_allowed_list:.//p' /proc/$(first_process $cgroup)/status)"
done
section "refused"
cat /tmp/failed-*
section "allocations"
allocations
section "metrics"
ask /metrics | grep -E '^numaward_(containers_started_unpinned|nri_(containers|disconnects|refusals))'
section "end"
