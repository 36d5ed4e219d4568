# The packaged unit, as it is and with the drop-in of docs/power.md.
mkdir -p /etc/numaward
echo 'enforcement: {cpuPower: {wakeUpLatency: 0}}' >/etc/numaward/config.yaml
cp /numaward.service /run/systemd/system/numaward.service
printf '[Service]\nExecStart=/bin/sleep infinity\n' >/run/systemd/system/load.service
systemctl daemon-reload
systemctl start load.service
_ready() { wget -q -O - http://127.0.0.1:9560/readyz && numaward explain --cpus 1 --memory 1Mi; }
_looked() { events | grep -q 'exclusive CPUs 2-3'; }
events() { wget -qO- "http://127.0.0.1:9560/api/v1/events?kind=cpu_power" | sed 's/},{/}\n{/g'; }
# hold NAME: with a daemon that has started.
hold() {
    systemctl start numaward.service || fail "not started"
    wait_for 120 _ready
    numaward guarantee load.service --cpus 2 --memory 64Mi --node 1 >/dev/null || fail "no guarantee"
    wait_for 30 _looked
    section "$1"
    echo "latency: $(cat /sys/devices/system/cpu/cpu2/power/pm_qos_resume_latency_us)"
    section "$1 events"
    events
    numaward release load.service || fail "not released"
}
hold "closed"
systemctl stop numaward.service
mkdir -p /run/systemd/system/numaward.service.d
cp /power.conf /run/systemd/system/numaward.service.d/
systemctl daemon-reload
hold "open"
section "outside of it"
# What the unit forbids otherwise stays so.
pid=$(systemctl show -P MainPID numaward.service)
nsenter -t $pid -m sh -c 'echo 1 >/proc/sys/vm/overcommit_memory; echo 1 >/sys/kernel/mm/ksm/run; echo 1 >/sys/devices/virtual/workqueue/cpumask' 2>&1
exit 0
