//! A compact map for a few entries. The table of workloads contains thousands of such maps.

/// Map stored as a sorted vector. A `BTreeMap` allocates space for eleven entries even if it has one.
#[derive(Clone, Debug)]
pub(crate) struct SmallMap<K, V>(Vec<(K, V)>);

impl<K: Ord, V> SmallMap<K, V> {
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    fn place(&self, key: &K) -> Result<usize, usize> {
        self.0.binary_search_by(|(known, _)| known.cmp(key))
    }

    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        let place = self.place(key).ok()?;
        self.0.get(place).map(|(_, value)| value)
    }

    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let place = self.place(key).ok()?;
        self.0.get_mut(place).map(|(_, value)| value)
    }

    /// Inserts a value, and replaces the previous value of the key.
    pub(crate) fn insert(&mut self, key: K, value: V) {
        match self.place(&key) {
            Ok(place) => self.0[place].1 = value,
            Err(place) => {
                if self.0.is_empty() {
                    // Without this, the vector would allocate space for four entries.
                    self.0.reserve_exact(1);
                }
                self.0.insert(place, (key, value));
            }
        }
    }

    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        let place = self.place(key).ok()?;
        Some(self.0.remove(place).1)
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the entries in the order of their keys.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.0.iter().map(|(key, value)| (key, value))
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.0.iter_mut().map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn behaves_like_btree_map() {
        let (mut small, mut expected) = (SmallMap::new(), BTreeMap::new());
        let mut seed = 1_u64;
        for step in 0..2000_u64 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let key = seed >> 33 & 15;
            match seed >> 61 {
                0..3 => {
                    small.insert(key, step);
                    expected.insert(key, step);
                }
                3..6 => assert_eq!(small.remove(&key), expected.remove(&key)),
                _ => assert_eq!(small.get_mut(&key).map(|value| *value += 1), {
                    expected.get_mut(&key).map(|value| *value += 1)
                }),
            }
            assert_eq!(small.get(&key), expected.get(&key));
            assert_eq!(small.is_empty(), expected.is_empty());
            assert!(small.iter().eq(&expected));
            assert!(small.keys().eq(expected.keys()) && small.values().eq(expected.values()));
        }
        small.values_mut().for_each(|value| *value = 0);
        assert!(small.values().all(|value| *value == 0));
    }

    #[test]
    fn one_entry_reserves_one_place() {
        let mut map = SmallMap::new();
        map.insert(1, 1);
        assert_eq!(map.0.capacity(), 1);
    }
}
