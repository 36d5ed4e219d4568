# Attempts of an unprivileged user and of a process in a container. The user nobody has a delegated subtree, like a user
# manager's.
set -eu
_done() { [ -s /run/tenant/$1 ]; }
# as_nobody COMMAND...: prints the output and the exit code.
as_nobody() {
    with_code numaward-capabilities nobody "$@" 2>&1
}
# attribute PATH [NAME VALUE]: prints the daemon's extended attributes of a directory, or sets an attribute.
cat >/run/attribute.pl <<'END'
my ($path, $name, $value) = @ARGV;
if (defined $name) {
    my $result = syscall(188, $path, $name, $value, length $value, 0);
    print $result == 0 ? "set $name\n" : "cannot set $name: $!\n";
    exit;
}
my $names = "\0" x 65536;
my $length = syscall(194, $path, $names, length $names);
for my $name (grep { /^user\.numaward\./ } split /\0/, substr $names, 0, $length > 0 ? $length : 0) {
    my $value = "\0" x 65536;
    my $length = syscall(191, $path, $name, $value, length $value);
    print substr($value, 0, $length > 0 ? $length : 0), "\n";
}
END
# attributes DIRECTORY: sets 60 attributes with long names on each directory in it. Prints the number of attributes.
cat >/run/attributes.pl <<'END'
my ($directory, $number, $value) = (@ARGV, 0, 'x');
for my $path (glob "$directory/*/") {
    for my $attribute (1 .. 60) {
        my $name = 'user.numaward.' . 'x' x 235 . $attribute;
        $number += syscall(188, $path, $name, $value, 1, 0) == 0;
    }
}
print "$number\n";
END
victim=$cgroups/system.slice/victim.service
tenant=$cgroups/system.slice/tenant.service
id=0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
pod=kubepods.slice/kubepods-pod11111111_2222_3333_4444_555555555555.slice

mkdir -p /etc/numaward
printf 'an-%s-token' address >/etc/numaward/token
chmod 600 /etc/numaward/token
cat >/etc/numaward/config.yaml <<'END'
control: {listen: "127.0.0.1:9561", tokenFile: /etc/numaward/token}
enforcement: {herding: {mode: "on"}}
END
cp /numaward.service /run/systemd/system/numaward.service
printf '[Service]\nExecStart=/bin/sleep infinity\n' >/run/systemd/system/victim.service
# Script of the subtree's owner: creates cgroups with a load in one, and on request many more cgroups.
mkdir -m 777 /run/tenant
cat >/run/tenant.sh <<'END'
own=/sys/fs/cgroup/system.slice/tenant.service
mkdir -p $own/inner $own/$1/cri-containerd-$2.scope $own/kubepods/burstable/podu1/web
echo $$ >$own/inner/cgroup.procs
# load SIZE: starts a load in a cgroup that is named like a container, for each cgroup driver.
load() {
    numaward-load --size $1 --report json --cgroup $own/$container >/run/tenant/load$1 &
    numaward-load --size $1 --report json --cgroup $own/kubepods/burstable/podu1/web >/run/tenant/web$1 &
}
container=$1/cri-containerd-$2.scope
load 1M
until [ -e /run/tenant/known ]; do sleep 1; done
load 32M
until [ -e /run/tenant/flood ]; do sleep 1; done
# Paths of 2.5 KB, and short ones.
mkdir $own/long
cd $own/long
for part in 1 2 3 4 5 6 7 8 9 10; do
    mkdir $part$(printf '%0240d' 0)
    cd $part$(printf '%0240d' 0)
done
seq 1 1500 | xargs mkdir
cd $own/inner
seq 1 4500 | xargs mkdir
echo made >/run/tenant/made
sleep infinity
END
cat >/run/systemd/system/tenant.service <<END
[Service]
User=nobody
Delegate=yes
Environment=PATH=/numaward-vm/bin:/bin
ExecStart=/bin/busybox sh /run/tenant.sh $pod $id
END
systemctl daemon-reload
systemctl start numaward victim || fail "the units do not start"
daemon=$(systemctl show --value -p MainPID numaward)
wait_for 100 ready
systemctl start tenant || fail "the tenant does not start"
quiet_guarantee victim.service --cpus 1 --memory 64Mi
# The journal is written at once, the ledger file later.
wait_for 60 [ -s /var/lib/numaward/ledger.json ]

watch_daemon
section "modes"
stat -c '%a %U %n' /run/numaward /run/numaward/control.sock /var/lib/numaward /var/lib/numaward/ledger.json \
    /var/lib/numaward/ledger.journal
section "files"
as_nobody cat /var/lib/numaward/ledger.json
as_nobody cat /var/lib/numaward/ledger.journal
as_nobody ls /var/lib/numaward
as_nobody ls /run/numaward
section "control"
as_nobody numaward release victim.service
section "signals"
for signal in TERM KILL STOP; do as_nobody kill -$signal $daemon; done
section "process"
for file in mem environ maps fd; do as_nobody head -c 1 /proc/$daemon/$file; done
section "knobs"
as_nobody sh -c "echo 0 >$victim/cpuset.cpus"
section "read"
as_nobody wget -q -O /dev/null http://127.0.0.1:9560/metrics
section "foreign mappings"
for list in regions stacks; do as_nobody wget -O - http://127.0.0.1:9560/api/v1/workloads/victim.service/$list; done
# request METHOD PATH HOST: prints the first line of the response.
request() {
    rm -f /run/answer
    {
        printf '%s %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n' $1 $2 $3
        for _try in $(seq 60); do
            sleep 0.5
            [ -s /run/answer ] && break
        done
    } | as_nobody nc 127.0.0.1 9560 >/run/answer
    head -n 1 /run/answer
}
section "change"
as_nobody wget -O - --post-data '{}' --header 'Content-Type: application/json' http://127.0.0.1:9560/api/v1/allocations
request DELETE /api/v1/allocations/victim.service localhost
section "rebound"
request GET /metrics evil.example

# The same from new namespaces, in which nobody is mapped to root. The files are made accessible, so that only the peer
# credentials protect the daemon.
section "container"
as_nobody unshare -U -r -m -p -f -n -i -u sh -c 'id -u; numaward release victim.service; kill -0 '$daemon'; wget -q -O - http://127.0.0.1:9560/livez'
chmod 755 /run/numaward
chmod 666 /run/numaward/control.sock
section "opened socket"
as_nobody numaward release victim.service
section "opened socket in a container"
as_nobody unshare -U -r -m -p -f -n sh -c 'numaward release victim.service'
chmod 600 /run/numaward/control.sock
chmod 700 /run/numaward

# Root in a container with the host's network, such as a pod with hostNetwork: the host's user namespace, its own file system,
# process ids and cgroups, and the default capabilities of runtimes. It can reach the daemon's ports, and the names of its
# sockets.
mkdir -p /run/container/bin /run/container/proc /run/container/sys
cp /bin/busybox $(command -v numaward) $(command -v numaward-capabilities) /run/container/bin
cat >/run/container/enter.sh <<'END'
set -e
mount --make-rprivate /
mount --bind /run/container /run/container
mount -t proc proc /run/container/proc
mount -t sysfs -o ro sysfs /run/container/sys
mount -t cgroup2 -o ro cgroup2 /run/container/sys/fs/cgroup
cd /run/container
# pivot_root does not work with an initramfs as root.
/usr/bin/mount --move /run/container /
exec chroot . /bin/busybox sh -c '
    export PATH=/bin
    exec numaward-capabilities CHOWN,DAC_OVERRIDE,FSETID,FOWNER,MKNOD,NET_RAW,SETGID,SETUID,SETFCAP,SETPCAP,NET_BIND_SERVICE,SYS_CHROOT,KILL,AUDIT_WRITE \
        busybox sh -c "$1"' sh "$1"
END
# in_container COMMANDS: prints the output and the exit code.
in_container() {
    with_code /usr/bin/unshare -m -p -f -i -u -C sh /run/container/enter.sh "$1" 2>&1
}
section "host's network"
in_container 'busybox id -u; busybox wget -q -O - http://127.0.0.1:9560/livez; busybox wget -q -O /figures http://127.0.0.1:9560/metrics'
section "host's network: files"
for file in /run/numaward /var/lib/numaward/ledger.json /etc/numaward/token; do in_container "busybox ls $file"; done
section "host's network: control"
in_container 'numaward release victim.service'
section "host's network: change"
for path in "POST /api/v1/allocations" "DELETE /api/v1/allocations/victim.service"; do
    for port in 9560 9561; do
        rm -f /run/container/answer
        in_container "{
            printf '$path HTTP/1.0\r\nContent-Type: application/json\r\n\r\n'
            for try in \$(busybox seq 60); do busybox sleep 0.5; [ -s /answer ] && break; done
        } | busybox nc 127.0.0.1 $port >/answer; busybox head -n 1 /answer"
    done
done
section "host's network: process"
in_container "busybox kill -KILL $daemon"
in_container "busybox cat /proc/$daemon/environ"
section "host's network: knobs"
in_container 'echo +cpuset >/sys/fs/cgroup/cgroup.subtree_control'
in_container 'busybox mount -o remount,rw /sys/fs/cgroup'
in_container 'busybox mount -t cgroup2 none /proc'
# Abstract sockets have a name and no file, so every process in the network namespace can reach them.
section "the daemon's sockets"
for file in /proc/$daemon/fd/*; do
    inode=$(readlink $file | sed -n 's/^socket:\[\(.*\)\]$/\1/p')
    [ -n "$inode" ] && awk -v inode=$inode '$7 == inode && NF > 7 { print $8 }' /proc/net/unix
done | sort -u
section "with the token"
authorized="Authorization: Bearer $(cat /etc/numaward/token)"
with_code wget -q -O /dev/null --header "$authorized" http://127.0.0.1:9561/api/v1/allocations

section "still held"
allocations

section "forged"
# A new workload has its own counters a moment after its first page.
_counted() { ask /api/v1/workloads | grep -q '"workload":"tenant.service"[^}]*"counters":"own"'; }
wait_for 60 _done load1M
wait_for 60 _done web1M
wait_for 60 _counted
touch /run/tenant/known
wait_for 60 _done load32M
wait_for 60 _done web32M
ask /api/v1/workloads
echo
section "forged figures"
ask /metrics | grep -E '^numaward_memory_allocated_bytes_total.*(pods|namespace=|cri-containerd|tenant)'

section "peak before the marks"
peak
section "marks"
perl /run/attribute.pl $victim >/run/mark
cat /run/mark
inode() { stat -c %i $1; }
forged=$tenant/inner
sed -e "s#/system.slice/victim.service#/system.slice/tenant.service/inner#g" -e "s#victim.service#forged#g" \
    -e "s#:$(inode $victim)\b#:$(inode $forged)#g" /run/mark >/run/forged
for prefix in user trusted; do
    as_nobody perl /run/attribute.pl $forged $prefix.numaward.$(inode $forged) "$(cat /run/forged)"
done
: >/run/restarting
systemctl stop numaward
rm -r /var/lib/numaward/*
systemctl start numaward
wait_for 100 ready
rm /run/restarting
section "rebuilt"
allocations
section "rebuilt log"
journalctl -q --no-pager -u numaward | grep -i "mark"

section "flood"
touch /run/tenant/flood
wait_for 300 _done made
_crowded() { ask /api/v1/status | grep -q 'too many cgroups'; }
wait_for 120 _crowded
ask /api/v1/status
echo
section "after the flood"
systemctl start numaward
numaward release victim.service
quiet_guarantee victim.service --cpus 1 --memory 64Mi
cat $victim/cpuset.cpus
ask /livez
echo "restarts $(systemctl show --value -p NRestarts numaward)"
section "regions of the flood"
with_code numaward regions tenant.service -o json | tail -n 1
section "peak"
peak
print_latencies
section "attributes"
as_nobody perl /run/attributes.pl $tenant/inner
section "after six kills"
# The daemon notifies systemd up to a second after it is ready.
_runs() { [ "$(systemctl show --value -p NRestarts numaward)" = $kill ] && ready && systemctl is-active --quiet numaward; }
for kill in 1 2 3 4 5 6; do
    systemctl kill -s KILL --kill-who=main numaward
    wait_for 60 _runs
done
# Restarts are not limited, however fast the kills come.
systemctl show --value -p StartLimitIntervalUSec numaward
cat $victim/cpuset.cpus
systemctl is-active numaward
section "peak of the last start"
peak
section "end"
