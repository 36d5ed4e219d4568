# With the strategy `kubelet`, placements do not depend on the free memory of the nodes.
set -eu
echo 'strategy: kubelet' >>/etc/numaward/config.yaml

run web burstable --millicpus 100 --unlimited -- sleep 1000000
web=$cgroup
start_plugin
wait_for 60 grep -q . $web/cpuset.cpus

run db guaranteed --millicpus 2000 --mebibytes 128 -- sh -c \
    'grep -E "^(Cpus|Mems)_allowed_list" /proc/self/status; exec numaward-load --size 48M --report json'
db=$cgroup db_pod=$pod db_container=$container
scope=${db##*/}
slice=$(basename "$(dirname "$db")")
wait_for 120 grep -q '{' /var/log/pods/db/main.log
section "first instruction"
grep -o -E '(Cpus|Mems)_allowed_list.*' /var/log/pods/db/main.log
section "placed"
where $db
section "shared"
where $web
section "protection"
protection $db
section "properties"
systemctl show -p AllowedCPUs,AllowedMemoryNodes,MemoryMin,MemoryLow "$scope" | sort
systemctl show -p MemoryMin,MemoryLow "$slice" | sort
section "misses"
ask /metrics | grep '^numaward_numa_miss_bytes_total'

# After a reload, systemd writes the properties again, with the values of the guarantee.
systemctl daemon-reload
section "reloaded"
where $db
section "reloaded protection"
protection $db

section "unpinned"
samples numaward_containers_started_unpinned_total
section "removal"
numaward-cri remove $db_container
numaward-cri remove-pod $db_pod
section "removed"
allocations
section "removed shared"
where $web
section "removed protection"
protection $db
section "log"
grep -E 'WARN|ERROR' /tmp/daemon.log || true
section "end"
