# Precedes the scripts of attacks: checks throughout that the daemon is alive.
set -eu
# watch.pl: checks every 0.2 s that the daemon is alive, except during a restart, until there is a file /run/over. It writes to
# /run/latencies the milliseconds of each answer and the section of the report, and to /run/late a line for each late or failed answer. It
# is one process: a new one for each check would wait for its CPU and its memory beside the attack, and not for the daemon. With a file
# /run/shared, it asks from the address of the attacker, and not as another user.
cat >/run/watch.pl <<'PERL'
use strict;
my $clock_gettime = `uname -m` =~ /aarch64/ ? 113 : 228;
# Returns the time of CLOCK_MONOTONIC.
sub milliseconds {
    my $time = "\0" x 16;
    syscall($clock_gettime, 1, $time) == 0 or die $!;
    my ($seconds, $nanoseconds) = unpack 'q q', $time;
    return $seconds * 1000 + $nanoseconds / 1_000_000;
}
my ($loopback, $shared) = map { pack 'S n C4 x8', 2, 9560, @$_ } [127, 0, 0, 1], [10, 9, 8, 7];
sub section { open my $file, '<', '/run/section' or die $!; chomp(my $name = <$file>); return $name }
# Returns the answer, or what has failed.
sub ask {
    socket my $socket, 2, 1, 0 or return "socket: $!";
    connect $socket, -e '/run/shared' ? $shared : $loopback or return "connect: $!";
    syswrite $socket, "GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" or return "write: $!";
    my ($answer, $bits) = ('', '');
    vec($bits, fileno $socket, 1) = 1;
    while (select my $ready = $bits, undef, undef, 1) {
        my $read = sysread $socket, $answer, 4096, length $answer;
        return "read: $!" if !defined $read;
        return $answer if $read == 0;
    }
    return "nothing within a second after: $answer";
}
$SIG{PIPE} = 'IGNORE';
open my $latencies, '>', '/run/latencies' or die $!;
open my $late, '>', '/run/late' or die $!;
until (-e '/run/over') {
    if (!-e '/run/restarting') {
        my $asked = milliseconds();
        my $answer = ask();
        my $took = int(milliseconds() - $asked);
        my $section = section();
        syswrite $latencies, "$took $section\n";
        $answer =~ s/\s+/ /g;
        my $is_late = $took >= 1000 || $answer !~ m{^HTTP/1.1 200};
        syswrite $late, "$section: $took ms: $answer\n" if $is_late && !-e '/run/restarting';
    }
    select undef, undef, undef, 0.2;
}
PERL
# section NAME: begins a section, also for the lines of watch.pl.
section() {
    _section=$1
    echo "$1" >/run/section
    printf '\n=== %s\n' "$1"
}
# watch_daemon: begins the checks.
watch_daemon() {
    echo before >/run/section
    perl /run/watch.pl &
    watcher=$!
}
# print_latencies: ends the checks, and prints sections with the late answers and the latest ones.
print_latencies() {
    : >/run/over
    wait $watcher
    section "late"
    cat /run/late
    section "latest answers in milliseconds"
    sort -n /run/latencies | tail -n 5
}
