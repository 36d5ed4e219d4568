# A guest of libvirt: nodes of its threads and memory, and the effect of libvirt's own pinning within a guarantee.
unit='machine-qemu\x2d1\x2dweb.scope'
workload='machine-qemu-*-web.scope'
_held() { numaward get guarantees "$unit" | grep -q ' held'; }
_has_memory() { [ "$(cat "/sys/fs/cgroup/machine.slice/$unit/memory.current")" -ge $((128 << 20)) ]; }

# cgroups NAME: prints the guest's cgroups with their knobs, and the allowed CPUs and nodes of each thread.
cgroups() {
    section "$1"
    (
        cd "/sys/fs/cgroup/machine.slice/$unit" || exit
        find . -type d | sort | while read -r folder; do
            echo "$folder cpus=$(cat "$folder/cpuset.cpus") mems=$(cat "$folder/cpuset.mems")" \
                "effective=$(cat "$folder/cpuset.cpus.effective")/$(cat "$folder/cpuset.mems.effective")" \
                "type=$(cat "$folder/cgroup.type")"
            for thread in $(cat "$folder/cgroup.threads" 2>/dev/null); do
                echo "  $(cat "/proc/$thread/comm")" \
                    "$(sed -n 's/^\(Cpus\|Mems\)_allowed_list:\t//p' "/proc/$thread/status" | tr '\n' ' ')"
            done
        done
    )
}
# ends NAME COMMAND...: prints the output and the exit code.
ends() {
    section "$1"
    shift
    "$@" 2>&1
    echo "code $?"
}

start_numaward
section "start"
cd /srv || exit
virsh define web.xml
virsh start web
wait_for 240 _has_memory
settle
wait_for 240 _estimated '0\.[2-9]'
section "top before"
numaward top --once --filter web
look "seen before"
cgroups "before"
section "declare"
cat >>/etc/numaward/config.yaml <<'END'
guarantees:
  - unit: machine-qemu*web.scope
    cpus: 2
    memory: 256Mi
END
numaward config check
systemctl restart numaward
wait_for 120 ready
wait_for 240 _held
settle
section "get"
numaward get guarantees 'machine-qemu\x2d1\x2dweb.scope'
wait_for 240 _estimated '0\.0'
section "top after"
numaward top --once --filter web
look "seen after"
cgroups "guaranteed"
section "resident"
cat "/sys/fs/cgroup/machine.slice/$unit/memory.numa_stat"

section "pin"
virsh vcpupin web 0 2
virsh emulatorpin web 3
virsh iothreadpin web 1 3
cgroups "pinned"
ends "pin outside" virsh vcpupin web 1 0
ends "memory outside" virsh numatune web --nodeset 0 --live
settle
cgroups "pinned outside"
section "libvirtd again"
systemctl restart libvirtd
virsh list
settle
cgroups "restarted"
section "held"
numaward get guarantees "$unit"
numaward events | grep ' drift ' || echo "nobody rewrote anything"

section "next"
virsh destroy web
virsh start web
unit='machine-qemu\x2d2\x2dweb.scope'
wait_for 240 _held
settle
cgroups "again"
section "machined"
machinectl list
virsh destroy web
log
