//! The folder and the small files in it.

use std::{fs, io::Read as _, path::Path};

use anyhow::{Context as _, bail};
use k3_shared::formats::{census::Problem, safetensors::is_lfs_pointer};

/// The vocabulary, which k3-run needs for text but not for `--ids`.
const VOCABULARY: &str = "tiktoken.model";

/// Refuse what cannot be a checkpoint's folder.
///
/// # Errors
/// If it does not exist, is a file, or its `config.json` is a dangling link or a Git-LFS pointer.
pub(crate) fn check_folder(dir: &Path) -> anyhow::Result<()> {
    let metadata = fs::metadata(dir).with_context(|| {
        format!(
            "{}: no such folder; name the one that holds config.json and the shards",
            dir.display()
        )
    })?;
    if !metadata.is_dir() {
        bail!(
            "{}: is a file; name the folder that holds config.json and the shards",
            dir.display()
        );
    }
    if let Some(problem) = check_file(dir, "config.json") {
        bail!("{}: {}", dir.join("config.json").display(), problem.message);
    }
    Ok(())
}

/// Files beside the shards that are there in name only.
pub(crate) fn check_small_files(dir: &Path) -> Vec<Problem> {
    let path = dir.join(VOCABULARY);
    if !path.exists() && !path.is_symlink() {
        log::info!("no {VOCABULARY} here: without it k3-run takes --ids, or --tokenizer DIR");
    }
    check_file(dir, VOCABULARY).into_iter().collect()
}

/// What is wrong with a file that is there but is a dangling link or a Git-LFS pointer; absence is no problem here.
fn check_file(dir: &Path, name: &str) -> Option<Problem> {
    let path = dir.join(name);
    if let Ok(target) = fs::read_link(&path)
        && !path.exists()
    {
        let target = target.display();
        let message = format!("is a link to {target}, which does not exist; finish the download");
        return Some(Problem::of(name, message));
    }
    let mut start = Vec::new();
    let file = fs::File::open(&path).ok()?;
    file.take(64).read_to_end(&mut start).ok()?;
    is_lfs_pointer(&start).then(|| {
        let message = "is a Git-LFS pointer, not the file itself; run `git lfs pull` in the folder";
        Problem::of(name, message)
    })
}
