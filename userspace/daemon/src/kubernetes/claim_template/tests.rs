use std::path::{Path, PathBuf};

use numaward_engine::claims::{
    allocator::{self, Amounts, Claim, Slice},
    devices::{self, DRIVER, NodeAmounts, NodeDevices},
};
use numaward_guarantee::claim::{ReservedClaim, ReservedPart, check_pod};
use numaward_kube::dra::{claim, messages::ClaimId};
use numaward_tests_support::assert_golden;
use numaward_topology::{Bytes, HugepageSize, Machine, ZoneKind};

use super::{super::dra, *};

fn request(text: &str) -> ManifestRequest {
    ManifestRequest { text: text.to_owned(), device_class: "numa-node".to_owned(), label: None }
}

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/claim_template").join(name)
}

fn example() -> String {
    std::fs::read_to_string(file("db.yaml")).unwrap()
}

/// Returns a pod with these lines in its specification.
fn pod(spec: &str) -> String {
    let spec: String = spec.lines().flat_map(|line| ["  ", line, "\n"]).collect();
    format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: web, namespace: ns}}\nspec:\n{spec}")
}

fn container(name: &str, limits: &str) -> String {
    format!("{{name: {name}, image: x, resources: {{limits: {{{limits}}}}}}}")
}

/// Returns a pod with one container.
fn simple(limits: &str) -> String {
    pod(&format!("containers: [{}]", container("main", limits)))
}

/// Returns the documents of a text.
fn documents(text: &str) -> Vec<Json> {
    Manifest::parse(text).unwrap().documents().map(|(document, _)| document).collect()
}

/// Converts a text to manifests with claims. Returns its documents and the notes.
fn convert(text: &str) -> Result<(Vec<Json>, Vec<String>), String> {
    claim_manifests(&request(text)).map(|manifests| (documents(&manifests.text), manifests.notes))
}

/// Returns the name and the requested amounts of each template.
fn templates(documents: &[Json]) -> Vec<(String, Json)> {
    let templates = documents.iter().filter(|document| document["kind"] == "ResourceClaimTemplate");
    let capacity = |template: &Json| {
        template["spec"]["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"].clone()
    };
    templates
        .map(|template| (template["metadata"]["name"].as_str().unwrap().to_owned(), capacity(template)))
        .collect()
}

#[test]
fn manifest_keeps_everything_else() {
    let manifests = claim_manifests(&request(&example())).unwrap();
    assert_golden(&file("claims.yaml"), &manifests.text);
    assert_eq!(manifests.notes, [""; 0]);
    let again = convert(&manifests.text).unwrap_err();
    assert!(again.contains("there is a claim \"main\" already"), "{again}");
}

#[test]
fn policy_selects_pods_by_label() {
    let label = ("app".to_owned(), "db".to_owned());
    let manifests = claim_manifests(&ManifestRequest { label: Some(label), ..request(&example()) }).unwrap();
    assert_golden(&file("policy.yaml"), &manifests.text);
    assert_eq!(manifests.notes, [""; 0]);
    let label = ("app".to_owned(), "web".to_owned());
    let manifests = claim_manifests(&ManifestRequest { label: Some(label), ..request(&example()) }).unwrap();
    assert!(matches!(&manifests.notes[..], [note] if note.contains("do not have the label app=web")));
}

#[test]
fn guarantees_become_claims() {
    let small = container("log", "cpu: 500m, memory: 100Mi");
    let large = container("main", "cpu: 4, memory: 8Gi");
    for (what, text, expected, of_pod) in [
        (
            "whole CPUs",
            simple("cpu: 2, memory: 4Gi"),
            json!({"main": {"cpu": "2", "memory": "4Gi"}}),
            ["2", "4Gi"],
        ),
        (
            "rounding",
            simple("cpu: 2000m, memory: 1G"),
            json!({"main": {"cpu": "2", "memory": "954Mi"}}),
            ["2", "954Mi"],
        ),
        (
            "a fraction is shared",
            simple("cpu: 1500m, memory: 1Gi"),
            json!({"main": {"memory": "1Gi"}}),
            ["1500m", "1Gi"],
        ),
        (
            "two containers",
            pod(&format!("containers: [{large}, {small}]")),
            json!({"main": {"cpu": "4", "memory": "8Gi"}, "log": {"memory": "100Mi"}}),
            ["4500m", "8292Mi"],
        ),
        (
            "an init container uses the claim of an app container",
            pod(&format!(
                "initContainers: [{}]\ncontainers: [{large}]",
                container("init", "cpu: 2, memory: 1Gi")
            )),
            json!({"main": {"cpu": "4", "memory": "8Gi"}}),
            ["4", "8Gi"],
        ),
        (
            "a larger init container does not",
            pod(&format!(
                "initContainers: [{}]\ncontainers: [{large}]",
                container("init", "cpu: 6, memory: 1Gi")
            )),
            json!({"main": {"cpu": "4", "memory": "8Gi"}, "init": {"cpu": "6", "memory": "1Gi"}}),
            ["10", "9Gi"],
        ),
        (
            "a sidecar",
            pod(&format!(
                "initContainers:\n- {{name: proxy, restartPolicy: Always, resources: {{limits: {{cpu: 1, memory: 1Gi}}}}}}\n\
                 containers: [{large}]"
            )),
            json!({"proxy": {"cpu": "1", "memory": "1Gi"}, "main": {"cpu": "4", "memory": "8Gi"}}),
            ["5", "9Gi"],
        ),
        (
            "resources of the pod as a whole",
            pod(&format!(
                "resources: {{requests: {{cpu: 7, memory: 10Gi}}, limits: {{cpu: 7, memory: 10Gi}}}}\ncontainers: [{large}, {{name: a}}, {{name: b}}]"
            )),
            json!({"main": {"cpu": "4", "memory": "8Gi"}, "a": {"cpu": "3", "memory": "2Gi"}}),
            ["7", "10Gi"],
        ),
        (
            "an annotation leaves a container in the shared pool",
            pod(&format!("containers: [{large}, {small}]"))
                .replace("namespace: ns", "namespace: ns, annotations: {log.numaward.io/placement: shared}"),
            json!({"main": {"cpu": "4", "memory": "8Gi"}}),
            ["4500m", "8292Mi"],
        ),
        (
            "default requests of the pod as a whole",
            pod("resources: {limits: {cpu: 3, memory: 2Gi}}\ncontainers: [{name: a}]"),
            json!({"a": {"cpu": "3", "memory": "2Gi"}}),
            ["3", "2Gi"],
        ),
        (
            "a string with a quote",
            simple("cpu: '2', \"memory\": \"4Gi\""),
            json!({"main": {"cpu": "2", "memory": "4Gi"}}),
            ["2", "4Gi"],
        ),
    ] {
        let (documents, notes) = convert(&text).unwrap_or_else(|error| panic!("{what}: {error}"));
        let claims: Map<_, _> = templates(&documents)
            .into_iter()
            .map(|(name, amounts)| (name.strip_prefix("web-").unwrap().to_owned(), amounts))
            .collect();
        assert_eq!(Json::from(claims), expected, "{what}");
        let spec = &documents.last().unwrap()["spec"];
        let [cpu, memory] = of_pod;
        let resources = json!({"cpu": cpu, "memory": memory});
        assert_eq!(spec["resources"], json!({"requests": resources, "limits": resources}), "{what}");
        assert_eq!(notes, [""; 0], "{what}");
    }
}

#[test]
fn containers_keep_other_resources_and_claims() {
    let text = pod("\
resourceClaims:
- name: gpu
  resourceClaimTemplateName: one-gpu
containers:
- name: main
  resources:
    limits: {cpu: 2, memory: 4Gi, example.com/nic: 1}
    claims: [{name: gpu, request: one}]
- {name: other, resources: {limits: {cpu: 100m, memory: 4Mi}}}");
    let (documents, _) = convert(&text).unwrap();
    let spec = &documents.last().unwrap()["spec"];
    assert_eq!(
        spec["containers"],
        json!([
            {"name": "main", "resources":
                {"limits": {"example.com/nic": "1"}, "claims": [{"name": "gpu", "request": "one"}, {"name": "main"}]}},
            {"name": "other", "resources": {"limits": {"cpu": "100m"}, "claims": [{"name": "other"}]}}
        ])
    );
    assert_eq!(
        spec["resourceClaims"],
        json!([
            {"name": "gpu", "resourceClaimTemplateName": "one-gpu"},
            {"name": "main", "resourceClaimTemplateName": "web-main"},
            {"name": "other", "resourceClaimTemplateName": "web-other"}
        ])
    );
}

#[test]
fn each_kind_with_a_pod_is_changed() {
    for (version, kind, path) in KINDS {
        let mut object = json!({"spec": {"containers": [{"name": "main", "resources": {"limits": {"cpu": "2", "memory": "1Gi"}}}]}});
        for key in path.iter().rev() {
            object = json!({*key: object});
        }
        let own = json!({"apiVersion": version, "kind": kind, "metadata": {"generateName": "x-"}});
        for (key, value) in own.as_object().unwrap() {
            object[key] = value.clone();
        }
        // JSON is YAML, too.
        for text in [object.to_string(), serde_json::to_string_pretty(&object).unwrap(), yaml(&object)] {
            let (documents, notes) = convert(&text).unwrap();
            let [template, changed] = &documents[..] else { panic!("{kind}: {documents:?}") };
            assert_eq!((&template["metadata"], notes.len()), (&json!({"name": "x-main"}), 0), "{kind}");
            let spec = path.iter().fold(changed, |value, key| &value[key])["spec"].clone();
            assert_eq!(spec["containers"][0]["resources"], json!({"claims": [{"name": "main"}]}), "{kind}");
        }
    }
}

#[test]
fn styles_of_yaml_are_kept() {
    let old = "\
%YAML 1.2
---
apiVersion: v1 # ü
\"kind\":   Pod
metadata:
  'name': wëb
spec:
    containers:
    - resources:     # old

          limits: # more
            cpu: 1
            memory: >-
              1Gi

      # The name.
      name:  main
      args: [ 'a: b',
        0o17, yes, |-]
    - name: none
      resources:
    priority: 0x10\r
...
---
# nothing
---
x: !a
";
    let error = convert(old).unwrap_err();
    assert!(error.contains("line 27: anchors and tags"), "{error}");
    let old = old.replace("!a", "a").replace("|-]", "z]").replace("%YAML 1.2\n---\n", "");
    let old = old.replace(
        "name: none\n      resources:\n",
        "name: none\n      resources: {limits: {cpu: 1, memory: 1Gi}}\n",
    );
    let new = claim_manifests(&request(&old)).unwrap().text;
    let start = new.find("---\napiVersion: v1 #").unwrap() + 4;
    let expected = old
        .replace(
            "resources:     # old\n\n          limits: # more\n            cpu: 1\n            memory: >-\n              1Gi\n",
            "resources:\n        claims:\n          - name: main\n",
        )
        .replace("resources: {limits: {cpu: 1, memory: 1Gi}}", "resources:\n        claims:\n          - name: none")
        .replace(
            "    containers:\n",
            "    resources:\n      limits:\n        cpu: \"2\"\n        memory: 2Gi\n      requests:\n        cpu: \"2\"\n        memory: 2Gi\n    \
             resourceClaims:\n      - name: main\n        resourceClaimTemplateName: \"wëb-main\"\n      - name: none\n        \
             resourceClaimTemplateName: \"wëb-none\"\n    containers:\n",
        );
    assert_eq!(&new[start..], expected);
}

#[test]
fn refuses_other_input() {
    let guaranteed = simple("cpu: 2, memory: 4Gi");
    for (text, expected) in [
        (String::new(), "there is no Pod, Deployment"),
        ("kind: Service\napiVersion: v1".to_owned(), "there is no Pod, Deployment"),
        ("just a text".to_owned(), "there is no Pod, Deployment"),
        ("a: [1".to_owned(), "not valid YAML"),
        ("a: 1\nb: 2\na: 3".to_owned(), "line 1: the key \"a\" is given twice"),
        ("a: &x 1\nb: *x".to_owned(), "line 1: anchors and tags"),
        ("b: *x".to_owned(), "line 1"),
        ("? [a]\n: 1".to_owned(), "line 1: a key must be a plain word"),
        ("[".repeat(65), "nested deeper than 64 levels"),
        (
            "apiVersion: v1\nkind: List\nitems: []".to_owned(),
            "document 1 (List , line 1): items: write each item",
        ),
        (guaranteed.replace("name: web, ", ""), "metadata.name: it is missing"),
        (
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}".to_owned(),
            "(Deployment a, line 1): spec.template.spec: it is missing",
        ),
        (
            guaranteed.replace("4Gi", "4 GB"),
            "(Pod web, line 1): spec.containers[\"main\"].resources.limits.memory: \"4 GB\" is not a quantity",
        ),
        (guaranteed.replace("containers: [", "containers: x #"), "spec or status"),
        (guaranteed.replace("name: main, ", ""), "missing field `name`"),
        (simple("cpu: 2"), "(Pod web, line 1): no claim: its class is Burstable"),
        (pod("containers: [{name: a}]"), "its class is BestEffort"),
        (simple("cpu: 2, memory: 1Gi").replace("{limits", "{requests: {cpu: 1}, limits"), "Burstable"),
        (
            guaranteed.replace("namespace: ns", "annotations: {numaward.io/placement: shared}"),
            "numaward.io/placement in metadata.annotations leaves",
        ),
        (
            simple("cpu: 2, memory: 1Gi, hugepages-64Ki: 1Mi"),
            "container \"main\": devices have no capacity of hugepages-64Ki",
        ),
        (
            format!("{guaranteed}---\n{guaranteed}"),
            "document 2 (Pod web, line 7): metadata.name: the template for container \"main\"",
        ),
        (guaranteed.replace("name: web", &format!("name: {}", "w".repeat(249))), "which is too long"),
        (
            guaranteed.replace("containers:", "resourceClaims: {}\n  containers:"),
            "spec.resourceClaims: it is not a list",
        ),
        (
            guaranteed.replace("containers:", "resourceClaims: [{name: main}]\n  containers:"),
            "there is a claim \"main\" already",
        ),
        (format!("x: {}", "y".repeat(300)) + "\n" + &guaranteed.repeat(2), "given twice"),
    ] {
        let error = convert(&text).unwrap_err();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let label = Some(("app".to_owned(), "db".to_owned()));
    let text = guaranteed.replace(", namespace: ns", "");
    let error = claim_manifests(&ManifestRequest { label, ..request(&text) }).unwrap_err();
    assert!(error.contains("metadata.namespace: it is missing"), "{error}");
}

#[test]
fn notes_name_what_is_left_alone() {
    let annotated = simple("cpu: 2, memory: 4Gi").replace(
        "namespace: ns",
        "namespace: ns, annotations: {numaward.io/same-cache: 'true', other.io/x: y}",
    );
    let text = format!("{}---\n{annotated}", simple("cpu: 2").replace("web", "other"));
    let (_, notes) = convert(&text).unwrap();
    let [annotation, burstable] = &notes[..] else { panic!("{notes:?}") };
    assert!(
        annotation.contains(
            "document 2 (Pod web, line 7): claims do not follow the annotations numaward.io/same-cache"
        ),
        "{annotation}"
    );
    assert!(
        burstable.contains("document 1 (Pod other, line 1): no claim: its class is Burstable"),
        "{burstable}"
    );
}

/// The scheduler's rule and the driver understand the templates: each claim gets the amounts of its containers, and the pod requests as much.
#[test]
fn driver_gives_what_the_containers_request() {
    let machine = Machine::builder().nodes(2).cores_per_node(8).memory(Bytes::gib(32)).build().unwrap();
    let huge = ZoneKind::Hugepages(HugepageSize(Bytes::mib(2)));
    let amounts = NodeAmounts { cpus: 8, memory: [(ZoneKind::Memory, 16 << 30), (huge, 1 << 30)].into() };
    let free = machine.nodes.keys().map(|&node| (node, amounts.clone())).collect();
    let devices = NodeDevices::new(&machine, &BTreeMap::new(), false).publish(&free, &BTreeMap::new());
    let mut slices = [Slice { name: "s".into(), driver: DRIVER.into(), pool: "n1".into(), devices }];
    let documents = documents(&claim_manifests(&request(&example())).unwrap().text);
    let mut reserved = BTreeMap::new();
    for template in documents.iter().filter(|document| document["kind"] == "ResourceClaimTemplate") {
        let name = template["metadata"]["name"].as_str().unwrap();
        // The fixtures of the allocator have the amounts of a request without another level.
        let mut devices = template["spec"]["spec"]["devices"].clone();
        let exactly = &mut devices["requests"][0]["exactly"];
        exactly["capacity"] = exactly["capacity"]["requests"].take();
        let claim: Claim = serde_json::from_value(devices).unwrap();
        let allocated = allocator::allocate(&slices, &[claim]).unwrap().remove(0);
        allocator::consume(&mut slices, &allocated);
        let [device] = &allocated[..] else { panic!("{allocated:?}") };
        let consumed: BTreeMap<_, _> =
            device.consumed.iter().map(|(name, amount)| (name.to_string(), amount.to_string())).collect();
        let result = json!({"request": "node", "driver": DRIVER, "pool": "n1",
            "device": &*slices[device.device.0].devices[device.device.1].name, "consumedCapacity": consumed});
        let status = json!({"allocation": {"devices": {"results": [result]}}, "reservedFor": [{"uid": "p"}]});
        let id = ClaimId { namespace: "prod".to_owned(), uid: name.to_owned(), name: name.to_owned() };
        let object = json!({"metadata": {"uid": name}, "status": status}).to_string();
        let parts = claim::read_text(object.as_bytes(), "n1", &id).unwrap().parts;
        let parts = parts.into_iter().map(|part| ReservedPart {
            node: part.node,
            consumed: part.consumed,
            terms: part.terms,
        });
        let of_claim = ReservedClaim {
            namespace: id.namespace,
            name: id.name,
            pod: "p".to_owned(),
            parts: parts.collect(),
            pending: false,
        };
        reserved.insert(name, of_claim);
    }
    let given = |name: &str| devices::resources(&reserved[name].parts[0].consumed);
    let main = Resources::none().with_cpu("2".parse().unwrap()).with_memory("4Gi".parse().unwrap());
    assert_eq!(given("db-main"), main.with_hugepages(HugepageSize(Bytes::mib(2)), "64Mi".parse().unwrap()));
    assert_eq!(given("db-log"), Resources::none().with_memory("128Mi".parse().unwrap()));
    assert_eq!(reserved.len(), 2, "the init container uses the claim of main");

    let mut pod = documents.last().unwrap()["spec"]["template"].clone();
    pod["metadata"]["uid"] = json!("p");
    let pod = pod_of_manifest(&pod.to_string()).unwrap();
    let claims = || reserved.iter().map(|(uid, claim)| (*uid, claim));
    let requests = dra::requests(&pod);
    check_pod(claims(), Some(&requests)).unwrap();
    let less: Amounts = requests
        .into_iter()
        .map(|(name, amount)| (name, amount.saturating_sub(Quantity::whole(1))))
        .collect();
    assert!(check_pod(claims(), Some(&less)).is_err());
    assert_eq!(pod.request().qos(), QosClass::Guaranteed);
}
