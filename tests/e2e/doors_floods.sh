# An unprivileged user tries to stop or starve the daemon: with many mapped files, connections, slow readers and event streams,
# and by taking its port during a restart. The daemon still answers other users, and keeps the guarantees.
set -eu
# Protects a developer's host: the script does nothing outside of a machine.
[ -e /numaward.service ] || exit 1
# as_nobody COMMAND...: replaces this process, which has to be a separate one.
as_nobody() {
    exec numaward-capabilities nobody "$@" >/dev/null 2>&1
}
# as_second_user COMMAND...: the same as another unprivileged user.
as_second_user() {
    exec perl -e '$) = "1 1"; $( = 1; ($<, $>) = (1, 1); exec @ARGV' "$@" >/dev/null 2>&1
}
# attack.pl KIND: runs one attack until it is ended. It writes to /run/attack/KIND as soon as the attack has begun, and to
# /run/attack/KIND.log a line for each request that is refused. Perl has no modules here.
cat >/run/attack.pl <<'PERL'
use strict;
my ($kind) = @ARGV;
my $address = pack 'S n C4 x8', 2, 9560, $kind =~ /^shared/ ? (10, 9, 8, 7) : (127, 0, 0, 1);
sub begun { open my $file, '>', "/run/attack/$kind" or die $!; print $file "begun\n"; close $file }
sub client {
    socket my $socket, 2, 1, 0 or die $!;
    # The smallest receive buffer: the kernel takes little of a response for a client that does not read.
    setsockopt $socket, 1, 8, pack 'l', 1;
    return connect($socket, $address) ? $socket : undef;
}
sub ask { my ($socket, $path) = @_; syswrite $socket, "GET $path HTTP/1.1\r\nHost: localhost\r\n\r\n" }
# Returns true if data or the end of the stream can be read.
sub is_ready { my ($socket) = @_; my $bits = ''; vec($bits, fileno $socket, 1) = 1; return select $bits, undef, undef, 0 }
$SIG{PIPE} = 'IGNORE';
if ($kind =~ /connections$/) {
    # Reopens connections that the daemon closes.
    my @open;
    for my $round (0 .. 1_000_000) {
        push @open, grep { defined } client();
        shift @open if @open > 500;
        begun() if $round == 100;
        select undef, undef, undef, 0.005;
    }
} elsif ($kind =~ /^(scrapes|samples|events)/) {
    my %path = (scrapes => '/metrics', samples => '/api/v1/stream?samples=true', events => '/api/v1/stream');
    my (%open, %head);
    open my $log, '>', "/run/attack/$kind.log" or die $!;
    for my $round (0 .. 1_000_000) {
        while (keys %open < 32) {
            my $socket = client() or last;
            ask($socket, $path{$kind =~ s/-.*//r});
            $open{fileno $socket} = $socket;
        }
        # Reads a little from each connection, as slowly as the daemon permits. An idle stream has nothing to read.
        for my $socket ($round % 20 == 19 ? values %open : ()) {
            next if !is_ready($socket);
            my $id = fileno $socket;
            my $read = sysread $socket, my $buffer, 256;
            $head{$id} .= $buffer if $read && length($head{$id} // '') < 1000;
            my $is_refused = ($head{$id} // '') =~ m{^HTTP/1.1 503};
            next if $read && !$is_refused;
            syswrite $log, "refused\n" if $is_refused;
            delete $open{$id};
            delete $head{$id};
        }
        begun() if $round == 40;
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
    my $is_arm = `uname -m` =~ /aarch64/;
    my $mmap = $is_arm ? 222 : 9;
    mkdir '/run/attack/folder';
    chdir '/run/attack/folder' or die $!;
    # Names that are not UTF-8, and that would clear a terminal.
    for my $level (10 .. 24) {
        my $name = "$level\xff\e[2J\r" . 'x' x 242;
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
    # Allocates on both nodes in turn, again and again, for call chains of a process with that many mappings: MPOL_INTERLEAVE, and
    # MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE.
    # Before that, it allocates 480 MiB on node 1 and keeps them: MPOL_BIND.
    my $set_mempolicy = $is_arm ? 237 : 238;
    my ($second, $both) = (pack('Q', 2), pack('Q', 3));
    syscall $set_mempolicy, 2, $second, 64;
    syscall($mmap, 0, 480 << 20, 3, 0x8022, -1, 0) != -1 or die "mmap: $!";
    syscall $set_mempolicy, 3, $both, 64;
    for my $round (0 .. 1_000_000) {
        my $memory = syscall $mmap, 0, 4 << 20, 3, 0x8022, -1, 0;
        die "mmap: $!" if $memory == -1;
        syscall $is_arm ? 215 : 11, $memory, 4 << 20;
        begun() if $round == 10;
        select undef, undef, undef, 0.1;
    }
}
PERL
mkdir -m 777 /run/attack
victim=$cgroups/system.slice/victim.service
mkdir -p /etc/numaward
echo 'observe: {callChains: {enabled: true, sampleEvery: 16}}' >/etc/numaward/config.yaml
cp /numaward.service /run/systemd/system/numaward.service
printf '[Service]\nExecStart=/bin/sleep infinity\n' >/run/systemd/system/victim.service
printf '[Service]\nUser=nobody\nEnvironment=PATH=/numaward-vm/bin:/usr/bin:/bin\nExecStart=%s /run/attack.pl files\n' \
    "$(command -v perl)" >/run/systemd/system/tenant.service
systemctl daemon-reload
systemctl start numaward victim || fail "the units do not start"
wait_for 100 ready
quiet_guarantee victim.service --cpus 1 --memory 64Mi
held=$(cat $victim/cpuset.cpus)
# Many workloads and small buffers of the kernel, so that a scrape and a sample wait for a client that does not read.
echo "4096 16384 65536" >/proc/sys/net/ipv4/tcp_wmem
pad=$(printf '%0200d' 0)
for _number in $(seq 200); do mkdir $cgroups/many-$_number-$pad; done
_many() { ask /api/v1/workloads | grep -q "many-200-"; }
wait_for 60 _many
section "sizes"
ask /metrics | wc -c
# The shell reports a command that is terminated.
(timeout 5 wget -q -O /run/sample 'http://127.0.0.1:9560/api/v1/stream?samples=true' || true) 2>/dev/null
grep -c '^event: sample' /run/sample
wc -c </run/sample
watch_daemon
# began KIND: succeeds if the attack has begun.
began() { [ -s /run/attack/$1 ]; }
# scrape: succeeds if a scrape of root completes within the scrape timeout of Prometheus.
scrape() { timeout 10 wget -q -O /run/figures http://127.0.0.1:9560/metrics && grep -q '^numaward_build_info' /run/figures; }
# resize BYTES: succeeds if a change is accepted.
resize() { numaward resize victim.service --memory $1 >/dev/null 2>&1; }

# repairs: succeeds if the daemon restores the CPUs of the guarantee after another program has changed them.
repairs() {
    echo 0-3 >$victim/cpuset.cpus
    wait_for 60 _is_restored
}
_is_restored() { [ "$(cat $victim/cpuset.cpus)" = "$held" ]; }

# closed: prints the number of connections that the daemon has closed, while the client has not read all of the response (FIN_WAIT1).
closed() { awk '$2 ~ /:2558$/ && $4 == "04"' /proc/net/tcp | wc -l; }
# stream QUERY TEXT: succeeds if a stream of root has this text within 10 s.
stream() {
    rm -f /run/stream
    (timeout 10 wget -q -O /run/stream "http://127.0.0.1:9560/api/v1/stream$1" || true) 2>/dev/null
    grep -q "$2" /run/stream
}

for attack in connections scrapes samples events; do
    section "$attack"
    as_nobody perl /run/attack.pl $attack &
    attackers=$!
    if [ $attack = events ]; then
        # Two users have as many connections as there are places of streams.
        as_second_user perl /run/attack.pl events-2 &
        attackers="$attackers $!"
        wait_for 60 began events-2
    fi
    wait_for 60 began $attack
    # Only scrapes and samples have a response that a client can block: for 30 s.
    case $attack in
        scrapes | samples) sleep 40 ;;
        *) sleep 10 ;;
    esac
    for _try in 1 2 3; do with_code scrape; done
    with_code stream "" '^: numaward'
    with_code stream "?samples=true" '^event: sample'
    with_code resize 65Mi
    with_code resize 64Mi
    with_code repairs
    section "ended $attack"
    closed
    end $attackers 2>/dev/null
    cat /run/attack/$attack*.log 2>/dev/null | wc -l
done

section "files"
systemctl start tenant
wait_for 300 began files
asking=
for _client in 1 2 3 4 5 6 7 8; do
    numaward regions tenant.service -o json >/run/regions-$_client 2>&1 &
    asking="$asking $!"
    numaward stacks tenant.service -o json >/run/stacks-$_client 2>/run/stacks-$_client.err &
    asking="$asking $!"
done
with_code scrape
with_code repairs
for _asked in $asking; do with_code wait $_asked; done
for _client in 1 8; do grep -c '"regions"' /run/regions-$_client || true; done
for _client in 1 8; do
    section "stacks of $_client"
    cat /run/stacks-$_client
done
section "regions of 1"
cat /run/regions-1
section "regions as text"
with_code numaward regions tenant.service
# The daemon reads the same mappings to move the pages beyond the share of the second node. Up to 270 MiB of the first node are used
# by others, and are not offered, so that 110 MiB at least of the 480 MiB on the second node are beyond its share.
section "budget"
with_code numaward guarantee tenant.service --memory 950Mi --memory-limit 1300Mi --preferred-nodes 0 2>&1
_moves() { ask /metrics | grep '^numaward_budget_moved_bytes_total{outcome="moved"}' | grep -v ' 0$'; }
ask /api/v1/allocations
cat $cgroups/system.slice/tenant.service/memory.numa_stat | grep anon
wait_for 300 _moves
_moves
with_code scrape
with_code repairs
with_code numaward release tenant.service
systemctl stop tenant
section "peak before the restart"
peak

section "port"
expect_error "cannot listen and tries again"
: >/run/restarting
systemctl stop numaward
as_nobody perl /run/attack.pl port &
attacker=$!
wait_for 60 began port
wget -q -O - http://127.0.0.1:9560/metrics
section "root without a daemon"
with_code numaward get 2>&1
with_code numaward status 2>&1
section "root with a daemon"
systemctl start numaward
wait_for 100 numaward get guarantees victim.service
# Still forged: the port is the user's.
wget -q -O - http://127.0.0.1:9560/livez
numaward get
with_code repairs
systemctl is-active numaward
end $attacker 2>/dev/null
_served() { ask /readyz >/run/ready && ! grep -q forged /run/ready; }
wait_for 60 _served
section "own port"
with_code scrape
section "peak after the port was taken"
peak
# systemd keeps the address while the daemon restarts.
section "port of the socket unit"
cp /numaward.socket /run/systemd/system/numaward.socket
systemctl daemon-reload
systemctl stop numaward
systemctl start numaward.socket || fail "the socket unit does not start"
systemctl start numaward
rm /run/attack/port
as_nobody perl /run/attack.pl port &
attacker=$!
for _restart in 1 2 3; do
    systemctl restart numaward 2>/dev/null
    with_code scrape
done
section "peak with the socket unit"
peak
section "attack on the socket unit"
[ ! -e /run/attack/port ] && echo "not taken"
kill -0 $attacker && echo "still tries"
end $attacker 2>/dev/null

# Off the loopback, all users of the host have one address, like the kubelet and the other processes of a host towards a pod.
systemctl stop numaward.socket numaward 2>/dev/null
rm /run/systemd/system/numaward.socket
systemctl daemon-reload
busybox ip address add 10.9.8.7/32 dev lo || fail "no address"
echo 'listen: 0.0.0.0:9560' >/etc/numaward/config.yaml
systemctl start numaward
wait_for 100 ready
section "shared address"
: >/run/shared
rm /run/restarting
as_nobody perl /run/attack.pl shared-connections &
attacker=$!
wait_for 60 began shared-connections
sleep 20
for _try in 1 2 3; do with_code timeout 10 wget -q -O /run/figures http://10.9.8.7:9560/metrics; done
kill -0 $attacker && echo "still tries"
end $attacker 2>/dev/null
section "answers at the shared address"
grep -c ' shared address$' /run/latencies

print_latencies
section "peak"
peak
section "held"
[ "$(cat $victim/cpuset.cpus)" = "$held" ] && echo same
echo "restarts $(systemctl show --value -p NRestarts numaward)"
section "end"
