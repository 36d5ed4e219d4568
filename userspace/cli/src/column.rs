//! The columns of workloads: what they are sorted by, and which of them fit on a screen.

use clap::ValueEnum;

/// A column of the workloads, in the order of the screen. What workloads can be sorted by is described for the help.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Column {
    /// Name
    Name,
    // The promised nodes.
    #[value(skip)]
    Nodes,
    // Where its memory lies.
    #[value(skip)]
    Bar,
    /// Memory that it has, most first
    #[default]
    Resident,
    /// Share that is local, least first
    Local,
    /// Memory allocated on the CPU's node, per second
    LocalRate,
    /// Memory allocated on other nodes, per second
    RemoteRate,
    /// Share of accesses that go to other nodes, most first
    Accesses,
    /// Memory allocated outside its nodes
    Missed,
}

impl Column {
    /// All but the name, the most useful first.
    pub(crate) const BY_WORTH: [Self; 8] = [
        Self::Resident,
        Self::Local,
        Self::RemoteRate,
        Self::Missed,
        Self::Accesses,
        Self::Nodes,
        Self::LocalRate,
        Self::Bar,
    ];

    /// Its title and its cells of a terminal; the name takes what is left.
    pub(crate) const fn head(self) -> (&'static str, usize) {
        match self {
            Self::Name => ("WORKLOAD", 0),
            Self::Nodes => ("NODES", 7),
            Self::Bar => ("BY NODE", 16),
            Self::Resident => ("RESIDENT", 10),
            Self::Local => ("LOCAL", 8),
            Self::LocalRate => ("LOCAL/S", 12),
            Self::RemoteRate => ("REMOTE/S", 12),
            Self::Accesses => ("ACCESSES", 9),
            Self::Missed => ("MISSED", 10),
        }
    }

    pub(crate) const fn is_text(self) -> bool {
        matches!(self, Self::Name | Self::Nodes | Self::Bar)
    }

    /// Those that a screen of this width has room for, in order, and the width of the name.
    pub(crate) fn fitting(width: usize, sort: Self) -> (Vec<Self>, usize) {
        let least = if width < 60 { 10 } else { 24 };
        let (mut chosen, mut left) = (vec![Self::Name], width);
        for column in [sort].into_iter().chain(Self::BY_WORTH) {
            let takes = column.head().1 + 1;
            if !chosen.contains(&column) && left >= takes + least {
                left -= takes;
                chosen.push(column);
            }
        }
        chosen.sort();
        (chosen, left)
    }
}
