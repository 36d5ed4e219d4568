set -eu
leaves_nothing
config=/tmp/config.yaml
# configure MODE HERDING: writes the configuration of the next daemon.
configure() {
    cat >$config <<EOF
enforcement:
  mode: $1
  herding: {mode: $2, systemSlices: [/init.scope, /exempt]}
guarantees:
- {cgroup: "/batch/*", cpus: 1, memory: 64Mi}
EOF
}
# show NAME CGROUP...: prints the CPU set of each cgroup, and the allowed CPUs of its first process.
show() {
    section "$1"
    shift
    for _cgroup; do
        _pid=$(head -n 1 $cgroups/$_cgroup/cgroup.procs)
        _allowed=$([ -z "$_pid" ] || sed -n 's/^Cpus_allowed_list:\t//p' /proc/$_pid/status)
        echo "$_cgroup [$(cat $cgroups/$_cgroup/cpuset.cpus)] $_allowed"
    done
}
shared() { allocations | sed 's/.*"sharedCpus":"\([^"]*\)".*/\1/'; }
_herded() { [ "$(cat $cgroups/$1/cpuset.cpus)" = "$(shared)" ]; }
_counts() { [ "$(allocations | grep -o '"directory"' | wc -l)" = $1 ]; }
_holds() { allocations | grep -q "\"name\":\"$1\""; }
_waits() { allocations | grep -q '"waiting":\[{"cgroup":"'$1'"'; }
all="other pinned exempt slice/a slice/b"

for cgroup in other exempt pinned slice/a slice/b; do live $cgroup; done
echo 0-1 >$cgroups/pinned/cpuset.cpus
echo +cpuset +memory >$cgroups/slice/cgroup.subtree_control
configure on on
start_daemon --config $config
show "before" $all
section "zero metrics"
ask /metrics | grep -E '^numaward_(herd|declared)'

numaward exec --cpus 1 --memory 64Mi --name first -- sleep 10000 2>>$remarks &
exec=$!
wait_for 20 populated numaward/first
show "herded" $all slice numaward/first
section "herded allocations"
allocations

# A guarantee in a confined slice: the slice has to keep these CPUs, so its other children are confined instead.
quiet_guarantee /slice/a --cpus 1 --memory 64Mi
show "opened" $all slice numaward/first
section "opened allocations"
allocations
live late
live slice/late
wait_for 20 _herded late
wait_for 20 _herded slice/late
show "late" late slice/late
section "metrics"
ask /metrics | grep -E '^numaward_(herd|cpu_manager_shared)'

cat /sys/devices/system/cpu/online >$cgroups/other/cpuset.cpus
wait_for 20 _herded other
kill_daemon
start_daemon --config $config
show "restarted" $all slice numaward/first late slice/late
section "restarted allocations"
allocations
section "restarted writes"
samples numaward_enforcement_writes_total

# A dry run restores the knobs and keeps the guarantees.
stop_daemon
configure dry-run on
start_daemon --config $config
show "dry run" $all numaward/first
section "dry run allocations"
allocations
section "dry run status"
numaward status
stop_daemon
configure on on
start_daemon --config $config
show "on again" $all slice numaward/first late slice/late
section "on again allocations"
allocations

numaward release slice/a
kill $(cat $cgroups/numaward/first/cgroup.procs)
wait $exec || true
wait_for 20 _counts 0
show "given back" $all slice late slice/late

# Declared guarantees: three fit, the fourth waits.
mkdir $cgroups/batch
echo +cpuset +memory >$cgroups/batch/cgroup.subtree_control
for name in a b c; do live batch/$name; done
wait_for 20 _counts 3
live batch/d
wait_for 20 _waits /batch/d
show "declared" batch/a batch/b batch/c
section "declared allocations"
allocations
section "release of a declared one"
with_code numaward release batch/a 2>&1
kill $(cat $cgroups/batch/a/cgroup.procs)
wait_for 20 rmdir $cgroups/batch/a
wait_for 20 _holds batch/d
section "given later"
allocations
section "declared metrics"
ask /metrics | grep -E '^numaward_declared'
for name in b c d; do
    kill $(cat $cgroups/batch/$name/cgroup.procs)
    wait_for 20 rmdir $cgroups/batch/$name
done
wait_for 20 _counts 0

# Partitions: every kernel supports them for a child of the root; a nested one is refused with the reason.
live part
quiet_guarantee /part --cpus 1 --memory 64Mi --partition root
section "partition"
cat $cgroups/part/cpuset.cpus.partition
show "partition herd" part other
section "partition allocations"
allocations
echo member >$cgroups/part/cpuset.cpus.partition
wait_for 20 grep -qx root $cgroups/part/cpuset.cpus.partition
numaward release part
section "partition released"
cat $cgroups/part/cpuset.cpus.partition
section "nested partition"
with_code numaward exec --cpus 1 --memory 64Mi --partition isolated -- sh -c 'cat /sys/fs/cgroup$(sed s/0::// /proc/self/cgroup)/cpuset.cpus.partition' 2>&1
wait_for 20 _counts 0
show "at the end" other pinned slice/b
section "log"
cat /tmp/daemon.log
tidy
