# The demo, inside its machine: a daemon and workloads that allocate again and again.

# CPU 0 is kept for everybody.
NUMAWARD_RESERVED_SYSTEM_CPUS=0 numaward run --listen "0.0.0.0:$port" >/tmp/daemon.log 2>&1 &
daemon=$!

# workload NAME ARGUMENTS...
workload() {
    cgroup=/sys/fs/cgroup/$1
    shift
    mkdir "$cgroup"
    while :; do
        numaward-load --cgroup "$cgroup" "$@" >/dev/null || break
    done &
}
workload database --size 64M --hold 3 --cpus 0 --policy bind:3
workload cache --size 64M --hold 3 --cpus 2
workload analytics --size 64M --hold 3 --cpus 4 --policy interleave:0-3
workload inference --size 64M --hold 3 --cpus 3 --kind thp
# What one node has loaded is used by another. The kernel samples that, sooner than it usually does, and moves the pages.
sampling=/sys/kernel/debug/sched/numa_balancing
echo 1 >/proc/sys/kernel/numa_balancing
echo 50 >$sampling/scan_delay_ms
echo 100 >$sampling/scan_period_min_ms
# A fifth of a CPU: all CPUs of an emulated machine are one of the host.
reports=/sys/fs/cgroup/reports
mkdir $reports
echo "20000 100000" >$reports/cpu.max
while :; do
    echo 2 >$reports/cpuset.cpus
    # What it prints first comes when all is loaded.
    numaward-load --cgroup $reports --size 16M --cpus 2 --walk --hold 15 | {
        read -r _
        echo 4 >$reports/cpuset.cpus
        cat >/dev/null
    }
done &

until wget -q -O /dev/null "http://127.0.0.1:$port/readyz" 2>/dev/null; do
    kill -0 $daemon || { cat /tmp/daemon.log; exit 1; }
    sleep 0.2
done
# One with a guarantee, in a cgroup that the daemon makes for it.
numaward exec --name guarded --cpus 1 --memory 160Mi --policy single-numa-node -- \
    sh -c 'while numaward-load --size 64M --hold 3; do :; done' >/dev/null &

while [ "$seconds" -gt 0 ]; do
    kill -0 $daemon || { cat /tmp/daemon.log; exit 1; }
    seconds=$((seconds - 1))
    sleep 1
done
kill $daemon
wait $daemon
