set -eu
leaves_nothing
config=/tmp/config.yaml
cat >$config <<'EOF'
enforcement:
  herding: {mode: on}
guarantees:
- {cgroup: "/batch/*", cpus: 1, memory: 64Mi}
EOF
# tree NAME: prints every knob of every cgroup, and the controllers that the root enables.
tree() {
    section "$1"
    (
        cd $cgroups
        find . -type d | sort | while read -r _cgroup; do
            for _knob in cgroup.subtree_control cpuset.cpus cpuset.mems cpuset.cpus.exclusive cpuset.cpus.partition memory.min memory.low \
                memory.high memory.max memory.swap.max cpu.max cpu.weight hugetlb.2MB.max; do
                [ ! -f $_cgroup/$_knob ] || echo "$_cgroup/$_knob=$(cat $_cgroup/$_knob)"
            done
        done
    )
}
_counts() { [ "$(allocations | grep -o '"directory"' | wc -l)" = $1 ]; }

# numaward enables controllers in bare (all), and in the root and slice (huge pages).
for cgroup in other pinned plain slice/a slice/b batch/one bare/inner loose; do live $cgroup; done
echo -hugetlb >$cgroups/cgroup.subtree_control || fail "the controller hugetlb stays enabled"
for node in 0 1; do
    echo 8 >/sys/devices/system/node/node$node/hugepages/hugepages-2048kB/nr_hugepages
done
echo +cpuset +memory +cpu >$cgroups/slice/cgroup.subtree_control
echo +cpuset +memory +cpu >$cgroups/batch/cgroup.subtree_control
echo 0-1 >$cgroups/pinned/cpuset.cpus
echo 0 >$cgroups/pinned/cpuset.mems
echo 16M >$cgroups/pinned/memory.low
echo 300M >$cgroups/slice/a/memory.high
echo "50000 100000" >$cgroups/slice/a/cpu.max
tree "before"

start_daemon --config $config
quiet_guarantee /slice/a --cpus 1 --memory 64Mi --hugepages-2Mi 4Mi
quiet_guarantee /other --memory 32Mi
quiet_guarantee /bare/inner --cpus 1 --memory 32Mi
quiet_guarantee /loose --memory 32Mi --memory-limit 64Mi
wait_for 60 _counts 5
tree "held"
section "while the daemon runs"
must_fail numaward uninstall --config $config 2>&1
kill_daemon
section "restored"
restore --config $config -o json
tree "after"
section "again"
restore --config $config

# A controller that another program uses meanwhile stays enabled, and is reported.
section "with a user of a controller"
start_daemon --config $config
quiet_guarantee /bare/inner --cpus 1 --memory 32Mi
kill_daemon
mkdir $cgroups/bare/theirs
echo 40M >$cgroups/bare/theirs/memory.high
section "in use"
must_fail numaward uninstall --config $config -o json 2>/tmp/uninstall.log
section "in use: controllers"
cat $cgroups/bare/cgroup.subtree_control
echo max >$cgroups/bare/theirs/memory.high
section "no longer in use"
restore --config $config
section "no longer in use: controllers"
cat $cgroups/bare/cgroup.subtree_control
for node in 0 1; do echo 0 >/sys/devices/system/node/node$node/hugepages/hugepages-2048kB/nr_hugepages; done
echo +hugetlb >$cgroups/cgroup.subtree_control
tidy
