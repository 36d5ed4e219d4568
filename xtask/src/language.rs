//! `cargo xtask language`: measures how far the language of code and documents is from that of the field.
//!
//! # Problem
//! A codebase drifts into a language of its own: doc comments that are questions, pronouns for software, participles as type names.
//! A list of forbidden words moves the habit to other words.
//!
//! # Algorithm
//! Seven numbers are counted per crate (six) and for all pages together (two, see [`Metric`]). Each has a wanted value. A crate that is
//! above it has its own limit in `xtask/language.json`; `--lower` lowers these limits to the present values, and nothing raises them.
//!
//! # Invariants
//! - Only text is read: the count of a file depends on nothing but that file.
//! - A crate without an entry has the wanted values as its limits, so a new crate starts with them.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use regex::Regex;

use crate::command;

/// The limits of crates that are above the wanted values, from the root of the checkout.
const LIMITS_FILE: &str = "xtask/language.json";
/// The name under which all Markdown files are counted together.
const PAGES: &str = "pages";

const OPENERS: &[&str] =
    &["what", "whether", "who", "whose", "whom", "those", "which", "where", "so", "as", "out", "by", "how"];
const PRONOUN: &str = r"(?i-u)\b(who|whom|whose|whoever|nobody|somebody|anybody|others)\b";
const WHAT_IS: &str = r"(?i-u)\bwhat (is|was|are|were|it|has|had|have|they|a|an|the|others|came|comes|can|could|cannot|must|may)\b";
const PARTICIPLE: &str = r"^(?:[A-Z][a-z]+ed|Held|Seen|Done|Known|Given|Kept|Found|Shown|Made|Taken|Left|Told|Sent|Lost|Met|Read|Written|Chosen|Heard|Waiting|Missing|RunningVm|Watching|Growing|Over|Alone|Together|Near|Others|Of|Whole|Inside|Apart|Anew)$";
const VAGUE_CONSTANTS: &[&str] = &[
    "LOOK", "PATIENCE", "LIMIT", "LIMITS", "FEW", "KEPT", "MANY", "LEAST", "MOST", "OFTEN", "SOON", "LATE",
    "LATEST", "PAUSE", "REST", "TRIES", "TURN", "ENOUGH", "SOME",
];
const VAGUE_FUNCTIONS: &[&str] = &[
    "of",
    "look",
    "settle",
    "show",
    "told",
    "tell",
    "mend",
    "heed",
    "over",
    "one",
    "those",
    "put",
    "go",
    "go_back",
    "turn",
    "be",
    "carry_out",
];
const ITEM: &str = r#"^[ \t]*(?:pub(?:\([^)]*\))?[ \t]+)?(?:(?:async|const|unsafe|extern[ \t]+"C")[ \t]+)*(struct|enum|trait|type|fn|const|static|mod|union)[ \t]+([A-Za-z_][A-Za-z0-9_]*)"#;

#[derive(Args)]
pub(crate) struct Arguments {
    /// Prints each place that counts for this metric
    #[arg(long, value_enum)]
    list: Option<Metric>,
    /// Only files below this folder
    #[arg(long, requires = "list")]
    under: Option<PathBuf>,
    /// Lowers the limits to the present values where these are smaller
    #[arg(long, conflicts_with = "list")]
    lower: bool,
}

/// A count per crate, or of all pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
enum Metric {
    /// Doc comments that begin with a question word or the like, in percent
    Openers,
    /// Pronouns of people, in 1,000 lines of comments
    Pronouns,
    /// Clauses such as "what is", in 1,000 lines of comments
    Whatis,
    /// Types that are named by a bare participle or adverb, in percent
    Participles,
    /// Constants and functions with a name that says no quantity and no action, in 1,000 definitions
    Vague,
    /// The mean length of the names of tests, in characters
    Testnames,
    /// Pronouns of people, in 1,000 words of all pages
    PagePronouns,
    /// Clauses such as "what is", in 1,000 words of all pages
    PageWhatis,
}

impl Metric {
    const ALL: [Self; 8] = [
        Self::Openers,
        Self::Pronouns,
        Self::Whatis,
        Self::Participles,
        Self::Vague,
        Self::Testnames,
        Self::PagePronouns,
        Self::PageWhatis,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Openers => "openers",
            Self::Pronouns => "pronouns",
            Self::Whatis => "whatis",
            Self::Participles => "participles",
            Self::Vague => "vague",
            Self::Testnames => "testnames",
            Self::PagePronouns => "page-pronouns",
            Self::PageWhatis => "page-whatis",
        }
    }

    /// The largest value of codebases that are models of this field, rounded up.
    const fn wanted(self) -> f64 {
        match self {
            Self::Openers | Self::Participles | Self::PageWhatis => 2.0,
            Self::Pronouns | Self::Whatis => 5.0,
            Self::Vague => 1.0,
            Self::Testnames => 32.0,
            Self::PagePronouns => 1.5,
        }
    }

    /// The size of the unit in which the share is given.
    const fn scale(self) -> u32 {
        match self {
            Self::Openers | Self::Participles => 100,
            Self::Testnames => 1,
            Self::Pronouns | Self::Whatis | Self::Vague | Self::PagePronouns | Self::PageWhatis => 1000,
        }
    }
}

/// A count and its total, per metric.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Share {
    part: u32,
    whole: u32,
}

impl Share {
    fn add(&mut self, part: usize, whole: usize) {
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        self.part = self.part.saturating_add(count(part));
        self.whole = self.whole.saturating_add(count(whole));
    }

    /// Returns the share in tenths of the unit of the metric, rounded to the nearest.
    fn value(self, metric: Metric) -> f64 {
        if self.whole == 0 {
            return 0.0;
        }
        let share = f64::from(self.part) * f64::from(metric.scale()) / f64::from(self.whole);
        (share * 10.0).round() / 10.0
    }
}

type MetricShares = BTreeMap<Metric, Share>;
/// Limits by crate and name of the metric.
type Limits = BTreeMap<String, BTreeMap<String, f64>>;

/// A place that counts for a metric.
struct SourcePlace {
    metric: Metric,
    path: PathBuf,
    line: usize,
    text: String,
}

/// Counts, prints, and lowers the limits if asked to.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let (counts, places) = measure(command::root())?;
    if let Some(metric) = arguments.list {
        let is_asked = |place: &&SourcePlace| {
            let under = arguments.under.as_ref();
            place.metric == metric && under.is_none_or(|under| place.path.starts_with(under))
        };
        for place in places.iter().filter(is_asked) {
            println!("{}:{}: {}", place.path.display(), place.line, place.text);
        }
        return Ok(());
    }
    print(&counts);
    if arguments.lower {
        let lowered = lowered(&read_limits()?, &counts);
        let text = serde_json::to_string_pretty(&lowered)? + "\n";
        fs::write(command::root().join(LIMITS_FILE), text)
            .with_context(|| format!("cannot write {LIMITS_FILE}"))?;
    }
    Ok(())
}

/// Fails if a crate, or the pages, are above their limits.
pub(crate) fn check() -> Result<()> {
    let (counts, _) = measure(command::root())?;
    let faults = excesses(&read_limits()?, &counts);
    ensure!(
        faults.is_empty(),
        "the language got worse (docs/style.md has the patterns; `cargo xtask language --list METRIC` the places):\n  {}",
        faults.join("\n  ")
    );
    println!(
        "the language of {} crates and of the pages is within its limits",
        counts.len().saturating_sub(1)
    );
    Ok(())
}

fn read_limits() -> Result<Limits> {
    let text = fs::read_to_string(command::root().join(LIMITS_FILE))
        .with_context(|| format!("cannot read {LIMITS_FILE}"))?;
    serde_json::from_str(&text).with_context(|| LIMITS_FILE.to_owned())
}

/// Returns the limit of a metric: the wanted value, or a larger one in the file.
fn limit(limits: &Limits, of: &str, metric: Metric) -> f64 {
    let own = limits.get(of).and_then(|own| own.get(metric.name())).copied();
    own.unwrap_or(0.0).max(metric.wanted())
}

/// Returns a line for each value that is above its limit.
fn excesses(limits: &Limits, counts: &BTreeMap<String, MetricShares>) -> Vec<String> {
    let mut faults = Vec::new();
    for (name, shares) in counts {
        for (&metric, share) in shares {
            let (value, limit) = (share.value(metric), limit(limits, name, metric));
            if value > limit {
                faults.push(format!("{name}: {} is {value:.1}, the limit is {limit:.1}", metric.name()));
            }
        }
    }
    faults
}

/// Returns the limits, each no larger than before and than the present value; those that are not above the wanted values are dropped.
fn lowered(limits: &Limits, counts: &BTreeMap<String, MetricShares>) -> Limits {
    let mut lowered = Limits::new();
    for (name, own) in limits {
        let shares = counts.get(name);
        for metric in Metric::ALL {
            let value =
                shares.and_then(|shares| shares.get(&metric)).map_or(0.0, |share| share.value(metric));
            let value = own.get(metric.name()).map_or(0.0, |limit| limit.min(value));
            if value > metric.wanted() {
                lowered.entry(name.clone()).or_default().insert(metric.name().to_owned(), value);
            }
        }
    }
    lowered
}

fn print(counts: &BTreeMap<String, MetricShares>) {
    print!("{:28}", "");
    for metric in Metric::ALL {
        print!("{:>14}", metric.name());
    }
    println!();
    for (name, shares) in counts {
        print!("{name:28}");
        for metric in Metric::ALL {
            match shares.get(&metric) {
                Some(share) => print!("{:14.1}", share.value(metric)),
                None => print!("{:>14}", "-"),
            }
        }
        println!();
    }
}

/// Counts all files of the checkout that git does not ignore.
fn measure(root: &Path) -> Result<(BTreeMap<String, MetricShares>, Vec<SourcePlace>)> {
    let mut list = Command::new("git");
    list.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(root);
    let listed = command::read(&mut list).context("the language is measured in the files of a checkout")?;
    let counter = Counter::new()?;
    let (mut counts, mut places) = (BTreeMap::<String, MetricShares>::new(), Vec::new());
    for name in listed.split_terminator('\0') {
        let path = Path::new(name);
        let extension = path.extension().and_then(|extension| extension.to_str());
        // A listed file that was just removed is not there.
        if !matches!(extension, Some("rs" | "md")) || name.contains("/corpus/") || !root.join(path).is_file()
        {
            continue;
        }
        let text = fs::read_to_string(root.join(path)).with_context(|| format!("cannot read {name}"))?;
        if extension == Some("rs") {
            let found = counter.count_code(path, &text, counts.entry(crate_of(root, path)).or_default());
            places.extend(found);
        } else {
            counter.count_page(&text, counts.entry(PAGES.to_owned()).or_default());
        }
    }
    Ok((counts, places))
}

/// Returns the folder of the crate that a file belongs to.
fn crate_of(root: &Path, path: &Path) -> String {
    let folder = path.ancestors().skip(1).find(|folder| root.join(folder).join("Cargo.toml").is_file());
    folder.map_or_else(String::new, |folder| folder.display().to_string())
}

struct Counter {
    pronoun: Regex,
    what_is: Regex,
    participle: Regex,
    item: Regex,
    word: Regex,
    code_block: Regex,
    code_span: Regex,
}

impl Counter {
    fn new() -> Result<Self> {
        Ok(Self {
            pronoun: Regex::new(PRONOUN)?,
            what_is: Regex::new(WHAT_IS)?,
            participle: Regex::new(PARTICIPLE)?,
            item: Regex::new(ITEM)?,
            word: Regex::new(r"[A-Za-z`'\[\]_:-]+")?,
            code_block: Regex::new(r"(?s)```.*?```")?,
            code_span: Regex::new(r"`[^`]*`")?,
        })
    }

    fn count_code(&self, path: &Path, text: &str, shares: &mut MetricShares) -> Vec<SourcePlace> {
        let mut places = Vec::new();
        let (mut is_in_doc, mut is_test) = (false, false);
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            let mut count = |metric: Metric, part: usize, whole: usize| {
                shares.entry(metric).or_default().add(part, whole);
                if part > 0 {
                    places.push(SourcePlace {
                        metric,
                        path: path.to_owned(),
                        line: index + 1,
                        text: line.to_owned(),
                    });
                }
            };
            let doc = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")).map(str::trim);
            if let Some(doc) = doc.filter(|doc| !is_in_doc && !doc.is_empty()) {
                is_in_doc = true;
                let opens = self
                    .word
                    .find(doc)
                    .is_some_and(|word| OPENERS.contains(&word.as_str().to_lowercase().as_str()));
                count(Metric::Openers, usize::from(opens), 1);
            }
            is_in_doc &= doc.is_some();
            if let Some(comment) = doc.or_else(|| line.strip_prefix("//")) {
                count(Metric::Pronouns, self.pronoun.find_iter(comment).count(), 1);
                count(Metric::Whatis, self.what_is.find_iter(comment).count(), 1);
                continue;
            }
            is_test |=
                line.starts_with("#[") && self.word.find_iter(line).any(|word| ends_in_test(word.as_str()));
            let Some(item) = self.item.captures(line) else { continue };
            let (kind, name) = (&item[1], &item[2]);
            let is_vague = match kind {
                "const" | "static" => VAGUE_CONSTANTS.contains(&name),
                "fn" => VAGUE_FUNCTIONS.contains(&name),
                _ => false,
            };
            count(Metric::Vague, usize::from(is_vague), 1);
            match kind {
                "struct" | "enum" | "trait" | "type" | "union" => {
                    count(Metric::Participles, usize::from(self.participle.is_match(name)), 1);
                }
                "fn" if is_test => {
                    is_test = false;
                    count(Metric::Testnames, name.len(), 1);
                }
                _ => {}
            }
        }
        places
    }

    fn count_page(&self, text: &str, shares: &mut MetricShares) {
        let text = self.code_block.replace_all(text, "");
        let text = self.code_span.replace_all(&text, "X");
        let words = text.split(|c: char| !c.is_ascii_alphabetic()).filter(|word| !word.is_empty()).count();
        shares.entry(Metric::PagePronouns).or_default().add(self.pronoun.find_iter(&text).count(), words);
        shares.entry(Metric::PageWhatis).or_default().add(self.what_is.find_iter(&text).count(), words);
    }
}

/// Returns true if the path of an attribute ends in `test`, as in `tokio::test`.
fn ends_in_test(path: &str) -> bool {
    path.split(|c: char| !c.is_alphanumeric() && c != '_').any(|part| part == "test")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(text: &str) -> (MetricShares, Vec<String>) {
        let mut shares = MetricShares::new();
        let places = Counter::new().unwrap().count_code(Path::new("a.rs"), text, &mut shares);
        let places = places.iter().map(|place| format!("{}:{}", place.metric.name(), place.line)).collect();
        (shares, places)
    }

    fn share(part: u32, whole: u32) -> Share {
        Share { part, whole }
    }

    #[test]
    fn counts_openers_per_comment() {
        let (shares, places) =
            count("/// Whether it is.\n/// What else.\nlet a;\n//! Returns it.\n\n/// `so`\n");
        assert_eq!(shares[&Metric::Openers], share(1, 3));
        assert_eq!(places, ["openers:1"]);
    }

    #[test]
    fn counts_pronouns_in_all_comments() {
        let (shares, places) =
            count("// Somebody else, or others.\nlet who = \"who\"; // who\n/// Nobody.\n");
        assert_eq!(shares[&Metric::Pronouns], share(3, 2));
        assert_eq!(places, ["pronouns:1", "pronouns:3"]);
    }

    #[test]
    fn counts_names_of_items() {
        let text = "pub(crate) struct Asked;\nconst LOOK: u8 = 1;\npub async fn of() {}\nconst fn with() {}\nenum OddName {}\n";
        let (shares, places) = count(text);
        assert_eq!((shares[&Metric::Participles], shares[&Metric::Vague]), (share(1, 2), share(2, 5)));
        assert_eq!(places, ["participles:1", "vague:2", "vague:3"]);
    }

    #[test]
    fn measures_names_of_tests() {
        let text = "#[test]\nfn abcd() {}\n#[cfg(test)]\nmod tests {}\n#[tokio::test]\n#[should_panic]\nasync fn ab() {}\nfn other() {}\n";
        assert_eq!(count(text).0[&Metric::Testnames], share(6, 2));
    }

    #[test]
    fn skips_code_in_pages() {
        let mut shares = MetricShares::new();
        Counter::new().unwrap().count_page("Who `who` is\n```\nwho\n```\nwhat is it", &mut shares);
        assert_eq!((shares[&Metric::PagePronouns], shares[&Metric::PageWhatis]), (share(1, 6), share(1, 6)));
    }

    #[test]
    fn new_crate_has_wanted_limits() {
        let (shares, _) = count("/// What it is.\nstruct Asked;\n");
        let counts = BTreeMap::from([("userspace/new".to_owned(), shares)]);
        let faults = excesses(&Limits::new(), &counts);
        assert!(
            faults.iter().any(|fault| fault.contains("openers is 100.0, the limit is 2.0")),
            "{faults:?}"
        );
        assert!(faults.iter().any(|fault| fault.contains("participles")), "{faults:?}");
    }

    #[test]
    fn limits_only_fall() {
        let counts = |part| {
            BTreeMap::from([("a".to_owned(), MetricShares::from([(Metric::Openers, share(part, 10))]))])
        };
        let limits = Limits::from([("a".to_owned(), BTreeMap::from([("openers".to_owned(), 30.0)]))]);
        assert_eq!(lowered(&limits, &counts(5)), limits);
        assert_eq!(lowered(&limits, &counts(2))["a"]["openers"].total_cmp(&20.0), std::cmp::Ordering::Equal);
        assert!(lowered(&limits, &counts(0)).is_empty());
        assert!(excesses(&limits, &counts(3)).is_empty());
        assert_eq!(excesses(&limits, &counts(4)).len(), 1);
    }
}
