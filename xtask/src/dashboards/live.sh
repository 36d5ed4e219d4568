# What dashboards and rules are shown, inside its machine: one of each thing that they are about, made on purpose.
# The workload `good` keeps its guarantee all the time; that of `bad` is broken after a minute.

cgroups=/sys/fs/cgroup
echo 1 >/proc/sys/kernel/numa_balancing
# Hugepages of pools, in the books of cgroups.
echo +hugetlb >$cgroups/cgroup.subtree_control
for node in 0 1 2 3; do echo 8 >/sys/devices/system/node/node$node/hugepages/hugepages-2048kB/nr_hugepages; done

# What is scraped is sent as well.
export NUMAWARD_OTLP_ENDPOINT="$receiver" NUMAWARD_OTLP_INTERVAL=5s NUMAWARD_OTLP_TRACES=false
numaward run --listen "0.0.0.0:$port" 2>/tmp/daemon.log &
daemon=$!
# check: ends the machine if the daemon has ended.
check() { kill -0 $daemon 2>/dev/null || { cat /tmp/daemon.log; exit 1; }; }
# wait_for COMMAND...
wait_for() { until "$@" >/dev/null 2>&1; do check; sleep 0.2; done; }
# again COMMAND...: for ever.
again() { while :; do "$@" >/dev/null 2>&1; sleep 0.2; done; }
wait_for wget -q -O - "http://127.0.0.1:$port/readyz"
wait_for numaward explain --cpus 1 --memory 1Mi

numaward exec --name good --cpus 1 --memory 128Mi -- sh -c 'while :; do numaward-load --size 64M --hold 2 >/dev/null; done' &
wait_for [ -d $cgroups/numaward/good ]

# Its node's cpuset is rewritten until the daemon leaves it to the other.
mkdir $cgroups/bad
sleep 100000 &
echo $! >$cgroups/bad/cgroup.procs
wait_for numaward guarantee /bad --cpus 1 --memory 128Mi
# For a while all is well.
sleep 10
other=$((($(cat $cgroups/bad/cpuset.mems) + 1) % 4))
again sh -c "echo 0-3 >$cgroups/bad/cpuset.mems" &
(
    until wget -q -O - "http://127.0.0.1:$port/api/v1/allocations" | grep -q '"state":"left"'; do sleep 1; done
    again numaward-load --cgroup $cgroups/bad --size 64M --policy bind:$other --hold 2
) &

# Memory on several nodes, of each of which it has a share.
numaward exec --name wide --memory 520Mi -- numaward-load --size 64M --hold 100000 >/dev/null &
wait_for [ -d $cgroups/numaward/wide ]

# An intruder on the good one's CPU.
cpus=$(cat $cgroups/numaward/good/cpuset.cpus)
mkdir $cgroups/intruder
numaward-load --cgroup $cgroups/intruder --size 16M --walk --cpus "$cpus" --hold 100000 >/dev/null 2>&1 &

# Memory that one node allocates and another uses.
mkdir $cgroups/remote
again sh -c "echo 0 >$cgroups/remote/cpuset.cpus
    numaward-load --cgroup $cgroups/remote --size 32M --walk --cpus 0 --hold 5 |
        { read -r _; echo 3 >$cgroups/remote/cpuset.cpus; cat; }" &

mkdir $cgroups/pages
numaward-load --cgroup $cgroups/pages --kind hugetlb --size 8M --cpus 0 --policy bind:0 --hold 100000 >/dev/null 2>&1 &

# Requests that are refused.
again sh -c 'numaward exec --cpus 99 --memory 1Gi -- true; sleep 2' &

# Held back at memory.high, and killed because memory ran out on the nodes that it is bound to.
mkdir $cgroups/held $cgroups/killed
echo 24M >$cgroups/held/memory.high
again numaward-load --cgroup $cgroups/held --size 48M --hold 5 &
again sh -c "numaward-load --cgroup $cgroups/killed --size 700M --policy bind:3 --hold 1; sleep 5" &

while :; do
    check
    sleep 1
done
