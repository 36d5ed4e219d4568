// Evaluates the policy `own-node` among the resources on standard input (a JSON array) for requests of a daemon with the token of a
// node, as the API server does.
import { Environment } from "@marcbachmann/cel-js";

const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
const resources = JSON.parse(Buffer.concat(chunks));
const policies = resources.filter((of) => of.kind === "ValidatingAdmissionPolicy");
const accounts = resources
  .filter((of) => of.kind === "ServiceAccount")
  .map((of) => `system:serviceaccount:${of.metadata.namespace}:${of.metadata.name}`);
const cel = new Environment({ enableOptionalTypes: true, unlistedVariablesAreDyn: true });

const NODE = "node-1";
const LONG = "n".repeat(200);
const TOPOLOGIES = ["topology.node.k8s.io", "noderesourcetopologies"];
const SLICES = ["resource.k8s.io", "resourceslices"];
const CLAIMS = ["resource.k8s.io", "resourceclaims", "status"];
const NODES = ["", "nodes"];
const EVENTS = ["events.k8s.io", "events"];
const OTHER_TOPOLOGY = "a NodeResourceTopology must have the name of the daemon's Kubernetes node";
const OTHER_NODE = "a daemon may change only its own Kubernetes node";
const OTHER_EVENT = "an event is reported by the daemon's node";
const OTHER_SLICE = "a ResourceSlice must be one of the driver numaward.io on the daemon's Kubernetes node";
const OTHER_ALLOCATION = "a daemon may not change the allocation of a ResourceClaim";
const OTHER_DEVICE = "a daemon may change only the status of the devices of its own Kubernetes node";
const NO_NODE = "the token names no node";
const named = (name) => ({ metadata: { name } });
const from = (reportingInstance) => ({ metadata: { name: "e" }, reportingInstance });

const slice = (nodeName, driver = "numaward.io") => ({ metadata: { name: "s" }, spec: { driver, ...(nodeName && { nodeName }) } });

const device = (pool, driver = "numaward.io") => ({ driver, pool, device: "node-0" });
const claim = (devices, allocation = { devices: { results: [] } }) => ({
  metadata: { name: "c" },
  status: { ...(allocation && { allocation }), reservedFor: [{ uid: "u" }], ...(devices && { devices }) },
});
const freed = { metadata: { name: "c" }, status: {} };

// Resource, operation, node of the token, object, previous object, and the message of the refusal.
const CASES = [
  [TOPOLOGIES, "CREATE", NODE, named(NODE), null, undefined],
  [TOPOLOGIES, "CREATE", NODE, named("node-2"), null, OTHER_TOPOLOGY],
  [TOPOLOGIES, "UPDATE", NODE, named(NODE), named(NODE), undefined],
  [TOPOLOGIES, "UPDATE", NODE, named("node-2"), named("node-2"), OTHER_TOPOLOGY],
  [TOPOLOGIES, "UPDATE", undefined, named(NODE), named(NODE), NO_NODE],
  [NODES, "UPDATE", NODE, named(NODE), named(NODE), undefined],
  [NODES, "UPDATE", NODE, named("node-2"), named("node-2"), OTHER_NODE],
  [NODES, "UPDATE", undefined, named(NODE), named(NODE), NO_NODE],
  [SLICES, "CREATE", NODE, slice(NODE), null, undefined],
  [SLICES, "CREATE", NODE, slice("node-2"), null, OTHER_SLICE],
  [SLICES, "CREATE", NODE, slice(undefined), null, OTHER_SLICE],
  [SLICES, "CREATE", NODE, slice(NODE, "gpu.example.com"), null, OTHER_SLICE],
  [SLICES, "CREATE", undefined, slice(NODE), null, NO_NODE],
  [SLICES, "UPDATE", NODE, slice(NODE), slice(NODE), undefined],
  [SLICES, "UPDATE", NODE, slice(NODE), slice("node-2"), OTHER_SLICE],
  [SLICES, "DELETE", NODE, null, slice(NODE), undefined],
  [SLICES, "DELETE", NODE, null, slice("node-2"), OTHER_SLICE],
  [SLICES, "DELETE", NODE, null, slice(NODE, "gpu.example.com"), OTHER_SLICE],
  [CLAIMS, "UPDATE", NODE, claim([device(NODE)]), claim(), undefined],
  [CLAIMS, "UPDATE", NODE, claim([device(`${NODE}/host`)]), claim([]), undefined],
  [CLAIMS, "UPDATE", NODE, claim([device("node-2"), device(NODE)]), claim([device("node-2")]), undefined],
  [CLAIMS, "UPDATE", NODE, claim([device("node-2")]), claim(), OTHER_DEVICE],
  [CLAIMS, "UPDATE", NODE, claim([device(NODE, "gpu.example.com")]), claim(), OTHER_DEVICE],
  [CLAIMS, "UPDATE", NODE, freed, claim(), OTHER_ALLOCATION],
  [CLAIMS, "UPDATE", NODE, claim([], { devices: {} }), claim(), OTHER_ALLOCATION],
  [CLAIMS, "UPDATE", undefined, claim(), claim(), NO_NODE],
  [EVENTS, "CREATE", NODE, from(NODE), null, undefined],
  [EVENTS, "CREATE", NODE, from("node-2"), null, OTHER_EVENT],
  [EVENTS, "CREATE", NODE, named("e"), null, OTHER_EVENT],
  [EVENTS, "CREATE", undefined, from(NODE), null, NO_NODE],
  [EVENTS, "UPDATE", NODE, from(NODE), from(NODE), undefined],
  [EVENTS, "UPDATE", NODE, from(NODE), from("node-2"), OTHER_EVENT],
  [EVENTS, "UPDATE", NODE, from(NODE), named("e"), OTHER_EVENT],
  // The daemon cuts the name of its node for an event.
  [EVENTS, "CREATE", LONG, from(`${LONG.slice(0, 124)} …`), null, undefined],
  [EVENTS, "CREATE", LONG, from(LONG), null, OTHER_EVENT],
];

// Returns the message with which the policy refuses a request; undefined if it does not, and null if it is not for this request.
function refusal(policy, request, object, oldObject) {
  const { matchConstraints, matchConditions, variables, validations } = policy.spec;
  const isMatch = matchConstraints.resourceRules.some(
    (rule) =>
      rule.apiGroups.includes(request.resource.group) &&
      rule.resources.includes([request.resource.resource, request.subResource].filter(Boolean).join("/")) &&
      rule.operations.includes(request.operation),
  );
  const context = { request, object, oldObject, variables: {} };
  if (!isMatch || !matchConditions.every((of) => cel.evaluate(of.expression, context))) return null;
  for (const { name, expression } of variables) context.variables[name] = cel.evaluate(expression, context);
  return validations.find((of) => !cel.evaluate(of.expression, context))?.message;
}

let failed = 0;
for (const policy of policies) {
  const judge = ([[group, resource, subResource], operation, node, object, oldObject], username) => {
    const extra = node && { "authentication.kubernetes.io/node-name": [node] };
    const userInfo = { username, ...(extra && { extra }) };
    const request = { resource: { group, resource }, subResource, operation, userInfo };
    return refusal(policy, request, object, oldObject);
  };
  const own = accounts.filter((account) => judge(CASES[0], account) !== null);
  if (own.length !== 1) throw new Error(`${policy.metadata.name} is for ${own.length} of ${accounts.length} accounts`);
  for (const request of CASES) {
    const found = [judge(request, own[0]), judge(request, "system:serviceaccount:other:numaward")];
    const expected = [request[5], null];
    if (found[0] === expected[0] && found[1] === expected[1]) continue;
    failed += 1;
    console.error(`${policy.metadata.name}: ${JSON.stringify(request)}: ${found} instead of ${expected}`);
  }
  console.log(`${policy.metadata.name}: ${CASES.length} requests, ${failed} judged wrongly`);
}
process.exit(failed ? 1 : 0);
