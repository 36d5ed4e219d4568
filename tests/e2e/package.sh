# The Debian package under systemd: installation, service, upgrade, removal, purge; then the program in the root of an image.
set -eu
export PATH=/usr/sbin:/usr/bin:/bin

_pinned() { [ "$(cat $load/cpuset.cpus)" = 2-3 ]; }
_reported() { ask /metrics | grep -q '^numaward_drift_repaired_total{knob="cpuset.cpus"} [1-9]'; }
# busybox also has a `dpkg`, which does not run maintainer scripts.
dpkg() { /usr/bin/dpkg "$@" >/run/dpkg.log 2>&1 || { cat /run/dpkg.log; fail "dpkg $*"; }; }
# journal: prints the daemon's log, which must not be empty.
journal() {
    journalctl -q --no-pager -u numaward >/run/journal
    [ -s /run/journal ] || fail "the journal has nothing of numaward"
    cat /run/journal
}

# The package installs the program under test. This root file system has no dpkg database.
rm /usr/bin/numaward
mkdir -p /var/lib/dpkg/info /var/lib/dpkg/updates /var/log
touch /var/lib/dpkg/status

section "installed"
dpkg --install /numaward.deb
state
stat -c '%a %U %n' /usr/bin/numaward /etc/numaward/config.yaml
section "unit"
systemd-analyze security --no-pager --threshold=32 numaward.service | tail -n 1
# The machine has no manual pages.
systemd-analyze verify --man=no numaward.service
echo verified

add_load
count_calls
systemctl -q enable --now numaward || fail "numaward does not start"
first=$(systemctl show --value -p MainPID numaward)
systemctl start load
wait_for 60 ready
wait_for 60 _loaded
section "status"
numaward status -o json
section "guarantee"
numaward guarantee load.service --cpus 2 --memory 64Mi -o json 2>>$remarks
section "exec"
numaward exec --cpus 1 --memory 16Mi --name job -- cat /proc/self/cgroup 2>>$remarks
section "drift"
echo 0 >$load/cpuset.cpus
wait_for 30 _pinned
wait_for 30 _reported
ask /api/v1/allocations
section "reloaded"
cat >/run/systemd/system/other.service <<'END'
[Service]
ExecStart=/bin/sleep infinity
END
systemctl start other
other=$cgroups/system.slice/other.service/cpuset.cpus
stat -c '%a %U %n' /etc/numaward/conf.d /etc/numaward/guarantees.d
printf 'guarantees:\n- unit: other.service\n  cpus: 1\n' >/etc/numaward/guarantees.d/other.yaml
echo 'probes: {slots: 9}' >/etc/numaward/conf.d/slots.yaml
systemctl reload numaward || fail "not reloaded"
cat $other
journalctl -q --no-pager -o cat -u numaward | grep -E '^(applied|needs a restart)'
# An invalid file changes nothing.
rm /etc/numaward/guarantees.d/other.yaml
echo 'probes: {slots: 0}' >/etc/numaward/conf.d/slots.yaml
systemctl reload numaward 2>/dev/null && echo "reloaded an invalid file"
cat $other
rm /etc/numaward/conf.d/slots.yaml
systemctl reload numaward || fail "not reloaded again"
_released() { [ -z "$(systemctl show --value -p AllowedCPUs other)" ]; }
wait_for 30 _released
systemctl show --value -p MainPID,ActiveState numaward | grep -v '^$' | sort | sed "s/^$first$/the same process/"
section "more of its life"
# A signal interrupts a call, and the kernel restarts it by restart_syscall.
kill -STOP $first
sleep 1
kill -CONT $first
for path in / /metrics /api/v1/topology /api/v1/workloads /api/v1/events /api/v1/status /openapi.json; do
    ask $path >/dev/null || echo "no answer: $path"
done
numaward doctor >/dev/null || echo "doctor: code $?"
numaward resize load.service --memory 80Mi >/dev/null || echo "not resized"
systemctl kill -s KILL numaward
wait_for 60 ready
killed=$(systemctl show --value -p MainPID numaward)

section "upgraded"
before=$(systemctl show --value -p MainPID numaward)
dpkg --install /numaward.deb
wait_for 60 ready
[ "$(systemctl show --value -p MainPID numaward)" != "$before" ] || echo "the old one runs"
cat $load/cpuset.cpus
section "upgraded allocations"
ask /api/v1/allocations
section "journal"
journal | grep -E 'WARN|ERROR|Main process|Failed' | grep -vE 'kind="(drift|intruder)"|part="pending_configuration"|code=killed|result .signal.' || true

section "filtered"
upgraded=$(systemctl show --value -p MainPID numaward)
grep -E '^Seccomp:' /proc/$upgraded/status
# forbidden NAME PROPERTY: makes a call that the daemon does not need, with the unit's restrictions and this property.
forbidden() {
    sed -e 's#^ExecStart=.*#ExecStart=/bin/busybox kill -0 1#' -e 's/^Type=.*/Type=oneshot/' \
        -e '/^WatchdogSec=/d; /Directory/d; /^Restart/d' -e "s/^MemoryMax=/$2\nMemoryMax=/" \
        /usr/lib/systemd/system/numaward.service >/run/systemd/system/$1.service
    systemctl daemon-reload
    if systemctl start $1 2>/dev/null; then echo "$1: done"; else echo "$1: $(journalctl -q --no-pager -o cat -u $1 | grep kill)"; fi
}
forbidden refused ""
forbidden allowed SystemCallFilter=kill
section "removed"
dpkg --remove numaward
must_fail systemctl is-active numaward
there /usr/bin/numaward /etc/numaward/config.yaml /var/lib/numaward/ledger.json
cat $load/cpuset.cpus
section "refused calls"
calls refused $first $killed $upgraded
section "made calls"
calls made $first $killed $upgraded
section "purged"
dpkg --purge numaward
there /etc/numaward /var/lib/numaward /usr/lib/systemd/system/numaward.service
echo nothing

# A static program cannot load the name service modules of glibc. This root contains only the files of an image and of a container
# runtime; the name server resolves every name.
perl -MSocket -e '
    socket(S, PF_INET, SOCK_DGRAM, 17) && bind(S, sockaddr_in(53, INADDR_LOOPBACK)) || die $!;
    while (my $from = recv(S, my $query, 512, 0)) {
        my $end = index($query, "\0", 12);
        my $type = unpack("n", substr($query, $end + 1, 2));
        my $answer = $type == 1 ? pack("nnnNn", 0xc00c, 1, 1, 60, 4) . inet_aton("127.0.0.1") : "";
        send(S, pack("a2nnnnn", $query, 0x8580, 1, $answer ? 1 : 0, 0, 0) . substr($query, 12, $end - 7) . $answer, 0, $from);
    }' &
perl -MSocket -e '
    socket(S, PF_INET, SOCK_STREAM, 6) && bind(S, sockaddr_in(8001, INADDR_LOOPBACK)) && listen(S, 9) || die $!;
    $| = 1;
    while (accept(C, S)) {
        sysread(C, my $head, 4096);
        print $head =~ /^\x16\x03/ ? "TLS\n" : (split /\r\n/, $head)[0] . "\n";
        close(C);
    }' >/run/asked &
# The root has no sysfs, and the API server closes each connection.
expect_error "the machine cannot be read"
allow_error "client error (Connect)"
root=/run/image
mkdir -p $root/var/lib/numaward $root/run $root/tmp $root/dev
mount --bind /dev $root/dev
tar -xf /layer.tar -C $root || fail "tar"
echo 'nameserver 127.0.0.1' >$root/etc/resolv.conf
cat >$root/etc/ca.crt <<'END'
-----BEGIN CERTIFICATE-----
MIIBhjCCAS2gAwIBAgIUO4i/InXpymsUfUCw4hZobwdU5KYwCgYIKoZIzj0EAwIw
GDEWMBQGA1UEAwwNbnVtYXdhcmQgdGVzdDAgFw0yNjExMjExMTEzMTNaGA8yMTI2
MTAyODExMTMxM1owGDEWMBQGA1UEAwwNbnVtYXdhcmQgdGVzdDBZMBMGByqGSM49
AgEGCCqGSM49AwEHA0IABFgtyGHwmaPr+53q1dA5EVgFD5Wb7wyXETmcLdNXBlNJ
BBBLtnFJeIjLMbYAahKlske8KqhQSdPeYi9h2MmxvNKjUzBRMB0GA1UdDgQWBBRT
ohdLuYDUPJoajLLM0QDWsjsO7TAfBgNVHSMEGDAWgBRTohdLuYDUPJoajLLM0QDW
sjsO7TAPBgNVHRMBAf8EBTADAQH/MAoGCCqGSM49BAMCA0cAMEQCIHAraRDq+mcS
WJw2bqh0i0IazKeCiAy6eMiLLbBCDMPyAiAtnKehARQFPChINhmuNdaVd+Cm0yC3
LL5dAncCggpbpA==
-----END CERTIFICATE-----
END
cat >$root/etc/kubeconfig <<'END'
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: 'http://api.numaward.test:8001', certificate-authority: /etc/ca.crt}}]
users: [{name: u, user: {}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
END
echo '{listen: "127.0.0.1:9570", mode: observe, kubernetes: {nodeName: host, kubeconfig: /etc/kubeconfig}}' >$root/etc/config.yaml
_asked() { grep -q "$1" /run/asked; }
section "names"
chroot $root /usr/bin/numaward run --config /etc/config.yaml 2>/tmp/daemon.log &
daemon=$!
wait_for 60 _asked 'GET /api/v1/pods'
kill $daemon
wait $daemon
grep -m 1 'GET /api/v1/pods' /run/asked
section "in a cluster"
mkdir -p $root/var/run/secrets/kubernetes.io/serviceaccount
cd $root/var/run/secrets/kubernetes.io/serviceaccount
printf token >token
printf default >namespace
cp $root/etc/ca.crt ca.crt
cd /
export KUBERNETES_SERVICE_HOST=127.0.0.1 KUBERNETES_SERVICE_PORT=8001
export NUMAWARD_KUBERNETES_NODE_NAME=host NUMAWARD_MODE=observe NUMAWARD_LISTEN=127.0.0.1:9571
chroot $root /usr/bin/numaward run 2>/tmp/daemon.log &
daemon=$!
wait_for 60 _asked TLS
kill $daemon
wait $daemon
tail -n 1 /run/asked
section "end"
