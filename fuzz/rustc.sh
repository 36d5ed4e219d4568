#!/bin/sh
# Cargo calls this for the crates of this workspace: it counts which branches are taken, so that the engine finds inputs
# that take others. Dependencies are those of an ordinary build. The flags are cargo-fuzz's. Cargo does not look into this
# file: after a change of it, `cargo clean --workspace` first.
case " $* " in
*" build_script_build "*) exec "$@" ;;
esac
exec "$@" -Copt-level=1 -Cdebug-assertions=on -Coverflow-checks=on -Ccodegen-units=4 --cfg fuzzing \
    -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Cllvm-args=-simplifycfg-branch-fold-threshold=0
