set -eu
echo "+cpuset +cpu +memory +hugetlb +pids" >$cgroups/cgroup.subtree_control || fail "no controllers"

# With the strategy `kubelet`, placements do not depend on the free memory of the nodes.
echo 'strategy: kubelet' >>/etc/numaward/config.yaml

# A container that runs before numaward starts is adopted.
run web burstable --millicpus 100 --unlimited -- sleep 1000000
web=$cgroup
run early guaranteed --millicpus 1000 --mebibytes 64 -- sleep 1000000
early=$cgroup
section "before"
where $early
start_plugin
wait_until_at 0 $early
wait_for 60 grep -qx 0,2-5 $web/cpuset.cpus
section "adopted"
where $early
section "adopted shared"
where $web
section "adopted metrics"
ask /metrics | grep -E '^numaward_(containers_started_unpinned|nri_)'

# Most versions of the runtimes ignore memory policies.
annotation=numaward.io/memory-policy=interleave
run policy burstable --millicpus 100 --unlimited -- sleep 1000000
annotation=
numaward-cri remove-pod $pod
section "policies missing"
ask /metrics | grep '^numaward_nri_memory_policies_missing'

run db guaranteed --millicpus 2000 --mebibytes 128 -- sh -c \
    'grep -E "^(Cpus|Mems)_allowed_list" /proc/self/status; exec numaward-load --size 48M --report json'
db=$cgroup db_pod=$pod db_container=$container
wait_for 120 grep -q '{' /var/log/pods/db/main.log
section "placed"
where $db
section "placed first instruction"
grep -o -E '(Cpus|Mems)_allowed_list.*' /var/log/pods/db/main.log
wait_for 30 booked "${db#$cgroups/}" $((48 << 20))
section "placed memory"
cat $db/memory.numa_stat
section "placed misses"
samples numaward_numa_miss_bytes_total
section "placed allocations"
allocations
section "placed assigned"
numaward-cri --socket /run/numaward/pod-resources/kubelet.sock assigned
section "placed shared"
where $web
section "placed protection"
protection $db
section "placed names"
# Resident memory is read periodically, for some of the workloads each time.
_resident() { ask /metrics | grep -q "^numaward_memory_resident_bytes.*pod=\"$1\",container=\"main\".*type=\"anon\""; }
wait_for 60 _resident db
wait_for 60 _resident web
ask /metrics | grep -E '^numaward_memory_resident_bytes.*pod="(db|web)",container="main".*type="anon"'

section "resized"
numaward-cri resize $db_container --millicpus 3000 --mebibytes 160 || fail "resize"
where $db
section "resized shared"
where $web
section "resized protection"
protection $db
section "resize refused"
must_fail numaward-cri resize $db_container --millicpus 4000 --mebibytes 160 2>&1
where $db
section "resized back"
numaward-cri resize $db_container --millicpus 2000 --mebibytes 128 || fail "resize back"
where $db

section "refused"
must_fail run big guaranteed --millicpus 5000 --mebibytes 64 -- sleep 1000000 2>&1
numaward-cri remove-pod $pod
section "after refused"
run small guaranteed --millicpus 1000 --mebibytes 64 -- sleep 1000000
where $cgroup
small=$cgroup small_pod=$pod

section "killed"
kill_daemon
section "meanwhile"
run meanwhile guaranteed --millicpus 1000 --mebibytes 64 -- sleep 1000000
meanwhile=$cgroup meanwhile_pod=$pod
where $meanwhile
numaward-cri remove-pod $small_pod
start_plugin
# The runtime writes the knobs; the daemon then reads them and reports the guarantee as held.
is_held() { allocations | grep -q '"name":"default/meanwhile/main"'; }
wait_for 60 is_held
wait_until_at 0 $meanwhile
section "back"
where $meanwhile
section "back undisturbed"
where $db
section "back early"
where $early
section "back allocations"
allocations
section "back metrics"
ask /metrics | grep -E '^numaward_.*_(errors|refusals)_total[{ ]'

section "runtime killed"
kill_runtime
_is_gone() { ! connected; }
wait_for 60 _is_gone
start_runtime
wait_for 120 connected
section "runtime back"
where $db
section "runtime back early"
where $early
section "runtime back metrics"
ask /metrics | grep -E '^numaward_.*_(errors|refusals)_total[{ ]'
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

section "unpinned in the end"
samples numaward_containers_started_unpinned_total
section "removed"
numaward-cri remove $db_container
numaward-cri remove-pod $db_pod
allocations
section "removed shared"
where $web
section "removed protection"
protection $db
section "log"
grep -E 'WARN|ERROR' /tmp/daemon.log || true
section "end"
