# The runtime's validator requires the plugin numaward: first only for pods that request it, then for all pods.
set -eu
echo "+cpuset +cpu +memory +hugetlb +pids" >$cgroups/cgroup.subtree_control || fail "no controllers"

restart_runtime() {
    kill_runtime
    start_runtime
}
# attempt POD [ANNOTATION]: creates a pod that is eligible for an exclusive CPU, and prints the placement or the error.
attempt() {
    annotation=${2:-}
    if run "$1" guaranteed --millicpus 1000 --mebibytes 64 -- sleep 1000000 2>&1; then where $cgroup; fi
    annotation=
}
# another CONTAINER: adds a container to the last pod, and prints the placement or the error.
another() {
    container=$(numaward-cri create $pod $name --container $1 --millicpus 1000 --mebibytes 64 -- sleep 1000000 2>&1) ||
        { echo "$container"; return; }
    numaward-cri start $container || fail "start $1"
    cgroup=$cgroups/kubepods/pod$name/$(container_group)
    where $cgroup
}

validate
restart_runtime
section "not asked"
attempt not-asked
numaward-cri remove-pod $pod
section "asked"
attempt asked 'required-plugins.noderesource.dev=["numaward"]'
numaward-cri remove-pod $pod
section "asked for a container"
attempt asked-for 'required-plugins.noderesource.dev/container.main=["numaward"]'
numaward-cri remove-pod $pod

tolerate=tolerate-missing-plugins.noderesource.dev
require_numaward $tolerate
restart_runtime
section "missing"
attempt missing
numaward-cri remove-pod $pod
section "tolerated"
attempt tolerated $tolerate=true
numaward-cri remove-pod $pod
start_plugin
section "placed"
attempt placed
# numaward has placed the container before the validator refuses it.
section "another is missing"
attempt another 'required-plugins.noderesource.dev=["other"]'
section "given back"
allocations
numaward-cri remove-pod $pod

# The pod is created before numaward hangs, so that the creation of the container is the first request without an answer.
name=late
pod=$(numaward-cri pod $name) || fail "pod $name"
kill -STOP $daemon
section "silent"
another first
late=$cgroup
section "after silent"
another second
kill -CONT $daemon
wait_for 120 grep -q . $late/cpuset.cpus
# It may be on all nodes for a moment.
wait_for 60 grep -qx "[01]" $late/cpuset.mems
section "adopted"
where $late
section "metrics"
ask /metrics | grep '^numaward_containers_started_unpinned'

kill_daemon
# The runtime may count numaward as present once more.
another third
section "gone"
another fourth
section "log"
grep -E 'NRI|WARN|ERROR' /tmp/daemon.log
grep -i -E 'nri|plugin "' /tmp/runtime.log | grep -v 'loading plugin' | tail -n 40
section "end"
