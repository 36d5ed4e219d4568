"""Reads the PodResources API at an address, and prints as JSON what it says: python3 pod_resources.py ADDRESS POD..."""

import json
import pathlib
import sys

import grpc

# Messages and service are made of the description when it is read, by grpcio-tools.
sys.path.insert(0, str(pathlib.Path(__file__).parent))
protos, services = grpc.protos_and_services("pod_resources.proto")


def devices(of):
    return sorted([one.resource, id, [node.id for node in one.topology.nodes]] for one in of for id in one.ids)


def memory(of):
    return [[one.kind, one.bytes, [node.id for node in one.topology.nodes]] for one in of]


def holds(of):
    return {"devices": devices(of.devices), "cpus": sorted(of.cpus), "memory": memory(of.memory)}


def containers(pod):
    return {f"{pod.namespace}/{pod.name}/{of.name}": holds(of) for of in pod.containers}


def get(stub, name):
    try:
        return containers(stub.Get(protos.Which(pod=name, namespace="default"), timeout=60).pod)
    except grpc.RpcError as error:
        return error.code().name


def main(address, *names):
    with grpc.insecure_channel(address) as channel:
        stub = services.PodResourcesListerStub(channel)
        pods = stub.List(protos.Nothing(), timeout=60, wait_for_ready=True).pods
        answer = {
            "list": {name: of for pod in pods for name, of in containers(pod).items()},
            "get": {name: get(stub, name) for name in names},
            "allocatable": holds(stub.GetAllocatableResources(protos.Nothing(), timeout=60)),
        }
    print(json.dumps(answer))


main(*sys.argv[1:])
