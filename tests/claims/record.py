"""Records allocations of resource claims by a real scheduler.

python3 record.py --kubernetes DIR --etcd FILE [--seed NUMBER] [--scenarios NUMBER] > OUTPUT

DIR has kube-apiserver and kube-scheduler of a release. Both and etcd run on the loopback interface, with a Kubernetes node for each
scenario, but without kubelets. Each scenario has random slices, and pods with random claims that come and go one after the other.
"""

import argparse
import concurrent.futures
import json
import pathlib
import random
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

DRIVER, OTHER = "numaward.io", "gpu.example.com"
NUMA_NODE = "resource.kubernetes.io/numaNode"
TOKEN = "record"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
PODS = "/api/v1/namespaces/default/pods"


class Api:
    def __init__(self, port):
        self.url = f"https://127.0.0.1:{port}"
        self.context = ssl.create_default_context()
        self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE

    def call(self, method, path, body=None, missing_is_fine=False):
        request = urllib.request.Request(self.url + path, method=method)
        request.add_header("Authorization", f"Bearer {TOKEN}")
        request.add_header("Content-Type", "application/merge-patch+json" if method == "PATCH" else "application/json")
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(request, data, context=self.context, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404 and missing_is_fine:
                return None
            raise RuntimeError(f"{method} {path}: {error.code}: {error.read().decode()}\n{json.dumps(body)}") from error


def start(arguments, folder):
    """Starts etcd, the API server and the scheduler. Returns the API and the processes."""
    ports = {"etcd": 23790, "peer": 23800, "api": 16443, "scheduler": 16259}
    etcd_url, peer_url = (f"http://127.0.0.1:{ports[which]}" for which in ("etcd", "peer"))
    subprocess.run(["openssl", "genrsa", "-out", folder / "key", "2048"], check=True, capture_output=True)
    (folder / "tokens").write_text(f'{TOKEN},admin,1,"system:masters"\n')
    cluster = {"server": f"https://127.0.0.1:{ports['api']}", "insecure-skip-tls-verify": True}
    (folder / "kubeconfig").write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": cluster}], "users": [{"name": "c", "user": {"token": TOKEN}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
    }))
    processes = []

    def run(program, *options):
        log = open(folder / f"{pathlib.Path(program).name}.log", "w")
        processes.append(subprocess.Popen([program, *options], stdout=log, stderr=log))

    run(arguments.etcd, "--unsafe-no-fsync", f"--data-dir={folder}/etcd", f"--listen-client-urls={etcd_url}",
        f"--advertise-client-urls={etcd_url}", f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}", f"--initial-cluster=default={peer_url}")
    run(f"{arguments.kubernetes}/kube-apiserver", f"--etcd-servers={etcd_url}", f"--secure-port={ports['api']}",
        "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
        f"--cert-dir={folder}/certificates", f"--token-auth-file={folder}/tokens", "--authorization-mode=RBAC",
        "--service-account-issuer=https://record", f"--service-account-key-file={folder}/key",
        f"--service-account-signing-key-file={folder}/key", "--service-cluster-ip-range=10.0.0.0/24",
        "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition,Priority")
    api = Api(ports["api"])
    deadline = time.monotonic() + 120
    while True:
        try:
            api.call("GET", "/api/v1/namespaces/default")
            break
        except (RuntimeError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    run(f"{arguments.kubernetes}/kube-scheduler", f"--kubeconfig={folder}/kubeconfig", "--leader-elect=false",
        f"--secure-port={ports['scheduler']}", "--bind-address=127.0.0.1", f"--cert-dir={folder}/scheduler")
    return api, processes


def policy(rng, step, value):
    """Returns a request policy, or none."""
    kind = rng.random()
    if value < step:
        return {"default": "0"}
    if kind < 0.1:
        return None
    found = {"default": "0", "validRange": {"min": "0", "step": str(step)}}
    if kind < 0.2:
        found["validRange"]["min"] = found["default"] = str(step)
    if kind > 0.85:
        found["validRange"]["max"] = str(step * min(3, value // step))
    if kind > 0.95:
        del found["validRange"]["step"]
    return found


def draw_slices(rng):
    nodes = rng.choice([1, 2, 2, 4, 4, 8])
    cpu_step = rng.choice([1, 1, 2])
    devices = []
    order = rng.sample(range(nodes), nodes)
    plain = rng.random() < 0.6
    for node in order:
        capacity = {}
        for name, value, step in (("cpu", rng.randint(3, 12), cpu_step), ("memory", rng.randint(4, 40) << 20, 1 << 20),
                                  ("hugepages2Mi", rng.choice([0, 4, 16]) << 20, 2 << 20)):
            usual = {"default": "0", "validRange": {"min": "0", "step": str(step)}}
            rule = usual if plain and value >= step else policy(rng, step, value)
            capacity[name] = {"value": str(value)} | ({"requestPolicy": rule} if rule else {})
        attributes = {NUMA_NODE: node, "socket": node * 2 // nodes, "kind": "node"}
        if rng.random() < 0.1:
            del attributes["socket"]
        devices.append({"name": f"node-{node}", "allowMultipleAllocations": True, "attributes": attributes,
                        "capacity": capacity})
    slices = []
    split = rng.randint(1, nodes)
    names = rng.sample(["a", "b"], 2)
    parts = [devices[:split], devices[split:]]
    for name, part in zip(names, parts):
        if part:
            slices.append({"name": name, "driver": DRIVER, "pool": "nodes", "devices": part})
    if rng.random() < 0.4:
        # Sorted before the nodes by its name, but after them because of the conditions.
        total = {name: {"value": str(sum(int(device["capacity"][name]["value"]) for device in devices)),
                        "requestPolicy": {"default": "0"}} for name in ("cpu", "memory", "hugepages2Mi")}
        slices.append({"name": "0", "driver": DRIVER, "pool": "all", "devices": [
            {"name": "host", "allowMultipleAllocations": True, "hasBindingConditions": True,
             "attributes": {"kind": "host"}, "capacity": total}]})
    if rng.random() < 0.5:
        gpus = [{"name": f"gpu-{number}", "attributes": {NUMA_NODE: rng.randrange(nodes), "kind": "gpu"},
                 "capacity": {"memory": {"value": "80"}}} for number in range(rng.randint(1, 3))]
        slices.append({"name": "g", "driver": OTHER, "pool": "gpus", "devices": gpus})
    return slices


def draw_amounts(rng):
    amounts = {}
    if rng.random() < 0.85:
        amounts["cpu"] = rng.choice(["500m", "1", "1", "2", "2", "3", "4", "6", "9"])
    if rng.random() < 0.7:
        amounts["memory"] = rng.choice(["1Mi", "1536Ki", "3Mi", "5Mi", "10Mi", "20Mi"])
    if rng.random() < 0.1:
        amounts["hugepages2Mi"] = rng.choice(["1Mi", "2Mi", "6Mi"])
    if rng.random() < 0.02:
        amounts["unknown"] = "1"
    return amounts


def draw_device_request(rng, kind=None, count=None):
    kind = kind or rng.choice(["node"] * 8 + ["host", "any"])
    selectors = [] if kind == "any" else [{"driver": DRIVER}, {"attribute": {"name": f"{DRIVER}/kind", "value": kind}}]
    if kind == "node" and rng.random() < 0.1:
        selectors.append({"attribute": {"name": NUMA_NODE, "value": rng.randrange(3)}})
    return {"selectors": selectors, "count": count or rng.choice([1, 1, 1, 1, 2, 2, 3]), "capacity": draw_amounts(rng)}


def draw_claim(rng, has_gpus):
    requests, constraints, names = [], [], []
    for number in range(rng.choice([1, 1, 1, 2, 2, 3])):
        name = f"r{number}"
        if rng.random() < 0.4:
            alternatives = [[f"s{index}", draw_device_request(rng)] for index in range(rng.randint(2, 4))]
            requests.append({"name": name, "firstAvailable": alternatives})
            names += [name] + [f"{name}/{alternative[0]}" for alternative in alternatives]
        else:
            requests.append({"name": name, "exactly": draw_device_request(rng)})
            names.append(name)
    if has_gpus and rng.random() < 0.4:
        requests.append({"name": "gpu", "exactly": {"selectors": [{"driver": OTHER}], "count": 1, "capacity": {}}})
        names.append("gpu")
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        relation = rng.choice(["matchAttribute", "distinctAttribute"])
        attribute = rng.choice([NUMA_NODE, NUMA_NODE, f"{DRIVER}/socket", f"{DRIVER}/kind"])
        constraint = {relation: attribute}
        if rng.random() < 0.4:
            constraint["requests"] = rng.sample(names, rng.randint(1, min(2, len(names))))
        constraints.append(constraint)
    return {"requests": requests, "constraints": constraints}


def slice_object(node, of):
    def device(of):
        value = lambda value: {"int": value} if isinstance(value, int) else {"string": value}
        found = {"name": of["name"], "attributes": {name: value(of_name) for name, of_name in of["attributes"].items()},
                 "capacity": of["capacity"]}
        if of.get("allowMultipleAllocations"):
            found["allowMultipleAllocations"] = True
        if of.get("hasBindingConditions"):
            found |= {"bindingConditions": ["example.com/ready"], "bindingFailureConditions": ["example.com/failed"]}
        return found

    return lambda count: {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": f"{of['name']}-{node}"},
        "spec": {"driver": of["driver"], "nodeName": node, "devices": [device(one) for one in of["devices"]],
                 "pool": {"name": f"{node}-{of['pool']}", "generation": 1, "resourceSliceCount": count}},
    }


def selector(of):
    if "driver" in of:
        return f'device.driver == "{of["driver"]}"'
    domain, name = of["attribute"]["name"].split("/")
    return (f'"{name}" in device.attributes["{domain}"] && '
            f'device.attributes["{domain}"]["{name}"] == {json.dumps(of["attribute"]["value"])}')


def claim_object(name, of):
    def request(of):
        found = {"deviceClassName": "any", "count": of["count"]}
        if of["selectors"]:
            found["selectors"] = [{"cel": {"expression": selector(one)}} for one in of["selectors"]]
        if of["capacity"]:
            found["capacity"] = {"requests": of["capacity"]}
        return found

    requests = []
    for one in of["requests"]:
        if "exactly" in one:
            requests.append({"name": one["name"], "exactly": request(one["exactly"])})
        else:
            alternatives = [{"name": alternative} | request(wanted) for alternative, wanted in one["firstAvailable"]]
            requests.append({"name": one["name"], "firstAvailable": alternatives})
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name},
            "spec": {"devices": {"requests": requests, "constraints": of["constraints"]}}}


def pod_object(name, node, claims):
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "containers": [{"name": "c", "image": "i", "resources": {"claims": [{"name": one} for one in claims]}}],
            "resourceClaims": [{"name": one, "resourceClaimName": one} for one in claims],
        },
    }


def outcome(api, pod, names):
    """Waits for the scheduler. Returns the allocated devices of each claim, or none if it found no host."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        claims = [api.call("GET", f"{CLAIMS}/{name}").get("status", {}).get("allocation") for name in names]
        if all(claims):
            return [[[one["request"], one["driver"], one["device"], one.get("consumedCapacity", {})]
                     for one in claim["devices"]["results"]] for claim in claims]
        state = api.call("GET", f"{PODS}/{pod}")
        for condition in state["status"].get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False" and not any(claims):
                if condition["reason"] != "Unschedulable" or "cannot allocate all claims" not in condition["message"]:
                    raise RuntimeError(f"{pod}: {condition}")
                return None
        time.sleep(0.1)
    raise RuntimeError(f"{pod}: the scheduler did not decide")


def remove(api, pod, names):
    api.call("DELETE", f"{PODS}/{pod}", {"gracePeriodSeconds": 0})
    for name in names:
        claim = api.call("GET", f"{CLAIMS}/{name}")
        claim["status"] = {}
        api.call("PUT", f"{CLAIMS}/{name}/status", claim)
        api.call("PATCH", f"{CLAIMS}/{name}", {"metadata": {"finalizers": None}})
        api.call("DELETE", f"{CLAIMS}/{name}", missing_is_fine=True)


def record(api, number, seed):
    rng = random.Random(f"{seed}.{number}")
    node = f"h{number}"
    slices = draw_slices(rng)
    api.call("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {
        "name": node, "labels": {"kubernetes.io/hostname": node}}})
    amounts = {"cpu": "1000", "memory": "1000Gi", "pods": "1000"}
    ready = {"type": "Ready", "status": "True", "reason": "r", "message": "m"}
    api.call("PATCH", f"/api/v1/nodes/{node}/status", {
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}})
    for of in slices:
        count = sum(1 for other in slices if other["pool"] == of["pool"])
        api.call("POST", "/apis/resource.k8s.io/v1/resourceslices", slice_object(node, of)(count))
    time.sleep(1)
    has_gpus, steps, bound = any(of["driver"] == OTHER for of in slices), [], {}
    for index in range(12):
        if bound and rng.random() < 0.25:
            pod = rng.choice(sorted(bound))
            remove(api, f"{node}-{pod}", bound.pop(pod))
            steps.append({"remove": pod})
        claims = [draw_claim(rng, has_gpus) for _ in range(rng.choice([1, 1, 1, 2]))]
        pod, names = f"{node}-{index}", [f"{node}-{index}-{number}" for number in range(len(claims))]
        for name, claim in zip(names, claims):
            api.call("POST", CLAIMS, claim_object(name, claim))
        api.call("POST", PODS, pod_object(pod, node, names))
        allocated = outcome(api, pod, names)
        steps.append({"pod": index, "claims": claims, "allocated": allocated})
        if allocated is None:
            remove(api, pod, names)
        else:
            bound[index] = names
    return {"slices": slices, "steps": steps}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubernetes", required=True)
    parser.add_argument("--etcd", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scenarios", type=int, default=60)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder, processes = pathlib.Path(folder), []
        try:
            api, processes = start(arguments, folder)
            version = api.call("GET", "/version")["gitVersion"]
            api.call("POST", "/apis/resource.k8s.io/v1/deviceclasses", {
                "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "any"}, "spec": {}})
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                work = [pool.submit(record, api, number, arguments.seed) for number in range(arguments.scenarios)]
                scenarios = [one.result() for one in work]
        finally:
            for process in reversed(processes):
                process.send_signal(signal.SIGTERM)
                process.wait()
    lines = (json.dumps({"kubernetes": version} | of, separators=(",", ":"), sort_keys=True) for of in scenarios)
    print("[" + ",\n".join(lines) + "]")


if __name__ == "__main__":
    main()
