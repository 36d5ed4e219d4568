//! Sets of CPU and NUMA node ids, in the list format of the kernel (`0-3,8,10-11`).
//!
//! A set has no fixed capacity: it is as long as its highest id requires. The list parser refuses ids above [`MAX_ID`],
//! which bounds the memory that a corrupt file can make it allocate.
//!
//! Source of the format: Documentation/admin-guide/cputopology.rst and cpuset(7), "List format".

use std::{
    cmp::Ordering,
    fmt,
    hash::Hash,
    marker::PhantomData,
    ops::{BitAnd, BitOr, Sub},
    str::FromStr,
};

use serde::{Deserialize, Serialize};

/// The highest id that a list may contain: far above the limits of Linux (8192 CPUs, 1024 nodes).
pub const MAX_ID: u32 = 65_535;

/// An id that can be a member of an [`IdSet`].
pub trait Id: Copy + Ord + Hash + fmt::Debug {
    /// The name of a list of such ids in error messages.
    const LIST_NAME: &'static str;
    fn from_u32(id: u32) -> Self;
    /// Returns the id's number.
    fn as_u32(self) -> u32;
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $list:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
            derive_more::Display,
        )]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl Id for $name {
            const LIST_NAME: &'static str = $list;
            fn from_u32(id: u32) -> Self {
                Self(id)
            }
            fn as_u32(self) -> u32 {
                self.0
            }
        }

    };
}

id!(
    /// A logical CPU, as numbered by the kernel.
    CpuId,
    "CPU list"
);
id!(
    /// A NUMA node, as numbered by the kernel. Ids need not be contiguous.
    NodeId,
    "node list"
);

/// A set of CPUs.
pub type CpuSet = IdSet<CpuId>;
/// A set of NUMA nodes.
pub type NodeSet = IdSet<NodeId>;

/// A set of ids, as a bit set with one bit per id.
///
/// The order is that of the number that the bits form: the kubelet orders masks of equal size like this.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct IdSet<T> {
    /// Has no zero words at the end, so that equal sets are equal vectors.
    words: Vec<u64>,
    id: PhantomData<T>,
}

impl<T: Id> IdSet<T> {
    /// Returns the empty set.
    pub const fn new() -> Self {
        Self { words: Vec::new(), id: PhantomData }
    }

    /// Returns the set with one id.
    pub fn single(id: T) -> Self {
        let mut set = Self::new();
        set.insert(id);
        set
    }

    /// Adds an id. Returns `true` if it was not a member.
    pub fn insert(&mut self, id: T) -> bool {
        let (word, bit) = position(id);
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        let before = self.words[word];
        self.words[word] |= bit;
        before & bit == 0
    }

    /// Removes an id. Returns `true` if it was a member.
    pub fn remove(&mut self, id: T) -> bool {
        let (word, bit) = position(id);
        let Some(held) = self.words.get_mut(word) else { return false };
        let was = *held & bit != 0;
        *held &= !bit;
        self.trim();
        was
    }

    /// Returns true if the id is a member.
    pub fn contains(&self, id: T) -> bool {
        let (word, bit) = position(id);
        self.words.get(word).is_some_and(|held| held & bit != 0)
    }

    /// Returns the number of members.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Returns true if the set has no members.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Returns the members in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = T> + '_ {
        self.words.iter().zip(0u32..).flat_map(|(&word, index)| {
            std::iter::successors((word != 0).then_some(word), |rest| {
                let next = rest & (rest - 1);
                (next != 0).then_some(next)
            })
            .map(move |rest| T::from_u32(index * 64 + rest.trailing_zeros()))
        })
    }

    /// Returns the lowest member.
    pub fn first(&self) -> Option<T> {
        self.iter().next()
    }

    /// Returns the highest member.
    pub fn last(&self) -> Option<T> {
        let index = u32::try_from(self.words.len()).ok()?.checked_sub(1)?;
        let word = self.words.last()?;
        Some(T::from_u32(index * 64 + 63 - word.leading_zeros()))
    }

    /// Returns true if every member of `self` is in `other`.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.words.iter().enumerate().all(|(i, word)| word & !other.word(i) == 0)
    }

    /// Returns true if the sets have a common member.
    pub fn intersects(&self, other: &Self) -> bool {
        self.words.iter().enumerate().any(|(i, word)| word & other.word(i) != 0)
    }

    /// Returns the bits, least significant word first, without zero words at the end.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Returns the set with these bits, least significant word first.
    pub fn from_words(words: impl Into<Vec<u64>>) -> Self {
        let mut set = Self { words: words.into(), id: PhantomData };
        set.trim();
        set
    }

    fn word(&self, index: usize) -> u64 {
        self.words.get(index).copied().unwrap_or(0)
    }

    fn trim(&mut self) {
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
    }

    fn combine(&self, other: &Self, op: impl Fn(u64, u64) -> u64) -> Self {
        let len = self.words.len().max(other.words.len());
        Self::from_words((0..len).map(|i| op(self.word(i), other.word(i))).collect::<Vec<_>>())
    }
}

fn position<T: Id>(id: T) -> (usize, u64) {
    ((id.as_u32() / 64) as usize, 1 << (id.as_u32() % 64))
}

impl<T: Id> Default for IdSet<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Id> BitOr for &IdSet<T> {
    type Output = IdSet<T>;
    fn bitor(self, other: Self) -> IdSet<T> {
        self.combine(other, |a, b| a | b)
    }
}

impl<T: Id> BitAnd for &IdSet<T> {
    type Output = IdSet<T>;
    fn bitand(self, other: Self) -> IdSet<T> {
        self.combine(other, |a, b| a & b)
    }
}

impl<T: Id> Sub for &IdSet<T> {
    type Output = IdSet<T>;
    fn sub(self, other: Self) -> IdSet<T> {
        self.combine(other, |a, b| a & !b)
    }
}

impl<T: Id> PartialOrd for IdSet<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T: Id> Ord for IdSet<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.words
            .len()
            .cmp(&other.words.len())
            .then_with(|| self.words.iter().rev().cmp(other.words.iter().rev()))
    }
}

impl<T: Id> FromIterator<T> for IdSet<T> {
    fn from_iter<I: IntoIterator<Item = T>>(ids: I) -> Self {
        let mut set = Self::new();
        set.extend(ids);
        set
    }
}

impl<T: Id> Extend<T> for IdSet<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, ids: I) {
        for id in ids {
            self.insert(id);
        }
    }
}

impl<T: Id> fmt::Display for IdSet<T> {
    /// Writes the kernel's list format; nothing for the empty set.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ids = self.iter().map(Id::as_u32).peekable();
        let mut separator = "";
        while let Some(low) = ids.next() {
            let mut high = low;
            while ids.next_if_eq(&(high + 1)).is_some() {
                high += 1;
            }
            match high {
                _ if high == low => write!(f, "{separator}{low}")?,
                _ => write!(f, "{separator}{low}-{high}")?,
            }
            separator = ",";
        }
        Ok(())
    }
}

impl<T: Id> fmt::Debug for IdSet<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

/// An error in the text of a list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {list_name}: {problem} (expected ids and ranges such as `0-3,8`)")]
pub struct ListError {
    /// The whole text.
    pub text: String,
    /// The kind of list: `CPU list` or `node list`.
    pub list_name: &'static str,
    pub problem: String,
}

impl<T: Id> FromStr for IdSet<T> {
    type Err = ListError;

    /// Parses the kernel's list format. White space around the list is ignored. An empty text is the empty set.
    fn from_str(text: &str) -> Result<Self, ListError> {
        let fail = |problem: String| ListError { text: text.to_owned(), list_name: T::LIST_NAME, problem };
        let id = |part: &str| match part.parse::<u32>() {
            // `parse` accepts a leading plus sign; the kernel does not.
            Ok(id) if id <= MAX_ID && part.starts_with(|c: char| c.is_ascii_digit()) => Ok(id),
            Ok(id) if id > MAX_ID => Err(fail(format!("id {id} is above {MAX_ID}"))),
            _ => Err(fail(format!("{part:?} is not an id"))),
        };
        let mut set = Self::new();
        let list = text.trim();
        if list.is_empty() {
            return Ok(set);
        }
        for part in list.split(',') {
            let (low, high) = match part.split_once('-') {
                Some((low, high)) => (id(low)?, id(high)?),
                None => (id(part)?, id(part)?),
            };
            if low > high {
                return Err(fail(format!("the range {part:?} is reversed")));
            }
            set.extend((low..=high).map(T::from_u32));
        }
        Ok(set)
    }
}

crate::serde_as_text!([T: Id] IdSet<T>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_parse_and_print() {
        for (text, ids, printed) in [
            ("", vec![], ""),
            ("\n", vec![], ""),
            ("0", vec![0], "0"),
            ("0-3,8", vec![0, 1, 2, 3, 8], "0-3,8"),
            ("8,0-3\n", vec![0, 1, 2, 3, 8], "0-3,8"),
            ("63-65,200", vec![63, 64, 65, 200], "63-65,200"),
            ("1,2,4", vec![1, 2, 4], "1-2,4"),
        ] {
            let set: CpuSet = text.parse().unwrap();
            assert_eq!(set.iter().map(|cpu| cpu.0).collect::<Vec<_>>(), ids, "{text:?}");
            assert_eq!(set.to_string(), printed, "{text:?}");
            assert_eq!(set.len(), ids.len());
            assert_eq!(set.last().map(|cpu| cpu.0), ids.last().copied());
        }
    }

    #[test]
    fn refuses_malformed_lists() {
        for text in ["a", "1-", "-1", "3-1", "1,,2", "0-70000", "1 2", "+1", "0-3:1/2"] {
            let error = text.parse::<NodeSet>().unwrap_err().to_string();
            assert!(error.contains("is not a node list"), "{text:?}: {error}");
        }
    }

    #[test]
    fn set_operations_keep_equal_sets_equal() {
        let a: NodeSet = "0-1,100".parse().unwrap();
        let b: NodeSet = "1,100-101".parse().unwrap();
        assert_eq!((&a & &b).to_string(), "1,100");
        assert_eq!((&a | &b).to_string(), "0-1,100-101");
        assert_eq!(&a - &b, "0".parse().unwrap());
        assert!((&a & &b).is_subset(&a) && a.intersects(&b) && !a.is_subset(&b));
        let mut c = a.clone();
        assert!(c.remove(NodeId(100)) && !c.remove(NodeId(100)));
        assert_eq!(c, "0-1".parse().unwrap());
        assert!(c < a, "ordered as numbers");
    }
}
