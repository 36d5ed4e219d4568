#!/bin/busybox sh
# The guest's first process, until it becomes systemd: registers the script with it. All else here is Debian's.

/bin/busybox mkdir -p /numaward-vm/bin
/bin/busybox --install -s /numaward-vm/bin
# Not a first boot, of which much would be made.
/numaward-vm/bin/tr -d - </proc/sys/kernel/random/uuid >/etc/machine-id
echo numaward-vm >/etc/hostname

read -r output _ </numaward-vm/ports
cat >/etc/systemd/system/numaward-vm.service <<END
[Unit]
Description=The script of this machine

[Service]
Environment=PATH=/numaward-vm/bin:/usr/sbin:/usr/bin HOME=/root TERM=dumb
WorkingDirectory=/root
ExecStart=/bin/busybox sh /numaward-vm/run
StandardOutput=tty
TTYPath=/dev/$output
END

exec /lib/systemd/systemd
