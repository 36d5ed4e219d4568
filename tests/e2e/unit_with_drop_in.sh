# The packaged unit, as it is and with a drop-in. The preceding script defines $config, the configuration; $kind, the kind of the
# event that shows that the daemon has handled the exclusive CPUs $cpus; `state`, which prints the settings of these CPUs;
# $forbidden, commands that fail in the unit also with the drop-in; and `drop_in`, which prints the drop-in.
set -eu
mkdir -p /etc/numaward
echo "$config" >/etc/numaward/config.yaml
cp /numaward.service /run/systemd/system/numaward.service
printf '[Service]\nExecStart=/bin/sleep infinity\n' >/run/systemd/system/load.service
systemctl daemon-reload
systemctl start load.service
_looked() { events $kind | grep -q "exclusive CPUs $cpus"; }
# hold NAME: starts the daemon and a workload with exclusive CPUs.
hold() {
    systemctl start numaward.service || fail "not started"
    wait_for 120 ready
    quiet_guarantee load.service --cpus 2 --memory 64Mi --node 1
    wait_for 30 _looked
    section "$1"
    state
    section "$1 events"
    events $kind
    numaward release load.service || fail "not released"
}
hold "closed"
systemctl stop numaward.service
mkdir -p /run/systemd/system/numaward.service.d
drop_in >/run/systemd/system/numaward.service.d/drop-in.conf
systemctl daemon-reload
hold "open"
section "outside of it"
pid=$(systemctl show -P MainPID numaward.service)
must_fail nsenter -t $pid -m sh -c "$forbidden" 2>&1
exit 0
