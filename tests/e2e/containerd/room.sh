# A running pod is moved between nodes so that a refused pod starts.
set -eu
echo "+cpuset +cpu +memory +hugetlb +pids" >$cgroups/cgroup.subtree_control || fail "no controllers"

# pod NAME CPUS MEMORY: prints a pod of the API server.
pod() {
    echo '{"metadata": {"namespace": "default", "name": "'$1'", "uid": "'$1'", "annotations": {}},
        "spec": {"nodeName": "host-1", "containers": [{"name": "main", "resources":
            {"requests": {"cpu": "'$2'", "memory": "'$3'"}, "limits": {"cpu": "'$2'", "memory": "'$3'"}}}]}}'
}
echo "[$(pod moved 1 320Mi), $(pod other 2 64Mi), $(pod big 2 64Mi)]" >/run/pods.json
numaward-cri api-server /run/pods.json --kubeconfig /run/kubeconfig >/run/events 2>/run/api-server.log &
wait_for 60 [ -s /run/kubeconfig ]
cat >>/etc/numaward/config.yaml <<'END'
  refused: make-room
  nodeName: host-1
  kubeconfig: /run/kubeconfig
END
echo 'strategy: native' >>/etc/numaward/config.yaml
export SSL_CERT_FILE=/authority.pem
start_plugin
synced() { ask /metrics | grep -q '^numaward_kubernetes_pods_synced 1'; }
wait_for 60 synced

# One CPU of each node is left.
annotation=numaward.io/preferred-nodes=0
run moved guaranteed --millicpus 1000 --mebibytes 320 -- numaward-load --size 256M --walk --report json
moved=$cgroup
annotation=
run other guaranteed --millicpus 2000 --mebibytes 64 -- sleep 1000000
other=$cgroup
wait_for 120 grep -q '{' /var/log/pods/moved/main.log
section "moved before"
where $moved
section "other before"
where $other
section "memory before"
cat $moved/memory.numa_stat

# Like the kubelet: the sandbox stays, and the container is created again until that succeeds.
big=$(numaward-cri pod big --class guaranteed --driver $DRIVER) || fail "the sandbox of big"
create() {
    container=$(numaward-cri create $big big --class guaranteed --driver $DRIVER --millicpus 2000 --mebibytes 64 \
        -- sleep 1000000 2>>/tmp/create.err)
}
wait_for 240 create
numaward-cri start "$container" || fail "start big"
section "refused"
grep -c 'the pod is refused' /tmp/daemon.log
section "big"
where $cgroups/kubepods/podbig/$(container_group)
section "moved"
where $moved
section "memory"
cat $moved/memory.numa_stat
section "other"
where $other
section "writes"
kill -0 $(first_process $moved) && echo goes on
section "misses"
samples numaward_numa_miss_bytes_total
section "rebalances"
ask /metrics | grep -E '^numaward_rebalances_total'
section "events"
events rebalance
section "allocations"
allocations
section "unpinned"
samples numaward_containers_started_unpinned_total
section "log"
grep -E 'WARN|ERROR' /tmp/daemon.log || true
section "end"
