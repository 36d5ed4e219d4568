# CRI-O.
set -eu
export CONTAINER_RUNTIME_ENDPOINT=/run/crio/crio.sock
mkdir -p /etc/containers /etc/cni/net.d
echo '{"default": [{"type": "insecureAcceptAnything"}]}' >/etc/containers/policy.json
serve() { exec crio --config /etc/crio/crio.conf; }
# The configured transport reads the image from a file.
import() { numaward-cri pull localhost/test:1; }
shims() { ps -o args | grep '[c]onmon '; }
container_group() { echo crio-$container; }
validate() { printf '[crio.nri.default_validator]\nnri_enable_default_validator = true\n' >>/etc/crio/crio.conf; }
require_numaward() {
    cat >>/etc/crio/crio.conf <<END
nri_validator_required_plugins = ["numaward"]
nri_validator_tolerate_missing_plugins_annotation = "$1"
END
}
