#!/bin/busybox sh
# The guest's first and only process of its own: prepares the machine, runs /numaward-vm/script, tells its exit code.

/bin/busybox mkdir -p /bin /dev /etc /proc /root /run /sys /tmp
/bin/busybox --install -s /bin
export PATH=/bin HOME=/root TERM=dumb
cd /root || exit

must() { "$@" || { echo "numaward-vm: failed: $*"; poweroff -f; }; }
may() { "$@" || echo "numaward-vm: went on without: $*"; }

must mount -t proc proc /proc
must mount -t sysfs sysfs /sys
must mount -t devtmpfs devtmpfs /dev
must mount -t tmpfs tmpfs /run
must mount -t tmpfs tmpfs /tmp
must mount -t cgroup2 cgroup2 /sys/fs/cgroup
# A kernel under lockdown refuses some of these; what needs them has to cope.
mkdir -p /dev/pts /dev/shm
may mount -t devpts devpts /dev/pts
may mount -t tmpfs tmpfs /dev/shm
may mount -t bpf bpf /sys/fs/bpf
may mount -t tracefs tracefs /sys/kernel/tracing
may mount -t debugfs debugfs /sys/kernel/debug
may mount -t securityfs securityfs /sys/kernel/security

for controller in $(cat /sys/fs/cgroup/cgroup.controllers); do
    may sh -c "echo +$controller >/sys/fs/cgroup/cgroup.subtree_control"
done

hostname numaward-vm
echo 'root:x:0:0:root:/root:/bin/sh' >/etc/passwd
echo 'root:x:0:' >/etc/group
must ip link set lo up

if [ -f /numaward-vm/modules ]; then
    for module in $(cat /numaward-vm/modules); do
        must insmod "/numaward-vm/$module.ko"
    done
fi
if [ -f /numaward-vm/network ]; then
    must ip link set eth0 up
    must ip addr add 10.0.2.15/24 dev eth0
fi

# Raw: no carriage returns are added. Doing it again afterwards waits until all output has left the machine.
must stty -F /dev/ttyS1 raw
must stty -F /dev/ttyS2 raw
echo begun >/dev/ttyS2
sh /numaward-vm/script </dev/null >/dev/ttyS1 2>&1
code=$?
stty -F /dev/ttyS1 raw
echo "exit $code" >/dev/ttyS2
poweroff -f
