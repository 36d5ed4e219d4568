NUMAWARD_STRATEGY=native numaward run 2>>/tmp/daemon.log &
daemon=$!
_ready() { wget -qO- http://127.0.0.1:9560/readyz && numaward explain --cpus 1 --memory 1Mi; }
wait_for 20 _ready

# Another cgroup, which may use all CPUs.
mkdir $cgroups/other
sleep 1000 &
echo $! >$cgroups/other/cgroup.procs
numaward exec --cpus 2 --memory 16Mi --node 1 --hide-siblings --isolate --name held -- sleep 1000 2>/dev/null &
_runs() { grep -q 'populated 1' $cgroups/numaward/held/cgroup.events && [ "$(cat $cgroups/other/cpuset.cpus.effective)" != 0-11 ]; }
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

# Another workload takes one thread of the two cores that are left on node 1: one core is whole.
numaward exec --cpus 1 --memory 16Mi --node 1 --name half -- sleep 1000 2>/dev/null &
wait_for 20 grep -q 'populated 1' $cgroups/numaward/half/cgroup.events
section "too few"
numaward exec --cpus 2 --memory 16Mi --node 1 --hide-siblings -- true 2>&1
echo "code $?"
section "shared"
numaward exec --cpus 500m --memory 16Mi --hide-siblings -- true 2>&1
echo "code $?"

# A restart keeps it, and a release gives all back.
kill -9 $daemon
NUMAWARD_STRATEGY=native numaward run 2>>/tmp/daemon.log &
wait_for 20 _ready
section "kept"
numaward get -o json
numaward release --all --yes 2>/dev/null >/dev/null
_all() { [ "$(cat $cgroups/other/cpuset.cpus.effective)" = 0-11 ]; }
wait_for 20 _all
section "released"
numaward get -o json
exit 0
