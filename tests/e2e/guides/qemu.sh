# A virtual machine: its threads are pinned to other CPUs while it runs, and its memory stays on its node.
unit=guest.service
_pid() { systemctl show --value -p MainPID guest; }
# After five seconds of CPU time (in hundredths), the guest has allocated its memory.
_runs() { [ "$(cut -d ' ' -f 14 "/proc/$(_pid)/stat")" -ge 500 ]; }
_named() { numaward get guarantees 'machine-qemu\x2d1\x2dweb.scope'; }

# On a busy host, the bus of an emulated systemd sometimes answers after the daemon's timeout, so the command is repeated.
_guarantees() {
numaward guarantee guest.service --cpus 2 --memory 448Mi --node 1
}
_released() { numaward release guest.service; ! numaward get guarantees guest.service; }

start_numaward
section "start"
systemd-run --unit=guest --slice=machine.slice --property=CPUAffinity=0-1 \
    qemu-system-x86_64 -M q35,memory-backend=ram -accel kvm -accel tcg -smp 1 -m 256 \
    -object memory-backend-ram,id=ram,size=256M,prealloc=on \
    -kernel /boot/memtest86+x64.bin -append console=ttyS0,115200 \
    -display none -serial file:/run/guest.console -nic none
wait_for 600 _runs
settle
look "started"
section "pin"
taskset --all-tasks --pid --cpu-list 2-3 "$(systemctl show --value -p MainPID guest)"
settle
wait_for 120 _estimated '0\.[89]|1'
section "top before"
numaward top --once --filter guest
look "before"
section "guarantee"
wait_for 120 _guarantees
settle
wait_for 120 _estimated '0\.0'
section "top after"
numaward top --once --filter guest
look "after"
section "describe"
numaward describe guest.service
systemctl stop guest
settle
section "stopped"
numaward get guarantees guest.service
wait_for 120 _released
section "bound elsewhere"
numaward exec --cpus 1 --memory 192Mi --node 1 -- \
    qemu-system-x86_64 -display none -m 64 -M q35,memory-backend=ram \
    -object memory-backend-ram,id=ram,size=64M,host-nodes=0,policy=bind 2>&1
echo "code $?"

section "declare"
cat >>/etc/numaward/config.yaml <<'END'
guarantees:
  - unit: machine-qemu*web.scope
    cpus: 2
    memory: 192Mi
END
numaward config check
systemctl restart numaward
wait_for 120 ready
systemd-run --scope --unit='machine-qemu\x2d1\x2dweb' --slice=machine.slice \
    qemu-system-x86_64 -display none -m 64 -M q35,memory-backend=ram \
    -object memory-backend-ram,id=ram,size=64M,prealloc=on >/tmp/web 2>&1 &
wait_for 300 _named
section "declared"
numaward get guarantees 'machine-qemu\x2d1\x2dweb.scope'
cat /sys/fs/cgroup/machine.slice/*web.scope/cpuset.mems
log
