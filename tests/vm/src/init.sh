#!/bin/busybox sh
# The guest's first process: prepares the machine.

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

exec sh /numaward-vm/run
