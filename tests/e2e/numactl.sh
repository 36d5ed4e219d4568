# Runs the same command with numactl and with `numaward numactl`, on four nodes, one of them without CPUs.
set -eu
leaves_nothing
numactl() { /numactl/ld-linux-x86-64.so.2 --library-path /numactl /numactl/numactl "$@"; }

# Prints the CPUs, the nodes, the policy of the stack, and numactl's own report of the policy.
cat >/probe <<'END'
grep -E '^(Cpus|Mems)_allowed_list' /proc/self/status
awk '/ \[?stack/ { print $2; exit }' /proc/self/numa_maps
/numactl/ld-linux-x86-64.so.2 --library-path /numactl /numactl/numactl --show | grep -E '^(policy|membind|preferred):'
END

# compare OPTIONS...: runs both and prints the exit codes, without the programs' own messages.
compare() {
    section "$*"
    with_code numactl "$@" sh /probe 2>/dev/null
    echo --
    with_code numaward numactl "$@" sh /probe 2>/dev/null
}
all() {
    compare -N 0
    compare -N 1,2
    compare -N '!0'
    compare -N all
    compare -N 3
    compare -C 0,2
    compare -C '!1-2'
    compare -C +1
    compare -m 1
    compare -m 1-2
    compare -m '!1'
    compare -m all
    compare -m 3
    compare -m 4
    compare -p 2
    compare -p 1,2
    compare -p all
    compare -P 1-2
    compare -i 0,3
    compare -i all
    compare -i '!0'
    compare -l
    compare -N 1 -m 2
    compare -w 0-1
    compare -w all
    # Long names, and abbreviations.
    compare --cpunodebind=0,2
    compare --cpubind 1
    compare -c +1
    compare --physcpubind=1,4-5
    compare --physcpu 0-2,4
    compare --membind 0,2
    compare --mem=!0,3
    compare --preferred=3
    compare --preferred-many 0,3
    compare --interleave=0-2
    compare --weighted-interleave=1,3
    compare --localalloc
    compare --all -m 2
    compare -al
    compare --pref 0
    compare --l
    # Lists: relative, inverted, of a device, and `same`.
    compare -m +3
    compare -m +1-2
    compare -m '!+0'
    compare -N +2
    compare -C '!+0-1'
    compare -i +0,2
    compare -p +1
    compare -P '!2'
    compare -w '!0-1'
    compare -N '!0,2'
    compare -m 0x2
    compare -m 02
    compare -N 2 -m same
    compare -m 1 -N same
    compare -N 0 -C 4-5 -m same
    compare -m same
    compare -C same
    compare -N 1,same
    compare -m 0,,1
    compare -m 0-
    compare -m ''
    compare -p ''
    compare -C 6
    compare -C +6
    compare -C all
    compare -C '!all'
    compare -N '!all'
    compare -i '!all'
    compare -m netdev:eth0
    compare -N netdev:eth0
    compare -p netdev:eth0
    compare -m '!netdev:eth0'
    compare -m netdev:lo
    compare -m netdev:none
    compare -m block:vda
    compare -N block:vda
    compare -m block:none
    compare -m file:/dev/vda
    compare -m file:/disk/file
    compare -m file:/disk
    compare -m file:/none
    compare -m file:/probe
    compare -m pci:0000:80:00.0
    compare -m pci:80:00.0
    compare -m pci:80:0.0
    compare -m pci:80:00
    compare -m pci:a0:00.0
    compare -m pci:00:00.0
    compare -m pci:none
    compare -m usb:1
    # Several options, and their order.
    compare -b -m 1
    compare -b -m 1-2
    compare -b -N 1
    compare -b -i 0-1
    compare -b -p 1
    compare -b -P 1-2
    compare -b
    compare -m 1 -b
    compare -a
    compare -a -N 1 -m 2
    compare -N 1 -a -m 2
    compare -C 1 -N 2
    compare -N 2 -C 1
    compare -N 2 -l
    compare -C 0,3 -i 1,2
    compare -m 1 -m 1
    compare -m 1 -i 2
    compare -l -p 1
    compare -w 1 -i 1
    compare -t
    compare --strict -m 1
    compare -x
    compare --bogus
    compare --all=1
    # Options for shared memory together with a command.
    compare -L 1m
    compare -u
    compare -T
    compare -V
    compare -d
    compare --touch -m 1
}

# shown OPTIONS...: compares the reports of both programs.
shown() {
    section "shown $*"
    numactl "$@" 2>/dev/null | grep -v 'free:' || true
    echo "--"
    numaward numactl "$@" 2>/dev/null | grep -v 'free:' || true
}

# shared OPTIONS...: runs both with options for shared memory or about the program, without a command.
shared() {
    section "only numactl $*"
    rm -f /dev/shm/*
    _code=0
    numactl "$@" >/dev/null 2>&1 || _code=$?
    echo "code $_code"
    echo --
    with_code numaward numactl "$@" 2>&1
}

# A file system on the disk, which is on node 3; the network card is on node 2.
mkdir -p /disk /dev/shm
mount -t ext4 /dev/vda /disk || fail "the disk has no file system"
echo file >/disk/file

mkdir /sys/fs/cgroup/narrow
echo +cpuset >/sys/fs/cgroup/cgroup.subtree_control
echo 1-2 >/sys/fs/cgroup/narrow/cpuset.mems
echo 2-5 >/sys/fs/cgroup/narrow/cpuset.cpus

all
(
    echo 0 >/sys/fs/cgroup/narrow/cgroup.procs
    for options in "-m +1" "-m 0" "-N +0" "-C +3" "-C 0" "-m all" "-i all" "-a -m 1" "-a -N 0" "-N !+0" "-C !2" "-m +2" \
        "-a -m +1" "-a -C 0" "-P all" "-w all" "-m block:vda" "-N all -m same" "-a -i all"; do
        section "narrow $options"
        with_code numactl $options sh /probe 2>/dev/null
        echo --
        with_code numaward numactl $options sh /probe 2>/dev/null
    done
)
for options in -s --show "-N 1 -s" "-C 0,3 -s" "-m 1 -s" "-m 1-2 -s" "-p 2 --show" "-P 1-2 -s" "-i 1-2 -s" "-a -m 2 -s" \
    "-s -m 1" "-m !0 -s"; do
    shown $options
done
for options in -H --hardware "-b -H" "-H -m 1" "-N 1 -H"; do
    shown $options
done
shared -L 1m -f /dev/shm/a -m 1
shared --length=1m --file=/dev/shm/a --interleave=0,2 --touch --dump-nodes
shared -L 1m -o 4k -f /dev/shm/a -p 1 -T -V
shared -L 1m -M 600 -S /dev/shm/key -m 1 -t -d
shared --length 1m --shmid=7 --shmmode=600 --shm /dev/shm/key --localalloc
shared --version
shared -H --cpu-compress
shared -m ip:10.0.2.2 true
shared -m 2-1 true
# ours OPTIONS...: runs both with options that only numaward accepts.
ours() {
    section "only ours $*"
    with_code numactl "$@" true 2>&1
    echo --
    with_code numaward numactl "$@" sh /probe 2>/dev/null
}
ours -m block:/dev/vda
ours -m pci:81:00.0
ours -m netdev:eth0,0
ours -i block:vda,netdev:eth0
(
    echo 0 >/sys/fs/cgroup/narrow/cgroup.procs
    ours -N netdev:eth0
    ours -m netdev:eth0
)
section "weighted"
with_code numaward numactl -w 0 true 2>&1
section "alone"
numaward numactl -m 1 cat /proc/self/cgroup 2>&1

start_daemon
section "registered"
with_code numaward numactl -N 1 -m 2 sh -c 'cat /proc/self/cgroup; sh /probe; echo $$; exit 7' 2>&1
numaward numactl -m 1 sleep 1000 &
command=$!
# The process is registered before it executes the command.
_is_command() { [ "$(cat /proc/$command/comm)" = sleep ]; }
wait_for 20 _is_command
section "process"
cat /proc/$command/comm
cat /proc/$command/cgroup
section "counted"
_counted() { ask /metrics | grep -q "workload=\"numaward/sleep-$command\""; }
wait_for 30 _counted
echo "$command"
section "described"
numaward describe sleep-$command
end $command
_released() { [ ! -e $cgroups/numaward/sleep-$command ]; }
wait_for 30 _released
section "left"
numaward get

# Exclusive CPUs on the only allowed node; the request confines other cgroups.
section "isolated"
with_code numaward exec --cpus 2 --node 2 --isolate --name alone -- sh -c '
    grep -E "^(Cpus|Mems)_allowed_list" /proc/self/status
    cat /sys/fs/cgroup/narrow/cpuset.cpus' 2>>$remarks
_given_back() { [ "$(cat $cgroups/narrow/cpuset.cpus)" = 2-5 ]; }
wait_for 20 _given_back
section "log"
cat /tmp/daemon.log
umount /disk
tidy
