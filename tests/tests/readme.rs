//! The README: its commands run, its flags, paths and targets exist, and its tables are what programs say today.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
#[path = "../examples/pages/pages.rs"]
#[expect(dead_code, reason = "the pages themselves have a test of their own")]
mod pages;
#[path = "common/process.rs"]
mod process;
#[path = "../examples/pages/readme.rs"]
mod readme;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use common::Fixture;
use process::{Done, bin_dir};
use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn text() -> String {
    fs::read_to_string(root().join("README.md")).unwrap()
}

/// The lines of every fenced block of this language, lines that end in a backslash joined to the next.
fn fenced(text: &str, language: &str) -> Vec<String> {
    let (mut lines, mut inside) = (Vec::<String>::new(), false);
    for line in text.lines() {
        if let Some(fence) = line.strip_prefix("```") {
            inside = !inside && fence == language;
        } else if inside {
            match lines.last_mut() {
                Some(last) if last.ends_with('\\') => {
                    last.pop();
                    last.push_str(line.trim_start());
                }
                _ => lines.push(line.to_owned()),
            }
        }
    }
    lines
}

/// The commands, without comments.
fn commands(text: &str) -> Vec<String> {
    let lines = fenced(text, "sh");
    let commands = lines
        .iter()
        .map(|line| line.split(" #").next().unwrap().trim());
    let commands = commands.filter(|line| !line.is_empty() && !line.starts_with('#'));
    commands.map(str::to_owned).collect()
}

/// A home folder in which the tiny checkpoint is the model, for commands that are meant for the released one.
struct Home {
    fixture: Fixture,
}

impl Home {
    fn new() -> Self {
        let fixture = Fixture::empty();
        let model = fixture.path("k3model");
        k3_tests::synth::tiny(&model).unwrap();
        k3_tests::tokenizer::write_tiny(&model).unwrap();
        fs::write(fixture.path("prompt.txt"), "The world said hello,").unwrap();
        // Folders that stand for other disks.
        for disk in ["disk2", "disk3"] {
            fs::create_dir(fixture.path(disk)).unwrap();
        }
        Self { fixture }
    }

    /// Run a command as it is printed, in that home; measuring its disk would take longer than everything else.
    fn run(&self, line: &str) -> Done {
        let line = line
            .replace("--probe", "--disk-speed 3G")
            .replace("/mnt/", "./");
        let path = format!("{}:/usr/bin:/bin", bin_dir().display());
        let home = self.fixture.path("");
        let mut command = Command::new("sh");
        command.args(["-euc", &line]).current_dir(&home);
        command.env_clear().env("HOME", &home).env("PATH", path);
        process::finish(command.stdin(std::process::Stdio::null()))
    }
}

/// Packages and targets by kind: `package`, `bin`, `example`, `bench`, `test`.
fn cargo_targets() -> BTreeSet<(String, String)> {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--no-deps",
            "--offline",
            "--format-version",
            "1",
        ])
        .current_dir(root())
        .output()
        .unwrap();
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut found = BTreeSet::new();
    let name = |value: &Value| value["name"].as_str().unwrap().to_owned();
    for package in metadata["packages"].as_array().unwrap() {
        found.insert(("package".to_owned(), name(package)));
        for target in package["targets"].as_array().unwrap() {
            let kind = target["kind"][0].as_str().unwrap();
            found.insert((kind.to_owned(), name(target)));
        }
    }
    found
}

/// Whether what a cargo command names is there; building it is what this test is part of.
fn check_cargo(line: &str, targets: &BTreeSet<(String, String)>) -> Result<(), String> {
    let words: Vec<&str> = line
        .split_whitespace()
        .skip_while(|w| w.contains('='))
        .collect();
    let known = ["build", "test", "bench", "run"];
    if words[0] != "cargo" || !known.contains(&words[1]) {
        return Err(format!("{line}: not a command of cargo"));
    }
    for pair in words[2..].windows(2).take_while(|pair| pair[0] != "--") {
        let kind = match pair[0] {
            "-p" => "package",
            "--example" | "--bench" | "--test" | "--bin" => &pair[0][2..],
            _ => continue,
        };
        if !targets.contains(&(kind.to_owned(), pair[1].to_owned())) {
            return Err(format!("{line}: no {kind} {}", pair[1]));
        }
    }
    Ok(())
}

/// Whether make knows the target and can say what it would do.
fn check_make(line: &str) -> Result<(), String> {
    let line = line.replacen("make", "make -n", 1);
    let mut command = Command::new("sh");
    command.args(["-euc", &line]).current_dir(root());
    let done = process::finish(command.stdin(std::process::Stdio::null()));
    match done.code {
        Some(0) => Ok(()),
        _ => Err(format!("{line}: {}", done.stderr)),
    }
}

/// Run or check one command.
fn check(line: &str, home: &Home, targets: &BTreeSet<(String, String)>) -> Result<(), String> {
    let first = line.split_whitespace().find(|word| !word.contains('='));
    match first {
        Some("cargo") => check_cargo(line, targets),
        Some("make") => check_make(line),
        Some(tool) if tool.starts_with("k3-") || tool == "printf" => match home.run(line) {
            Done { code: Some(0), .. } => Ok(()),
            done => Err(format!("{line}: exit {:?}: {}", done.code, done.stderr)),
        },
        // Where the tools are found: here they are those of this test.
        None if line == "PATH=$PWD/target/release:$PATH" => Ok(()),
        _ => Err(format!("{line}: this test does not know how to try it")),
    }
}

#[test]
fn every_command_does_what_it_did_when_it_was_written() {
    let commands = commands(&text());
    assert!(commands.len() > 15, "{commands:#?}");
    let (home, targets) = (Home::new(), cargo_targets());
    let failed: Vec<String> = commands
        .iter()
        .filter_map(|line| check(line, &home, &targets).err())
        .collect();
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn a_command_that_was_renamed_is_found() {
    let (home, targets) = (Home::new(), cargo_targets());
    let good = [
        "k3-census -q ~/k3model -o c.json",
        "make -C pipelines demo",
        "cargo bench -p k3-run --bench kernels",
    ];
    for line in good {
        check(line, &home, &targets).unwrap();
    }
    let bad = [
        "k3-count ~/k3model",
        "k3-census ~/k3model --hush",
        "k3-plan --budget 8Q",
        "make -C pipelines demonstration",
        "cargo bench -p k3-run --bench kernel",
        "cargo tset --workspace",
        "rm -rf target",
    ];
    for line in bad {
        assert!(check(line, &home, &targets).is_err(), "{line}");
    }
}

/// Every long flag of the five tools and of the two of the tests.
fn known_flags() -> BTreeSet<String> {
    let mut flags = BTreeSet::new();
    for mut command in pages::commands() {
        command.build();
        let long = command.get_arguments().filter_map(|arg| arg.get_long());
        flags.extend(long.map(|long| format!("--{long}")));
    }
    // Of cargo, and of a test binary.
    let others = [
        "--workspace",
        "--release",
        "--bins",
        "--locked",
        "--bench",
        "--example",
        "--ignored",
        "--no-deps",
        "--open",
    ];
    flags.extend(others.map(str::to_owned));
    flags
}

/// Long flags in a text: two hyphens and a letter, not in the middle of a word or a longer dash.
fn flags_in(text: &str) -> BTreeSet<String> {
    let starts = text.match_indices("--").filter(|(at, _)| {
        let before = text[..*at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || "-<!|+".contains(c))
    });
    let names = starts.map(|(at, _)| {
        let rest = text[at + 2..].chars();
        rest.take_while(|c| c.is_ascii_alphanumeric() || *c == '-')
            .collect::<String>()
    });
    let names = names.filter(|name| name.starts_with(|c: char| c.is_ascii_lowercase()));
    // Two hyphens within belong to an arrow of a drawing.
    let names = names.filter(|name| !name.contains("--"));
    names.map(|name| format!("--{name}")).collect()
}

#[test]
fn every_flag_exists() {
    let flags = flags_in(&text());
    assert!(flags.len() > 60, "{flags:?}");
    let unknown: Vec<_> = flags.difference(&known_flags()).cloned().collect();
    assert!(unknown.is_empty(), "{unknown:?}");
    let found = flags_in("`--budgit 8G` and --plan, not a|--b nor <!-- c -->");
    assert_eq!(found, ["--budgit", "--plan"].map(str::to_owned).into());
}

/// Words in backquotes and targets of links that lie in a folder of this tree.
fn paths_in(text: &str) -> BTreeSet<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    let links = text
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next());
    let words = quoted.flat_map(str::split_whitespace).chain(links);
    let folders = [
        "bins/",
        "shared/",
        "manifests/",
        "pipelines/",
        "tests/",
        ".ci/",
    ];
    let words = words.filter(|word| folders.iter().any(|folder| word.starts_with(folder)));
    words
        .map(|word| word.trim_end_matches([',', '.']).to_owned())
        .collect()
}

#[test]
fn every_path_exists() {
    let paths = paths_in(&text());
    assert!(paths.len() > 5, "{paths:?}");
    // What pipelines make lies in their work folder.
    let made = |path: &String| path.starts_with("pipelines/work");
    let missing: Vec<_> = paths
        .iter()
        .filter(|path| !made(path) && !root().join(path).exists())
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn every_pipeline_named_in_the_text_is_a_target() {
    let text = text();
    let is_name = |word: &&str| word.chars().all(|c| c.is_ascii_lowercase() || c == '-');
    let calls = text.split("make -C pipelines ").skip(1);
    let calls = calls.filter_map(|rest| rest.split(['`', '#', '\n']).next());
    let named = calls.flat_map(|call| call.split_whitespace().take_while(is_name));
    let named: BTreeSet<&str> = named.collect();
    assert!(named.len() > 8, "{named:?}");
    for target in named {
        let variables = if target == "fetch" || target == "conform" {
            " MODEL=m"
        } else {
            ""
        };
        check_make(&format!("make -C pipelines {target}{variables}")).unwrap();
    }
}

#[test]
fn tables_are_what_programs_write_today() {
    let text = text();
    let (updated, count) = readme::update(&text, &root()).unwrap();
    assert!(count >= 6, "only {count} blocks");
    let same = text
        .lines()
        .zip(updated.lines())
        .find(|(old, new)| old != new);
    assert!(same.is_none(), "run: make -C pipelines readme\n{same:#?}");
    assert_eq!(text.lines().count(), updated.lines().count());
}

#[test]
fn a_block_is_written_anew_and_a_broken_one_is_an_error() {
    let block = "<!-- flags k3-plan -->\nwhatever\n<!-- end -->\n";
    let (updated, count) = readme::update(block, &root()).unwrap();
    assert_eq!(count, 1);
    assert!(updated.contains("--budget SIZE") && !updated.contains("whatever"));
    for bad in [
        "<!-- flags k3-plan -->\n",
        "<!-- flags k3-gone -->\n<!-- end -->\n",
        "<!-- from no/rows -->\n<!-- end -->\n",
    ] {
        assert!(readme::update(bad, &root()).is_err(), "{bad}");
    }
}

/// What tools print, in the first column of the table of symptoms.
fn messages_in(text: &str) -> Vec<String> {
    let table = text.split("| what you see |").nth(1).unwrap();
    let rows = table
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    let first = rows.map(|row| row.split('|').nth(1).unwrap());
    let quoted = first.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    quoted.map(str::to_owned).collect()
}

/// Every source of the tools, lines that a string goes on over joined.
fn sources(dir: &Path, all: &mut String) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, all);
        } else if path.extension().is_some_and(|e| e == "rs") {
            all.push_str(&fs::read_to_string(path).unwrap());
        }
    }
}

#[test]
fn every_message_among_the_symptoms_is_one_that_a_tool_has() {
    let mut code = String::new();
    for folder in ["bins", "shared/src"] {
        sources(&root().join(folder), &mut code);
    }
    let messages = messages_in(&text());
    assert!(messages.len() >= 6, "{messages:?}");
    let unknown: Vec<_> = messages
        .iter()
        .filter(|m| !code.contains(m.as_str()))
        .collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}
