# Node 1 is slow according to the firmware. The weights follow from that, and the original weights are restored.
set -eu
leaves_nothing
config=/tmp/config.yaml
weights=/sys/kernel/mm/mempolicy/weighted_interleave
by_bandwidth='{enforcement: {interleaveWeights: {source: bandwidth}}, strategy: native}'
echo "$by_bandwidth" >$config
_given_up() { events interleave_weights | grep -q 'Another program set weights'; }
state() {
    section "$1"
    echo $(cat $weights/node0 $weights/node1)
}
# bandwidth NODE: prints the lower of the reported read and write bandwidths.
bandwidth() {
    cat /sys/devices/system/node/node$1/access0/initiators/read_bandwidth \
        /sys/devices/system/node/node$1/access0/initiators/write_bandwidth | sort -n | head -n 1
}
section "bandwidths"
echo $(bandwidth 0) $(bandwidth 1)
found=$(cat $weights/node1)
echo 2 >$weights/node1
state "before"
section "doctor"
numaward doctor --config $config -o json 2>/dev/null | tr -d '\n' | grep -o '"interleave weights"[^}]*'
start_daemon --config $config
state "held"
section "events"
events interleave_weights
section "figures"
ask /metrics | grep '^numaward_interleave_weight'
section "load"
numaward exec --cpus 1 --memory 1200Mi --node 0,1 --memory-policy weighted-interleave --name load -- \
    numaward-load --size 128M --hold 0 --report json 2>/tmp/load.err
wait_for 20 no_guarantees
# The shell's message about the killed daemon is not part of the load's output.
section "killed"
kill_daemon
start_daemon --config $config
state "held again"

echo 99 >$weights/node1
wait_for 30 _given_up
state "of somebody else"
kill_daemon
echo '{strategy: native}' >$config
start_daemon --config $config
state "kept"
kill_daemon
echo 2 >$weights/node1
echo "$by_bandwidth" >$config
start_daemon --config $config
state "held anew"
kill_daemon
restore --config $config
state "uninstalled"
section "errors"
cat /tmp/load.err
section "log"
cat /tmp/daemon.log
echo $found >$weights/node1
tidy
