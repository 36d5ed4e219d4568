# Prints the ledger of each disk after a power loss. The disks are consecutive in /dev/vdb, $size MiB each.
set -eu

mkdir /run/power
section found
number=0
while [ "$number" -lt "$images" ]; do
    dd if=/dev/vdb of=/dev/vda bs=1M skip=$((number * size)) count="$size" 2>/dev/null || fail "no image $number"
    mount -t ext4 /dev/vda /run/power || fail "image $number has no file system"
    numaward-crash-check ledger /run/power
    umount /run/power || fail "image $number is in use"
    number=$((number + 1))
done
exit 0
