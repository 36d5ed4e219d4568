set -eu
leaves_nothing
_log_has() { grep -q "$1" /tmp/daemon.log; }
# die SECTION: kills the daemon in this section. The next daemon has a new log file.
die() {
    section "$1"
    kill_daemon
    new_log
}
# pins SECTION: prints the CPUs and nodes of the workload that runs all the time.
pins() {
    section "$1"
    (cd $held && cat cpuset.cpus cpuset.mems memory.min)
    grep -h -E '^(Cpus|Mems)_allowed_list' "/proc/$(head -1 $held/cgroup.procs)/status"
}
held=$cgroups/numaward/held
export NUMAWARD_STATE_DIRECTORY=/state
expect_error "not all guarantees could be enforced again"
expect_error "a damaged ledger was set aside"
# Reported if no other drift of the workload was in the minute before.
allow_error "another program keeps writing it, and its value is kept"

mkdir /state
# Too small from the beginning.
mount -t tmpfs -o size=1m,mode=700 tmpfs /state
start_daemon
section "no room"
with_code numaward exec --cpus 1 --memory 16Mi --name room -- true 2>&1
must_fail ls -d $cgroups/numaward/room 2>&1
ls /state
section "no room allocations"
allocations
die "no room: killed"
umount /state

mount -t tmpfs -o size=2100k,mode=700 tmpfs /state
start_daemon

# Another program overwrites two knobs of a workload repeatedly. The daemon gives up after a minute.
live fought
section "fought"
numaward guarantee /fought --cpus 1 --memory 128Mi -o json 2>>$remarks
# A node outside the guarantee.
elsewhere=3
[ "$(cat $cgroups/fought/cpuset.mems)" = 3 ] && elsewhere=2
section "elsewhere"
echo $elsewhere
(while :; do
    echo 0-5 >$cgroups/fought/cpuset.cpus || true
    echo 0-3 >$cgroups/fought/cpuset.mems || true
    sleep 0.1
done) &
writer=$!

numaward exec --cpus 1 --memory 64Mi --name held -- numaward-load --size 16M --report json >/tmp/held.json 2>/tmp/held.err &
wait_for 60 [ -s /tmp/held.json ]
pins "held"

# The journal has preallocated space for guarantees; the ledger file has to wait for free space.
wait_for 30 grep -q '"held"' /state/ledger.json
section "full disk"
must_fail dd if=/dev/zero of=/state/filler bs=512 2>/dev/null
with_code numaward exec --cpus 1 --memory 16Mi --name full -- true 2>>$remarks
mkdir $cgroups/late
quiet_guarantee /late --cpus 1 --memory 16Mi
wait_for 60 _log_has 'the ledger file could not be updated'
section "full disk file"
grep -c '"late"' /state/ledger.json || true
section "full disk allocations"
allocations
pins "full disk held"
die "full disk: killed"
start_daemon
section "full disk: started"
allocations
pins "full disk: adopted"
section "room again"
rm /state/filler
with_code numaward exec --cpus 1 --memory 16Mi --name room -- true 2>>$remarks
numaward release late
rmdir $cgroups/late
_written_out() { ! grep -q '"late"' /state/ledger.json; }
wait_for 60 _written_out

# The cgroup of a workload is removed.
section "gone"
mkdir -p $cgroups/outer/inner
quiet_guarantee /outer/inner --cpus 1 --memory 16Mi
cat $cgroups/outer/memory.min
rmdir $cgroups/outer/inner
_gone() { ! allocations | grep -q outer/inner; }
wait_for 30 _gone
cat $cgroups/outer/memory.min
# A new cgroup with the same name is another cgroup.
mkdir $cgroups/outer/inner
quiet_guarantee /outer/inner --cpus 1 --memory 16Mi
numaward release outer/inner

section "left to the other"
_left() { [ "$(allocations | grep -o '"state":"left"' | wc -l)" = 2 ]; }
wait_for 240 _left
allocations
section "fight metrics"
ask /metrics | grep -E '^numaward_drift(_repaired)?_total\{knob="cpuset.(cpus|mems)"\}'
end $writer
echo 0-3 >$cgroups/fought/cpuset.mems
section "missing load"
load fought --size 64M --policy bind:$elsewhere
# The kernel updates `memory.numa_stat` every two seconds.
_booked() { [ "$(sed -n 's/^anon .*N'$elsewhere'=\([0-9]*\).*/\1/p' $cgroups/fought/memory.numa_stat)" -ge 67108864 ]; }
wait_for 60 _booked
cat /tmp/load-fought
section "missing numa_stat"
cat $cgroups/fought/memory.numa_stat
section "misses"
ask /metrics | grep -E '^numaward_numa_miss_bytes_total\{workload="fought"'
section "miss events"
_reported() { ask "/api/v1/events?kind=miss&workload=fought" | grep -q message; }
wait_for 30 _reported
ask "/api/v1/events?kind=miss"
end $load_pid

section "read-only"
# A mount over the directory: a file system with files that are open for writing cannot be remounted read-only.
mount -t tmpfs -o ro,mode=700 tmpfs /state
with_code numaward exec --cpus 1 --memory 16Mi --name readonly -- true 2>&1
die "read-only: killed"
section "read-only: start"
with_code timeout 60 numaward run 2>&1
pins "read-only held"
umount /state
start_daemon
section "read-write allocations"
allocations

# The ledger file is damaged: the journal contains all data.
die "damaged file: killed"
echo nonsense >/state/ledger.json
start_daemon
wait_for 30 [ -s /state/ledger.json ]
section "damaged file"
ls -1 /state
cat /state/ledger.json.damaged-1
grep -c 'a damaged ledger was set aside; nothing is missing' /tmp/daemon.log
section "damaged file allocations"
allocations
pins "damaged file held"

# The journal is damaged too.
die "damaged: killed"
rm /state/ledger.json.damaged-1 /state/ledger.journal
cp /state/ledger.json /tmp/ledger.json
head -c 100 /tmp/ledger.json >/state/ledger.json
start_daemon
section "damaged"
ls -1 /state
head -c 100 /tmp/ledger.json | cmp - /state/ledger.json.damaged-1 && echo kept
grep -c 'damaged ledger was set aside' /tmp/daemon.log
section "damaged allocations"
allocations
pins "damaged held"

die "lost: killed"
echo nonsense >/state/ledger.json
echo nonsense >/state/ledger.json.1
echo nonsense >/state/ledger.journal
start_daemon
section "lost"
ls -1 /state
section "lost allocations"
allocations
pins "lost held"
section "end"
stop_daemon
umount /state
tidy
