# Node 1 is slow by the firmware. Weights follow from that, and what was found comes back.
socket=/run/numaward/control.sock
config=/tmp/config.yaml
weights=/sys/kernel/mm/mempolicy/weighted_interleave
by_bandwidth='{enforcement: {interleaveWeights: {source: bandwidth}}, strategy: native}'
echo "$by_bandwidth" >$config
_ready() { wget -qO- http://127.0.0.1:9560/readyz && [ -S $socket ] && numaward explain --cpus 1 --memory 1Mi; }
_none() { [ "$(numaward get)" = "nothing is promised" ]; }
_given_up() { events | grep -q 'Somebody else set weights'; }
events() { wget -qO- "http://127.0.0.1:9560/api/v1/events?kind=interleave_weights" | sed 's/},{/}\n{/g'; }
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
state() {
    section "$1"
    echo $(cat $weights/node0 $weights/node1)
}
# What the firmware reports of a node, the lesser of both.
bandwidth() {
    cat /sys/devices/system/node/node$1/access0/initiators/read_bandwidth \
        /sys/devices/system/node/node$1/access0/initiators/write_bandwidth | sort -n | head -n 1
}
section "bandwidths"
echo $(bandwidth 0) $(bandwidth 1)
echo 2 >$weights/node1
state "before"
section "doctor"
numaward doctor --config $config -o json 2>/dev/null | tr -d '\n' | grep -o '"interleave weights"[^}]*'
start
state "held"
section "events"
events
section "figures"
wget -qO- http://127.0.0.1:9560/metrics | grep '^numaward_interleave_weight'
section "load"
numaward exec --cpus 1 --memory 1200Mi --node 0,1 --memory-policy weighted-interleave --name load -- \
    numaward-load --size 128M --hold 0 --report json 2>/tmp/load.err
wait_for 20 _none
# What the shell says about it is no part of the load's figures.
section "killed"
die
start
state "held again"

echo 99 >$weights/node1
wait_for 30 _given_up
state "of somebody else"
die
echo '{strategy: native}' >$config
start
state "kept"
die
echo 2 >$weights/node1
echo "$by_bandwidth" >$config
start
state "held anew"
die
numaward uninstall --restore --config $config 2>/tmp/uninstall.log || { cat /tmp/uninstall.log; fail "not restored"; }
state "uninstalled"
section "errors"
cat /tmp/load.err
section "log"
cat /tmp/daemon.log
exit 0
