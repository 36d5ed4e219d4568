//! The commands in the pages about Kubernetes: each is run by the tests of the cluster, or listed here with the reason
//! why not. This test needs no cluster, so it runs with the unit tests.

/// Sources of the tests of the cluster.
const TESTS: [&str; 6] = [
    include_str!("../../tests/e2e/cluster.rs"),
    include_str!("../../tests/e2e/cluster/decisions.rs"),
    include_str!("../../tests/e2e/cluster/life.rs"),
    include_str!("../../tests/e2e/cluster/node.rs"),
    include_str!("../../tests/e2e/cluster/node.sh"),
    include_str!("../../tests/e2e/cluster/readers.rs"),
];

#[derive(Debug)]
enum CommandTest {
    /// Run by a test that contains this text, with the names of its own cluster.
    Run(&'static str),
    Not(&'static str),
}
use CommandTest::{Not, Run};

const APPLY: CommandTest = Run(r#"kubectl.must(&["apply", "--kustomize", &"#);
const ROLLOUT: CommandTest =
    Run(r#"["rollout", "status", "daemonset/numaward", "--namespace=numaward", "--timeout=30m"]"#);
const CORDON: CommandTest = Run(r#"kubectl.must(&["cordon", node::NAME]);"#);
const UNCORDON: CommandTest = Run(r#"kubectl.must(&["uncordon", node::NAME]);"#);
const REGISTRY: CommandTest = Not("the tests have no registry, and import the image");
const HOOK: CommandTest = Not("the hook of the chart has not run on a cluster; the page says so");
const HELM: CommandTest = Not(
    "the cluster runs the overlays; the stage `manifests` has Helm make the chart with the values of this page, and compares what \
     it makes with the overlays",
);
const READS: CommandTest = Not("only reads; the tests ask the daemon of the same by its API");
/// Each line of the pages, without its comment.
const KUBERNETES: &[(&str, CommandTest)] = &[
    (
        "cargo xtask dist --out dist",
        Not("the tests take the image of `dist` made of the programs under test"),
    ),
    (
        "skopeo copy --all oci-archive:dist/numaward-0.1.0-oci.tar docker://registry.example/numaward:0.1.0",
        REGISTRY,
    ),
    (
        "ctr -n k8s.io images import dist/numaward-0.1.0-oci.tar",
        Run("ctr -n k8s.io images import $IMPORT /numaward.tar"),
    ),
    ("kubectl create namespace numaward", HELM),
    ("kubectl label namespace numaward pod-security.kubernetes.io/enforce=privileged", HELM),
    (
        "helm install numaward deploy/helm/numaward --namespace numaward --set mode=try --set image.repository=registry.example/numaward",
        HELM,
    ),
    ("kubectl -n numaward rollout status daemonset/numaward", ROLLOUT),
    ("cd deploy/overlays/try", Not("the tests name the folder")),
    ("kustomize edit set image numaward=registry.example/numaward:0.1.0", REGISTRY),
    ("kubectl kustomize . | less", Not("shows what is applied next")),
    ("kubectl apply -k .", APPLY),
    (
        "kubectl -n numaward exec daemonset/numaward -- numaward config view --config /etc/numaward/config.yaml --origins",
        READS,
    ),
    (
        "numaward config check config.yaml --group gpu",
        Not("writes nothing; `files_of_group_and_node_override_the_first_one` loads such files"),
    ),
    (
        "kubectl -n numaward delete pod --field-selector spec.nodeName=HOST",
        Run(r#"kubectl.must(&["--namespace=numaward", "delete", "pod", &of_host]);"#),
    ),
    ("kubectl -n numaward exec daemonset/numaward -- numaward status", READS),
    ("kubectl -n numaward exec daemonset/numaward -- numaward topology", READS),
    ("kubectl -n numaward exec daemonset/numaward -- numaward explain --cpus 4 --memory 8Gi", READS),
    (
        "install -D -m 0644 deploy/seccomp/numaward.json /var/lib/kubelet/seccomp/numaward.json",
        Not("the test `deploy` puts this file there"),
    ),
    (
        "helm -n numaward upgrade numaward deploy/helm/numaward --reuse-values --set config.enforcement.mode=off",
        HELM,
    ),
    ("helm -n numaward uninstall numaward", HELM),
    ("kubectl -n numaward rollout undo daemonset/numaward", HOOK),
    (
        r#"kubectl -n numaward patch daemonset numaward --patch '{"spec":{"minReadySeconds":0,"updateStrategy":{"rollingUpdate":{"maxUnavailable":"10%"}}}}'"#,
        HOOK,
    ),
    ("kubectl delete namespace numaward", HELM),
    ("rm -r /var/lib/numaward /run/numaward", Run("rm -r /var/lib/numaward /run/numaward ")),
];
const MIGRATION: &[(&str, CommandTest)] = &[
    ("kubectl cordon HOST", CORDON),
    ("systemctl stop kubelet", Run("\n        stop-kubelet\n        mkdir kubelet-before")),
    ("mkdir kubelet-before", Run("\n        mkdir kubelet-before\n")),
    (
        "cp /var/lib/kubelet/{config.yaml,cpu_manager_state,memory_manager_state} kubelet-before/",
        Run("cp /var/lib/kubelet/config.yaml {state} kubelet-before/"),
    ),
    (
        "numaward import-kubelet-state kubelet-before --config config.yaml --dry-run",
        Run("\n        {import} --dry-run\n"),
    ),
    (
        "numaward import-kubelet-state kubelet-before --config config.yaml",
        Run(r#""numaward import-kubelet-state kubelet-before --config config.yaml";"#),
    ),
    (
        "rm /var/lib/kubelet/cpu_manager_state /var/lib/kubelet/memory_manager_state",
        Run(r"rm {state}\nstart-kubelet"),
    ),
    ("systemctl start kubelet", Run(r"\nstart-kubelet")),
    (
        "kubectl apply -k deploy/overlays/migrate",
        Run(r#"kubectl.must(&["apply", "--kustomize", &migrate]);"#),
    ),
    (
        "kubectl -n numaward delete pod --field-selector spec.nodeName=HOST",
        Run(r#"kubectl.must(&["--namespace=numaward", "delete", "pod", &of_host]);"#),
    ),
    ("kubectl uncordon HOST", UNCORDON),
    ("kill $(pidof numaward)", Run("\n        kill $(pidof numaward)\n")),
    ("while pidof numaward; do sleep 1; done", Run("\n        while pidof numaward; do sleep 1; done\n")),
    (
        "NUMAWARD_ENFORCEMENT_MODE=off timeout 60 numaward run --config config.yaml",
        Run("\n        NUMAWARD_ENFORCEMENT_MODE=off timeout 60 numaward run --config config.yaml\n"),
    ),
    ("cp kubelet-before/* /var/lib/kubelet/", Run("\n        cp kubelet-before/* /var/lib/kubelet/\n")),
    ("kubectl delete -k deploy/overlays/migrate", Run(r#"kubectl.must(&["delete", "--kustomize", &migrate"#)),
    ("rm -r /var/lib/numaward /run/numaward", Run("rm -r /var/lib/numaward /run/numaward ")),
    (
        "kubectl -n numaward exec POD -- numaward export-kubelet-state --into /var/lib/numaward/kubelet-now",
        Run("numaward export-kubelet-state --into {EXPORTED}"),
    ),
    (
        "cp /var/lib/numaward/kubelet-now/* /var/lib/kubelet/",
        Run("\n        cp {EXPORTED}/* /var/lib/kubelet/\n"),
    ),
];

/// Returns the lines of the blocks for a shell, without comments.
fn commands(page: &str) -> Vec<&str> {
    let (mut kind, mut found) = (None, Vec::new());
    for line in page.lines() {
        match (line.strip_prefix("```"), kind) {
            (Some(begins), None) => kind = Some(begins),
            (Some(_), Some(_)) => kind = None,
            // A block without a language may be a part of a file, which has brackets or ` = `.
            (None, Some("")) if !line.starts_with('[') && !line.contains(" = ") => {
                found.extend(line.split("  #").next().map(str::trim).filter(|line| !line.is_empty()));
            }
            (None, _) => {}
        }
    }
    found
}

#[test]
fn documented_commands_are_tested() {
    let tests = TESTS.concat();
    for (name, page, known) in [
        ("kubernetes", include_str!("../../docs/kubernetes.md"), KUBERNETES),
        ("migration", include_str!("../../docs/migration.md"), MIGRATION),
    ] {
        let commands = commands(page);
        for command in &commands {
            let how = known.iter().find(|(line, _)| line == command);
            assert!(how.is_some(), "docs/{name}.md: no test runs this, and no reason is given: {command}");
        }
        for (command, how) in known {
            assert!(commands.contains(command), "docs/{name}.md does not have: {command}");
            match how {
                Run(words) => {
                    assert!(tests.contains(words), "no test of the cluster has {words:?}: {command}");
                }
                Not(why) => assert!(!why.is_empty(), "{command}"),
            }
        }
    }
}
