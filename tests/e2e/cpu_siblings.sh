set -eu
leaves_nothing
export NUMAWARD_STRATEGY=native
start_daemon

# Another cgroup, without restriction.
mkdir $cgroups/other
sleep 1000 &
echo $! >$cgroups/other/cgroup.procs
numaward exec --cpus 2 --memory 16Mi --node 1 --hide-siblings --isolate --name held -- sleep 1000 2>>$remarks &
_runs() { populated numaward/held && [ "$(cat $cgroups/other/cpuset.cpus.effective)" != 0-11 ]; }
wait_for 20 _runs
section "held"
numaward get -o json
section "explained"
numaward explain held
section "its CPUs"
cat $cgroups/numaward/held/cpuset.cpus.effective
section "those of others"
cat $cgroups/other/cpuset.cpus.effective
section "siblings"
cat /sys/devices/system/cpu/cpu*/topology/thread_siblings_list | sort -n -u

# Another workload uses one thread of the remaining two cores of node 1: one core stays free.
numaward exec --cpus 1 --memory 16Mi --node 1 --name half -- sleep 1000 2>>$remarks &
wait_for 20 populated numaward/half
section "too few"
with_code numaward exec --cpus 2 --memory 16Mi --node 1 --hide-siblings -- true 2>&1
section "shared"
with_code numaward exec --cpus 500m --memory 16Mi --hide-siblings -- true 2>&1

# A restart keeps the setting, and a release restores all CPUs.
kill_daemon
start_daemon
section "kept"
numaward get -o json
numaward release --all --yes 2>/dev/null >/dev/null
_all() { [ "$(cat $cgroups/other/cpuset.cpus.effective)" = 0-11 ]; }
wait_for 20 _all
section "released"
numaward get -o json
tidy
