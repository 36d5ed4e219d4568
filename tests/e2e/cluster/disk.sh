# The disk, which outlives the machine: what containerd, the kubelet and numaward keep.
mkdir -p /var/lib
mount -t ext4 /dev/vda /var/lib 2>/dev/null || { mke2fs /dev/vda >/dev/null && mount -t ext4 /dev/vda /var/lib; } ||
    fail "no disk"
