set -eu
leaves_nothing
allows() { grep -E '^(Cpus|Mems)_allowed_list' /proc/$1/status; }
has() { allocations >/tmp/answer && grep -q "$1" /tmp/answer; }
# report [SECONDS TEXT]: prints the guarantees. With arguments, waits until they contain the text and prints that response.
report() {
    wait_for "$1" has "$2"
    cat /tmp/answer
}
has_not() { ! has "$1"; }

# Above the guarantee, a workload is throttled early; if it makes no progress, its `memory.high` is raised.
expect_error "a damaged ledger was set aside"
expect_error "does not have the memory that is guaranteed on it"
expect_error "its value is kept"
mkdir -p /etc/numaward
cat >/etc/numaward/config.yaml <<'END'
memoryThrottlingFactor: 0.1
memoryQos: {raiseHighOnStall: true}
END
start_daemon

# A user's cgroup in a delegated subtree: the user owns all files.
mkdir -p $cgroups/delegated/app
chown -R 1000:1000 $cgroups/delegated
chmod 700 $cgroups/delegated/app
section "delegated"
numaward guarantee /delegated/app --cpus 1 --memory 64Mi --name app -o json 2>>$remarks
section "delegated knobs"
cd $cgroups/delegated/app
cat cpuset.cpus cpuset.mems memory.min ../memory.min
cd /
section "capabilities"
grep CapEff /proc/$daemon/status

# The ledger file is written in the background; the next change needs one before it.
wait_for 20 grep -q '"app"' /var/lib/numaward/ledger.json

numaward exec --cpus 2 --memory 256Mi --name job -- numaward-load --size 64M --report json >/tmp/job.json 2>/tmp/job.err &
job=$!
wait_for 60 [ -s /tmp/job.json ]
process=$(cat $cgroups/numaward/job/cgroup.procs)
section "guaranteed"
allocations
section "process"
allows $process

# All copies of the ledger are damaged while the daemon is down.
_written_out() { [ -s /var/lib/numaward/ledger.json.1 ] && grep -q '"job"' /var/lib/numaward/ledger.json; }
wait_for 60 _written_out
kill_daemon
for file in ledger.json ledger.json.1 ledger.journal; do
    head -c 100 /var/lib/numaward/$file >/tmp/half
    cat /tmp/half >/var/lib/numaward/$file
done
start_daemon
section "rebuilt"
allocations
section "rebuilt process"
allows $process
section "set aside"
ls /var/lib/numaward | grep damaged
section "rebuilt log"
grep -E 'ledger|taken over' /tmp/daemon.log
section "rebuilt writes"
samples numaward_enforcement_writes_total
section "nothing twice"
with_code numaward exec --cpus 1 --memory 64Mi --name more -- true 2>&1

# A program overwrites a knob repeatedly, from here to the end.
mkdir $cgroups/writer
sh -c "echo \$\$ >$cgroups/writer/cgroup.procs; while :; do echo 0-3 >$cgroups/numaward/job/cpuset.cpus; sleep 0.1; done" &
writer=$!
section "writer"
echo $writer
section "fought over"
report 20 '"state":"waiting","count":[0-9]*,"noticed":"write"'

# A write to an ancestor removes the guaranteed node.
section "narrowed"
node=$(cat $cgroups/delegated/app/cpuset.mems)
echo $((1 - node)) >$cgroups/delegated/cpuset.mems
report 20 '"state":"ineffective"'
echo >$cgroups/delegated/cpuset.mems
wait_for 20 has_not '"state":"ineffective"'

# A guaranteed CPU goes offline and online.
cpu=$(cat $cgroups/delegated/app/cpuset.cpus)
section "offline"
echo 0 >/sys/devices/system/cpu/cpu$cpu/online
report 20 '"missing":'
section "offline metrics"
_is_offline() { ask /metrics | grep -q "promised_cpus_offline.* 1"; }
wait_for 20 _is_offline
ask /metrics | grep promised_
section "online"
echo 1 >/sys/devices/system/cpu/cpu$cpu/online
wait_for 20 has_not '"missing":'
allocations
section "online knobs"
cat $cgroups/delegated/app/cpuset.cpus $cgroups/delegated/app/cpuset.cpus.effective

# Huge pages reduce the memory of a node below its guarantees.
section "less memory"
node=$(cat $cgroups/numaward/job/cpuset.mems)
pages=/sys/devices/system/node/node$node/hugepages/hugepages-2048kB/nr_hugepages
echo 400 >$pages
report 20 '"missing":'
wait_for 60 has_event ' does not have the memory that is guaranteed on it'
section "less memory metrics"
ask /metrics | grep -E 'promised_memory|node_memory_bytes'
echo 0 >$pages
wait_for 20 has_not '"missing":'

# The workload may exceed its guarantee; it is throttled until memory.high is raised.
numaward release app
numaward exec --cpus 1 --memory 32Mi --memory-limit 256Mi --name hungry -- numaward-load --size 128M --report json >/tmp/hungry.json 2>/tmp/hungry.err &
hungry=$!
wait_for 20 populated numaward/hungry
limits() { (cd $cgroups/numaward/hungry && cat memory.min memory.low memory.high memory.max); }
section "limits"
limits
wait_for 180 [ -s /tmp/hungry.json ]
section "raised limits"
limits
section "stalls"
ask '/api/v1/events?kind=stall'
section "stall metrics"
ask /metrics | grep '^numaward_memory_high'
end $hungry

# The daemon gives up: the knob keeps the other program's value, and the guarantee is flagged.
section "left"
report 180 '"state":"left","count":[0-9]*,"noticed":"write"'
section "left knob"
cat $cgroups/numaward/job/cpuset.cpus
section "status"
numaward status
kill $writer
section "events"
ask '/api/v1/events?kind=drift'
echo
section "machine events"
ask '/api/v1/events?kind=machine_change'
echo
section "drift metrics"
ask /metrics | grep '^numaward_drift' | grep -v ' 0$'
section "log"
cat /tmp/daemon.log
kill $job
section end
tidy
