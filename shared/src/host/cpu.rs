//! Which cores this process may compute on.

use std::{collections::BTreeSet, fs, path::Path};

use super::{HostError, read};

/// Cores of the affinity mask, hyper-threads of one core counted once.
///
/// A cpuset cgroup is already part of the mask. A processor whose siblings are unknown counts as a core of its own.
pub(super) fn usable_cores(root: &Path) -> Result<usize, HostError> {
    let path = root.join("proc/self/status");
    let status = read(&path)?;
    let allowed = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        .and_then(parse_list)
        .filter(|list| !list.is_empty())
        .ok_or(HostError::Field {
            path,
            field: "Cpus_allowed_list",
        })?;
    let cores: BTreeSet<u32> = allowed
        .iter()
        .map(|cpu| {
            let file = root.join(format!(
                "sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            ));
            let siblings = fs::read_to_string(file)
                .ok()
                .and_then(|text| parse_list(&text));
            siblings
                .and_then(|list| list.first().copied())
                .unwrap_or(*cpu)
        })
        .collect();
    Ok(cores.len())
}

/// The processor's name as the kernel prints it; the architecture where it prints none.
pub(super) fn model(root: &Path) -> String {
    const KEYS: [&str; 4] = ["model name", "Model", "cpu model", "uarch"];
    let text = fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
    let value = |key: &str| {
        text.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == key).then(|| value.trim().to_owned())
        })
    };
    KEYS.into_iter()
        .find_map(value)
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// `0-3,8,10-11`; `None` if it is no such list.
fn parse_list(text: &str) -> Option<BTreeSet<u32>> {
    let mut list = BTreeSet::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        // The kernel has at most 8192 processors; a longer range is not a list of them.
        if last.checked_sub(first)? > 1 << 16 {
            return None;
        }
        list.extend(first..=last);
    }
    Some(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_is_known_by_its_name_or_its_architecture() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(model(dir.path()), std::env::consts::ARCH);
        fs::create_dir(dir.path().join("proc")).unwrap();
        let cpuinfo = "processor\t: 0\nmodel\t\t: 2\nmodel name\t: ACME 9000 @ 2.4GHz\n";
        fs::write(dir.path().join("proc/cpuinfo"), cpuinfo).unwrap();
        assert_eq!(model(dir.path()), "ACME 9000 @ 2.4GHz");
    }

    #[test]
    fn processor_lists_are_read() {
        let list = |text| parse_list(text).map(|l| l.into_iter().collect::<Vec<_>>());
        assert_eq!(list("0-2,5\n"), Some(vec![0, 1, 2, 5]));
        assert_eq!(list(""), Some(vec![]));
        assert_eq!(list("3-1"), None);
        assert_eq!(list("0-4294967295"), None);
        assert_eq!(list("a"), None);
    }
}
