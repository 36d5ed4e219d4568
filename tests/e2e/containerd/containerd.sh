# containerd. $IMPORT has arguments of `ctr images import`.
serve() { exec containerd --config /etc/containerd/config.toml; }
import() { ctr -n k8s.io images import $IMPORT /image/image.tar; }
shims() { ps -o args | grep '[c]ontainerd-shim'; }
container_group() {
    case $DRIVER in
        systemd) echo cri-containerd-$container ;;
        *) echo $container ;;
    esac
}
