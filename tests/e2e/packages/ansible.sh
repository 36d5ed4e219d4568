# The playbook of docs/rollout.md, with a repository on a web server, on this host alone.
set -eu
# Ansible refuses other encodings.
export LC_ALL=C.UTF-8 HOME=/root
busybox httpd -p 127.0.0.1:8080 -h /srv
rm -f /etc/apt/sources.list /etc/apt/sources.list.d/*
ln -sfn now/apt /srv/apt
sed 's#^URIs: ADDRESS#URIs: http://127.0.0.1:8080/apt#' /srv/now/apt/numaward.sources >/etc/apt/sources.list.d/numaward.sources
mkdir -p /etc/apt/keyrings
cp /srv/now/numaward.asc /etc/apt/keyrings/numaward.asc
quietly apt-get -q -o APT::Update::Error-Mode=any update

# A server with the API of Prometheus: the result of each query is in /run/result, and the queries are noted.
cat >/run/prometheus.py <<'END'
import http.server, urllib.parse
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        url = urllib.parse.urlparse(self.path)
        with open("/run/queries", "a") as file:
            print(url.path, *urllib.parse.parse_qs(url.query)["query"], file=file)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        with open("/run/result") as file:
            self.wfile.write(f'{{"status": "success", "data": {{"resultType": "vector", "result": {file.read()}}}}}'.encode())
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", 9090), Handler).serve_forever()
END
echo '[]' >/run/result
python3 /run/prometheus.py &
_serves() { wget -q -O /dev/null 'http://127.0.0.1:9090/api/v1/query?query=up'; }
wait_for 60 _serves
rm /run/queries

mkdir /run/fleet
cd /run/fleet
cp /playbook.yaml playbook.yaml
printf '[numaward]\nhost-1 ansible_connection=local ansible_python_interpreter=/usr/bin/python3\n' >inventory
# play OPTION...: prints the reasons of failed tasks, the counts of the playbook's end, and the exit code.
play() {
    code=0
    ANSIBLE_NOCOLOR=1 ansible-playbook -i inventory playbook.yaml -e prometheus=http://127.0.0.1:9090 \
        -e '{"gates": ["up{job=\"numaward\"} == 0"]}' "$@" >/run/played 2>&1 || code=$?
    grep -E '^(fatal|failed):|^ERROR' /run/played || true
    sed -n 's/^host-1  *: *//p' /run/played | tr -s ' '
    echo "code $code"
}
ansible-playbook --version | head -n 1

section "installed"
echo 'listen: 127.0.0.1:9560' >config.yaml
play
state
cat /etc/numaward/config.yaml /run/queries
section "again"
before=$(pid)
play
section "checked"
echo 'log: {level: debug}' >>config.yaml
play --check
cat /etc/numaward/config.yaml
[ "$(pid)" = "$before" ] && echo "the same process"
section "changed"
play
cat /etc/numaward/config.yaml
restarted "$before"
section "invalid"
before=$(pid)
echo 'listn: 127.0.0.1:9561' >>config.yaml
play
cat /etc/numaward/config.yaml
[ "$(pid)" = "$before" ] && echo "the same process"
section "closed gate"
sed -i '/listn/d' config.yaml
echo '[{"metric": {}, "value": [0, "1"]}]' >/run/result
play
section "end"
