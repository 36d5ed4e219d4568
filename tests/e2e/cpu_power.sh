# Exclusive CPUs 2 and 3, and what they are set to. Nothing here has a frequency: the governor is missing.
socket=/run/numaward/control.sock
config=/tmp/config.yaml
cpu=/sys/devices/system/cpu
echo 'enforcement: {cpuPower: {governor: performance, wakeUpLatency: 0}}' >$config
_ready() { [ -S $socket ] && numaward explain --cpus 1 --memory 1Mi; }
start() {
    numaward run --config $config 2>>/tmp/daemon.log &
    daemon=$!
    wait_for 60 _ready
}
# die: as it comes.
die() {
    kill -9 $daemon
    wait $daemon
}
latency() { cat $cpu/cpu$1/power/pm_qos_resume_latency_us; }
state() {
    section "$1"
    echo $(for number in 0 1 2 3; do latency $number; done)
}
_set() { [ "$(latency 2)" = n/a ]; }
_back() { [ "$(latency 2)" = 150 ]; }
_given_up() { events | grep -q 'Somebody else wrote these'; }
events() { wget -qO- "http://127.0.0.1:9560/api/v1/events?kind=cpu_power" | sed 's/},{/}\n{/g'; }
hold() {
    numaward guarantee /held --cpus 2 --memory 64Mi --node 1 >/dev/null || fail "no guarantee"
    wait_for 20 _set
}
release() {
    numaward release held || fail "not released"
    wait_for 20 _back
}
mkdir $cgroups/held
sh -c "echo 0 >$cgroups/held/cgroup.procs; exec sleep 100000" &
echo 150 >$cpu/cpu2/power/pm_qos_resume_latency_us

section "frequencies"
ls -d $cpu/cpu*/cpufreq
section "doctor"
numaward doctor --config $config 2>/dev/null | grep -i 'cpu power'
start
state "before"
hold
state "held"
section "events"
events
section "figures"
wget -qO- http://127.0.0.1:9560/metrics | grep '^numaward_cpu_power_'
die
state "held by nobody"
start
state "held again"
die
start
release
state "released"

hold
echo 70 >$cpu/cpu3/power/pm_qos_resume_latency_us
wait_for 30 _given_up
release
state "of somebody else"
echo 0 >$cpu/cpu3/power/pm_qos_resume_latency_us

hold
die
echo 'enforcement: {cpuPower: {wakeUpLatency: 20}}' >$config
start
_20() { [ "$(latency 2)" = 20 ]; }
wait_for 20 _20
state "another value"
die
echo '{}' >$config
start
state "not configured"
die
echo 'enforcement: {cpuPower: {wakeUpLatency: 20}}' >$config
start
wait_for 20 _20
die
numaward uninstall --restore --config $config 2>/tmp/uninstall.log || { cat /tmp/uninstall.log; fail "not restored"; }
state "uninstalled"
section "log"
cat /tmp/daemon.log
exit 0
