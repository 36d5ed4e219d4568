# Containers that request a memory policy: prints the policy of their processes as the kernel shows it, and the nodes of their
# pages.
set -eu
echo "+cpuset +cpu +memory +hugetlb +pids" >$cgroups/cgroup.subtree_control || fail "no controllers"
echo 'topologyManagerPolicy: best-effort' >>/etc/numaward/config.yaml
start_plugin

# policy CGROUP: prints the policy of the first process, which is that of its stack.
policy() {
    awk '/ \[?stack/ { sub(/^[0-9a-f]* /, ""); sub(/ \[?stack.*/, ""); print; exit }' \
        /proc/$(first_process "$1")/numa_maps
}
# The request exceeds one node, so the container gets both.
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

# A container without exclusive CPUs, with a policy over all nodes.
annotation=numaward.io/memory-policy=interleave
run shared burstable --millicpus 100 -- sleep 1000000
section "policy of shared"
policy $cgroup
section "metrics"
ask /metrics | grep '^numaward_nri_memory_policies_missing'
section "log"
grep -E 'memory polic|WARN|ERROR' /tmp/daemon.log || true
section "end"
