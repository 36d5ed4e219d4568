# A JVM: its heap is touched at the start, and threads on all CPUs use it.
unit=tomcat10.service
_answers() { wget -q -O - http://127.0.0.1:8080/ | grep -q 'It works'; }
_asks() {
ab -q -t 120 -n 1000000 -c 4 http://127.0.0.1:8080/
}

# On a busy host, the bus of an emulated systemd sometimes answers after the daemon's timeout, so the command is repeated.
_guarantees() {
numaward guarantee tomcat10.service --cpus 2 --memory 384Mi
}
# _threads: prints the number of garbage collector threads, and the number of all threads.
_threads() {
    grep -h . "/proc/$(systemctl show --value -p MainPID tomcat10)"/task/*/comm >/tmp/threads
    grep -c '^GC Thread#' /tmp/threads
    wc -l </tmp/threads
}
_released() { numaward release tomcat10.service; ! numaward get guarantees tomcat10.service; }

start_numaward
section "heap"
echo 'JAVA_OPTS="-Xms128m -Xmx128m -XX:+UseParallelGC -XX:+AlwaysPreTouch"' >>/etc/default/tomcat10
# An emulated machine takes minutes for the second compiler tier.
echo 'JAVA_OPTS="$JAVA_OPTS -XX:TieredStopAtLevel=1"' >>/etc/default/tomcat10
section "start"
systemctl start tomcat10
wait_for 600 _answers
_asks >/tmp/asks 2>&1 &
wait_for 120 _estimated '0\.[2-9]|1'
section "top before"
numaward top --once --filter tomcat
look "before"
section "guarantee"
wait_for 120 _guarantees
settle
wait_for 120 _estimated '0\.[01]'
section "top guaranteed"
numaward top --once --filter tomcat
look "guaranteed"
section "threads before"
_threads
section "restart"
systemctl restart tomcat10
wait_for 600 _answers
_asks >/tmp/asks 2>&1 &
settle
wait_for 120 _estimated '0\.0'
section "top after"
numaward top --once --filter tomcat
look "after"
section "threads after"
_threads
section "cpus"
grep -h -E '^(Cpus|Mems)_allowed_list' "/proc/$(systemctl show --value -p MainPID tomcat10)/status"
section "describe"
numaward describe tomcat10.service
wait_for 120 _released
systemctl stop tomcat10
section "options on all nodes"
java -XX:+UseParallelGC -XX:+UseNUMA -XX:+PrintFlagsFinal -version >/tmp/options 2>&1
grep -E ' (ParallelGCThreads|UseNUMA) ' /tmp/options || fail "java: $(cat /tmp/options)"
section "options"
numaward exec --cpus 1 --memory 256Mi -- \
    java -XX:+UseParallelGC -XX:+UseNUMA -XX:MaxRAMPercentage=50 -XX:+PrintFlagsFinal -version >/tmp/options 2>&1
grep -E ' (MaxHeapSize|ParallelGCThreads|UseNUMA) ' /tmp/options || fail "java: $(cat /tmp/options)"
log
