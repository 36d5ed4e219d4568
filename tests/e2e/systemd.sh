set -eu
_active() { [ "$(systemctl show --value -p ActiveState "$1")" = active ]; }
_loaded() { [ -s /run/load.json ]; }
_unpinned() { grep -q '^Cpus_allowed_list:.0-3' "/proc/$(systemctl show --value -p MainPID load)/status"; }
_pinned() { [ "$(cat $load/cpuset.cpus)" = 2-3 ]; }
load=$cgroups/system.slice/load.service

cat >/run/systemd/system/numaward.service <<'END'
[Service]
Type=notify
ExecStart=/usr/bin/numaward run --log-level debug
Restart=always
RestartSec=100ms
END
cat >/run/systemd/system/load.service <<'END'
[Service]
ExecStart=/usr/bin/numaward-load --size 32M --report json
StandardOutput=file:/run/load.json
END
systemctl daemon-reload
systemctl start numaward load
wait_for 60 ready
wait_for 60 _loaded

# pins NAME: prints the CPUs, nodes and limits of the unit's process and cgroup.
pins() {
    section "$1"
    grep -h -E '^(Cpus|Mems)_allowed_list' "/proc/$(systemctl show --value -p MainPID load)/status"
    # A cgroup without a guarantee may have no cpuset controller.
    (cd $load && cat cpuset.cpus cpuset.mems memory.min memory.max) || [ ! -e $load/cpuset.cpus ]
    systemctl show -p AllowedCPUs,AllowedMemoryNodes,MemoryMin,MemoryMax load | sort
}

section "guarantee"
numaward guarantee load.service --cpus 2 --memory 64Mi -o json 2>>$remarks
pins "held"
cat $cgroups/system.slice/memory.min

# From its next start on, the unit has a memory policy over all nodes that it may use.
mkdir /run/systemd/system/load.service.d
printf '[Service]\nNUMAPolicy=interleave\nNUMAMask=all\n' >/run/systemd/system/load.service.d/policy.conf
systemctl daemon-reload
pins "reloaded"

section "restart"
rm /run/load.json
systemctl restart load
wait_for 60 _loaded
pins "restarted"
section "restarted policy"
sed -n '/stack/{s/^[0-9a-f]* \([^ ]*\) .*/\1/p;q}' "/proc/$(systemctl show --value -p MainPID load)/numa_maps"
section "restarted load"
cat /run/load.json
section "restarted misses"
ask /metrics | grep -E '^numaward_numa_miss_bytes_total.*load'
section "restarted allocations"
allocations

section "written past systemd"
echo 0 >$load/cpuset.cpus
wait_for 30 _pinned
pins "repaired"

section "daemon killed"
systemctl kill -s KILL numaward
wait_for 60 ready
pins "adopted"
section "adopted allocations"
allocations
section "daemon stopped"
systemctl stop numaward
systemctl daemon-reload
systemctl restart load
pins "without the daemon"
systemctl start numaward
wait_for 60 ready

section "release"
numaward release load.service
# systemd disables the controller after its response, and the kernel then lifts the restriction of the processes.
wait_for 10 _unpinned
pins "released"
systemctl daemon-reload
systemctl restart load
pins "released and restarted"

section "exec"
with_code numaward exec --cpus 2 --memory 64Mi --name job -- sh -c 'grep -E "^(Cpus|Mems)_allowed_list" /proc/self/status; cat /proc/self/cgroup' 2>>$remarks
section "no such unit"
with_code numaward guarantee none.service --cpus 1 --memory 64Mi 2>&1
section "not running"
systemctl stop load
with_code numaward guarantee load.service --cpus 1 --memory 64Mi 2>&1
# Other cgroups are confined: units by properties, and a slice without exclusive CPUs as a whole.
mkdir -p /etc/numaward
cat >/etc/numaward/config.yaml <<'END'
enforcement:
  herding: {mode: on, systemSlices: [/init.scope, /system.slice/exempt.service]}
END
for unit in other exempt late batched; do
    printf '[Service]\nExecStart=/bin/sleep infinity\n' >/run/systemd/system/$unit.service
done
echo Slice=batch.slice >>/run/systemd/system/batched.service
systemctl daemon-reload
systemctl start load other exempt batched
systemctl restart numaward
wait_for 60 ready

# herd NAME UNIT...: prints the CPU property of each unit, and the allowed CPUs of its process.
herd() {
    section "$1"
    shift
    for _unit; do
        _pid=$(systemctl show --value -p MainPID $_unit)
        _allowed=$(sed -n 's/^Cpus_allowed_list:\t//p' /proc/$_pid/status)
        echo "$_unit [$(systemctl show --value -p AllowedCPUs $_unit)] $_allowed"
    done
    echo "batch.slice [$(systemctl show --value -p AllowedCPUs batch.slice)]"
}
_herded() { [ "$(systemctl show --value -p AllowedCPUs $1)" = 0-1 ]; }
_free() { [ -z "$(systemctl show --value -p AllowedCPUs $1)" ]; }
herd "before" load other exempt batched
quiet_guarantee load.service --cpus 2 --memory 64Mi
herd "herded" load other exempt batched
section "herded allocations"
allocations
systemctl daemon-reload
herd "herded and reloaded" load other exempt batched
systemctl start late
systemctl restart other
wait_for 30 _herded late
wait_for 30 _herded other
herd "herded and restarted" load other exempt batched late
systemctl kill -s KILL numaward
wait_for 60 ready
herd "herded and adopted" load other exempt batched late
numaward release load.service >/dev/null
wait_for 30 _free late
herd "given back" load other exempt batched late
systemctl daemon-reload
systemctl restart other
herd "given back and restarted" load other exempt batched late

section "log"
journalctl -q --no-pager -u numaward | tail -40
systemctl stop numaward

section "checks"
numaward-enforce-check systemd
section "end"
