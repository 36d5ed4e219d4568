# PostgreSQL: one process reads the table into the shared buffers, and backends on all CPUs use them.
unit=postgresql@17-main.service
_answers() { runuser -u postgres -- psql -qAtc 'SELECT 1'; }
# The commands of the page are not indented.
_asks() {
runuser -u postgres -- pgbench -n -S -c 4 -T 40
}

start_numaward
systemctl start postgresql@17-main
wait_for 120 _answers
section "load"
runuser -u postgres -- pgbench -q -i -s 5
runuser -u postgres -- psql -c 'CREATE EXTENSION pg_prewarm'
systemctl restart postgresql@17-main
wait_for 120 _answers
runuser -u postgres -- psql -c "SELECT pg_prewarm('pgbench_accounts')"
look "loaded"
_asks >/tmp/asks 2>&1 &
asks=$!
settle
section "top before"
numaward top --once --filter postgresql
look "before"
settle
look "before, again"
wait $asks || fail "pgbench: $(cat /tmp/asks)"

_asks >/tmp/asks 2>&1 &
asks=$!
sleep 10
section "guarantee"
numaward guarantee postgresql@17-main.service --cpus 2 --memory 384Mi
settle
section "top guaranteed"
numaward top --once --filter postgresql
look "guaranteed"
wait $asks || fail "pgbench: $(cat /tmp/asks)"

section "restart"
systemctl restart postgresql@17-main
wait_for 120 _answers
runuser -u postgres -- psql -c "SELECT pg_prewarm('pgbench_accounts')"
_asks >/tmp/asks 2>&1 &
asks=$!
settle
settle
section "top after"
numaward top --once --filter postgresql
look "after"
wait $asks || fail "pgbench: $(cat /tmp/asks)"
section "describe"
numaward describe postgresql@17-main.service
section "trial"
numaward release postgresql@17-main.service
numaward trial postgresql@17-main.service --cpus 2 --memory 384Mi --rounds 6 --after "tps =" --prepare "systemctl restart postgresql@17-main && sleep 5" -- runuser -u postgres -- pgbench -n -S -c 4 -T 5
section "left by the trial"
numaward get guarantees
log
