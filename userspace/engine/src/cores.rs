//! Selection of whole cores with different numbers of CPUs.
//!
//! If a CPU is offline, or the processor mixes core types, whole cores cannot provide every number of CPUs: cores of
//! 2, 2 and 1 CPUs provide 1 to 5, cores of 2 and 2 CPUs only 2 and 4.

/// Returns the indices of sizes with the sum `to`, or `None` if there are none. Earlier indices are preferred.
pub(crate) fn find_sizes_with_sum(sizes: &[usize], to: usize) -> Option<Vec<usize>> {
    let fits = |place: &usize, left: &mut usize, rest: &dyn Fn(usize) -> bool| {
        let taken = sizes[*place] <= *left && rest(*left - sizes[*place]);
        *left -= if taken { sizes[*place] } else { 0 };
        taken
    };
    let mut left = to;
    let first: Vec<usize> = (0..sizes.len()).filter(|place| fits(place, &mut left, &|_| true)).collect();
    if left == 0 {
        return Some(first);
    }
    if sizes.iter().sum::<usize>() < to {
        return None;
    }
    // `reached[place][sum]`: whether some of the sizes from `place` on have this sum.
    let mut reached = vec![vec![false; to + 1]; sizes.len() + 1];
    reached[sizes.len()][0] = true;
    for place in (0..sizes.len()).rev() {
        for sum in 0..=to {
            let with = sum.checked_sub(sizes[place]).is_some_and(|rest| reached[place + 1][rest]);
            reached[place][sum] = with || reached[place + 1][sum];
        }
    }
    let mut left = to;
    let taken = |place: &usize| fits(place, &mut left, &|rest| reached[*place + 1][rest]);
    reached[0][to].then(|| (0..sizes.len()).filter(taken).collect())
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
}
