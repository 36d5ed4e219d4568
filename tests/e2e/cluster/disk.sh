# Mounts the disk, which outlives the machine, for the data of containerd, the kubelet and numaward.
mkdir -p /var/lib
mount -t ext4 /dev/vda /var/lib 2>/dev/null || { mke2fs /dev/vda >/dev/null && mount -t ext4 /dev/vda /var/lib; } ||
    fail "no disk"
