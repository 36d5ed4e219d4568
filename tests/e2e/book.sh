# What the commands of the first page need: a daemon, a service, and a program.
_ready() { wget -q -O - http://127.0.0.1:9560/readyz && numaward explain --cpus 1 --memory 1Mi; }
# Not every image has it: curl -s URL.
curl() { wget -q -O - "$2"; }

cat >/run/systemd/system/numaward.service <<'END'
[Service]
Type=notify
ExecStart=/usr/bin/numaward run
END
cat >/run/systemd/system/postgresql.service <<'END'
[Service]
ExecStart=/usr/bin/sleep infinity
END
systemctl daemon-reload
systemctl start numaward postgresql
wait_for 60 _ready
mkdir -p /run/here
cd /run/here
printf '#!/bin/sh\nsleep 1\necho served\n' >server
chmod +x server
