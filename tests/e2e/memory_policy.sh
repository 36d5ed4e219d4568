# Commands with a memory policy and guaranteed memory on both nodes, because one node has too little.
set -eu
leaves_nothing
mkdir -p /etc/numaward
echo 'topologyManagerPolicy: best-effort' >/etc/numaward/config.yaml
start_daemon
# The administrator sets the weights.
weights=/sys/kernel/mm/mempolicy/weighted_interleave
[ -d $weights ] && echo 3 >$weights/node0 && echo 1 >$weights/node1

# The kernel shows the policy of the command's stack.
for policy in none bind preferred-many interleave weighted-interleave; do
    option=
    [ $policy = none ] || option="--memory-policy $policy"
    section "policy of $policy"
    code=0
    numaward exec --cpus 1 --memory 500Mi $option --name policy -- \
        awk '/ \[?stack/ { sub(/^[0-9a-f]* /, ""); sub(/ \[?stack.*/, ""); print; exit }' /proc/self/numa_maps 2>/tmp/policy.err ||
        code=$?
    [ $code = 0 ] || { cat /tmp/policy.err; echo "code $code"; }
    wait_for 20 no_guarantees
done

for policy in none interleave weighted-interleave; do
    # Older kernels than Linux 6.9 refuse it, as above.
    [ $policy != weighted-interleave ] || [ -d $weights ] || continue
    option=
    [ $policy = none ] || option="--memory-policy $policy"
    rm -f /tmp/load
    numaward exec --cpus 1 --memory 500Mi $option --name load -- numaward-load --size 128M --report json >/tmp/load 2>/tmp/load.err &
    command=$!
    _loaded() { [ -s /tmp/load ] || ! kill -0 $command; }
    wait_for 60 _loaded
    section "load of $policy"
    cat /tmp/load
    [ $policy = interleave ] && numaward describe load >/tmp/described
    end $command
    wait_for 20 no_guarantees
done
section "described"
cat /tmp/described

mkdir $cgroups/runs
section "refused"
with_code numaward guarantee /runs --cpus 1 --memory 16Mi --memory-policy bind 2>&1
section "log"
cat /tmp/daemon.log
[ ! -d $weights ] || { echo 0 >$weights/node0 && echo 0 >$weights/node1; }
tidy
