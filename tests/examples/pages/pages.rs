//! Manual pages and completions, from the command lines that the tools parse themselves.

use std::{fs, path::Path};

use anyhow::Context as _;
use clap::{Command, CommandFactory as _};
use clap_complete::Shell;
use clap_mangen::Man;

/// What a reader of every page wants besides the flags, as roff.
const EXIT_STATUS: &str = r#".SH "EXIT STATUS"
.TP
0
done (a closed pipe too)
.TP
1
the answer is no: damaged, does not fit, or stopped rather than print a wrong token
.TP
2
usage or environment
.TP
130, 143
interrupted by SIGINT or SIGTERM
"#;

/// The command lines of the five tools, in the order of the pipeline.
pub(crate) fn commands() -> [Command; 5] {
    [
        k3_census::Cli::command(),
        k3_pack::Cli::command(),
        k3_plan::Cli::command(),
        k3_run::Cli::command(),
        k3_simcache::Cli::command(),
    ]
}

/// The manual page of a tool, as roff.
pub(crate) fn page(command: &Command) -> anyhow::Result<Vec<u8>> {
    let name = command.get_name().to_owned();
    let mut page = Vec::new();
    Man::new(command.clone()).render(&mut page)?;
    page.extend(EXIT_STATUS.as_bytes());
    page.extend(b".SH \"SEE ALSO\"\n");
    let others = commands().map(|other| other.get_name().to_owned());
    let others = others.iter().filter(|other| **other != name);
    let others: Vec<String> = others
        .map(|other| format!(".BR {} (1)", other.replace('-', r"\-")))
        .collect();
    page.extend(others.join(",\n").as_bytes());
    page.push(b'\n');
    Ok(page)
}

/// The completions of a tool for a shell.
pub(crate) fn completions(command: &Command, shell: Shell) -> Vec<u8> {
    let mut command = command.clone();
    let name = command.get_name().to_owned();
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut text);
    text
}

/// Where a shell looks for the completions of a tool, below a prefix.
fn place(shell: Shell, name: &str) -> String {
    match shell {
        Shell::Zsh => format!("share/zsh/site-functions/_{name}"),
        Shell::Fish => format!("share/fish/vendor_completions.d/{name}.fish"),
        _ => format!("share/bash-completion/completions/{name}"),
    }
}

/// Write every page and completion below `out`.
pub(crate) fn write(out: &Path) -> anyhow::Result<()> {
    for command in commands() {
        let name = command.get_name();
        put(out, &format!("share/man/man1/{name}.1"), &page(&command)?)?;
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            put(out, &place(shell, name), &completions(&command, shell))?;
        }
    }
    Ok(())
}

fn put(out: &Path, place: &str, text: &[u8]) -> anyhow::Result<()> {
    let path = out.join(place);
    let folder = path.parent().unwrap_or(out);
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    fs::write(&path, text).with_context(|| path.display().to_string())
}
