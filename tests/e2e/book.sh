# The daemon as its package installs it, further programs, and a terminal with typed keys.
set -eu -o pipefail
systemctl start numaward
wait_for 120 ready
# The first step of the history takes ten seconds.
_remembered() { curl -s http://127.0.0.1:9560/api/v1/history/workloads | grep -q redis.service; }
wait_for 120 _remembered
cd /run/here
ln -s /srv/traces /srv/prometheusrule.yaml .

# Programs that print their CPUs and memory policy.
cat >where <<'END'
cpus=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status)
policy=$(awk '/ \[?stack/ { print $2; exit }' /proc/self/numa_maps)
END
for program in forwarder:forwarded batch:done scan:scanned trader:traded; do
    printf '#!/bin/sh\n. /run/here/where\necho "%s on $cpus by $policy"\n' "${program#*:}" >"${program%%:*}"
done
# The editor of `systemctl edit`: inserts the text of the book below the first comment.
cat >editor <<'END'
#!/bin/sh
awk '{ print } /^### Anything between/ { print "[Service]\nMemoryMax=1G" }' "$1" >/tmp/edited && cat /tmp/edited >"$1"
END
chmod +x forwarder batch scan trader editor
export EDITOR=/run/here/editor

# types WORDS KEYS COMMAND: runs the command in a terminal of 50 lines, and types the keys as soon as the words are on the screen.
types() {
    rm -f /tmp/screen /tmp/over
    : >/tmp/screen
    {
        _tries=900
        until grep -qF "$1" /tmp/screen || [ -e /tmp/over ] || [ $_tries = 0 ]; do
            _tries=$((_tries - 1))
            sleep 0.1
        done
        printf "$2"
        sleep 1
    } | {
        _over=0
        TERM=xterm LC_ALL=C.UTF-8 NO_COLOR=1 /usr/bin/script -qefc "stty rows 50 cols 120; $3" /tmp/screen >/dev/null || _over=$?
        echo $_over >/tmp/over
    }
    # Removes escape sequences, and the messages of `script`.
    sed "/^Script /d; s/$(printf '\033')\[[0-9;?]*[a-zA-Z]/ /g" /tmp/screen | tr -d '\r'
    return "$(cat /tmp/over)"
}

guarantee() { numaward guarantee postgresql@17-main.service --cpus 2 --memory 40Mi --node 0; }
# Leaves one free CPU on each node. Two CPUs of one node are free after the small workload has moved.
crowd() {
    numaward guarantee redis.service --cpus 6 --memory 40Mi --node 0
    numaward guarantee small.service --cpus 1 --memory 20Mi --preferred-nodes 1
}
# stray: a moment later, another program allows a service both nodes, and the service allocates outside its guarantee.
stray() {
    {
        sleep 3
        for _ in $(seq 20); do
            echo 0-1 >"$(cgroup_of postgresql@17-main.service)/cpuset.mems"
            numaward-load --cgroup "$(cgroup_of postgresql@17-main.service)" --size 4M --policy bind:1 --hold 0 || true
        done
    } &
}
# distant: a moment later, a workload repeatedly allocates memory on the other node.
distant() {
    mkdir -p $cgroups/distant
    {
        sleep 3
        for _ in $(seq 20); do numaward-load --cgroup $cgroups/distant --cpus 0 --size 16M --policy bind:1 --hold 0; done
    } &
}
# configured: writes a configuration file for a command that reads it. The daemon uses the defaults.
configured() {
    mkdir -p /etc/numaward
    echo 'topologyManagerPolicy: restricted' >/etc/numaward/config.yaml
}
# Records three seconds before 02:30. After the first sample, another program overwrites a knob of a guarantee, because the
# recording only contains events after its first sample.
_recorded() { [ "$(stat -c %s night.record)" -gt 100 ]; }
night() {
    numaward guarantee small.service --cpus 1 --memory 20Mi
    date -u -s "@$((($(date +%s) / 86400 + 1) * 86400 + 9000 - 3))"
    {
        wait_for 60 _recorded
        sleep 3
        echo 0-7 >"$(cgroup_of small.service)/cpuset.cpus"
        sleep 5
        numaward release small.service
    } &
}
