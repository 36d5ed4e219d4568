socket=/run/numaward/control.sock
config=/tmp/config.yaml
cat >$config <<'EOF'
enforcement:
  herding: {mode: on}
guarantees:
- {cgroup: "/batch/*", cpus: 1, memory: 64Mi}
EOF
_ready() { wget -qO- http://127.0.0.1:9560/readyz && [ -S $socket ] && numaward explain --cpus 1 --memory 1Mi; }
# live CGROUP: a process in the cgroup, which is made if need be.
live() {
    mkdir -p $cgroups/$1
    sh -c "echo 0 >$cgroups/$1/cgroup.procs; exec sleep 10000" &
    wait_for 10 grep -q . $cgroups/$1/cgroup.procs
}
# tree NAME: every knob of every cgroup.
tree() {
    section "$1"
    (
        cd $cgroups
        find . -mindepth 1 -type d | sort | while read -r _cgroup; do
            for _knob in cpuset.cpus cpuset.mems cpuset.cpus.exclusive cpuset.cpus.partition memory.min memory.low \
                memory.high memory.max memory.swap.max cpu.max cpu.weight hugetlb.2MB.max; do
                [ -f $_cgroup/$_knob ] && echo "$_cgroup/$_knob=$(cat $_cgroup/$_knob)"
            done
        done
    )
}
_counts() { [ "$(wget -qO- http://127.0.0.1:9560/api/v1/allocations | grep -o '"directory"' | wc -l)" = $1 ]; }

for cgroup in other pinned plain slice/a slice/b batch/one; do live $cgroup; done
echo +cpuset +memory +cpu >$cgroups/slice/cgroup.subtree_control
echo +cpuset +memory +cpu >$cgroups/batch/cgroup.subtree_control
echo 0-1 >$cgroups/pinned/cpuset.cpus
echo 0 >$cgroups/pinned/cpuset.mems
echo 16M >$cgroups/pinned/memory.low
echo 300M >$cgroups/slice/a/memory.high
echo "50000 100000" >$cgroups/slice/a/cpu.max
tree "before"

numaward run --config $config 2>>/tmp/daemon.log &
daemon=$!
wait_for 60 _ready
numaward guarantee /slice/a --cpus 1 --memory 64Mi >/dev/null || fail "no guarantee for /slice/a"
numaward guarantee /other --memory 32Mi >/dev/null || fail "no guarantee for /other"
wait_for 60 _counts 3
tree "held"
section "while the daemon runs"
numaward uninstall --restore --config $config 2>&1 && echo "it was not refused"
kill -9 $daemon
wait $daemon
section "restored"
numaward uninstall --restore --config $config -o json 2>/tmp/uninstall.log || { cat /tmp/uninstall.log; fail "not restored"; }
tree "after"
section "again"
numaward uninstall --restore --config $config 2>/tmp/uninstall.log || { cat /tmp/uninstall.log; fail "not restored"; }
