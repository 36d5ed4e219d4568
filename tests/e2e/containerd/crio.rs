//! CRI-O with crun, its default. Debian has no package of CRI-O, so its programs come from a folder.

use super::{
    CRUN, CriServer, Release, V2, check, check_forty, check_refusals, check_room, check_with_systemd,
    newer::check_required_plugin,
};

/// The libraries of crun and conmon are those of `V2`.
const CRIO: Release =
    Release { server: CriServer::Crio, config: ("crio.conf", "/etc/crio/crio.conf"), oci: CRUN, ..V2 };

#[test]
fn containers_are_placed() {
    check(&CRIO);
}

#[test]
fn containers_are_placed_with_systemd() {
    check_with_systemd(&CRIO);
}

#[test]
fn forty_containers_share_no_cpu() {
    check_forty(&CRIO);
}

#[test]
fn refused_pod_leaves_nothing() {
    check_refusals(&CRIO);
}

#[test]
fn required_plugin_stops_pods() {
    check_required_plugin(&CRIO);
}

#[test]
fn running_pod_makes_room() {
    check_room(&CRIO);
}
