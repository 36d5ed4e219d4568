# Memory policies and affinities that processes have set themselves, and a unit that is stopped for a while.
set -eu
echo '+cpuset +cpu +memory' >$cgroups/cgroup.subtree_control
mkdir -p /etc/numaward
cat >/etc/numaward/config.yaml <<EOF
strategy: native
guard: act
EOF
_knobs() { (cd $cgroups && find . -name 'cpuset.cpus' -o -name 'cpuset.mems' -o -name 'memory.m[ai][xn]' | sort); }
_knobs >/tmp/knobs
start_daemon
_numactl() { /numactl/ld-linux-x86-64.so.2 --library-path /numactl /numactl/numactl "$@"; }
_policies() { cut -d ' ' -f 2 /proc/$1/numa_maps | sort -u; }
_allowed() { sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "/proc/$1/status"; }
_free_mib() { awk '/MemFree/ { print int($4 / 1024) }' /sys/devices/system/node/node$1/meminfo; }
# _spread SIZE: starts a load with `numactl --interleave=all` in the cgroup spread; its process id is in $spread.
_spread() {
    mkdir -p $cgroups/spread
    rm -f /tmp/spread
    _numactl --interleave=all numaward-load --report json --cgroup $cgroups/spread --size "$1" >/tmp/spread &
    wait_for 60 test -s /tmp/spread
    spread=$(cat $cgroups/spread/cgroup.procs)
}
_end_spread() {
    kill $spread
    wait_for 20 rmdir $cgroups/spread
}

# A guarantee for a process with a memory policy.
_spread 16M
section "policy"
_policies $spread
section "policy and guarantee"
numaward guarantee /spread --memory 64Mi --node 1 2>&1 >/dev/null
section "policy with guarantee"
_policies $spread
numaward release /spread
wait_for 20 no_guarantees
section "policy after guarantee"
_policies $spread
_end_spread

# A command from a shell on one CPU of node 1 gets all CPUs of that node.
section "narrow shell"
taskset 8 sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status
section "command of narrow shell"
taskset 8 numaward exec --cpus 3 --memory 16Mi --node 1 --name narrow -- \
    sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status 2>>$remarks
wait_for 20 no_guarantees

# A unit that is bound to one of its CPUs.
cat >/run/systemd/system/web.service <<EOF
[Service]
ExecStart=/bin/sleep infinity
CPUAffinity=3
EOF
systemctl daemon-reload
systemctl start web
section "bound unit"
numaward guarantee web.service --cpus 3 --memory 16Mi --node 1 2>&1 >/dev/null
_allowed "$(systemctl show --value -p MainPID web)"
section "bound unit in status"
numaward status
section "bound unit in doctor"
with_code numaward doctor

# The unit is stopped for longer than a restart takes, and keeps its guarantee.
systemctl stop web
wait_for 90 has_event "web.service does not run"
section "stopped unit"
numaward get
section "stopped unit in status"
numaward status
section "stopped unit events"
events unit_stopped
systemctl start web
wait_for 30 has_event "web.service runs again and has its guarantee"
_is_held() { numaward get | grep -q '^web.service .* held'; }
wait_for 30 _is_held
section "started unit"
numaward get
cat $cgroups/system.slice/web.service/cpuset.cpus
numaward release web.service
wait_for 20 no_guarantees

# The guarantee of a stopped unit is released.
quiet_guarantee web.service --cpus 3 --memory 16Mi --node 1
systemctl stop web
numaward release web.service
wait_for 20 no_guarantees
section "released while stopped"
ls /run/systemd/system.control/web.service.d 2>/dev/null || echo "no drop-ins"
systemctl start web
systemctl show --property AllowedCPUs,AllowedMemoryNodes,MemoryMin,MemoryMax web | sort
systemctl stop web

# One node is low on memory. The process with a memory policy has most memory there, and the other node has room for it.
node=1
[ "$(_free_mib 0)" -gt "$(_free_mib 1)" ] || node=0
other=$((1 - node))
numaward exec --memory 300Mi --node $node --name db -- sleep 100000 2>>$remarks &
wait_for 20 test -e $cgroups/numaward/db/cpuset.mems
free=$(_free_mib $node)
part=$(((free - 200) / 2 + 20))
_spread $((2 * part))M
mkdir $cgroups/hog
cat /sys/devices/system/node/node$node/cpulist >$cgroups/hog/cpuset.cpus
load hog --size $(($(_free_mib $node) - 200))M
_hog_is_steered() { [ "$(cat $cgroups/hog/cpuset.mems)" = $other ]; }
wait_for 60 _hog_is_steered
section "low"
echo "spread '$(cat $cgroups/spread/cpuset.mems)' $(_policies $spread)"
section "low node"
echo $node
section "low events"
numaward events --kind steered
section "end"

# Nothing is left of the daemon.
_end_spread
unload hog $load_pid
kill $(cat $cgroups/numaward/db/cgroup.procs)
wait_for 20 no_guarantees
stop_daemon
restore
section "new knobs"
_knobs | grep -vxF -f /tmp/knobs || true
