//! Columns of the workload table: sort keys, titles, and the columns that fit on a screen.

use clap::ValueEnum;

/// A column of the workload table, in the order of the screen. The doc comments of sort keys are help texts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Column {
    /// Name
    Name,
    // The guaranteed nodes.
    #[value(skip)]
    Nodes,
    // The distribution of its memory over the nodes.
    #[value(skip)]
    Bar,
    /// Resident memory, most first
    #[default]
    Resident,
    /// Share of local memory, least first
    Local,
    /// Memory allocated on the CPU's node, per second
    LocalRate,
    /// Memory allocated on other nodes, per second
    RemoteRate,
    /// Share of accesses to other nodes, most first
    Accesses,
    /// Memory allocated outside the guaranteed nodes
    Missed,
}

impl Column {
    /// All columns but the name, the most useful first.
    pub(crate) const BY_PRIORITY: [Self; 8] = [
        Self::Resident,
        Self::Local,
        Self::RemoteRate,
        Self::Missed,
        Self::Accesses,
        Self::Nodes,
        Self::LocalRate,
        Self::Bar,
    ];

    /// Returns the title and the width in cells of a terminal; the name gets the remaining width.
    pub(crate) const fn title_and_width(self) -> (&'static str, usize) {
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

    /// Returns the columns that fit on a screen of this width, in order, and the width of the name.
    pub(crate) fn fitting(width: usize, sort: Self) -> (Vec<Self>, usize) {
        let least = if width < 60 { 10 } else { 24 };
        let (mut chosen, mut left) = (vec![Self::Name], width);
        for column in [sort].into_iter().chain(Self::BY_PRIORITY) {
            let takes = column.title_and_width().1 + 1;
            if !chosen.contains(&column) && left >= takes + least {
                left -= takes;
                chosen.push(column);
            }
        }
        chosen.sort();
        (chosen, left)
    }
}
