# containerd. $IMPORT has arguments of `ctr images import`.
set -eu
serve() { exec containerd --config /etc/containerd/config.toml; }
import() { ctr -n k8s.io images import $IMPORT /image/image.tar; }
shims() { ps -o args | grep '[c]ontainerd-shim'; }
container_group() {
    case $DRIVER in
        systemd) echo cri-containerd-$container ;;
        *) echo $container ;;
    esac
}
validate() { printf "\n[plugins.'io.containerd.nri.v1.nri'.default_validator]\n    enable = true\n" >>/etc/containerd/config.toml; }
require_numaward() {
    printf "    required_plugins = ['numaward']\n    tolerate_missing_plugins_annotation = '$1'\n" >>/etc/containerd/config.toml
}
