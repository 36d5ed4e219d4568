# Prints the power settings of exclusive CPUs 2 and 3. Virtual machines have no frequency scaling, so there is no governor.
set -eu
leaves_nothing
config=/tmp/config.yaml
cpu=/sys/devices/system/cpu
echo 'enforcement: {cpuPower: {governor: performance, wakeUpLatency: 0}}' >$config
latency() { cat $cpu/cpu$1/power/pm_qos_resume_latency_us; }
state() {
    section "$1"
    echo $(for number in 0 1 2 3; do latency $number; done)
}
_set() { [ "$(latency 2)" = n/a ]; }
_back() { [ "$(latency 2)" = 150 ]; }
_given_up() { events cpu_power | grep -q 'Another program wrote these'; }
hold() {
    quiet_guarantee /held --cpus 2 --memory 64Mi --node 1
    wait_for 20 _set
}
release() {
    numaward release held || fail "not released"
    wait_for 20 _back
}
live held
echo 150 >$cpu/cpu2/power/pm_qos_resume_latency_us

section "frequencies"
must_fail ls -d $cpu/cpu*/cpufreq 2>&1
section "doctor"
numaward doctor --config $config 2>/dev/null | grep -i 'cpu power'
start_daemon --config $config
state "before"
hold
state "held"
section "events"
events cpu_power
section "figures"
ask /metrics | grep '^numaward_cpu_power_'
kill_daemon
state "held by nobody"
start_daemon --config $config
state "held again"
kill_daemon
start_daemon --config $config
release
state "released"

hold
echo 70 >$cpu/cpu3/power/pm_qos_resume_latency_us
wait_for 30 _given_up
release
state "of somebody else"
echo 0 >$cpu/cpu3/power/pm_qos_resume_latency_us

hold
kill_daemon
echo 'enforcement: {cpuPower: {wakeUpLatency: 20}}' >$config
start_daemon --config $config
_20() { [ "$(latency 2)" = 20 ]; }
wait_for 20 _20
state "another value"
kill_daemon
echo '{}' >$config
start_daemon --config $config
state "not configured"
kill_daemon
echo 'enforcement: {cpuPower: {wakeUpLatency: 20}}' >$config
start_daemon --config $config
wait_for 20 _20
kill_daemon
restore --config $config
state "uninstalled"
section "log"
cat /tmp/daemon.log
echo 0 >$cpu/cpu2/power/pm_qos_resume_latency_us
tidy
