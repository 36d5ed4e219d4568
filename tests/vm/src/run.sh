#!/bin/busybox sh
# Runs /numaward-vm/script and reports its exit code, on a machine that its init has prepared.

must() { "$@" || { echo "numaward-vm: failed: $*"; poweroff -f; }; }

for module in $(cat /numaward-vm/modules); do
    must insmod "/numaward-vm/$module.ko"
done
if [ -f /numaward-vm/network ]; then
    must ip link set eth0 up
    must ip addr add 10.0.2.15/24 dev eth0
fi

read -r output status </numaward-vm/ports
# Raw: no carriage returns are added. Doing it again afterwards waits until all output has left the machine.
must stty -F "/dev/$output" raw
must stty -F "/dev/$status" raw
echo begun >"/dev/$status"
sh /numaward-vm/script </dev/null >"/dev/$output" 2>&1
code=$?
stty -F "/dev/$output" raw
echo "exit $code" >"/dev/$status"
poweroff -f
