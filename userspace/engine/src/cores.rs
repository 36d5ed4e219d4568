//! Selection of whole cores with different numbers of CPUs.
//!
//! If a CPU is offline, or the processor mixes core types, whole cores cannot provide every number of CPUs: cores of
//! 2, 2 and 1 CPUs provide 1 to 5, cores of 2 and 2 CPUs only 2 and 4.
//!
//! # Algorithm
//! Cores are taken in the given order as long as they fit. If that leaves a rest, the possible sums of all later cores
//! are computed, as one bit per sum, and each core is taken if the later ones can complete the sum.

/// Cores of equal size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CoreRun {
    /// Number of CPUs of each core.
    pub(crate) size: usize,
    /// Number of cores.
    pub(crate) count: usize,
}

/// Returns the runs of equal sizes.
pub(crate) fn core_runs(sizes: &[usize]) -> Vec<CoreRun> {
    let equal = sizes.chunk_by(|a, b| a == b);
    equal.filter_map(|run| Some(CoreRun { size: *run.first()?, count: run.len() })).collect()
}

/// Returns the number of cores of each run so that their sizes have the sum `to`, or `None` if this is impossible.
/// Cores of earlier runs are preferred.
pub(crate) fn find_counts_with_sum(runs: &[CoreRun], to: usize) -> Option<Vec<usize>> {
    let most = |run: &CoreRun, left: usize| left.checked_div(run.size).unwrap_or(0).min(run.count);
    let mut left = to;
    let mut take_first = |run: &CoreRun| {
        let count = most(run, left);
        left -= count * run.size;
        count
    };
    let first: Vec<usize> = runs.iter().map(&mut take_first).collect();
    if left == 0 {
        return Some(first);
    }
    let total = runs.iter().fold(0usize, |sum, run| sum.saturating_add(run.size.saturating_mul(run.count)));
    if total < to {
        return None;
    }
    // Possible sums of the runs after each one, last run first.
    let mut later = Vec::with_capacity(runs.len());
    let mut sums = Sums::zero(to);
    for run in runs.iter().rev() {
        let next = sums.with(run);
        later.push(std::mem::replace(&mut sums, next));
    }
    if !sums.has(to) {
        return None;
    }
    let mut left = to;
    let take = |(run, later): (&CoreRun, Sums)| {
        let count = (0..=most(run, left)).rev().find(|count| later.has(left - count * run.size))?;
        left -= count * run.size;
        Some(count)
    };
    runs.iter().zip(later.into_iter().rev()).map(take).collect()
}

/// Returns the indices of sizes with the sum `to`, or `None` if there are none. Earlier indices are preferred.
pub(crate) fn find_sizes_with_sum(sizes: &[usize], to: usize) -> Option<Vec<usize>> {
    let runs = core_runs(sizes);
    let counts = find_counts_with_sum(&runs, to)?;
    let mut start = 0;
    let places = runs.iter().zip(counts).flat_map(|(run, count)| {
        let places = start..start + count;
        start += run.count;
        places
    });
    Some(places.collect())
}

/// Set of possible sums up to a maximum, one bit per sum.
#[derive(Clone, Debug)]
struct Sums(Vec<u64>);

impl Sums {
    /// Makes the set of the sum zero.
    fn zero(most: usize) -> Self {
        let mut words = vec![0; most / 64 + 1];
        words[0] = 1;
        Self(words)
    }

    fn has(&self, sum: usize) -> bool {
        self.0.get(sum / 64).is_some_and(|word| word >> (sum % 64) & 1 == 1)
    }

    /// Returns the sums of which some cores of the run are a part.
    fn with(&self, run: &CoreRun) -> Self {
        let mut all = self.clone();
        // Numbers of cores 1, 2, 4 … and a rest can be combined to every number up to the count.
        let (mut step, mut left) = (1, run.count);
        while left > 0 {
            let count = step.min(left);
            all.add_shifted(count.saturating_mul(run.size));
            left -= count;
            step *= 2;
        }
        all
    }

    /// Adds every sum again, increased by `by`.
    fn add_shifted(&mut self, by: usize) {
        let (words, bits) = (by / 64, by % 64);
        for place in (words..self.0.len()).rev() {
            let low = self.0[place - words] << bits;
            let high = match (place - words).checked_sub(1) {
                Some(before) if bits > 0 => self.0[before] >> (64 - bits),
                _ => 0,
            };
            self.0[place] |= low | high;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_first_sizes_with_the_sum() {
        let of = |sizes: &[usize], to| find_sizes_with_sum(sizes, to);
        assert_eq!(of(&[2, 2, 2], 4), Some(vec![0, 1]));
        assert_eq!(of(&[2, 2, 1], 3), Some(vec![0, 2]));
        assert_eq!(of(&[1, 2, 2], 4), Some(vec![1, 2]), "the first has to be passed over");
        assert_eq!(of(&[4, 3, 3], 6), Some(vec![1, 2]));
        assert_eq!((of(&[2, 2], 3), of(&[2, 2], 6), of(&[], 0)), (None, None, Some(vec![])));
    }

    #[test]
    fn sums_are_exact() {
        // All lists of up to six sizes of 1 to 4, compared with all of their subsets.
        for list in 0u32..4096 {
            let sizes: Vec<usize> = (0..6).map(|place| (list >> (2 * place) & 3) as usize + 1).collect();
            for to in 0..=24 {
                let members =
                    |mask: u32| (0..6).filter(move |place| mask >> place & 1 == 1).collect::<Vec<_>>();
                let subsets = (0..64)
                    .map(members)
                    .filter(|of| of.iter().map(|&place| sizes[place]).sum::<usize>() == to);
                // The earliest indices: the indicators of all places are compared.
                let is_in = |of: &Vec<usize>| (0..6).map(|place| of.contains(&place)).collect::<Vec<_>>();
                assert_eq!(find_sizes_with_sum(&sizes, to), subsets.max_by_key(is_in), "{sizes:?} {to}");
            }
        }
    }

    #[test]
    fn sums_can_exceed_a_word() {
        let runs = [CoreRun { size: 7, count: 100 }, CoreRun { size: 8, count: 1000 }];
        assert_eq!(find_counts_with_sum(&runs, 7 * 96 + 8 * 999), Some(vec![96, 999]));
        assert_eq!(find_counts_with_sum(&runs, 8_700), Some(vec![100, 1000]));
        assert_eq!((find_counts_with_sum(&runs, 8_699), find_counts_with_sum(&runs, 6)), (None, None));
    }
}
