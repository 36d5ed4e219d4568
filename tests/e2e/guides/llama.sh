# An inference server: its model was loaded on one node, and its threads run on all nodes.
unit=llama-server.service
model=/srv/model.gguf
_answers() { ask_server /health; }
ask_server() { wget -q -O - "http://127.0.0.1:8080$1"; }
_completes() {
wget -q -O - --post-data '{"prompt": "NUMA", "n_predict": 400, "ignore_eos": true}' http://127.0.0.1:8080/completion
}
# _where: prints the pages of the model's mapping by node.
_where() {
grep model.gguf "/proc/$(systemctl show --value -p MainPID llama-server)/numa_maps"
}

# On a busy host, the bus of an emulated systemd sometimes answers after the daemon's timeout, so the command is repeated.
_guarantees() {
numaward guarantee llama-server.service --cpus 2 --memory 384Mi --node 1
}

start_numaward
section "model"
numaward numactl --cpunodebind=0 python3 /srv/model.py /srv/model.gguf
ls -l /srv
section "start"
printf 'LLAMA_ARG_MODEL=/srv/model.gguf\nLLAMA_ARG_LOAD_MODE=none\nLLAMA_ARG_CTX_SIZE=512\nLLAMA_ARG_PORT=8080\n' >>/etc/default/llama-server
systemctl start llama-server
wait_for 600 _answers
_completes >/dev/null 2>&1 &
# By then the server has computed for a while, after loading the model.
settle
wait_for 120 _estimated '0\.[2-9]|1'
section "top before"
numaward top --once --filter llama
look "before"
section "guarantee"
wait_for 120 _guarantees
settle
wait_for 120 _estimated '0\.0'
section "top guaranteed"
numaward top --once --filter llama
look "guaranteed"

section "mapped"
sed -i 's/LLAMA_ARG_LOAD_MODE=none/LLAMA_ARG_LOAD_MODE=mmap/' /etc/default/llama-server
echo LLAMA_ARG_THREADS=2 >>/etc/default/llama-server
systemctl restart llama-server
wait_for 600 _answers
settle
_where
section "top mapped"
numaward top --once --filter llama
section "read again"
systemctl stop llama-server
dd if=/srv/model.gguf iflag=nocache count=0
systemctl start llama-server
wait_for 600 _answers
_completes >/dev/null 2>&1 &
settle
_where
section "top after"
numaward top --once --filter llama
look "after"
section "words"
wget -q -O - --post-data '{"prompt": "NUMA", "n_predict": 8, "ignore_eos": true}' http://127.0.0.1:8080/completion
section "describe"
numaward describe llama-server.service
log
