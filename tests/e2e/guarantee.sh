# The hints and messages of the strategy `kubelet` are compared.
set -eu
leaves_nothing
export NUMAWARD_STRATEGY=kubelet
_moved() { grep -q "^anon N0=1[0-9]\{8\} N1=[0-9]\{1,6\}$" $cgroups/batch/memory.numa_stat; }

start_daemon
section "zero metrics"
ask /metrics | grep -E '^numaward_(memory_manager|cpu_manager|topology_manager_admission_(req|err)|enforcement_writes|drift)'

section "exec"
with_code numaward exec --cpus 2 --memory 256Mi --name first -- sh -c '
    grep -E "^(Cpus|Mems)_allowed_list" /proc/self/status
    cat /proc/self/cgroup
    numaward-load --size 128M --report json --hold 0 >/tmp/first.json
    wget -qO- http://127.0.0.1:9560/metrics | grep -E "^numaward_numa_miss_bytes_total" >/tmp/first.miss
    exit 7' 2>>$remarks
section "exec load"
cat /tmp/first.json
section "exec misses"
cat /tmp/first.miss
section "after exec"
allocations

section "signal"
numaward exec --cpus 1 --memory 64Mi --name signalled -- sleep 1000 2>>$remarks &
exec=$!
wait_for 10 populated numaward/signalled
kill -TERM $exec
with_code wait $exec
section "not found"
with_code numaward exec --cpus 1 --memory 64Mi -- no-such-command 2>/dev/null

numaward exec --cpus 2 --memory 256Mi --name held -- numaward-load --size 128M --report json >/tmp/held.json 2>/tmp/held.err &
held=$!
wait_for 60 [ -s /tmp/held.json ]
section "refused"
with_code numaward exec --cpus 2 --memory 64Mi -- true 2>&1
section "would be refused"
with_code numaward explain --cpus 2 --memory 64Mi
section "explained"
numaward explain held -o json
section "explained to people"
numaward explain held
section "knobs"
cd $cgroups/numaward/held
cat cpuset.cpus cpuset.mems memory.min memory.max ../memory.min
cd /
section "the daemon's CPUs"
own_cpus() { cat /proc/$daemon/task/*/status | sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' | sort -u; }
own_cpus
wait_for 30 booked numaward/held $((128 << 20))
section "held numa_stat"
cat $cgroups/numaward/held/memory.numa_stat

section "repaired"
echo 0 >$cgroups/numaward/held/cpuset.cpus
wait_for 20 grep -qx 2-3 $cgroups/numaward/held/cpuset.cpus
cat $cgroups/numaward/held/cpuset.cpus

section "daemon killed"
kill_daemon
start_daemon
section "adopted"
allocations
section "adopted knobs"
cat $cgroups/numaward/held/cpuset.cpus
section "adopted writes"
samples numaward_enforcement_writes_total
section "killed"
# Only the daemon can release the guarantee then.
kill -9 $held
kill $(cat $cgroups/numaward/held/cgroup.procs)
wait_for 30 [ ! -e $cgroups/numaward/held ]
section "released"
allocations
section "the daemon's CPUs later"
own_cpus

section "before guarantee"
load batch --cpus 2 --size 128M --policy preferred:1
wait_for 30 booked batch $((128 << 20))
cat $cgroups/batch/memory.numa_stat
section "guarantee"
# Node 1 has two free CPUs, node 0 one. A request for one CPU uses the node with less free capacity.
numaward guarantee /batch --cpus 1 --memory 256Mi -o json 2>>$remarks
# If the pages take long to move, as under emulation, the move continues after the response.
wait_for 60 _moved
section "after guarantee"
cat $cgroups/batch/memory.numa_stat
section "release"
numaward release batch
cat $cgroups/batch/memory.min $cgroups/batch/memory.max
with_code numaward release batch 2>&1
unload batch $load_pid

# A container, as Docker's driver cgroupfs makes it: a file with its name, then a cgroup of its id.
id=$(printf '%064d' 7)
mkdir -p /var/lib/docker/containers/$id
echo '{"Name":"/web"}' >/var/lib/docker/containers/$id/config.v2.json
section "container"
load docker/$id --cpus 2 --size 64M
must_fail numaward guarantee docker/web --cpus 1 --memory 128Mi 2>&1
numaward describe docker/web | grep -o "/docker/$id" | head -1
numaward guarantee /docker/$id --name web --cpus 1 --memory 128Mi -o json >/tmp/container.json 2>>$remarks
grep -E '"(name|cgroup)"' /tmp/container.json
samples numaward_memory_allocated_bytes_total | grep -c 'workload="docker/web"'
numaward release web
unload docker/$id $load_pid
rmdir $cgroups/docker

section "bad input"
for arguments in "--cpus 0 --memory 1Mi" "--cpus 1 --memory 0" "--cpus 1 --memory 1gb" "--cpus 1000 --memory 1Mi"; do
    numaward exec $arguments -- true 2>&1 | head -1
done
must_fail numaward guarantee /nowhere --cpus 1 --memory 1Mi 2>&1
section "nothing left"
ls $cgroups/numaward | grep -v '\.' || true
section "unreachable"
stop_daemon
with_code numaward exec --cpus 1 --memory 1Mi -- true 2>/dev/null
with_code numaward explain --cpus 1 --memory 1Mi 2>/dev/null
tidy
