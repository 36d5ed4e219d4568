# Common part of the tests of package managers.
set -eu
export PATH=/usr/sbin:/usr/bin LC_ALL=C DEBIAN_FRONTEND=noninteractive
# The shell is busybox's; its applets of these names have fewer features.
dpkg() { /usr/bin/dpkg "$@"; }
rpm() { /usr/bin/rpm "$@"; }
sha256sum() { /usr/bin/sha256sum "$@"; }

# quietly COMMAND...: prints the output only if the command fails.
quietly() { "$@" >/run/said 2>&1 || { cat /run/said; fail "$*"; }; }
# files: prints mode and owner of the program and of the configuration.
files() { stat -c '%a %U %n' /usr/bin/numaward /etc/numaward/config.yaml; }
pid() { systemctl show --value -p MainPID numaward; }
# restarted PID: succeeds if the daemon has another process id.
restarted() {
    [ "$(pid)" != "$1" ] && [ "$(pid)" != 0 ] || fail "the old process runs, or none"
    echo "another process"
}

# begin: starts the daemon with a guarantee of CPUs 2-3 for a unit, and changes the configuration as an administrator would.
begin() {
    add_load
    echo "# changed" >>/etc/numaward/config.yaml
    systemctl -q enable --now numaward || fail "numaward does not start"
    systemctl start load
    wait_for 60 ready
    wait_for 60 _loaded
    section "guarantee"
    numaward guarantee load.service --cpus 2 --memory 64Mi -o json 2>>$remarks
}

# The package installs the program under test.
rm /usr/bin/numaward
mkdir /srv/now /srv/next
tar -xf /dist.tar -C /srv/now --no-same-owner
tar -xf /next.tar -C /srv/next --no-same-owner
