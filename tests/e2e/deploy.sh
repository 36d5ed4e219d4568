# containerd runs the image with the security context of the manifests.
set -eu
echo "+cpuset +cpu +memory +hugetlb +pids" >$cgroups/cgroup.subtree_control || fail "no controllers"
mkdir -p /var/lib/kubelet/pod-resources /config
# State files of a kubelet that pins no containers.
echo '{"policyName":"none","defaultCpuSet":"","checksum":1353318690}' >/var/lib/kubelet/cpu_manager_state
echo '{"policyName":"None","machineState":{},"checksum":4236770233}' >/var/lib/kubelet/memory_manager_state
[ -d /sys/kernel/tracing/events ] || mount -t tracefs tracefs /sys/kernel/tracing
# systemd makes all mounts shared.
mount --make-rshared / || fail "shared"

section "images"
ctr -n k8s.io images import $IMPORT /numaward.tar 2>&1 || fail "import of numaward's image"
ctr -n k8s.io images list -q | grep numaward

# run_daemon OVERLAY: starts the pod of the DaemonSet and waits until it is ready; $daemon is its process id.
run_daemon() {
    cp /$1.yaml /config/config.yaml
    made=$(numaward-cri run-daemon-set /$1.json --node host-1 --config /config) || fail "$1"
    daemon=$(head -n1 $cgroups/kubepods/burstable/podnumaward/${made#* }/cgroup.procs)
    wait_for 120 ask /readyz
}
# Prints the logged warnings.
report() {
    grep -E '"level":"(WARN|ERROR)"' /var/log/pods/numaward/numaward.log || true
}

run_daemon observe
section "observe status"
ask /api/v1/status
section "observe capabilities"
grep -E '^(CapEff|CapBnd|Seccomp|NoNewPrivs):' /proc/$daemon/status
section "observe log"
report
numaward-cri remove ${made#* } && numaward-cri remove-pod ${made% *} || fail "remove"

run_daemon try
wait_for 120 connected
section "try status"
ask /api/v1/status
section "try capabilities"
grep -E '^(CapEff|CapBnd|Seccomp|NoNewPrivs):' /proc/$daemon/status
run tried guaranteed --millicpus 2000 --mebibytes 64 -- sleep 1000000
section "tried"
echo "cpus $(cat $cgroup/cpuset.cpus) mems $(cat $cgroup/cpuset.mems) min $(cat $cgroup/memory.min)"
section "decided"
decided() { ask "/api/v1/events?kind=decided"; }
_decided() { decided | grep -q "Dry run"; }
wait_for 60 _decided
decided
section "try log"
report
section "try leaves"
must_fail ls -d /run/numaward 2>/dev/null
must_fail ls -d /var/lib/numaward 2>/dev/null
numaward-cri remove $container && numaward-cri remove-pod $pod || fail "remove tried"
numaward-cri remove ${made#* } && numaward-cri remove-pod ${made% *} || fail "remove"

count_calls
run_daemon enforce
wait_for 120 connected
section "enforce status"
ask /api/v1/status
section "enforce capabilities"
grep -E '^(CapEff|CapBnd|Seccomp|NoNewPrivs):' /proc/$daemon/status
run db guaranteed --millicpus 2000 --mebibytes 64 -- sleep 1000000
section "placed"
cat $cgroup/cpuset.cpus $cgroup/cpuset.mems
section "drift"
placed=$(cat $cgroup/cpuset.cpus)
echo 0 >$cgroup/cpuset.cpus
_pinned() { [ "$(cat $cgroup/cpuset.cpus)" = "$placed" ]; }
wait_for 60 _pinned
allocations
_id=0
for command in status topology "explain --cpus 1 --memory 1Mi" doctor; do
    ctr -n k8s.io tasks exec --exec-id "e$((_id += 1))" ${made#* } /usr/bin/numaward $command >/run/answer 2>&1 || echo "failed: $command: $(cat /run/answer)"
done >/run/commands
section "enforce commands"
cat /run/commands
section "enforce refused calls"
# Includes the shim of containerd and its descendants: runc, the daemon and the commands.
calls refused $(sed -n 's/^PPid:\t//p' /proc/$daemon/status)
section "enforce made calls"
calls made $daemon
section "enforce sockets"
(cd /run/numaward && find . -mindepth 1 | sed "s#^./##" | sort)
section "enforce log"
report
section "end"
