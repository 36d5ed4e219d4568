# DPDK: a core of one node serves queues with buffers on the other node.
unit=forwarder.service
_forwards() { journalctl -q --no-pager -o cat -u forwarder | grep -q 'TX-packets: [1-9]'; }
_guarded() { grep -q 'TX-packets: [1-9]' /tmp/guarded; }
_start() {
numaward exec --cpus 2 --memory 192Mi --hugepages-2Mi 96Mi --node 1 --name forwarder -- \
    dpdk-testpmd --no-pci --vdev net_null0 --vdev net_null1 -- \
    --total-num-mbufs=8192 --auto-start --stats-period=5
}

start_numaward
section "pools"
sysctl vm.nr_hugepages=160
grep . /sys/devices/system/node/node*/hugepages/hugepages-2048kB/nr_hugepages
section "start"
systemd-run --unit=forwarder dpdk-testpmd -l 0,2 --no-pci --vdev net_null0 --vdev net_null1 -- \
    --total-num-mbufs=8192 --auto-start --stats-period=5
wait_for 120 _forwards
settle
section "said"
journalctl -q --no-pager -o cat -u forwarder | head -n 30
section "top before"
numaward top --once --filter forwarder
look "before"
section "describe before"
numaward describe forwarder.service
section "late guarantee"
numaward guarantee forwarder.service --cpus 2 --memory 192Mi --hugepages-2Mi 96Mi --node 1 2>&1
echo "code $?"
section "late pages"
grep -h huge /proc/$(systemctl show --value -p MainPID forwarder)/numa_maps
section "late threads"
grep -h Cpus_allowed_list /proc/$(systemctl show --value -p MainPID forwarder)/task/*/status | sort | uniq -c
numaward release forwarder.service
systemctl stop forwarder
_released() { ! numaward get guarantees forwarder.service; }
wait_for 60 _released

section "other sockets"
numaward exec --cpus 2 --memory 192Mi --hugepages-2Mi 96Mi --node 1 --name other -- \
    timeout 60 dpdk-testpmd --no-pci --socket-mem 32,32 -- --stats-period=5 2>&1
echo "code $?"
_gone() { [ ! -e $cgroups/numaward/other ]; }
wait_for 60 _gone
unit=numaward/forwarder
section "guarantee"
_start >/tmp/guarded 2>&1 &
forwarder=$!
wait_for 120 _guarded
settle
section "guarded said"
head -n 30 /tmp/guarded
section "top after"
numaward top --once --filter forwarder
look "after"
section "describe"
numaward describe forwarder
kill $forwarder
log
