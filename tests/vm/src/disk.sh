#!/bin/busybox sh
# The guest's first process, where the root file system is on a disk: mounts that, takes our files there and goes on in it.

/bin/busybox mkdir -p /bin /dev /proc /sys /system
/bin/busybox --install -s /bin
export PATH=/bin

must() { "$@" || { echo "numaward-vm: failed: $*"; poweroff -f; }; }

must mount -t sysfs sysfs /sys
must mount -t devtmpfs devtmpfs /dev
for module in $(cat /numaward-vm/modules); do
    must insmod "/numaward-vm/$module.ko"
done
: >/numaward-vm/modules

# The disk is there when the kernel has found it, and the last one has this serial number.
until disk=$(grep -l '^system$' /sys/block/vd*/serial 2>/dev/null); do
    usleep 50000
done
disk=${disk%/serial}
must mount -t ext4 "/dev/${disk##*/}" /system
must cp /bin/busybox /system/usr/bin/busybox
must cp -a /numaward-vm /system/
must cp -a /numaward-vm/files/. /system/
umount /sys
mkdir -p /system/dev /system/proc
must mount -t proc proc /system/proc
must mount --move /dev /system/dev
exec switch_root /system /numaward-vm/init
