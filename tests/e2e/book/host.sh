# Prepares the commands of the book: services, a program, and the commands of the tests that read their state.
set -eu -o pipefail
export SYSTEMD_BUS_TIMEOUT=600
# curl -s URL: some images have no curl.
curl() { wget -q -O - "$2"; }

for service in postgresql@17-main redis small; do
    printf '[Service]\nExecStart=/usr/bin/sleep infinity\n' >/run/systemd/system/$service.service
done
systemctl daemon-reload
systemctl start postgresql@17-main redis small
mkdir -p /run/here
printf '#!/bin/sh\nsleep 1\necho served\n' >/run/here/server
chmod +x /run/here/server

cgroup_of() { echo "$cgroups$(systemctl show --value -p ControlGroup "$1")"; }
cpus_of() { cat "$(cgroup_of "$1")/cpuset.cpus" 2>/dev/null; }
# forget: releases the service's guarantee, if it has one.
forget() { numaward release postgresql@17-main.service || true; }

