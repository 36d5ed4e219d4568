//! The strategy `kubelet` repeats every record of the real kubelet.

mod folder;
mod runner;

#[test]
fn all_vectors_pass() {
    let report = runner::run(&folder::own("conformance")).unwrap();
    assert!(report.failures.is_empty(), "\n{report}");
    assert!(report.scenarios > 0 && report.state_files > 0, "{report}");
}

#[test]
fn refuses_directory_without_vectors() {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    assert!(runner::run(&here.join("src")).is_err_and(|error| error.contains("no vectors")));
    assert!(runner::run(&here.join("absent")).is_err_and(|error| error.contains("absent")));
}
