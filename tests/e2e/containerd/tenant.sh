# Attempts of a tenant that may create pods, but no privileged ones. All pods use the host's network.
set -eu
echo "+cpuset +cpu +memory +hugetlb +pids" >$cgroups/cgroup.subtree_control || fail "no controllers"

# describe NAMESPACE NAME ANNOTATIONS: prints a pod in the API server's format, with one container of one CPU. The UID is the
# name.
describe() {
    echo '{"metadata": {"namespace": "'$1'", "name": "'$2'", "uid": "'$2'", "annotations": {'$3'}'${4:-}'},
        "spec": {"nodeName": "host-1", "containers": [{"name": "main", "resources":
            {"requests": {"cpu": "1", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "64Mi"}}}]}}'
}
owner=', "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "host-1", "uid": "n", "controller": true}]'
{
    echo '['
    describe default victim ''
    echo ,
    # All attributes of the mirror of a static pod, with the UID of the victim.
    describe tenant forged '"kubernetes.io/config.hash": "victim", "kubernetes.io/config.mirror": "victim"' "$owner"
    echo ']'
} >/run/pods.json
numaward-cri api-server /run/pods.json --kubeconfig /run/kubeconfig >/run/events 2>/run/api-server.log &
wait_for 60 [ -s /run/kubeconfig ]
cat >>/etc/numaward/config.yaml <<'END'
  nodeName: host-1
  kubeconfig: /run/kubeconfig
strategy: kubelet
reservedSystemCPUs: "0"
END
# The API server's client requires a certificate authority, also for an unencrypted connection.
export SSL_CERT_FILE=/authority.pem
start_plugin
synced() { ask /metrics | grep -q '^numaward_kubernetes_pods_synced 1'; }
wait_for 60 synced

run victim guaranteed --millicpus 1000 --mebibytes 64 -- sleep 1000000
victim=$cgroup
section "victim"
where $victim
section "victim before"
allocations

# tenant NAME ANNOTATION COMMAND...: runs a pod in the tenant's namespace.
tenant() {
    _pod=$1 annotation=$2
    shift 2
    run $_pod guaranteed --millicpus 1000 --mebibytes 64 -- "$@" || fail "pod $_pod"
    annotation=
}
namespace=kube-system
tenant allowed numaward.io/placement=off sleep 1000000
section "off, where it is allowed"
where $cgroup
numaward-cri remove-pod $pod
namespace=tenant

# Attempts of a root process in such a container.
cat >/run/try.sh <<'END'
# try COMMAND...: prints the output and the exit code.
try() {
    busybox "$@" 2>&1
    echo "code $?"
}
echo "== who"
try id -u
echo "== files"
for file in /run/numaward /var/lib/numaward /etc/numaward /run/containerd; do try ls $file; done
echo "== signals"
try kill -0 DAEMON
echo "== knobs"
try sh -c 'echo 0-5 >/sys/fs/cgroup/cpuset.cpus'
try mount -o remount,rw /sys/fs/cgroup
try mount -t cgroup2 none /bin
try unshare -U -r -m mount -o remount,rw /sys/fs/cgroup
try mkdir /sys/fs/cgroup/more
echo "== CPUs"
try taskset -p 3f $$
try grep Cpus_allowed_list /proc/$$/status
echo "== figures"
try wget -q -O /dev/null http://127.0.0.1:9560/metrics
echo "== changes"
try wget -O - --post-data '{}' --header 'Content-Type: application/json' http://127.0.0.1:9560/api/v1/allocations
try sh -c "{ printf 'DELETE /api/v1/allocations/default/victim/main HTTP/1.0\r\n\r\n'; sleep 10; } | busybox nc 127.0.0.1 9560 | busybox head -n 1"
echo "== end"
sleep 1000000
END
tenant off numaward.io/placement=off sh -c "$(sed "s/DAEMON/$daemon/" /run/try.sh)"
off=$cgroup
section "off"
where $off
said() { sed 's/^[^ ]* std[a-z]* [FP] //' /var/log/pods/off/main.log; }
_tried() { said | grep -q '^== end'; }
wait_for 240 _tried
section "tried"
said
section "off: knobs"
cat $off/cpuset.cpus
_warned() { grep -q NumaPlacementOffIgnored /run/events; }
wait_for 60 _warned
section "off: event"
grep NumaPlacementOffIgnored /run/events
section "off: log"
grep 'placement: off counts as shared' /tmp/daemon.log

tenant forged kubernetes.io/config.hash=victim sleep 1000000
section "forged"
where $cgroup
section "forged: allocations"
allocations
section "forged: assigned"
numaward-cri --socket /run/numaward/pod-resources/kubelet.sock assigned
numaward-cri remove-pod $pod
section "forged: removed"
allocations

long=$(head -c 5000 /dev/zero | tr '\0' x)
tenant long "numaward.io/preferred-nodes=$long" sleep 1000000
section "long"
where $cgroup
section "long: allocations"
allocations
numaward-cri remove-pod $pod
n=0
for broken in 'main.numaward.io/preferred-nodes=0-99999999999' 'numaward.io/guarantee={"a": ["' \
    "numaward.io/placement$(printf '=\033[2J\nnumaward')" numaward.io/no-such-thing=1; do
    n=$((n + 1))
    tenant broken$n "$broken" sleep 1000000
    section "broken $n"
    where $cgroup
    section "broken $n: allocations"
    allocations
    numaward-cri remove-pod $pod
done

section "unpinned"
samples numaward_containers_started_unpinned_total
section "victim at the end"
where $victim
section "allocations at the end"
allocations
section "log"
grep -E 'WARN|ERROR' /tmp/daemon.log | cut -c1-400
section "end"
