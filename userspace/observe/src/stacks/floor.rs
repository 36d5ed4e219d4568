//! Lookup of the closest symbol at or before each of some addresses.
//!
//! Symbol tables are unsorted and can be too large to store, so the addresses are sorted instead, and each symbol is
//! compared with them once.

/// The closest symbol so far for each address.
#[derive(Debug)]
pub(super) struct SymbolLookup<T> {
    /// Sorted and unique.
    addresses: Vec<u64>,
    /// Closest symbol that begins at or before this address and after the previous one.
    best: Vec<Option<(u64, T)>>,
}

impl<T: Clone> SymbolLookup<T> {
    /// Starts a lookup without any symbol.
    pub(super) fn new(addresses: impl IntoIterator<Item = u64>) -> Self {
        let mut addresses: Vec<u64> = addresses.into_iter().collect();
        addresses.sort_unstable();
        addresses.dedup();
        Self { best: vec![None; addresses.len()], addresses }
    }

    /// Offers a symbol that begins at `start`; `symbol` is only called if it is the closest so far.
    pub(super) fn offer(&mut self, start: u64, symbol: impl FnOnce() -> T) {
        let place = self.addresses.partition_point(|address| *address < start);
        if let Some(best) = self.best.get_mut(place)
            && best.as_ref().is_none_or(|(known, _)| *known < start)
        {
            *best = Some((start, symbol()));
        }
    }

    /// Returns each address with the closest symbol that begins at or before it.
    pub(super) fn into_symbols(self) -> impl Iterator<Item = (u64, Option<(u64, T)>)> {
        let mut last = None;
        self.addresses.into_iter().zip(self.best).map(move |(address, best)| {
            if best.is_some() {
                last = best;
            }
            (address, last.clone())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_belongs_to_preceding_symbol() {
        let mut floor = SymbolLookup::new([50, 10, 51, 99, 50]);
        for start in [60, 20, 50, 11, 30, 100] {
            floor.offer(start, || format!("at {start}"));
        }
        let found: Vec<_> =
            floor.into_symbols().map(|(address, of)| (address, of.map(|(start, _)| start))).collect();
        assert_eq!(found, [(10, None), (50, Some(50)), (51, Some(50)), (99, Some(60))]);
        assert_eq!(SymbolLookup::<u32>::new([]).into_symbols().count(), 0);
    }
}
