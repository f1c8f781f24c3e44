//! That every row of section 4 has its test.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Rows of the table.
const ROWS: u32 = 49;

fn sources(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            sources(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") {
            into.push(path);
        }
    }
}

/// Numbers of the functions `row_NN_...` that are marked as tests and not as ignored.
fn rows_of(source: &str) -> Vec<u32> {
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let mut rows = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some(rest) = line.strip_prefix("fn row_") else {
            continue;
        };
        let above = lines[..at]
            .iter()
            .rev()
            .take_while(|line| line.starts_with('#') || line.starts_with("//"));
        let attributes: Vec<&&str> = above.filter(|line| line.starts_with('#')).collect();
        let is_test = attributes.iter().any(|a| a.starts_with("#[test]"));
        if is_test && !attributes.iter().any(|a| a.starts_with("#[ignore")) {
            let number = rest.split('_').next().unwrap();
            assert_eq!(number.len(), 2, "{line}: two digits");
            rows.push(number.parse().unwrap());
        }
    }
    rows
}

#[test]
fn every_row_has_a_test_of_its_name() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut paths = Vec::new();
    for part in ["bins", "shared", "tests"] {
        sources(&root.join(part), &mut paths);
    }
    let found: BTreeSet<u32> = paths
        .iter()
        .flat_map(|path| rows_of(&fs::read_to_string(path).unwrap()))
        .collect();
    let missing: Vec<u32> = (1..=ROWS).filter(|row| !found.contains(row)).collect();
    assert!(
        missing.is_empty(),
        "no test is named row_NN_... for rows {missing:?}"
    );
    assert_eq!(found.last(), Some(&ROWS), "the table has {ROWS} rows");
}
