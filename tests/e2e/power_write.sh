# Sends requests to a daemon whose files are on a disk.
set -eu

mkdir /run/power
mount -t ext4 /dev/vda /run/power || fail "no file system"
section write
numaward-crash-check write /run/power /dev/vda "$offset" --steps "$steps" --seed "$seed"
