// Validates the resources on standard input (a JSON array) against the Prometheus operator's schemas.
import * as v1 from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";

const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
let failed = 0;
for (const resource of JSON.parse(Buffer.concat(chunks))) {
  const name = `${resource.kind} ${resource.metadata?.name}`;
  const kind = resource.apiVersion === "monitoring.coreos.com/v1" ? v1[resource.kind] : undefined;
  try {
    if (!kind) throw new Error(`no schema for ${resource.apiVersion}`);
    new kind(resource).validate();
    console.log(`${name}: as the operator expects`);
  } catch (error) {
    failed += 1;
    console.error(`${name}: ${error.message}`);
  }
}
process.exit(failed ? 1 : 0);
