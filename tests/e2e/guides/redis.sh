# Redis is pinned to the CPUs of node 1. That node is full of page cache, so Redis's memory is allocated on node 0.
unit=redis-server.service
_answers() { redis-cli ping | grep -q PONG; }

start_numaward
section "pin"
mkdir -p /etc/systemd/system/redis-server.service.d
printf '[Service]\nCPUAffinity=2-3\n' >/etc/systemd/system/redis-server.service.d/cpus.conf
systemctl daemon-reload
section "page cache"
numaward numactl --cpunodebind=1 dd if=/dev/vda of=/dev/null bs=1M count=1000
grep -E 'MemFree|FilePages' /sys/devices/system/node/node1/meminfo
section "start"
systemctl start redis-server
wait_for 120 _answers
look "started"
section "fill"
redis-benchmark -q -t set -n 60000 -r 60000 -d 1024 -P 16
settle
section "top before"
numaward top --once --filter redis
look "before"
section "guarantee"
numaward guarantee redis-server.service --cpus 1 --memory 256Mi --node 1
settle
section "top guaranteed"
numaward top --once --filter redis
look "guaranteed"
section "fill again"
redis-cli flushall
redis-benchmark -q -t set -n 60000 -r 60000 -d 1024 -P 16
settle
section "top after"
numaward top --once --filter redis
look "after"
section "describe"
numaward describe redis-server.service
section "trial"
numaward release redis-server.service
numaward trial redis-server.service --cpus 1 --memory 256Mi --node 1 --rounds 6 --after "SET:" --prepare "redis-cli flushall && systemctl restart redis-server" -- redis-benchmark -q -t set -n 20000 -r 20000 -d 1024 -P 16
section "left by the trial"
numaward get guarantees
log
