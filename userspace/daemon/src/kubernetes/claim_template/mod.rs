//! Manifests of pods with resource claims, from manifests of pods with requests.
//!
//! The guarantees that a pod would get by its requests become claims for the same amounts of one NUMA node each: a template for each
//! claim, and the pod that uses them ([`plan`]). Alternatively, an admission policy changes the pods ([`policy`]).

mod manifest;
mod plan;
mod policy;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use numaward_api::claim_template::{ClaimManifests, ManifestRequest};
use numaward_config::yaml;
use numaward_engine::{QosClass, Quantity, Resources, claims::devices::CPU};
use numaward_kube::{api::pod_of_manifest, pod::Pod};
use serde_json::{Map, Value as Json, json};

use self::{
    manifest::{Change, Manifest},
    plan::{PlannedClaim, PodPlan, capacity_of},
};
use super::nri::guarantees;

/// Maximum length of the name of an object.
const MAX_NAME_BYTES: usize = 253;
/// Domain of the annotations for placement.
const DOMAIN: &str = "numaward.io/";
/// First line of changed manifests.
const HEAD: &str = "# Kubernetes 1.36 or newer; 1.34 and 1.35 with the feature gate DRAConsumableCapacity\n";
/// First line of admission policies.
const POLICY_HEAD: &str = "# Kubernetes 1.36 or newer\n";

/// Kinds of objects with a pod, and the path of the pod.
const KINDS: [(&str, &str, &[&str]); 6] = [
    ("v1", "Pod", &[]),
    ("apps/v1", "Deployment", &["spec", "template"]),
    ("apps/v1", "StatefulSet", &["spec", "template"]),
    ("apps/v1", "DaemonSet", &["spec", "template"]),
    ("batch/v1", "Job", &["spec", "template"]),
    ("batch/v1", "CronJob", &["spec", "jobTemplate", "spec", "template"]),
];

/// A document with a pod.
struct PodDocument<'a> {
    /// Number of the document, from 0 on.
    number: usize,
    /// Text that names the document in messages.
    place: String,
    content: &'a Json,
    /// Path of the pod in the content.
    path: &'static [&'static str],
}

/// A pod with claims for its containers.
struct ClaimingPod {
    /// Name of the object with the pod.
    name: String,
    namespace: Option<String>,
    pod: Pod,
    plan: PodPlan,
}

/// Reason why a pod gets no claims.
enum NoClaims {
    /// None of its containers would have a guarantee.
    NoGuarantee(String),
    Invalid(String),
}

/// Returns manifests with resource claims, or admission policies that add claims to pods. An error names the document and the
/// field.
pub fn claim_manifests(request: &ManifestRequest) -> Result<ClaimManifests, String> {
    let manifest = Manifest::parse(&request.text)?;
    let contents: Vec<_> = manifest.documents().collect();
    let (mut notes, mut without, mut names) = (Vec::new(), Vec::new(), BTreeSet::new());
    let (mut changes, mut objects) = (Vec::new(), Vec::new());
    for (number, (content, line)) in contents.iter().enumerate() {
        let Some(document) = PodDocument::find(number, content, *line)? else { continue };
        let place = &document.place;
        let claiming = match document.claiming_pod() {
            Ok(claiming) => claiming,
            Err(NoClaims::NoGuarantee(reason)) => {
                without.push(format!("{place}: no claim: {reason}"));
                continue;
            }
            Err(NoClaims::Invalid(problem)) => return Err(format!("{place}: {problem}")),
        };
        for claim in &claiming.plan.claims {
            let name = claiming.template_name(claim);
            if name.len() > MAX_NAME_BYTES || !names.insert((claiming.namespace.clone(), name.clone())) {
                return Err(format!(
                    "{place}: metadata.name: the template for container {:?} would have the name {name:?}, which is too long or that \
                     of another template: change it",
                    claim.name
                ));
            }
            objects.push(yaml(&claiming.template(claim, &request.device_class)));
        }
        notes.extend(document.annotations_without_effect().map(|note| format!("{place}: {note}")));
        match &request.label {
            None => changes.extend(document.changes(&claiming)),
            Some((key, value)) => {
                let policy = policy::policy(&claiming, (key, value));
                objects.extend(policy.map_err(|problem| format!("{place}: {problem}"))?);
                let found = document.pod().and_then(|pod| pod["metadata"]["labels"][key].as_str());
                if found != Some(value) {
                    notes.push(format!(
                        "{place}: its pods do not have the label {key}={value}, by which the policy selects pods: add it"
                    ));
                }
            }
        }
    }
    if objects.is_empty() {
        let kinds = "there is no Pod, Deployment, StatefulSet, DaemonSet, Job or CronJob".to_owned();
        return Err(if without.is_empty() { kinds } else { without.join("; ") });
    }
    notes.extend(without);
    let objects = objects.join("---\n");
    let text = match request.label {
        Some(_) => format!("{POLICY_HEAD}{objects}"),
        None => format!("{HEAD}{objects}---\n{}", manifest.with(&changes)?),
    };
    Ok(ClaimManifests { text, notes })
}

impl<'a> PodDocument<'a> {
    /// Returns a document if it is of a kind with a pod.
    fn find(number: usize, content: &'a Json, line: usize) -> Result<Option<Self>, String> {
        let text = |key: &str| content[key].as_str().unwrap_or_default();
        let (version, kind) = (text("apiVersion"), text("kind"));
        let place = format!("document {} ({kind} {}, line {line})", number + 1, object_name(content));
        if (version, kind) == ("v1", "List") {
            return Err(format!("{place}: items: write each item of the list as a document"));
        }
        let found =
            KINDS.into_iter().find(|(of_version, of_kind, _)| (*of_version, *of_kind) == (version, kind));
        Ok(found.map(|(.., path)| Self { number, place, content, path }))
    }

    fn pod(&self) -> Option<&'a Json> {
        self.path.iter().try_fold(self.content, |value, key| value.get(key))
    }

    /// Returns the path of a field of the pod.
    fn field(&self, field: &str) -> String {
        self.path.iter().fold(String::new(), |path, key| path + key + ".") + field
    }

    fn annotations(&self) -> BTreeMap<String, String> {
        let annotations = self.pod().and_then(|pod| pod["metadata"]["annotations"].as_object());
        let text = |(key, value): (&String, &Json)| Some((key.clone(), value.as_str()?.to_owned()));
        annotations.into_iter().flatten().filter_map(text).collect()
    }

    fn claiming_pod(&self) -> Result<ClaimingPod, NoClaims> {
        let name = object_name(self.content);
        if name.is_empty() {
            return Err(NoClaims::Invalid(
                "metadata.name: it is missing, and the templates are named after it".to_owned(),
            ));
        }
        let of_pod = |problem: String| NoClaims::Invalid(self.field(&problem));
        let pod = self.pod().ok_or_else(|| of_pod("spec: it is missing".to_owned()))?;
        let pod = pod_of_manifest(&reduced(pod).to_string()).map_err(of_pod)?;
        let annotations = self.annotations();
        let plan = PodPlan::new(&pod, &guarantees(&pod, &annotations)).map_err(of_pod)?;
        if plan.claims.is_empty() {
            return Err(NoClaims::NoGuarantee(match pod.request().qos() {
                QosClass::Guaranteed => {
                    format!(
                        "{DOMAIN}placement in {} leaves its containers without a guarantee",
                        self.field("metadata.annotations")
                    )
                }
                class => format!(
                    "its class is {class}, and only Guaranteed pods have a guarantee to claim: in {}, give each container limits of cpu \
                     and memory, and no other requests",
                    self.field("spec")
                ),
            }));
        }
        let references = &self.pod().unwrap_or(&Json::Null)["spec"]["resourceClaims"];
        if !references.is_null() && !references.is_array() {
            return Err(of_pod("spec.resourceClaims: it is not a list".to_owned()));
        }
        let names: BTreeSet<_> =
            references.as_array().into_iter().flatten().filter_map(|of| of["name"].as_str()).collect();
        if let Some(claim) = plan.claims.iter().find(|claim| names.contains(claim.name.as_str())) {
            return Err(of_pod(format!(
                "spec.resourceClaims: there is a claim {:?} already, which would be the name of the one for this container",
                claim.name
            )));
        }
        let namespace = self.content["metadata"]["namespace"].as_str().map(str::to_owned);
        Ok(ClaimingPod { name, namespace, pod, plan })
    }

    /// Returns a note on annotations that claims do not follow.
    fn annotations_without_effect(&self) -> Option<String> {
        let keys = self.annotations().into_keys();
        let is_for_placement = |key: &String| {
            key.split_once('/').is_some_and(|(domain, name)| {
                (domain == "numaward.io" || domain.ends_with(".numaward.io")) && name != "placement"
            })
        };
        let keys: Vec<_> = keys.filter(is_for_placement).collect();
        (!keys.is_empty()).then(|| format!("claims do not follow the annotations {}", keys.join(", ")))
    }

    /// Returns the changes for the claims of the pod.
    fn changes(&self, claiming: &ClaimingPod) -> Vec<Change> {
        let change = |path: &[&str], key: &str, value| Change {
            document: self.number,
            path: self.path.iter().chain(path).map(|&key| key.to_owned()).collect(),
            key: key.to_owned(),
            value,
        };
        let spec = &self.pod().unwrap_or(&Json::Null)["spec"];
        let mut references = spec["resourceClaims"].as_array().cloned().unwrap_or_default();
        references.extend(claiming.plan.claims.iter().map(|claim| claiming.claim_reference(claim)));
        let mut changes = vec![
            change(&["spec"], "resources", claiming.resources()),
            change(&["spec"], "resourceClaims", references.into()),
        ];
        for list in ["initContainers", "containers"] {
            for (index, container) in spec[list].as_array().into_iter().flatten().enumerate() {
                let claim = container["name"].as_str().and_then(|name| claiming.plan.claim_of(name));
                changes.extend(claim.map(|claim| {
                    let resources = with_claim(&container["resources"], claim);
                    change(&["spec", list, &index.to_string()], "resources", resources)
                }));
            }
        }
        changes
    }
}

impl ClaimingPod {
    fn template_name(&self, claim: &PlannedClaim) -> String {
        format!("{}-{}", self.name, claim.name)
    }

    /// Returns the template of a claim.
    fn template(&self, claim: &PlannedClaim, device_class: &str) -> Json {
        let amounts =
            claim.amounts.iter().map(|(name, amount)| (name.to_string(), quantity(name, *amount).into()));
        let amounts: Map<String, Json> = amounts.collect();
        let mut metadata = json!({"name": self.template_name(claim)});
        if let Some(namespace) = &self.namespace {
            metadata["namespace"] = namespace.as_str().into();
        }
        let exactly = json!({"deviceClassName": device_class, "capacity": {"requests": amounts}});
        json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": metadata,
            "spec": {"spec": {"devices": {"requests": [{"name": "node", "exactly": exactly}]}}},
        })
    }

    /// Returns the entry of `spec.resourceClaims` for a claim.
    fn claim_reference(&self, claim: &PlannedClaim) -> Json {
        json!({"name": claim.name, "resourceClaimTemplateName": self.template_name(claim)})
    }

    /// Returns the resources of the pod as a whole.
    fn resources(&self) -> Json {
        let amounts = amounts(&self.plan.resources);
        json!({"requests": amounts, "limits": amounts})
    }
}

/// Returns the name of an object, or the beginning of the names that it gets.
fn object_name(content: &Json) -> String {
    let metadata = &content["metadata"];
    let name =
        metadata["name"].as_str().or_else(|| Some(metadata["generateName"].as_str()?.trim_end_matches('-')));
    name.unwrap_or_default().to_owned()
}

/// Returns the fields of a pod that decide its guarantees.
fn reduced(pod: &Json) -> Json {
    let pick = |from: &Json, keys: &[&str]| -> Json {
        let Some(fields) = from.as_object() else { return from.clone() };
        let picked = keys.iter().filter_map(|&key| Some((key.to_owned(), fields.get(key)?.clone())));
        picked.collect::<Map<_, _>>().into()
    };
    let mut spec = pick(&pod["spec"], &["containers", "initContainers", "resources"]);
    for list in ["containers", "initContainers"] {
        for container in spec.get_mut(list).and_then(Json::as_array_mut).into_iter().flatten() {
            *container = pick(container, &["name", "resources", "restartPolicy"]);
            if let Some(resources) = container.get_mut("resources") {
                *resources = pick(resources, &["requests", "limits"]);
            }
        }
    }
    json!({"metadata": {"uid": "of-manifest"}, "spec": spec})
}

/// Returns the resources of a container without the amounts of a claim, and with the claim.
fn with_claim(resources: &Json, claim: &PlannedClaim) -> Json {
    let mut resources = resources.as_object().cloned().unwrap_or_default();
    for part in ["requests", "limits"] {
        let Some(Json::Object(amounts)) = resources.get_mut(part) else { continue };
        amounts.retain(|name, _| capacity_of(name).is_none_or(|name| !claim.amounts.contains_key(name)));
        if amounts.is_empty() {
            resources.remove(part);
        }
    }
    let claims = resources.entry("claims").or_insert_with(|| json!([]));
    let mut all = claims.as_array().cloned().unwrap_or_default();
    all.push(json!({"name": claim.name}));
    *claims = all.into();
    resources.into()
}

/// Returns the amounts of resources by name.
fn amounts(resources: &Resources) -> Map<String, Json> {
    let memory = resources.memory.iter().map(|(kind, amount)| (kind.to_string(), *amount));
    let all = resources.cpu.map(|amount| (CPU.to_owned(), amount)).into_iter().chain(memory);
    let all = all.filter(|(_, amount)| !amount.is_zero());
    all.map(|(name, amount)| (name.clone(), quantity(&name, amount).into())).collect()
}

/// Returns the text of an amount, in bytes with the largest suffix that needs no fraction.
fn quantity(name: &str, amount: Quantity) -> String {
    let suffixes = [(30, "Gi"), (20, "Mi"), (10, "Ki")];
    let bytes = amount.units().filter(|bytes| name != CPU && Quantity::whole(*bytes) == amount);
    let fitting = bytes.and_then(|bytes| {
        let (shift, suffix) = suffixes.into_iter().find(|(shift, _)| bytes.trailing_zeros() >= *shift)?;
        Some(format!("{}{suffix}", bytes >> shift))
    });
    fitting.unwrap_or_else(|| amount.to_string())
}
