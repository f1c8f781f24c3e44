//! `FAULTS.md` and the tests it names belong together: a test that is renamed or taken away breaks the table.
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]

use std::{collections::BTreeSet, fs, path::Path};

/// Rows of the list of public faults that apply to k3, by their numbers there.
const PUBLIC_FAULTS: [u32; 65] = [
    1, 2, 3, 4, 6, 7, 10, 12, 13, 14, 15, 16, 18, 19, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 32,
    34, 35, 36, 37, 38, 40, 41, 42, 46, 48, 49, 50, 52, 54, 57, 58, 59, 61, 62, 63, 65, 67, 68, 69,
    71, 73, 74, 75, 76, 78, 79, 81, 83, 84, 85, 55, 87, 88, 89, 20,
];

/// A line of a table: what may go wrong, the tests that raise it, what the user sees.
struct Row {
    fault: String,
    tests: Vec<(String, String)>,
    seen: String,
}

fn rows(text: &str) -> Vec<Row> {
    let cells = |line: &str| -> Vec<String> {
        let inner = line.trim().trim_start_matches('|').trim_end_matches('|');
        inner
            .split(" | ")
            .map(|cell| cell.trim().to_owned())
            .collect()
    };
    let is_row = |line: &&str| line.starts_with("| ") && !line.starts_with("| fault ");
    let row = |line: &str| {
        let cells = cells(line);
        let [fault, tests, seen] = &cells[..] else {
            panic!("three cells: {line}");
        };
        let named = tests.split('`').skip(1).step_by(2);
        let test = |name: &str| {
            let (file, function) = name.split_once("::").unwrap_or_else(|| panic!("{line}"));
            (file.to_owned(), function.to_owned())
        };
        Row {
            fault: fault.clone(),
            tests: named.map(test).collect(),
            seen: seen.clone(),
        }
    };
    text.lines().filter(is_row).map(row).collect()
}

/// Whether `source` has a function of this name that is a test: by its attribute, or by a macro or proptest that makes one.
fn has_test(source: &str, name: &str) -> bool {
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let by_macro = source.contains("macro_rules! mutants")
        && lines.iter().any(|l| l.starts_with(&format!("{name} \"")));
    let is_test = |(at, line): (usize, &&str)| {
        let Some(rest) = line
            .strip_prefix("fn ")
            .and_then(|rest| rest.strip_prefix(name))
        else {
            return false;
        };
        let above = lines[..at].iter().rev();
        let mut attributes =
            above.take_while(|l| l.starts_with('#') || l.starts_with("//") || l.ends_with(']'));
        rest.starts_with('(') && attributes.any(|l| l.starts_with("#[test]"))
    };
    by_macro || lines.iter().enumerate().any(is_test)
}

fn table() -> Vec<Row> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("FAULTS.md");
    rows(&fs::read_to_string(path).unwrap())
}

#[test]
fn every_test_that_the_table_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let table = table();
    assert!(table.len() > 80, "{} rows", table.len());
    for row in table {
        assert!(
            !row.tests.is_empty() || row.seen.starts_with("none:"),
            "{}: no test",
            row.fault
        );
        assert!(row.seen.len() > 10, "{}: what does a user see?", row.fault);
        for (file, name) in row.tests {
            let source =
                fs::read_to_string(root.join(&file)).unwrap_or_else(|e| panic!("{file}: {e}"));
            assert!(
                has_test(&source, &name),
                "{}: {file} has no test {name}",
                row.fault
            );
        }
    }
}

#[test]
fn every_public_fault_has_its_row() {
    let number = |row: &Row| {
        row.fault
            .strip_prefix('#')?
            .split(' ')
            .next()?
            .parse::<u32>()
            .ok()
    };
    let found: BTreeSet<u32> = table().iter().filter_map(number).collect();
    let missing: Vec<u32> = PUBLIC_FAULTS
        .into_iter()
        .filter(|n| !found.contains(n))
        .collect();
    assert!(missing.is_empty(), "no row for {missing:?}");
}
