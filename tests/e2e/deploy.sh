# The image, run by containerd as the manifests demand. $IMPORT is set before.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
echo "+cpuset +cpu +memory +hugetlb +pids" >$cgroups/cgroup.subtree_control || fail "no controllers"
mkdir -p /run /tmp /var/lib/kubelet /var/log/pods /config
echo '127.0.0.1 localhost' >/etc/hosts
touch /etc/resolv.conf
[ -d /sys/kernel/tracing/events ] || mount -t tracefs tracefs /sys/kernel/tracing
# As systemd leaves it.
mount --make-rshared / || fail "shared"

ask() { wget -q -O - "http://127.0.0.1:9560$1"; }
metrics() { ask /metrics; }
connected() { metrics | grep -q '^numaward_nri_connected 1'; }

# The image of the sandbox, and of the pods that are placed.
mkdir -p /image/root/bin
cp /bin/busybox /image/root/bin/sleep
cd /image
tar -cf layer.tar -C root .
layer=$(sha256sum layer.tar | cut -d' ' -f1)
cat >config.json <<END
{"architecture": "amd64", "os": "linux", "config": {"Entrypoint": ["/bin/sleep", "1000000"], "Env": ["PATH=/bin"]},
 "rootfs": {"type": "layers", "diff_ids": ["sha256:$layer"]}}
END
echo '[{"Config": "config.json", "RepoTags": ["localhost/test:1", "localhost/pause:1"], "Layers": ["layer.tar"]}]' >manifest.json
tar -cf image.tar manifest.json config.json layer.tar
cd /

containerd --config /etc/containerd/config.toml >/tmp/containerd.log 2>&1 &
wait_for 300 ctr version
ctr -n k8s.io images import $IMPORT /image/image.tar >/tmp/import.log 2>&1 || { cat /tmp/import.log; fail "import"; }
section "images"
ctr -n k8s.io images import $IMPORT /numaward.tar 2>&1 || fail "import of numaward's image"
ctr -n k8s.io images list -q | grep numaward

# run OVERLAY: a pod of its DaemonSet, ready; $daemon is its process.
run() {
    # As in every script: see guest.sh.
    { cat /$1.yaml; echo 'probes: {intruders: {enabled: false}}'; } >/config/config.yaml
    made=$(numaward-cri run-daemon-set /$1.json --node host-1 --config /config) || fail "$1"
    daemon=$(head -n1 $cgroups/kubepods/burstable/podnumaward/${made#* }/cgroup.procs)
    wait_for 120 ask /readyz
}

run observe
section "observe status"
ask /api/v1/status
section "observe capabilities"
grep -E '^(CapEff|CapBnd|Seccomp|NoNewPrivs):' /proc/$daemon/status
section "observe log"
grep -E '"level":"(WARN|ERROR)"' /var/log/pods/numaward/numaward.log
numaward-cri remove ${made#* } && numaward-cri remove-pod ${made% *} || fail "remove"

run enforce
wait_for 120 connected
section "enforce status"
ask /api/v1/status
section "enforce capabilities"
grep -E '^(CapEff|CapBnd|Seccomp|NoNewPrivs):' /proc/$daemon/status
pod=$(numaward-cri pod db) || fail "pod"
main=$(numaward-cri create $pod db --millicpus 2000 --mebibytes 64 -- sleep 1000000) || fail "create"
numaward-cri start $main || fail "start"
db=$cgroups/kubepods/poddb/$main
section "placed"
cat $db/cpuset.cpus $db/cpuset.mems
section "drift"
echo 0 >$db/cpuset.cpus
_pinned() { [ "$(cat $db/cpuset.cpus)" = 3-4 ]; }
wait_for 60 _pinned
ask /api/v1/allocations
section "enforce sockets"
ls /run/numaward
section "enforce log"
grep -E '"level":"(WARN|ERROR)"' /var/log/pods/numaward/numaward.log
section "end"
