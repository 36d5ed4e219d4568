config='enforcement: {interrupts: move-away}'
kind=interrupts_moved
cpus=3-4
rps=/sys/class/net/eth0/queues/rx-0/rps_cpus
echo 18 >$rps
state() {
    echo "workqueues: $(cat /sys/devices/virtual/workqueue/cpumask)"
    echo "new: $(cat /proc/irq/default_smp_affinity)"
    echo "rps: $(cat $rps)"
}
forbidden='echo 1 >/proc/sys/vm/overcommit_memory; echo 1 >/sys/kernel/mm/ksm/run'
