# Hugepages of pools: allocated on known nodes from known CPUs, and freed.
set -eu
leaves_nothing

metrics() { ask /metrics | grep -E '^numaward_(hugepages_|(memory_resident|numa_miss)_bytes.*hugepages)'; }

echo "+cpuset +memory +hugetlb" >$cgroups/cgroup.subtree_control
for node in 0 1; do
    echo 40 >/sys/devices/system/node/node$node/hugepages/hugepages-2048kB/nr_hugepages
done
# Workloads that exist when the daemon starts have counters before it is ready.
for name in local remote spread kept; do mkdir $cgroups/$name; done
printf 'strategy: native\nenforcement: {mode: dry-run}\nobserve: {residencyInterval: 5s}\n' >/tmp/config.yaml
start_daemon --config /tmp/config.yaml
section probes
ask /metrics | grep '^numaward_probe_info{'
section before
metrics

# Nothing is enforced, so pages follow the policy: one node is guaranteed, the other is not.
section guarantee
expect_error "are not written to the kernel: enforcement.mode"
numaward guarantee /kept --cpus 1 --memory 64Mi --hugepages-2Mi 8Mi -o json 2>>$remarks
load local --cpus 0 --kind hugetlb --size 16M --policy bind:0
local=$load_pid
load remote --cpus 0 --kind hugetlb --size 16M --policy bind:1
remote=$load_pid
load spread --cpus 2 --kind hugetlb --size 16M --policy interleave:0-1
spread=$load_pid
load kept --cpus 0 --kind hugetlb --size 8M --policy bind:0
one=$load_pid
load kept --cpus 0 --kind hugetlb --size 4M --policy bind:1
two=$load_pid

# resident NAME NODE BYTES: succeeds if the daemon has read this value.
resident() {
    ask /metrics | grep -q "^numaward_memory_resident_bytes{workload=\"$1\",numa_node=\"$2\",type=\"hugepages-2Mi\"} $3\$"
}
wait_for 60 resident kept 1 4194304
wait_for 60 resident spread 1 8388608
section after
metrics
section workloads
ask /api/v1/workloads
section "kernel's book"
for name in local remote spread kept; do
    echo $name $(grep total $cgroups/$name/hugetlb.2MB.numa_stat)
done
section status
numaward status

end $local $remote $spread $one $two
wait_for 60 resident kept 1 0
wait_for 60 resident local 0 0
section freed
metrics
section log
grep -E "WARN|ERROR" /tmp/daemon.log | grep -vE 'kind="(miss|intruder)"' | head -40
section "exit code"
stop_daemon
echo $?
for node in 0 1; do echo 0 >/sys/devices/system/node/node$node/hugepages/hugepages-2048kB/nr_hugepages; done
tidy
