# No workload without a guarantee is harmed by guarantees of other workloads.
set -eu
mkdir -p /etc/numaward
cat >/etc/numaward/config.yaml <<EOF
strategy: native
guard: act
EOF
start_daemon
_oom_kills() { sed -n 's/^oom_kill //p' "$cgroups/$1/memory.events"; }
_is_on_node_0() { sed -n 's/^anon N0=\([0-9]*\) .*/\1/p' $cgroups/moved/memory.numa_stat | awk '{ exit $1 < 190 * 1048576 }'; }
_free_mib() { awk '/MemFree/ { print int($4 / 1024) }' /sys/devices/system/node/node$1/meminfo; }

# A guarantee raises a limit, the workload exceeds the previous limit, and the guarantee is released.
mkdir $cgroups/limited
echo 120M >$cgroups/limited/memory.max
load limited --size 60M
first=$load_pid
quiet_guarantee /limited --memory 300Mi
load limited --size 150M
section "raised"
cat $cgroups/limited/memory.max
section "release"
numaward release /limited
sleep 3
section "pending"
cat $cgroups/limited/memory.max
numaward status | grep limited
end $load_pid
_has_old_limit() { [ "$(cat $cgroups/limited/memory.max)" = $((120 << 20)) ]; }
wait_for 90 _has_old_limit
section "kills by the limit"
_oom_kills limited
unload limited $first

# A process has mapped huge pages of node 0 and not touched them; node 1 has none.
echo 8 >/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages
mkdir $cgroups/postgres
numaward-harm-check bystander huge-pages --cgroup $cgroups/postgres >/tmp/postgres &
postgres=$!
wait_for 20 test -s /tmp/postgres
section "reserved huge pages"
with_code numaward guarantee /postgres --memory 64Mi --node 1 2>&1
section "reserved huge pages after"
echo "nodes $(cat $cgroups/postgres/cpuset.mems)"
numaward guarantee /postgres --memory 64Mi --node 0 2>>$remarks >/dev/null
sleep 10
kill -0 $postgres && echo lives
numaward release /postgres
end $postgres
echo 0 >/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages
wait_for 20 no_guarantees
rmdir $cgroups/postgres

# A guarantee ends while the pages of its workload still move: no later step of the move narrows the nodes again.
load moved --cpus 0 --size 200M
section "moved"
for delay in 0.05 0.2 0.6; do
    quiet_guarantee /moved --memory 220Mi --node 1
    sleep $delay
    numaward release /moved
    wait_for 20 no_guarantees
    sleep 5
    echo "nodes $(cat $cgroups/moved/cpuset.mems)"
    numaward guarantee /moved --memory 220Mi --node 0 2>>$remarks >/dev/null
    wait_for 20 _is_on_node_0
    numaward release /moved
    wait_for 20 no_guarantees
done
unload moved $load_pid

# A CPU belongs to another program's partition.
echo +cpuset >$cgroups/cgroup.subtree_control
mkdir $cgroups/dpdk
echo 4 >$cgroups/dpdk/cpuset.cpus
echo isolated >$cgroups/dpdk/cpuset.cpus.partition
section "partition"
cat $cgroups/dpdk/cpuset.cpus.partition
_sees_partition() { numaward explain --cpus 3 --memory 16Mi --node 1 | grep -q 'would be refused'; }
wait_for 30 _sees_partition
numaward exec --cpus 2 --memory 16Mi --node 1 --name beside -- sh -c 'sed -n "s/^Cpus_allowed_list:[[:space:]]*//p" /proc/self/status' 2>>$remarks
section "partition after"
cat $cgroups/dpdk/cpuset.cpus.partition $cgroups/dpdk/cpuset.cpus
rmdir $cgroups/dpdk
wait_for 20 no_guarantees

# One node is low on memory, and the other one is full.
numaward exec --cpus 1 --memory 220Mi --name db -- sleep 100000 2>>$remarks &
wait_for 20 grep -q . $cgroups/numaward/db/cpuset.mems
node=$(cat $cgroups/numaward/db/cpuset.mems)
other=$((1 - node))
mkdir -p /fill $cgroups/filler $cgroups/bystander
mount -t tmpfs -o size=95% none /fill
echo $other >$cgroups/filler/cpuset.mems
count=$(($(_free_mib $other) - 60))
sh -c "echo 0 >$cgroups/filler/cgroup.procs; exec dd if=/dev/zero of=/fill/x bs=1M count=$count" 2>/dev/null
cat /sys/devices/system/node/node$node/cpulist >$cgroups/bystander/cpuset.cpus
load bystander --size $(($(_free_mib $node) - 150))M
wait_for 60 has_event headroom_low
sleep 30
section "low"
ask /metrics | grep "^numaward_node_headroom_low{numa_node=\"$node\"}"
section "bystander"
echo "nodes $(cat $cgroups/bystander/cpuset.mems), killed $(_oom_kills bystander)"
section "events"
ask /api/v1/events
