config='enforcement: {cpuPower: {wakeUpLatency: 0}}'
kind=cpu_power
cpus=2-3
state() { echo "latency: $(cat /sys/devices/system/cpu/cpu2/power/pm_qos_resume_latency_us)"; }
forbidden='echo 1 >/proc/sys/vm/overcommit_memory; echo 1 >/sys/kernel/mm/ksm/run; echo 1 >/sys/devices/virtual/workqueue/cpumask'
