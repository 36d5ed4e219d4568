# A node of a cluster: the pod network, numaward's image, and the kubelet. Further scripts arrive over a port.
mkdir -p /etc/cni/net.d /var/run
[ -d /sys/kernel/tracing/events ] || mount -t tracefs tracefs /sys/kernel/tracing
# systemd makes all mounts shared.
mount --make-rshared / || fail "shared"

# As with systemd, the runtime, the kubelet and the commands of tests compete with the pods as cgroups, not as so many processes: a
# hundred containers that are created at once would leave the pods no CPU time, and the kubelet would restart numaward.
echo +cpu >$cgroups/cgroup.subtree_control
for _cgroup in system.slice/containerd.service system.slice/kubelet.service test.slice; do mkdir -p $cgroups/$_cgroup; done
for _process in $(pidof containerd); do echo $_process >$cgroups/system.slice/containerd.service/cgroup.procs; done
echo $$ >$cgroups/test.slice/cgroup.procs

# Pods, the kubelet and the host are on the same link.
brctl addbr br0 && ip addr del 10.0.2.15/24 dev eth0 && brctl addif br0 eth0 || fail "no bridge"
ip addr add 10.0.2.15/24 dev br0 && ip link set br0 up && ip route add default via 10.0.2.2 || fail "no address"
cat >/etc/cni/net.d/10-pods.conf <<END
{"cniVersion": "1.0.0", "name": "pods", "type": "bridge", "bridge": "br0", "isGateway": false, "ipMasq": false,
 "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.0.2.0/24", "rangeStart": "10.0.2.110", "rangeEnd": "10.0.2.250",
 "gateway": "10.0.2.2"}]], "routes": [{"dst": "0.0.0.0/0"}]}}
END
ctr -n k8s.io images import $IMPORT /numaward.tar 2>&1 || fail "import of numaward's image"
rm /numaward.tar /image/*.tar

cat >/bin/start-kubelet <<'END'
#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
echo $$ >/sys/fs/cgroup/system.slice/kubelet.service/cgroup.procs
kubelet --config /var/lib/kubelet/config.yaml --kubeconfig /etc/kubernetes/kubelet.conf --hostname-override node-1 \
    --node-ip 10.0.2.15 >>/tmp/kubelet.log 2>&1 </dev/null &
echo $! >/tmp/kubelet.pid
END
cat >/bin/stop-kubelet <<'END'
#!/bin/sh
pid=$(cat /tmp/kubelet.pid)
kill $pid
while kill -0 $pid 2>/dev/null; do sleep 1; done
END
cat >/bin/restart-containerd <<'END'
#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
kill -KILL $(pidof containerd)
echo $$ >/sys/fs/cgroup/system.slice/containerd.service/cgroup.procs
containerd --config /etc/containerd/config.toml >>/tmp/runtime.log 2>&1 </dev/null &
END
# record FILE: starts to record each change of the CPUs, the nodes and the first process of the cgroup in the current folder.
cat >/bin/record <<'END'
#!/bin/sh
{
    last=
    while read -r cpus <cpuset.cpus && read -r mems <cpuset.mems && read -r process <cgroup.procs; do
        now="$cpus $mems $process"
        [ "$now" = "$last" ] || echo "$now"
        last=$now
        sleep 0.5
    done
} >$1 2>&1 </dev/null &
END
chmod +x /bin/start-kubelet /bin/stop-kubelet /bin/restart-containerd /bin/record
mkdir -p /var/lib/kubelet
[ -e /var/lib/kubelet/config.yaml ] || cp /etc/kubernetes/kubelet.yaml /var/lib/kubelet/config.yaml
start-kubelet
section "commands"
exec nc -ll -p $COMMANDS -e /bin/sh
