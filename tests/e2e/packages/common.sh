# What the tests of package managers share.
set -eu
export PATH=/usr/sbin:/usr/bin LC_ALL=C DEBIAN_FRONTEND=noninteractive
# The shell is busybox's, which has programs of these names itself; they do less.
dpkg() { /usr/bin/dpkg "$@"; }
rpm() { /usr/bin/rpm "$@"; }
sha256sum() { /usr/bin/sha256sum "$@"; }

# quietly COMMAND...: shows what it printed only if it fails.
quietly() { "$@" >/run/said 2>&1 || { cat /run/said; fail "$*"; }; }
# files: mode and owner of what counts.
files() { stat -c '%a %U %n' /usr/bin/numaward /etc/numaward/config.yaml; }
pid() { systemctl show --value -p MainPID numaward; }
# restarted PID: whether another process runs since.
restarted() {
    [ "$(pid)" != "$1" ] && [ "$(pid)" != 0 ] || fail "the old process runs, or none"
    echo "another process"
}

# begin: it runs and holds CPUs 2-3 for a unit; its configuration is the administrator's.
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

# The program under test is the package's.
rm /usr/bin/numaward
mkdir /srv/now /srv/next
tar -xf /dist.tar -C /srv/now --no-same-owner
tar -xf /next.tar -C /srv/next --no-same-owner
