//! Manual pages and completions name everything that the tools accept.

#[path = "../examples/pages/pages.rs"]
mod pages;

use std::fs;

use clap::Command;
use clap_complete::Shell;

/// The long flags of a tool, as they are typed; `--help` and `--version` included.
fn flags(command: &Command) -> Vec<String> {
    let mut built = command.clone();
    built.build();
    let flags = built.get_arguments().filter(|arg| !arg.is_hide_set());
    let flags = flags.filter_map(|arg| arg.get_long());
    flags.map(|long| format!("--{long}")).collect()
}

/// Whether a text has this flag, and not only a longer one that begins like it.
fn names(text: &str, flag: &str) -> bool {
    text.match_indices(flag).any(|(at, _)| {
        let after = text[at + flag.len()..].chars().next();
        !after.is_some_and(|c| c.is_alphanumeric() || c == '-')
    })
}

#[test]
fn every_page_names_every_flag() {
    for command in pages::commands() {
        let page = String::from_utf8(pages::page(&command).unwrap()).unwrap();
        // Roff changes fonts by \fB, \fI and \fR, and escapes hyphens.
        let page = [r"\fB", r"\fI", r"\fR", r"\"]
            .iter()
            .fold(page, |page, mark| page.replace(mark, ""));
        let flags = flags(&command);
        assert!(flags.len() >= 4, "{}: {flags:?}", command.get_name());
        for flag in flags {
            assert!(names(&page, &flag), "{}: no {flag}", command.get_name());
        }
        for section in [
            "NAME",
            "SYNOPSIS",
            "OPTIONS",
            "\"EXIT STATUS\"",
            "\"SEE ALSO\"",
        ] {
            let heading = format!(".SH {section}\n");
            assert!(
                page.contains(&heading),
                "{}: no {section}",
                command.get_name()
            );
        }
    }
}

#[test]
fn every_shell_completes_every_flag() {
    for command in pages::commands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let text = String::from_utf8(pages::completions(&command, shell)).unwrap();
            for flag in flags(&command) {
                // Fish writes the name after `-l`.
                let (flag, found) = if shell == Shell::Fish {
                    let flag = format!("-l {}", &flag[2..]);
                    let found = names(&text, &flag);
                    (flag, found)
                } else {
                    let found = names(&text, &flag);
                    (flag, found)
                };
                assert!(found, "{} for {shell}: no {flag}", command.get_name());
            }
        }
    }
}

#[test]
fn files_lie_where_man_and_shells_look_for_them() {
    let dir = tempfile::tempdir().unwrap();
    pages::write(dir.path()).unwrap();
    for file in [
        "share/man/man1/k3-run.1",
        "share/man/man1/k3-census.1",
        "share/bash-completion/completions/k3-plan",
        "share/zsh/site-functions/_k3-pack",
        "share/fish/vendor_completions.d/k3-simcache.fish",
    ] {
        let text = fs::read_to_string(dir.path().join(file)).unwrap();
        assert!(text.contains("k3"), "{file}");
    }
}
