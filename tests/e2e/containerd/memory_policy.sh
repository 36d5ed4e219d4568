# Containers that ask for a memory policy: what the kernel shows of their processes, and where their pages are.
set -eu
echo "+cpuset +cpu +memory +hugetlb +pids" >$cgroups/cgroup.subtree_control || fail "no controllers"
echo 'topologyManagerPolicy: best-effort' >>/etc/numaward/config.yaml
ctr version
runc --version
start_plugin

# policy CGROUP: the policy of the stack of its first process, which is that of the process.
policy() {
    awk '/ \[?stack/ { sub(/^[0-9a-f]* /, ""); sub(/ \[?stack.*/, ""); print; exit }' \
        /proc/$(head -n1 "$1/cgroup.procs")/numa_maps
}
# More than one node has, so on both.
for policy in none bind preferred-many interleave weighted-interleave; do
    annotation=numaward.io/memory-policy=$policy
    [ $policy = none ] && annotation=
    run $policy guaranteed --millicpus 1000 --mebibytes 1400 -- numaward-load --size 256M --report json || fail "$policy"
    wait_for 120 grep -q '{' /var/log/pods/$policy/main.log
    section "policy of $policy"
    policy $cgroup
    section "nodes of $policy"
    cat $cgroup/cpuset.mems
    section "load of $policy"
    grep -o '{.*' /var/log/pods/$policy/main.log
    section "allocation of $policy"
    allocations
    numaward-cri remove-pod $pod
done

# One that shares, with a policy over all nodes.
annotation=numaward.io/memory-policy=interleave
run shared burstable --millicpus 100 -- sleep 1000000
section "policy of shared"
policy $cgroup
section "metrics"
ask /metrics | grep '^numaward_nri_memory_policies_missing'
section "log"
grep -E 'memory polic|WARN|ERROR' /tmp/daemon.log || true
section "end"
