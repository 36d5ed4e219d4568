# Interrupts and other kernel work on exclusive CPUs 3 and 4.
set -eu
config=/tmp/config.yaml
echo 'enforcement: {interrupts: move-away}' >$config

card=$(readlink -f /sys/class/net/eth0/device/..)
irq=$(grep -l 'input' $(ls -d $card/msi_irqs/* | sed 's,.*/\(.*\),/sys/kernel/irq/\1/actions,') | cut -d/ -f5)
workqueues=/sys/devices/virtual/workqueue/cpumask
rps=/sys/class/net/eth0/queues/rx-0/rps_cpus
echo 0-5 >/proc/irq/$irq/smp_affinity_list
echo 18 >$rps
state() {
    section "$1"
    echo "card: $(cat /proc/irq/$irq/smp_affinity_list)"
    echo "card's effective: $(cat /proc/irq/$irq/effective_affinity_list)"
    echo "new: $(cat /proc/irq/default_smp_affinity)"
    echo "workqueues: $(cat $workqueues)"
    echo "rps: $(cat $rps)"
}
# disk NAME: prints the CPU of each interrupt of the disk's queues.
disk() {
    section "$1"
    for actions in $(grep -l 'req' /sys/kernel/irq/*/actions); do
        number=$(echo $actions | cut -d/ -f5)
        echo "to CPU $(cat /proc/irq/$number/effective_affinity_list): interrupt $number ($(cat $actions))"
    done
}
_away() { [ "$(cat $workqueues)" = 27 ]; }
# The daemon writes the settings one after the other.
_card_away() { [ "$(cat /proc/irq/$irq/smp_affinity_list)" = 5 ] && [ "$(cat $rps)" = 00 ]; }
_back() { [ "$(cat $workqueues)" = 3f ] && [ "$(cat /proc/irq/$irq/smp_affinity_list)" != 5 ]; }
hold() {
    quiet_guarantee /held --cpus 2 --memory 64Mi --node 1
    wait_for 20 _away
}
release() {
    numaward release held || fail "not released"
    wait_for 20 _back
}
live held

start_daemon --config $config
for near in eth0 ${card##*/}; do
    [ $near = eth0 ] && section "near eth0" || section "near the PCI address"
    with_code numaward exec --cpus 1 --memory 64Mi --near $near --name near -- \
        grep -E '^(Cpus|Mems)_allowed_list' /proc/self/status 2>>$remarks
    wait_for 20 _back
done
disk "disk"
state "before"
hold
wait_for 20 _card_away
state "held"
disk "disk while held"
section "figures"
ask /metrics | grep '^numaward_interrupt_'
section "events"
events interrupts_moved
kill_daemon
state "held by nobody"
start_daemon --config $config
state "held again"
kill_daemon
start_daemon --config $config
release
state "released"

hold
wait_for 20 _card_away
echo 1 >/proc/irq/$irq/smp_affinity_list
release
state "administrator"
echo 0-5 >/proc/irq/$irq/smp_affinity_list

hold
kill_daemon
restore --config $config
state "uninstalled"

mkdir -p /run/irqbalance
/irqbalance/ld-linux-x86-64.so.2 --library-path /irqbalance /irqbalance/irqbalance --debug -t 1 >/tmp/irqbalance.log 2>&1 &
_listens() { ls /run/irqbalance/*.sock; }
wait_for 60 _listens
start_daemon --config $config
_banned() { tail -n 200 /tmp/irqbalance.log | grep 'Banned CPUs: ' | tail -n 1 | grep -q "$1"; }
banned() { grep 'Banned CPUs: ' /tmp/irqbalance.log | tail -n 1; }
hold
wait_for 60 _banned '18$'
sleep 5
section "banned"
banned
looked_at=0
section "reached with irqbalance"
for actions in /sys/kernel/irq/*/actions; do
    number=$(echo $actions | cut -d/ -f5)
    case $(cat $actions) in '' | *req* | timer) continue ;; esac
    # The kernel does not move the timer. smp_affinity is the target of the next interrupt; effective_affinity of an idle device
    # is older.
    affinity=$(cat /proc/irq/$number/smp_affinity)
    looked_at=$((looked_at + 1))
    [ $((0x$affinity & 0x18)) = 0 ] || echo "interrupt $number ($(cat $actions)): $affinity"
done
section "looked at with irqbalance"
echo $looked_at
release
wait_for 60 _banned '0$'
section "unbanned"
banned
section "log"
cat /tmp/daemon.log
exit 0
