//! A map with copies that share their unchanged entries.
//!
//! # Problem
//! The state of a thousand workloads is copied before each change, so that the change can be reverted. Readers compare
//! two states to find what changed. A deep copy and a deep comparison cost more than the change itself.
//!
//! # Algorithm
//! A copy shares one pointer until either copy changes. Then the map of pointers is copied, but unchanged values stay
//! shared. Two maps are compared by the addresses of their values.

use std::{
    borrow::Borrow,
    cmp::Ordering,
    collections::{BTreeMap, btree_map},
    ops::Deref,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

/// A map that is cheap to copy. It dereferences to the map that it contains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent, bound(deserialize = "K: Deserialize<'de> + Ord, V: Deserialize<'de>"))]
pub struct SharedMap<K: Ord, V>(Arc<BTreeMap<K, Arc<V>>>);

impl<K: Ord, V> Default for SharedMap<K, V> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K: Ord, V> Deref for SharedMap<K, V> {
    type Target = BTreeMap<K, Arc<V>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<'a, K: Ord, V> IntoIterator for &'a SharedMap<K, V> {
    type Item = (&'a K, &'a Arc<V>);
    type IntoIter = btree_map::Iter<'a, K, Arc<V>>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<K: Ord + Clone, V> SharedMap<K, V> {
    /// Inserts or replaces a value.
    pub fn insert(&mut self, key: K, value: impl Into<Arc<V>>) {
        Arc::make_mut(&mut self.0).insert(key, value.into());
    }

    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q)
    where
        K: Borrow<Q>,
    {
        if self.contains_key(key) {
            Arc::make_mut(&mut self.0).remove(key);
        }
    }

    /// Returns the keys that were added, removed or replaced since `before`, in order.
    pub fn changed_since(&self, before: &Self) -> Vec<K> {
        if Arc::ptr_eq(&self.0, &before.0) {
            return Vec::new();
        }
        let (mut old, mut new) = (before.iter().peekable(), self.iter().peekable());
        let mut changed = Vec::new();
        loop {
            let order = match (old.peek(), new.peek()) {
                (None, None) => return changed,
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some((was, _)), Some((is, _))) => was.cmp(is),
            };
            let was = (order != Ordering::Greater).then(|| old.next()).flatten();
            let is = (order != Ordering::Less).then(|| new.next()).flatten();
            if let (Some((_, was)), Some((_, is))) = (was, is)
                && Arc::ptr_eq(was, is)
            {
                continue;
            }
            changed.extend(was.or(is).map(|(key, _)| key.clone()));
        }
    }

    /// Applies the difference between two maps to this one, which may differ from both elsewhere.
    pub fn patch(&mut self, from: &Self, to: &Self) {
        for key in to.changed_since(from) {
            match to.get(&key) {
                Some(value) => self.insert(key, value.clone()),
                None => self.remove(&key),
            }
        }
    }
}

impl<K: Ord + Clone, V: Clone> SharedMap<K, V> {
    /// Returns a mutable value, which is copied if it is shared.
    pub fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        if !self.contains_key(key) {
            return None;
        }
        Arc::make_mut(&mut self.0).get_mut(key).map(Arc::make_mut)
    }

    /// Returns all values as mutable, copied if they are shared.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        Arc::make_mut(&mut self.0).values_mut().map(Arc::make_mut)
    }
}

impl<K: Ord, V> FromIterator<(K, V)> for SharedMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(items: I) -> Self {
        Self(Arc::new(items.into_iter().map(|(key, value)| (key, Arc::new(value))).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type MapEdit<'a> = &'a dyn Fn(&mut SharedMap<u32, String>);

    fn map(items: &[(u32, &str)]) -> SharedMap<u32, String> {
        items.iter().map(|(key, value)| (*key, (*value).to_owned())).collect()
    }

    #[test]
    fn copy_shares_unchanged_values() {
        let before = map(&[(1, "a"), (2, "b"), (3, "c")]);
        let mut now = before.clone();
        assert!(now.changed_since(&before).is_empty());
        now.insert(4, "d".to_owned());
        now.remove(&1);
        now.remove(&7);
        now.get_mut(&3).unwrap().push('!');
        assert!(now.get_mut(&1).is_none());
        assert_eq!(now.changed_since(&before), [1, 3, 4]);
        assert_eq!(before, map(&[(1, "a"), (2, "b"), (3, "c")]));
        assert_eq!(now, map(&[(2, "b"), (3, "c!"), (4, "d")]));
    }

    #[test]
    fn finds_changed_keys() {
        let before = map(&[(1, "a"), (3, "c"), (5, "e")]);
        let change = |change: MapEdit<'_>| {
            let mut now = before.clone();
            change(&mut now);
            (now.changed_since(&before), before.changed_since(&now))
        };
        assert_eq!(change(&|_| {}), (Vec::new(), Vec::new()));
        let changes: [(u32, MapEdit<'_>); 6] = [
            (0, &|now| now.insert(0, String::new())),
            (4, &|now| now.insert(4, String::new())),
            (9, &|now| now.insert(9, String::new())),
            (1, &|now| now.remove(&1)),
            (5, &|now| now.remove(&5)),
            (3, &|now| now.insert(3, "c".to_owned())),
        ];
        for (key, what) in changes {
            assert_eq!(change(what), (vec![key], vec![key]));
        }
        assert_eq!(before.changed_since(&SharedMap::default()), [1, 3, 5]);
        assert_eq!(SharedMap::default().changed_since(&before), [1, 3, 5]);
    }
}
