# Requests for call chains and regions of workloads that hang: a library on a file system that does not respond any more, and, by an
# unprivileged user, a process that holds its own memory map locked.
set -eu
# Protects a developer's host: the script does nothing outside of a machine.
[ -e /numaward.service ] || exit 1
# hung.pl KIND FOLDER: mounts a file system in user space with one file, `libc.so.6`. KIND is `library`, in which the file can be read
# until there is a file /run/hung/silent; or `lock`, in which no read is answered, and a child maps the file while another one reads it:
# the kernel then waits for the read with the lock of the child's memory map, held for writing. With `peek`, a child maps the file, and reads
# its own memory there once there is a file /run/hung/peek_now: the lock is held for reading. Perl has no modules here.
cat >/run/hung.pl <<'PERL'
use strict;
my ($kind, $folder) = @ARGV;
mkdir $folder;
sysopen my $fuse, '/dev/fuse', 2 or die "/dev/fuse: $!";
my $options = 'fd=' . fileno($fuse) . ',rootmode=40000,user_id=0,group_id=0' . ($kind eq 'library' ? ',allow_other' : '');
my ($source, $type) = ('hung', 'fuse');
syscall(165, $source, $folder, $type, 0, $options) == 0 or die "mount: $!";
my $content = 'a' x 4096;
if ($kind eq 'library') {
    open my $file, '<', '/lib/x86_64-linux-gnu/libc.so.6' or die $!;
    local $/;
    $content = <$file>;
} elsif ($kind eq 'peek') {
    if (!fork) {
        close $fuse;
        open my $file, '<', "$folder/libc.so.6" or die $!;
        my $address = syscall 9, 0, 4096, 1, 2, fileno $file, 0;
        open my $pid, '>', "/run/hung/peeks" or die $!;
        print $pid "$$\n";
        close $pid;
        select undef, undef, undef, 0.1 until -e '/run/hung/peek_now';
        open my $memory, '<', '/proc/self/mem' or die $!;
        sysseek $memory, $address, 0;
        sysread $memory, my $buffer, 1;
        sleep 1 while 1;
    }
} else {
    for my $child ('reads', 'maps') {
        next if fork;
        # Else the file system would outlast its server.
        close $fuse;
        sleep 2 if $child eq 'maps';
        open my $file, '<', "$folder/libc.so.6" or die $!;
        open my $pid, '>', "/run/hung/$child" or die $!;
        print $pid "$$\n";
        close $pid;
        sysread $file, my $buffer, 1 if $child eq 'reads';
        # PROT_READ, MAP_PRIVATE.
        syscall 9, 0, 4096, 1, 2, fileno $file, 0;
        sleep 1 while 1;
    }
}
sub answer { my ($unique, $error, $body) = @_; syswrite $fuse, pack('L l Q', 16 + length $body, $error, $unique) . $body }
# The attributes of the folder or of the file.
sub attributes {
    my ($node) = @_;
    my ($mode, $size) = $node == 1 ? (040755, 0) : (0100755, length $content);
    return pack 'Q6 L10', $node, $size, 0, 0, 0, 0, 0, 0, 0, $mode, 1, 0, 0, 0, 4096, 0;
}
my $opened = 0;
# include/uapi/linux/fuse.h
while (sysread $fuse, my $request, 1 << 18) {
    my (undef, $operation, $unique, $node) = unpack 'L L Q Q', $request;
    my $argument = substr $request, 40;
    my $is_silent = $kind ne 'library' || -e '/run/hung/silent';
    if ($operation == 26) {
        answer($unique, 0, pack 'L4 S2 L2 S2 L8', 7, 31, 1 << 17, 1, 12, 9, 1 << 17, 1, 32, (0) x 9);
    } elsif ($operation == 1) {
        my $is_file = unpack('Z*', $argument) eq 'libc.so.6';
        answer($unique, $is_file ? 0 : -2, $is_file ? pack('Q4 L2', 2, 0, 0, 0, 0, 0) . attributes(2) : '');
    } elsif ($operation == 3) {
        answer($unique, 0, pack('Q L2', 0, 0, 0) . attributes($node));
    } elsif ($operation == 14) {
        # FOPEN_DIRECT_IO, so that no read is answered from the kernel's cache, and FOPEN_KEEP_CACHE.
        my $is_direct = $kind eq 'lock' ? $opened++ > 0 : $is_silent && $kind eq 'library';
        answer($unique, 0, pack 'Q L2', 1, $is_direct ? 3 : 0, 0);
    } elsif ($operation == 15) {
        my (undef, $offset, $size) = unpack 'Q Q L', $argument;
        answer($unique, 0, $offset < length $content ? substr $content, $offset, $size : '') if !$is_silent;
    } elsif ($operation == 18 || $operation == 25) {
        answer($unique, 0, '');
    } elsif ($operation != 2 && $operation != 36 && $operation != 42) {
        answer($unique, -38, '');
    }
}
PERL
# Allocates on both nodes in turn, again and again: MPOL_INTERLEAVE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE.
cat >/run/allocate.pl <<'PERL'
my $nodes = pack 'Q', 3;
syscall 238, 3, $nodes, 64;
for (1 .. 1_000_000) {
    my $memory = syscall 9, 0, 4 << 20, 3, 0x8022, -1, 0;
    syscall 11, $memory, 4 << 20;
    select undef, undef, undef, 0.1;
}
PERL
mkdir -m 777 /run/hung
# As udev does.
chmod 666 /dev/fuse
mkdir -p /etc/numaward
echo 'observe: {callChains: {enabled: true, sampleEvery: 16}}' >/etc/numaward/config.yaml
cp /numaward.service /run/systemd/system/numaward.service
path='Environment=PATH=/numaward-vm/bin:/usr/bin:/bin'
printf '[Service]\nExecStart=/bin/sleep infinity\n' >/run/systemd/system/victim.service
printf '[Service]\n%s\nExecStart=/usr/bin/perl /run/hung.pl library /run/hung/library\n' "$path" >/run/systemd/system/hung.service
printf '[Service]\nUser=nobody\nEnvironment=LD_LIBRARY_PATH=/run/hung/library\nExecStart=/usr/bin/perl /run/allocate.pl\n' >/run/systemd/system/tenant.service
for kind in lock peek; do
    printf '[Service]\nUser=nobody\n%s\nExecStart=/usr/bin/unshare -U -r -m /usr/bin/perl /run/hung.pl %s /run/hung/%s\n' \
        "$path" $kind $kind >/run/systemd/system/${kind}ed.service
done
for number in 1 2; do
    cp /run/systemd/system/victim.service /run/systemd/system/other_$number.service
done
systemctl daemon-reload
systemctl start numaward victim hung || fail "the units do not start"
wait_for 100 ready
_mounted() { [ -s /run/hung/library/libc.so.6 ]; }
wait_for 60 _mounted
systemctl start tenant || fail "the tenant does not start"

# timed COMMAND...: prints the output, the exit code and the time in seconds.
timed() {
    _start=$(cut -d. -f1 /proc/uptime)
    with_code "$@" 2>&1
    echo "took $(($(cut -d. -f1 /proc/uptime) - _start))"
}
# calls NAME: succeeds if there are call chains of the workload.
# quick COMMAND...: prints whether the command succeeds within a second. One that waits in the kernel cannot be ended.
quick() {
    rm -f /run/quick
    ("$@" >/dev/null 2>&1 && : >/run/quick) &
    sleep 1
    if [ -e /run/quick ]; then echo "in time"; else echo late; fi
}
set_cpus() { echo $2 >$cgroups/$1/cpuset.cpus; }
# others NUMBER: changes and creates cgroups.
others() {
    quick mkdir $cgroups/other_$1
    quick set_cpus other_$1 0-1
    quick set_cpus other 0-$1
    quick systemctl start other_$1.service
}
calls() { numaward stacks $1 -o json 2>/dev/null | grep -q '"bytes"'; }
alive() { timeout 1 wget -q -O - http://127.0.0.1:9560/livez; }
wait_for 60 calls tenant.service
watch_daemon
section "before"
timed numaward stacks tenant.service -o json

: >/run/hung/silent
section "hung library"
timed numaward stacks tenant.service
section "hung library again"
timed numaward stacks tenant.service
section "beside the hung library"
timed numaward regions tenant.service -o json | tail -n 2
timed numaward stacks victim.service -o json | tail -n 2
alive

systemctl start locked || fail "the user's unit does not start"
_maps() { [ -s /run/hung/maps ]; }
wait_for 60 _maps
sleep 2
section "locked map"
# Older kernels wait for the lock: nobody can read the map.
timeout -s KILL 2 cat /proc/$(cat /run/hung/maps)/maps >/dev/null 2>&1 && echo readable || echo locked
section "regions of the locked map"
timed numaward regions locked.service
section "regions of the locked map again"
timed numaward regions locked.service
section "beside the locked map"
timed numaward regions victim.service -o json | tail -n 2
alive
wait_for 60 numaward guarantee victim.service --cpus 1 --memory 64Mi
cat $cgroups/system.slice/victim.service/cpuset.cpus

mkdir $cgroups/other
section "guarantee of the locked map"
timed numaward guarantee locked.service --cpus 1 --memory 64Mi
others 1
systemctl start peeked || fail "the user's second unit does not start"
_peeks() { [ -s /run/hung/peeks ]; }
wait_for 60 _peeks
quiet_guarantee peeked.service --cpus 1 --memory 64Mi
: >/run/hung/peek_now
sleep 2
section "release of the locked map"
cat $cgroups/system.slice/peeked.service/cpuset.mems
expect_error "the guarantee cannot be released; the release is retried"
timed numaward release peeked.service
others 2
cat $cgroups/system.slice/peeked.service/cpuset.mems

section "after the end of both"
systemctl kill -s KILL hung locked peeked tenant
_ended() { ! systemctl is-active -q hung && ! systemctl is-active -q locked && ! systemctl is-active -q peeked; }
wait_for 60 _ended
rm /run/hung/silent
umount -l /run/hung/library
systemctl start hung
wait_for 60 _mounted
systemctl start tenant
wait_for 60 calls tenant.service
timed numaward stacks tenant.service -o json | tail -n 2
timed numaward regions tenant.service -o json | tail -n 2
echo "restarts $(systemctl show --value -p NRestarts numaward)"
print_latencies
section "peak"
peak
section "end"
