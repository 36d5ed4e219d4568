export PATH=/usr/sbin:/usr/bin:/sbin:/bin
echo "+cpuset +cpu +memory +hugetlb +pids" >$cgroups/cgroup.subtree_control || fail "no controllers"
mkdir -p /run /tmp /var/lib /var/log/pods /etc/numaward
# Copied into each pod.
echo '127.0.0.1 localhost' >/etc/hosts
touch /etc/resolv.conf

# An image of busybox and the load maker, which serves for the sandbox too.
mkdir -p /image/root/bin
cp /bin/busybox /bin/numaward-load /image/root/bin/
for name in cat grep sh sleep; do ln -s busybox /image/root/bin/$name; done
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

start_containerd() {
    containerd --config /etc/containerd/config.toml >>/tmp/containerd.log 2>&1 &
    containerd=$!
    wait_for 300 ctr version
}
start_daemon() {
    numaward run --config /etc/numaward/config.yaml 2>>/tmp/daemon.log &
    daemon=$!
    wait_for 120 connected
}
metrics() { wget -qO- http://127.0.0.1:9560/metrics; }
connected() { metrics | grep -q '^numaward_nri_connected 1'; }
allocations() { wget -qO- http://127.0.0.1:9560/api/v1/allocations; echo; }

# run POD CLASS RESOURCES... -- COMMAND...: a pod with a container that runs; ids in $pod and $container.
run() {
    _name=$1 _class=$2
    shift 2
    pod=$(numaward-cri pod "$_name" --class "$_class") || fail "pod $_name"
    container=$(numaward-cri create "$pod" "$_name" --class "$_class" "$@") || return 1
    numaward-cri start "$container" || fail "start $_name"
    case $_class in
        guaranteed) cgroup=$cgroups/kubepods/pod$_name/$container ;;
        *) cgroup=$cgroups/kubepods/$_class/pod$_name/$container ;;
    esac
}
# where CGROUP: its CPUs and nodes, and those of its first process.
where() {
    echo "cpus $(cat "$1/cpuset.cpus")"
    echo "mems $(cat "$1/cpuset.mems")"
    grep -E '^(Cpus|Mems)_allowed_list' /proc/$(head -n1 "$1/cgroup.procs")/status
}

start_containerd
ctr -n k8s.io images import $IMPORT /image/image.tar >/tmp/import.log 2>&1 || { cat /tmp/import.log; fail "import"; }
cat >/etc/numaward/config.yaml <<END
kubernetes:
  nri:
    enabled: true
END

# What runs when numaward comes is adopted.
run web burstable --millicpus 100 --unlimited -- sleep 1000000
web=$cgroup
run early guaranteed --millicpus 1000 --mebibytes 64 -- sleep 1000000
early=$cgroup
section "before"
where $early
start_daemon
wait_for 60 grep -q . $early/cpuset.cpus
wait_for 60 grep -q . $web/cpuset.cpus
section "adopted"
where $early
section "adopted shared"
where $web
section "adopted metrics"
metrics | grep -E '^numaward_(containers_started_unpinned|nri_)'

run db guaranteed --millicpus 2000 --mebibytes 128 -- sh -c \
    'grep -E "^(Cpus|Mems)_allowed_list" /proc/self/status; exec numaward-load --size 48M --report json'
db=$cgroup db_pod=$pod db_container=$container
wait_for 120 grep -q '{' /var/log/pods/db/main.log
section "placed"
where $db
section "placed first instruction"
grep -o -E '(Cpus|Mems)_allowed_list.*' /var/log/pods/db/main.log
section "placed memory"
cat $db/memory.numa_stat
section "placed misses"
metrics | grep '^numaward_numa_miss_bytes_total'
section "placed allocations"
allocations
section "placed shared"
where $web

section "refused"
run big guaranteed --millicpus 5000 --mebibytes 64 -- sleep 1000000 2>&1 && fail "it was created"
numaward-cri remove-pod $pod
section "after refused"
run small guaranteed --millicpus 1000 --mebibytes 64 -- sleep 1000000
where $cgroup
small=$cgroup small_pod=$pod

section "killed"
kill -9 $daemon
wait $daemon
section "meanwhile"
run meanwhile guaranteed --millicpus 1000 --mebibytes 64 -- sleep 1000000
meanwhile=$cgroup meanwhile_pod=$pod
where $meanwhile
numaward-cri remove-pod $small_pod
start_daemon
wait_for 60 grep -q . $meanwhile/cpuset.cpus
section "back"
where $meanwhile
section "back undisturbed"
where $db
section "back allocations"
allocations

section "containerd killed"
kill -9 $containerd
wait $containerd
wait_for 60 sh -c '! wget -qO- http://127.0.0.1:9560/metrics | grep -q "^numaward_nri_connected 1"'
start_containerd
wait_for 120 connected
section "containerd back"
where $db
numaward-cri remove-pod $meanwhile_pod
section "at once"
for i in 1 2 3; do
    (
        if run "par$i" guaranteed --millicpus 1000 --mebibytes 64 -- sleep 1000000 2>/dev/null; then
            cat $cgroup/cpuset.cpus
        else
            echo refused
        fi
        echo $pod >/tmp/par$i
    ) &
    eval par$i=$!
done
wait $par1 $par2 $par3
for i in 1 2 3; do numaward-cri remove-pod $(cat /tmp/par$i); done

section "removed"
numaward-cri remove $db_container
numaward-cri remove-pod $db_pod
allocations
section "removed shared"
where $web
section "log"
grep -E 'WARN|ERROR' /tmp/daemon.log
section "end"
