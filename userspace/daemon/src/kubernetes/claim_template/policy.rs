//! An admission policy that attaches the templates of a manifest's claims to pods with a label.
//!
//! # Invariants
//! - A pod is changed only if it has the containers of the manifest and their amounts: for other amounts, the templates would be wrong.
//! - Pods of other namespaces are not changed: the templates are objects of a namespace.

use std::fmt::Write as _;

use numaward_engine::{ContainerRequest, Resources};
use serde_json::{Value as Json, json};

use super::{ClaimingPod, MAX_NAME_BYTES, PlannedClaim, amounts, plan::capacity_of};

/// Returns the policy and its binding.
pub(super) fn policy(claiming: &ClaimingPod, label: (&str, &str)) -> Result<[String; 2], String> {
    let namespace = claiming.namespace.as_deref().ok_or(
        "metadata.namespace: it is missing, and the policy is for pods of the namespace of the templates"
            .to_owned(),
    )?;
    let name = format!("numaward-claims.{namespace}.{}", claiming.name);
    if name.len() > MAX_NAME_BYTES {
        return Err(format!("metadata.name: the policy would have the name {name:?}, which is too long"));
    }
    let (name, namespace) = (Json::from(name), Json::from(namespace));
    let (key, value) = (Json::from(label.0), Json::from(label.1));
    let mut condition = conditions(claiming).join(" &&\n");
    let mut expression = format!("[\n  {}\n]", operations(claiming).join(",\n  "));
    let optional: String =
        optional_operations(claiming).iter().fold(String::new(), |all, operation| all + " +\n" + operation);
    expression.push_str(&optional);
    for text in [&mut condition, &mut expression] {
        *text = text.lines().fold(String::new(), |all, line| all + "\n          " + line);
    }
    let policy = format!(
        "\
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicy
metadata:
  name: {name}
spec:
  failurePolicy: Fail
  reinvocationPolicy: Never
  matchConstraints:
    namespaceSelector:
      matchLabels: {{kubernetes.io/metadata.name: {namespace}}}
    objectSelector:
      matchLabels: {{{key}: {value}}}
    resourceRules:
      - {{apiGroups: [\"\"], apiVersions: [v1], operations: [CREATE], resources: [pods]}}
  matchConditions:
    - name: same-requests
      expression: |{condition}
  mutations:
    - patchType: JSONPatch
      jsonPatch:
        expression: |{expression}
"
    );
    let binding = format!(
        "\
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicyBinding
metadata:
  name: {name}
spec:
  policyName: {name}
"
    );
    Ok([policy, binding])
}

/// A container that uses a claim, with its path in the pod.
struct Claimant<'a> {
    container: &'a ContainerRequest,
    /// Path in an expression.
    object: String,
    /// Path in a patch.
    path: String,
    claim: &'a PlannedClaim,
}

fn claimants(claiming: &ClaimingPod) -> impl Iterator<Item = Claimant<'_>> {
    let lists = [("initContainers", &claiming.pod.init_containers), ("containers", &claiming.pod.containers)];
    lists.into_iter().flat_map(move |(list, containers)| {
        containers.iter().enumerate().filter_map(move |(index, container)| {
            Some(Claimant {
                container,
                object: format!("object.spec.{list}[{index}].resources"),
                path: format!("/spec/{list}/{index}/resources"),
                claim: claiming.plan.claim_of(container.name.as_str())?,
            })
        })
    })
}

/// Returns the conditions under which a pod is the one of the manifest.
fn conditions(claiming: &ClaimingPod) -> Vec<String> {
    let mut conditions = Vec::new();
    let lists = [("initContainers", &claiming.pod.init_containers), ("containers", &claiming.pod.containers)];
    for (list, containers) in lists {
        let names: Json = containers.iter().map(|container| container.name.as_str()).collect();
        conditions.push(if containers.is_empty() {
            format!("!has(object.spec.{list})")
        } else {
            format!("has(object.spec.{list}) && object.spec.{list}.map(c, c.name) == {names}")
        });
    }
    match &claiming.pod.resources {
        None => conditions.push("!has(object.spec.resources)".to_owned()),
        Some(of_pod) => {
            conditions.push("has(object.spec.resources)".to_owned());
            conditions.extend(equal("object.spec.resources.requests", &of_pod.requests));
            conditions.extend(equal("object.spec.resources.limits", &of_pod.limits));
        }
    }
    for Claimant { container, object, .. } in claimants(claiming) {
        conditions.extend(equal(&format!("{object}.requests"), &container.requests));
        conditions.extend(equal(&format!("{object}.limits"), &container.limits));
    }
    conditions
}

/// Returns the condition that a part of a pod has these amounts; `None` if there are none.
fn equal(part: &str, resources: &Resources) -> Option<String> {
    let expected: Vec<_> =
        amounts(resources).into_iter().map(|(name, amount)| json!([name, amount])).collect();
    let is_equal = format!("a[0] in {part} && quantity({part}[a[0]]).compareTo(quantity(a[1])) == 0");
    (!expected.is_empty())
        .then(|| format!("has({part}) &&\n  {}.all(a,\n    {is_equal})", Json::from(expected)))
}

/// Returns the operations that each pod of the manifest needs.
fn operations(claiming: &ClaimingPod) -> Vec<String> {
    let mut operations = Vec::new();
    for Claimant { container, path, claim, .. } in claimants(claiming) {
        for (part, resources) in [("requests", &container.requests), ("limits", &container.limits)] {
            let names = amounts(resources).into_iter().map(|(name, _)| name);
            let is_claimed =
                |name: &String| capacity_of(name).is_some_and(|name| claim.amounts.contains_key(name));
            let remove = |name| format!("JSONPatch{{op: \"remove\", path: \"{path}/{part}/{name}\"}}");
            operations.extend(names.filter(is_claimed).map(remove));
        }
    }
    operations.push(add("/spec/resources", &claiming.resources()));
    operations
}

/// Returns the operations that append to a list, or create it.
fn optional_operations(claiming: &ClaimingPod) -> Vec<String> {
    let append = |object: &str, path: &str, items: Vec<Json>| {
        let mut each = String::new();
        for (number, item) in items.iter().enumerate() {
            let comma = if number == 0 { "" } else { ", " };
            // Writing to a String cannot fail.
            let _ = write!(each, "{comma}{}", add(&format!("{path}/-"), item));
        }
        format!("(has({object}) ? [{each}] :\n  [{}])", add(path, &items.into()))
    };
    let references = claiming.plan.claims.iter().map(|claim| claiming.claim_reference(claim));
    let mut operations =
        vec![append("object.spec.resourceClaims", "/spec/resourceClaims", references.collect())];
    for Claimant { object, path, claim, .. } in claimants(claiming) {
        let item = json!({"name": claim.name});
        operations.push(append(&format!("{object}.claims"), &format!("{path}/claims"), vec![item]));
    }
    operations
}

fn add(path: &str, value: &Json) -> String {
    format!("JSONPatch{{op: \"add\", path: \"{path}\", value: {value}}}")
}
