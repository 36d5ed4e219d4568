# Mounts the cgroup v1 hierarchies as systemd does with `systemd.unified_cgroup_hierarchy=0`, without systemd.
set -eu
for controller in $(cat $cgroups/cgroup.subtree_control); do
    echo "-$controller" >$cgroups/cgroup.subtree_control
done
cd /
umount $cgroups || fail "the hierarchy is in use"
mount -t tmpfs cgroup $cgroups
for controller in memory cpuset; do
    mkdir $cgroups/$controller
    mount -t cgroup -o $controller cgroup $cgroups/$controller || fail "v1 does not take $controller"
done

# start NAME: prints the output of doctor, and starts a daemon.
start() {
    section "$1 doctor"
    # It fails if a check fails.
    numaward doctor -o json || true
    numaward run >/tmp/daemon.log 2>&1 &
    daemon=$!
    wait_for 60 ask /readyz
}
stop() {
    section "$1 status"
    numaward status -o json
    section "$1 workloads"
    ask /api/v1/workloads
    section "$1 guarantee"
    with_code numaward exec --cpus 1 --memory 1Mi -- true 2>&1
    section "$1 end"
    stop_daemon
    echo $?
    section "$1 log"
    cat /tmp/daemon.log
    new_log
}

start "legacy"
stop "legacy"

# The hybrid layout of systemd: a v2 hierarchy without controllers that contains the processes too.
cgroups=$cgroups/unified
mkdir $cgroups
mount -t cgroup2 cgroup2 $cgroups
mkdir $cgroups/system.slice
start "hybrid"
load system.slice/database.service --cpus 2 --size 64M --policy preferred:1
sleep 2
section "hybrid counted"
ask /metrics | grep '^numaward_memory_allocated_bytes_total.*database'
stop "hybrid"
