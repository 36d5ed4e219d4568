# Precedes the scripts that run a container runtime: prepares an image, starts the runtime and the daemon, and defines functions.
# $DRIVER is the cgroup driver, $OCI the OCI runtime. Before it comes containerd.sh or crio.sh with the functions of this runtime:
# - serve: executes the server; its messages are in /tmp/runtime.log
# - import: makes the image known to it
# - shims: prints the command lines of processes that hold a pod's containers
# - container_group: prints the name of the cgroup of a container
# - validate: configures that required plugins must be connected; require_numaward ANNOTATION: that numaward is required in all pods
#   without this annotation
set -eu

export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mkdir -p /run /tmp /var/lib /var/log/pods /etc/numaward
# As udev does. crun reads the resources of an update from it.
[ -e /dev/stdin ] || ln -s /proc/self/fd/0 /dev/stdin
# Copied into each pod.
echo '127.0.0.1 localhost' >/etc/hosts
touch /etc/resolv.conf

# An image of busybox and numaward-load, which also serves as the sandbox image.
mkdir -p /image/root/bin
cp /bin/busybox /bin/numaward-load /image/root/bin/
for name in cat grep sh sleep; do ln -s busybox /image/root/bin/$name; done
cd /image
tar -cf layer.tar -C root .
layer=$(sha256sum layer.tar | cut -d' ' -f1)
case $(uname -m) in
aarch64) arch=arm64 ;;
*) arch=amd64 ;;
esac
cat >config.json <<END
{"architecture": "$arch", "os": "linux", "config": {"Entrypoint": ["/bin/sleep", "1000000"], "Env": ["PATH=/bin"]},
 "rootfs": {"type": "layers", "diff_ids": ["sha256:$layer"]}}
END
echo '[{"Config": "config.json", "RepoTags": ["localhost/test:1", "localhost/pause:1"], "Layers": ["layer.tar"]}]' >manifest.json
tar -cf image.tar manifest.json config.json layer.tar
cd /

start_runtime() {
    serve >>/tmp/runtime.log 2>&1 &
    runtime=$!
    wait_for 300 numaward-cri version
}
# kill_runtime: kills the server. Containers go on.
kill_runtime() {
    kill -9 $runtime
    wait $runtime || true
}
# start_plugin: starts the daemon and waits until it is connected to the runtime.
start_plugin() {
    start_daemon
    wait_for 120 connected
}
connected() { ask /metrics | grep -q '^numaward_nri_connected 1'; }

# run POD CLASS RESOURCES... -- COMMAND...: starts a pod with one container; their ids are in $pod and $container. $annotation and
# $namespace are optional.
run() {
    _name=$1 _class=$2
    shift 2
    _namespace=${namespace:+--namespace $namespace}
    pod=$(numaward-cri pod "$_name" $_namespace --class "$_class" --driver $DRIVER ${annotation:+--annotation "$annotation"}) ||
        fail "pod $_name"
    container=$(numaward-cri create "$pod" "$_name" $_namespace --class "$_class" --driver $DRIVER "$@") || return 1
    numaward-cri start "$container" || fail "start $_name"
    case $_class in guaranteed) _class= ;; esac
    case $DRIVER in
        systemd)
            _slice=kubepods${_class:+-$_class}
            cgroup=$cgroups/kubepods.slice${_class:+/$_slice.slice}/$_slice-pod$_name.slice/$(container_group).scope
            ;;
        *) cgroup=$cgroups/kubepods${_class:+/$_class}/pod$_name/$(container_group) ;;
    esac
}
# protection CGROUP: prints memory.min and memory.low of the cgroup and of its ancestors, from the inside out.
protection() {
    _cgroup=$1
    while [ "$_cgroup" != "$cgroups" ]; do
        if [ -e "$_cgroup" ]; then
            echo "${_cgroup##*/} $(cat "$_cgroup/memory.min") $(cat "$_cgroup/memory.low")"
        fi
        _cgroup=${_cgroup%/*}
    done
}
# first_process CGROUP: prints the id of the first process in the cgroup. With the systemd driver, crun puts a container's processes
# into a cgroup below that of the container.
first_process() { cat "$1/cgroup.procs" "$1"/*/cgroup.procs 2>/dev/null | head -n1; }
# where CGROUP: prints CPUs and nodes of the cgroup and of its first process.
where() {
    echo "cpus $(cat "$1/cpuset.cpus")"
    echo "mems $(cat "$1/cpuset.mems")"
    grep -E '^(Cpus|Mems)_allowed_list' /proc/$(first_process "$1")/status
}

# wait_until_at NODE CGROUP: waits until the daemon has written the CPUs and then the memory nodes of the cgroup.
wait_until_at() {
    wait_for 60 grep -q . "$2/cpuset.cpus"
    wait_for 60 grep -qx "$1" "$2/cpuset.mems"
}

start_runtime
section "versions"
numaward-cri version
$OCI --version
import >/tmp/import.log 2>&1 || { cat /tmp/import.log /tmp/runtime.log; fail "import"; }
cat >/etc/numaward/config.yaml <<END
kubernetes:
  nri:
    enabled: true
  podResources:
    socket: /run/numaward/pod-resources/kubelet.sock
END
