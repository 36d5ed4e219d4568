# apt and a repository on a web server.
set -eu

# The commands of docs/start.md.
section "verified"
cd /srv/now
gpg --import numaward.asc 2>&1
gpg --verify SHA256SUMS.asc SHA256SUMS 2>&1
sha256sum --check --ignore-missing SHA256SUMS
section "changed download"
cp -r /srv/now/SHA256SUMS /srv/now/SHA256SUMS.asc /run
echo >>/run/SHA256SUMS
must_fail gpg --verify /run/SHA256SUMS.asc /run/SHA256SUMS 2>&1
echo refused
cd /

busybox httpd -p 127.0.0.1:8080 -h /srv
rm -f /etc/apt/sources.list /etc/apt/sources.list.d/*
update() { apt-get -q -o APT::Update::Error-Mode=any update 2>&1; }
# publish FOLDER: makes the folder available at /apt of the web server.
publish() { ln -sfn "$1" /srv/apt; }
publish now/apt
sed 's#^URIs: ADDRESS#URIs: http://127.0.0.1:8080/apt#' /srv/now/apt/numaward.sources >/etc/apt/sources.list.d/numaward.sources

section "no key"
must_fail update
echo refused
section "another key"
mkdir -p /etc/apt/keyrings
gpg --no-default-keyring --keyring /usr/share/keyrings/debian-archive-keyring.gpg --armor --export >/etc/apt/keyrings/numaward.asc
must_fail update
echo refused
cp /srv/now/numaward.asc /etc/apt/keyrings/numaward.asc
section "changed index"
cp -r /srv/now/apt /srv/changed
# The size stays the same: only the hash shows the change.
printf changed | dd of=/srv/changed/dists/stable/main/binary-amd64/Packages.gz bs=1 seek=40 conv=notrunc 2>/dev/null
publish changed
must_fail update
echo refused
publish now/apt
section "found"
update || fail "apt refuses the repository"
apt-cache policy numaward | sed -n 's/^ *Candidate: //p'

section "installed"
quietly apt-get -qy install numaward
dpkg-query -W -f '${Version}\n' numaward
files
state
dpkg --verify numaward
echo intact
section "preset"
systemctl preset numaward 2>&1
must_fail systemctl is-enabled numaward
begin

section "upgraded"
before=$(pid)
publish next/apt
quietly update
quietly apt-get -qy upgrade
wait_for 60 ready
dpkg-query -W -f '${Version}\n' numaward
restarted "$before"
state
cat $load/cpuset.cpus
tail -n 1 /etc/numaward/config.yaml
section "upgraded allocations"
ask /api/v1/allocations
section "downgraded"
# The repository contains the earlier version too.
earlier=$(apt-cache madison numaward | sed -n 's/^ *numaward | *\([^+ ]*\) |.*/\1/p')
quietly apt-get -qy --allow-downgrades install "numaward=$earlier"
wait_for 60 ready
dpkg-query -W -f '${Version}\n' numaward
systemctl is-active numaward
cat $load/cpuset.cpus

section "removed"
quietly apt-get -qy remove numaward
must_fail systemctl is-active numaward
there /usr/bin/numaward /usr/lib/systemd/system/numaward.service /etc/numaward/config.yaml /var/lib/numaward/ledger.json
cat $load/cpuset.cpus
section "installed again"
quietly apt-get -qy install numaward
state
tail -n 1 /etc/numaward/config.yaml
section "restored"
systemctl start numaward
wait_for 60 ready
echo "before: $(cat $load/cpuset.cpus)"
systemctl stop numaward
quietly numaward uninstall
echo "after: $(systemctl show --value -p AllowedCPUs load)"
systemctl is-active load
section "purged"
quietly apt-get -qy purge numaward
# All installed files are removed. A link of the service would be dangling.
find /etc /usr /var/lib/numaward /var/lib/systemd -name '*numaward*' -not -path '/etc/apt/*' -not -path '*/numaward-vm*' \
    -not -name 'numaward-*' 2>/dev/null || true
echo nothing
section "end"
