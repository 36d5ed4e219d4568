# A pod is refused repeatedly, and the runtime is killed.
set -eu
echo "+cpuset +cpu +memory +hugetlb +pids" >$cgroups/cgroup.subtree_control || fail "no controllers"

echo '[{"metadata": {"namespace": "default", "name": "big", "uid": "big", "annotations": {}},
    "spec": {"nodeName": "host-1", "containers": [{"name": "main", "resources":
        {"requests": {"cpu": "9", "memory": "64Mi"}, "limits": {"cpu": "9", "memory": "64Mi"}}}]}}]' >/run/pods.json
numaward-cri api-server /run/pods.json --kubeconfig /run/kubeconfig >/run/events 2>/run/api-server.log &
wait_for 60 [ -s /run/kubeconfig ]
cat >>/etc/numaward/config.yaml <<'END'
  nodeName: host-1
  kubeconfig: /run/kubeconfig
END
export SSL_CERT_FILE=/authority.pem
start_plugin
synced() { ask /metrics | grep -q '^numaward_kubernetes_pods_synced 1'; }
wait_for 60 synced

one_shim() { [ "$(shims | wc -l)" = 1 ]; }
# refused: prints the message when the pod's container is created.
refused() {
    must_fail numaward-cri create $big big --class guaranteed --driver $DRIVER --millicpus 9000 --mebibytes 64 -- sleep 1000000 2>&1
}

run web burstable --millicpus 100 --unlimited -- sleep 1000000
web=$(first_process $cgroup)
section "refused"
# Like the kubelet: the sandbox stays for further attempts to create the container, and each new sandbox has the same name.
for sandbox in 1 2 3; do
    big=$(numaward-cri pod big --class guaranteed --driver $DRIVER) || fail "sandbox $sandbox"
    refused
    refused
    if [ $sandbox != 3 ]; then numaward-cri remove-pod $big; fi
done
section "runtime was killed"
kill_runtime
start_runtime
wait_for 120 connected
refused
numaward-cri remove-pod $big
wait_for 60 one_shim
section "the other pod"
kill -0 $web && echo lives
run next burstable --millicpus 100 --unlimited -- sleep 1000000
section "event"
wait_for 60 grep -q NumaPlacementRefused /run/events
grep NumaPlacementRefused /run/events | head -n1
section "end"
