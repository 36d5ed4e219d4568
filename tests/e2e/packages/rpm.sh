# rpm, on a system with Debian packages: it does not check the dependencies of the package.
set -eu
now=$(echo /srv/now/*.rpm)
next=$(echo /srv/next/*.rpm)

section "digests"
rpm --checksig --verbose "$now"
section "requires"
rpm --query --requires --package "$now" | grep -v '^rpmlib' | sort -u
section "installed"
quietly rpm --install --nodeps "$now"
files
state
rpm --verify --nodeps numaward
echo intact
section "preset of the administrator"
quietly rpm --erase numaward
mkdir -p /etc/systemd/system-preset
echo 'enable numaward.service' >/etc/systemd/system-preset/10-local.preset
quietly rpm --install --nodeps "$now"
state
begin

section "upgraded"
before=$(pid)
quietly rpm --upgrade --nodeps "$next"
wait_for 60 ready
rpm --query --queryformat '%{version}\n' numaward
restarted "$before"
state
cat $load/cpuset.cpus
tail -n 1 /etc/numaward/config.yaml
section "changed files"
must_fail rpm --verify --nodeps numaward

section "erased"
quietly rpm --erase numaward
must_fail systemctl is-active numaward
there /usr/bin/numaward /usr/lib/systemd/system/numaward.service /etc/systemd/system/multi-user.target.wants/numaward.service \
    /etc/numaward/config.yaml /etc/numaward/config.yaml.rpmsave /var/lib/numaward/ledger.json
[ ! -L /etc/systemd/system/multi-user.target.wants/numaward.service ] || echo "still enabled"
cat $load/cpuset.cpus
section "end"
