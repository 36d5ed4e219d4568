# Recorded state files of a kubelet with static policies, and containers in the cgroup layouts of both drivers. The test sets
# $container and $scope.
set -eu
echo +memory >$cgroups/cgroup.subtree_control
leaves_nothing

misses() { ask /metrics | grep '^numaward_numa_miss_bytes_total{'; }
held() { [ "$(ask /api/v1/allocations | grep -o '"namespace"' | wc -l)" = "$1" ]; }

# knobs: prints all knobs below the root that numaward could write.
knobs() {
    find $cgroups -mindepth 2 -name cpuset.cpus -o -mindepth 2 -name cpuset.mems -o -mindepth 2 -name cpuset.cpus.partition \
        -o -mindepth 2 -name memory.min -o -mindepth 2 -name memory.low -o -mindepth 2 -name memory.high \
        -o -mindepth 2 -name memory.max -o -mindepth 2 -name cgroup.subtree_control |
        sort | while read -r _knob; do echo "$_knob $(cat "$_knob")"; done
}

# The files were recorded on a larger machine.
expect_error "does not have the memory that is guaranteed on it"
mkdir -p /var/lib/kubelet
cp /kubelet/* /var/lib/kubelet

section "enforce refused"
must_fail env NUMAWARD_MODE=enforce numaward run 2>&1

section doctor
numaward doctor -o json || true

mkdir -p $cgroups/kubepods/podp1/$container $cgroups/kubepods.slice/kubepods-podp3.slice/$scope
# As the kubelet does.
for _cgroup in kubepods kubepods/podp1 kubepods.slice kubepods.slice/kubepods-podp3.slice; do
    echo +memory >$cgroups/$_cgroup/cgroup.subtree_control
done
knobs >/tmp/before
numaward run >/tmp/daemon.log 2>&1 &
daemon=$!
wait_for 60 ask /readyz
wait_for 30 held 4
section allocations
ask /api/v1/allocations

# The kubelet guarantees node 1 for p3, and p3 uses it.
load kubepods.slice/kubepods-podp3.slice/$scope --cpus 0 --policy bind:1
kept=$load_pid
section "kept"
misses
# The kubelet guarantees node 0 for p1, but p1 is bound to node 1.
load kubepods/podp1/$container --cpus 0 --policy bind:1
section "broken"
misses
section status
numaward status
section "still running"
knobs >/tmp/after
diff /tmp/before /tmp/after && echo same
ls /run/numaward
must_fail ls /var/lib/numaward 2>&1
must_fail ls -d $cgroups/numaward 2>&1

# A damaged file is reported, and the previous content stays in effect.
cp /var/lib/kubelet/memory_manager_state /tmp/good
sed s/4294967296/4294967297/ /tmp/good >/tmp/bad
mv /tmp/bad /var/lib/kubelet/memory_manager_state
damaged() { ask /api/v1/status | grep -q 'corrupted'; }
wait_for 30 damaged
section damaged
ask /api/v1/status
held 4 || fail "the guarantees are gone"
mv /tmp/good /var/lib/kubelet/memory_manager_state
repaired() { ! damaged; }
wait_for 30 repaired
# The kubelet is drained.
rm /var/lib/kubelet/*_manager_state
wait_for 30 held 0
kill $kept $load_pid $daemon
wait $daemon
tidy
