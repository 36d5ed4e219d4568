//! The pods that are known.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use super::StoredPod;

/// More pods than any Kubernetes node runs: what comes above is left out.
const MAX_PODS: usize = 4096;

/// Pods by UID (the runtime's), and by namespace and name.
#[derive(Debug, Default)]
pub(super) struct Store {
    by_uid: HashMap<String, Arc<StoredPod>>,
    /// The UIDs by namespace and name. A pod that was replaced by another of its name stays until it is deleted,
    /// but is not found by name any more.
    uids: BTreeMap<(String, String), String>,
}

impl Store {
    /// Adds a pod, or replaces what was known of it. False where there is no room.
    pub(super) fn put(&mut self, stored: StoredPod) -> bool {
        let id = &stored.pod.id;
        if self.by_uid.len() >= MAX_PODS && !self.by_uid.contains_key(&id.uid) {
            return false;
        }
        self.uids.insert((id.namespace.clone(), id.name.clone()), id.uid.clone());
        self.by_uid.insert(id.uid.clone(), Arc::new(stored));
        true
    }

    /// Forgets a pod.
    pub(super) fn remove(&mut self, stored: &StoredPod) {
        let id = &stored.pod.id;
        self.by_uid.remove(&id.uid);
        let name = (id.namespace.clone(), id.name.clone());
        if self.uids.get(&name) == Some(&id.uid) {
            self.uids.remove(&name);
        }
    }

    pub(super) fn by_uid(&self, uid: &str) -> Option<&Arc<StoredPod>> {
        self.by_uid.get(uid)
    }

    pub(super) fn by_name(&self, namespace: &str, name: &str) -> Option<&Arc<StoredPod>> {
        self.by_uid(self.uids.get(&(namespace.to_owned(), name.to_owned()))?)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<StoredPod>> {
        self.by_uid.values()
    }

    pub(super) fn len(&self) -> usize {
        self.by_uid.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::{Pod, PodId};

    fn pod(name: &str, uid: &str) -> StoredPod {
        let id = PodId { namespace: "n".to_owned(), name: name.to_owned(), uid: uid.to_owned() };
        let pod = Arc::new(Pod { id, ..Pod::default() });
        StoredPod { pod, is_running: false, container_ids: BTreeMap::new() }
    }

    #[test]
    fn a_pod_that_was_replaced_does_not_hide_its_successor() {
        let mut store = Store::default();
        assert!(store.put(pod("db-0", "old")) && store.put(pod("db-0", "new")));
        let found = |store: &Store| store.by_name("n", "db-0").map(|stored| stored.pod.id.uid.clone());
        assert_eq!(found(&store).as_deref(), Some("new"));
        assert!(store.by_uid("old").is_some());
        store.remove(&pod("db-0", "old"));
        assert_eq!(found(&store).as_deref(), Some("new"));
        store.remove(&pod("db-0", "new"));
        assert_eq!((found(&store), store.len()), (None, 0));
    }

    #[test]
    fn there_is_an_end_to_what_is_kept() {
        let mut store = Store::default();
        for number in 0..MAX_PODS {
            assert!(store.put(pod(&number.to_string(), &number.to_string())));
        }
        assert!(!store.put(pod("one more", "one more")));
        assert!(store.put(pod("0", "0")), "what is known can change");
        assert_eq!(store.len(), MAX_PODS);
    }
}
