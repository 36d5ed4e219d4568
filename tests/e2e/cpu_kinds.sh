# Virtual machines have no frequency scaling: each CPU's sysfs folder is replaced by a copy with simulated frequencies.
set -eu
leaves_nothing
cpus=/sys/devices/system/cpu
for cpu in 0 1 2 3 4 5 6 7; do
    cp -a $cpus/cpu$cpu /tmp/cpu$cpu 2>/dev/null || true
    mkdir /tmp/cpu$cpu/cpufreq
    echo 2100000 >/tmp/cpu$cpu/cpufreq/base_frequency
done
for cpu in 1 4; do echo 2700000 >/tmp/cpu$cpu/cpufreq/base_frequency; done
for cpu in 0 1 2 3 4 5 6 7; do
    mount --bind /tmp/cpu$cpu $cpus/cpu$cpu || fail "cpu$cpu"
done

NUMAWARD_STRATEGY=native start_daemon

section "topology"
ask /api/v1/topology
section "topology for people"
numaward topology

# asked NAME ARGUMENTS...: prints the allowed CPUs of a command with this request.
asked() {
    section "$1"
    shift
    with_code numaward exec "$@" -- grep -h -E '^(Cpus|Mems)_allowed_list' /proc/self/status 2>>$remarks
}
asked "isolated" --cpus 2 --memory 16Mi --policy single-numa-node --cpu-kind isolated
asked "without a tick" --cpus 2 --memory 16Mi --policy single-numa-node --cpu-kind nohz-full
asked "both" --cpus 1 --memory 16Mi --node 0 --cpu-kind isolated --cpu-kind nohz-full

asked "of the highest frequency" --cpus 1 --memory 16Mi --node 1 --cpu-kind high-frequency

numaward exec --cpus 1 --memory 16Mi --cpu-kind isolated --cpu-kind nohz-full --name held -- sleep 1000 2>>$remarks &
wait_for 20 populated numaward/held
section "explained"
numaward explain held
numaward release held

# refused NAME ARGUMENTS...: prints the message of a refused request.
refused() {
    section "$1"
    shift
    with_code numaward exec "$@" -- true 2>&1
}
refused "too many" --cpus 3 --memory 16Mi --policy single-numa-node --cpu-kind isolated
refused "too fast" --cpus 2 --memory 16Mi --policy single-numa-node --cpu-kind high-frequency
refused "none of it" --cpus 1 --memory 16Mi --cpu-kind efficiency
refused "shared" --cpus 500m --memory 16Mi --cpu-kind isolated
refused "unknown" --cpus 1 --memory 16Mi --cpu-kind fast
for cpu in 0 1 2 3 4 5 6 7; do umount $cpus/cpu$cpu; done
tidy
