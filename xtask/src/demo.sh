# The demo, inside its machine: a daemon and workloads that allocate again and again.

# This script and what it starts is the host's part: it keeps to CPU 0, which is never exclusive.
taskset -p 1 $$ >/dev/null
# Changes come from outside, so with a token.
(umask 077 && echo "$token" >/tmp/token)
export NUMAWARD_CONTROL_TOKEN_FILE=/tmp/token NUMAWARD_CONTROL_ALLOW_UNENCRYPTED=true
NUMAWARD_CONTROL_LISTEN="0.0.0.0:$control" NUMAWARD_RESERVED_SYSTEM_CPUS=0 \
    numaward run --listen "0.0.0.0:$port" >/tmp/daemon.log 2>&1 &
daemon=$!
cgroups=/sys/fs/cgroup

# workload NAME ARGUMENTS...
workload() {
    cgroup=$cgroups/$1
    shift
    mkdir -p "$cgroup"
    while :; do
        numaward-load --cgroup "$cgroup" "$@" >/dev/null || break
    done &
}
workload cache --size 192M --hold 15 --cpus 3
workload analytics --size 256M --hold 20 --cpus 6 --policy interleave:0-3
workload inference --size 384M --hold 15 --cpus 4 --kind thp
# What one node has loaded is used by another. The kernel samples that, sooner than it usually does, and moves the pages.
sampling=/sys/kernel/debug/sched/numa_balancing
echo 1 >/proc/sys/kernel/numa_balancing
echo 50 >$sampling/scan_delay_ms
echo 100 >$sampling/scan_period_min_ms
# A fifth of a CPU: all CPUs of an emulated machine are one of the host.
reports=$cgroups/reports
mkdir $reports
echo "20000 100000" >$reports/cpu.max
while :; do
    echo 3 >$reports/cpuset.cpus
    # What it prints first comes when all is loaded.
    numaward-load --cgroup $reports --size 16M --cpus 3 --walk --hold 15 | {
        read -r _
        echo 7 >$reports/cpuset.cpus
        cat >/dev/null
    }
done &

until wget -q -O /dev/null "http://127.0.0.1:$port/readyz" 2>/dev/null; do
    kill -0 $daemon || { cat /tmp/daemon.log; exit 1; }
    sleep 0.2
done
# One with a guarantee, in a cgroup that the daemon makes for it.
numaward exec --name guarded --cpus 1 --memory 320Mi --node 0 -- \
    sh -c 'while numaward-load --size 256M --hold 15; do :; done' >/dev/null &
until grep -q . $cgroups/numaward/guarded/cpuset.cpus 2>/dev/null; do
    kill -0 $daemon || { cat /tmp/daemon.log; exit 1; }
    sleep 0.2
done
# The one that is wrong: it runs on the exclusive CPU of another workload, and its memory is two hops away.
mkdir $cgroups/database
cat $cgroups/numaward/guarded/cpuset.cpus >$cgroups/database/cpuset.cpus
echo 3 >$cgroups/database/cpuset.mems
workload database --size 320M --hold 15

while [ "$seconds" -gt 0 ]; do
    kill -0 $daemon || { cat /tmp/daemon.log; exit 1; }
    seconds=$((seconds - 1))
    sleep 1
done
kill $daemon
wait $daemon
