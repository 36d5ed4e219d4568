# Creates and removes workloads of all kinds for $seconds, and records the resources of the daemon and of the kernel every $pause
# seconds.
set -eu

# Removed workloads are reported for a short time only, so that minutes correspond to hours.
printf '%s\n' 'stateDirectory: /run/state' 'observe: {keepRemoved: 5s}' >/run/config.yaml
start_daemon --config /run/config.yaml
count() { find $cgroups -type d 2>/dev/null | wc -l; }
first=$(count)
until=$(($(date +%s) + seconds))
goes_on() { [ "$(date +%s)" -lt $until ]; }

# Commands with CPUs and memory, each with a load.
commands() {
    number=0
    while goes_on; do
        number=$((number + 1))
        code=0
        numaward exec --cpus 1 --memory 32Mi --name "command-$1-$number" -- \
            timeout -s TERM 1 numaward-load --size 8M --report json >/dev/null 2>/tmp/command-$1 || code=$?
        # 143: `timeout` ended the load.
        [ $code -eq 143 ] || [ $code -eq 0 ] || echo "command-$1-$number: code $code: $(cat /tmp/command-$1)" >>/run/failures
        echo >>/run/commands
    done
}
# Cgroups of another program: created, guaranteed, released and removed; some have many children.
others() {
    number=0
    while goes_on; do
        number=$((number + 1))
        of=$cgroups/other-$number
        mkdir $of
        numaward-load --size 4M --report json --cgroup $of >/run/other 2>&1 &
        load=$!
        numaward guarantee /other-$number --memory 32Mi >/run/guarantee 2>&1 || cat /run/guarantee >>/run/failures
        if [ $((number % 2)) -eq 0 ]; then
            numaward release /other-$number >/run/guarantee 2>&1 || cat /run/guarantee >>/run/failures
        fi
        kill $load
        wait $load 2>/dev/null || true
        for below in $(seq 1 20); do mkdir $of/below-$below; done
        find $of -depth -type d -exec rmdir {} ';'
        echo >>/run/others
    done
}
# status_of NAME: prints a value of the daemon's /proc status.
status_of() { grep -o "^$1:[^0-9]*[0-9]*" /proc/$daemon/status | grep -o '[0-9]*$'; }
number_of() { if [ -e $1 ]; then wc -l <$1; else echo 0; fi; }
sample() {
    scraped=$(cut -d ' ' -f 1 /proc/uptime)
    for _ in 1 2 3 4 5 6 7 8 9 10; do ask /metrics >/run/metrics; done
    scraped="$scraped,$(cut -d ' ' -f 1 /proc/uptime)"
    entries=$(grep '^numaward_probe_map_entries' /run/metrics | sed 's/.* //' | tr '\n' '+')
    cat <<END
{"commands":$(number_of /run/commands),"others":$(number_of /run/others),"residentKib":$(status_of VmRSS),"threads":$(status_of Threads),"descriptors":$(ls /proc/$daemon/fd 2>/dev/null | wc -l),"cgroups":$(count),"series":$(grep -c '^numaward_' /run/metrics),"entries":$((${entries}0)),"stateBytes":$(du -k -s /run/state | cut -f 1)000,"tenScrapes":[$scraped]}
END
}

section "samples"
touch /run/failures
commands a &
first_commands=$!
commands b &
second_commands=$!
others &
third=$!
while goes_on; do
    sleep $pause
    sample
done
wait $first_commands $second_commands $third
_empty() { no_guarantees && [ "$(count)" -eq $first ]; }
wait_for 60 _empty
sleep 15
section "in the end"
sample
section "failures"
head -c 4000 /run/failures
section "log"
grep -E '"(ERROR|WARN)"|ERROR|WARN' /tmp/daemon.log | tail -n 20
kill -0 $daemon || fail "the daemon is gone"
section "end"
