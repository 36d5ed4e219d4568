# An unprivileged user tries to stop or starve the daemon: with many mapped files, connections, slow readers and event streams,
# and by taking its port during a restart. The daemon still answers other users, and keeps the guarantees.
set -eu
# Protects a developer's host: the script does nothing outside of a machine.
[ -e /numaward.service ] || exit 1
# as_nobody COMMAND...: replaces this process, which has to be a separate one.
as_nobody() {
    exec numaward-capabilities nobody "$@" >/dev/null 2>&1
}
# attack.pl KIND: runs one attack until it is ended. It writes to /run/attack/KIND as soon as the attack has begun. Perl has no
# modules here.
cat >/run/attack.pl <<'PERL'
use strict;
my ($kind) = @ARGV;
my $address = pack 'S n C4 x8', 2, 9560, 127, 0, 0, 1;
sub begun { open my $file, '>', "/run/attack/$kind" or die $!; print $file "begun\n"; close $file }
sub client {
    socket my $socket, 2, 1, 0 or die $!;
    return connect($socket, $address) ? $socket : undef;
}
sub ask { my ($socket, $path) = @_; syswrite $socket, "GET $path HTTP/1.1\r\nHost: localhost\r\n\r\n" }
# Returns true if data or the end of the stream can be read.
sub is_ready { my ($socket) = @_; my $bits = ''; vec($bits, fileno $socket, 1) = 1; return select $bits, undef, undef, 0 }
$SIG{PIPE} = 'IGNORE';
if ($kind eq 'connections') {
    # Reopens connections that the daemon closes.
    my @open;
    for my $round (0 .. 1_000_000) {
        push @open, grep { defined } client();
        shift @open if @open > 500;
        begun() if $round == 100;
        select undef, undef, undef, 0.005;
    }
} elsif ($kind eq 'scrapes' or $kind eq 'streams') {
    my $path = $kind eq 'scrapes' ? '/metrics' : '/api/v1/stream';
    my @open;
    for my $round (0 .. 1_000_000) {
        while (@open < 40) {
            my $socket = client() or last;
            ask($socket, $path);
            push @open, $socket;
        }
        # Reads a little from each connection, as slowly as the daemon permits.
        @open = grep { !is_ready($_) or sysread $_, my $buffer, $kind eq 'scrapes' ? 256 : 4096 } @open if $round % 20 == 19;
        begun() if $round == 0;
        select undef, undef, undef, 0.1;
    }
} elsif ($kind eq 'port') {
    socket my $socket, 2, 1, 0 or die $!;
    setsockopt $socket, 1, 2, pack 'l', 1;
    select undef, undef, undef, 0.001 until bind $socket, $address;
    listen $socket, 5 or die $!;
    begun();
    while (accept my $victim, $socket) {
        syswrite $victim, "HTTP/1.1 200 OK\r\nContent-Length: 7\r\nConnection: close\r\n\r\nforged\n";
        close $victim;
    }
} elsif ($kind eq 'files') {
    # Maps one page of a file under many long names: MAP_SHARED | MAP_POPULATE.
    my $mmap = `uname -m` =~ /aarch64/ ? 222 : 9;
    mkdir '/run/attack/folder';
    chdir '/run/attack/folder' or die $!;
    for my $level (10 .. 24) {
        my $name = $level . 'x' x 248;
        mkdir $name;
        chdir $name or die $!;
    }
    open my $file, '>', 'f' or die $!;
    print $file 'a' x 4096;
    close $file;
    for my $number (1 .. 50_000) {
        link 'f', "l$number" or die $!;
        open my $link, '<', "l$number" or die $!;
        my $place = syscall $mmap, 0, 4096, 1, 0x8001, fileno $link, 0;
        die "mmap: $!" if $place == -1;
        close $link;
    }
    begun();
    sleep 100_000;
}
PERL
mkdir -m 777 /run/attack
victim=$cgroups/system.slice/victim.service
mkdir -p /etc/numaward
echo 'observe: {callChains: {enabled: true}}' >/etc/numaward/config.yaml
cp /numaward.service /run/systemd/system/numaward.service
printf '[Service]\nExecStart=/bin/sleep infinity\n' >/run/systemd/system/victim.service
printf '[Service]\nUser=nobody\nEnvironment=PATH=/numaward-vm/bin:/usr/bin:/bin\nExecStart=%s /run/attack.pl files\n' \
    "$(command -v perl)" >/run/systemd/system/tenant.service
systemctl daemon-reload
systemctl start numaward victim || fail "the units do not start"
wait_for 100 ready
quiet_guarantee victim.service --cpus 1 --memory 64Mi
held=$(cat $victim/cpuset.cpus)
# peak: prints the peak memory of the daemon since its start, in KiB.
peak() { sed -n 's/^VmHWM:[^0-9]*\([0-9]*\) kB/\1/p' "/proc/$(systemctl show --value -p MainPID numaward)/status"; }
# Root checks continuously that the daemon is alive, except during a restart.
watch() {
    while [ ! -e /run/over ]; do
        if [ ! -e /run/restarting ] && ! timeout 1 wget -q -O /dev/null http://127.0.0.1:9560/livez; then
            [ -e /run/restarting ] || date >>/run/late
        fi
        sleep 0.2
    done
}
: >/run/late
watch 2>/dev/null &
watcher=$!
# began KIND: succeeds if the attack has begun.
began() { [ -s /run/attack/$1 ]; }
# scrape: succeeds if a scrape of root completes within the scrape timeout of Prometheus.
scrape() { timeout 10 wget -q -O /run/figures http://127.0.0.1:9560/metrics && grep -q '^numaward_build_info' /run/figures; }
# resize BYTES: succeeds if a change is accepted.
resize() { numaward resize victim.service --memory $1 >/dev/null 2>&1; }

for attack in connections scrapes streams; do
    section "$attack"
    as_nobody perl /run/attack.pl $attack &
    attacker=$!
    wait_for 60 began $attack
    sleep 5
    for _try in 1 2 3; do with_code scrape; done
    with_code resize 65Mi
    with_code resize 64Mi
    end $attacker 2>/dev/null
done

section "files"
systemctl start tenant
wait_for 300 began files
asking=
for _client in 1 2 3 4 5 6 7 8; do
    numaward regions tenant.service -o json >/run/regions-$_client 2>&1 &
    asking="$asking $!"
    numaward stacks tenant.service >/dev/null 2>&1 &
    asking="$asking $!"
done
with_code scrape
for _asked in $asking; do wait $_asked || true; done
for _client in 1 8; do grep -c '"regions"' /run/regions-$_client || true; done
systemctl stop tenant
section "peak before the restart"
peak

section "port"
allow_error "no figures are served"
attacker=
for _try in $(seq 20); do
    rm -f /run/attack/port
    : >/run/restarting
    as_nobody perl /run/attack.pl port &
    attacker=$!
    systemctl restart numaward
    sleep 1
    if began port; then break; fi
    end $attacker 2>/dev/null
    attacker=
done
if [ -n "$attacker" ]; then
    echo "taken"
    # The daemon retries meanwhile, and root does not get responses of the program that took the port.
    wait_for 100 numaward get victim.service
    numaward get
    systemctl is-active numaward
    end $attacker 2>/dev/null
else
    echo "never taken"
fi
_served() { ask /readyz >/run/ready && ! grep -q forged /run/ready; }
wait_for 60 _served
rm /run/restarting
with_code scrape

section "late"
: >/run/over
wait $watcher
cat /run/late
section "peak"
peak
section "held"
[ "$(cat $victim/cpuset.cpus)" = "$held" ] && echo same
echo "restarts $(systemctl show --value -p NRestarts numaward)"
section "end"
